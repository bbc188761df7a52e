"""Rules on expert parallelism."""

from __future__ import annotations

from toolkit.recipe.errors import Config, Rule
from toolkit.recipe.model_configs import fused_experts
from toolkit.recipe.rules.parallel import nearest
from toolkit.recipe.schema import Recipe


def _divides(recipe: Recipe) -> bool:
    return recipe.parallel.expert > 1


def nearest_experts(recipe: Recipe, config: Config) -> str:
    """The nearest sizes of `parallel.expert` that divide the experts."""
    return nearest(fused_experts(config), recipe.parallel.expert)


EXPERT_RULES = {
    "expert-dense": Rule(
        "parallel.expert",
        lambda r, c: _divides(r) and bool(c) and not fused_experts(c),
        "the layers of this model have no experts that processes could divide",
        "remove parallel.expert; parallel.tensor divides the layers themselves",
        reference="(https://arxiv.org/abs/2006.16668)",
    ),
    "expert-count": Rule(
        "parallel.expert",
        lambda r, c: _divides(r) and bool(fused_experts(c) % r.parallel.expert),
        "the {fused_experts} experts of a layer do not divide among so many processes",
        "set parallel.expert={nearest_experts}",
        reference="(https://arxiv.org/abs/2006.16668)",
    ),
    "expert-strategy": Rule(
        "strategy.name",
        lambda r, _: _divides(r) and r.strategy.name != "ddp",
        "{r.strategy.name} would divide experts once more over all processes, which have different ones",
        "set strategy.name=ddp, or remove parallel.expert",
    ),
    "expert-tensor": Rule(
        "parallel.expert",
        lambda r, _: _divides(r) and r.parallel.tensor > 1,
        "processes that divide layers read the same rows, and would send each token as often as there are of them",
        "remove parallel.expert, or parallel.tensor",
    ),
    "expert-seq2seq": Rule(
        "parallel.expert",
        lambda r, _: _divides(r) and r.objective == "seq2seq",
        "Transformers has no plan to divide the experts of encoder-decoders",
        "remove parallel.expert",
    ),
    "expert-quantization": Rule(
        "method.quantization",
        lambda r, _: _divides(r) and r.method.quantization != "none",
        "weights in fewer bits are stored in blocks, which are not divided",
        "set method.quantization=none, or remove parallel.expert",
    ),
    "expert-init": Rule(
        "method.init_lora_weights",
        lambda r, _: _divides(r) and r.method.name == "lora" and r.method.init_lora_weights != "default",
        "adapters that begin by weights or rows have not been tried with experts that processes divide",
        "set method.init_lora_weights=default, or remove parallel.expert",
    ),
    "expert-extra-lora": Rule(
        "extra.lora",
        lambda r, _: _divides(r) and bool(r.extra.lora),
        "further settings of PEFT have not been tried with experts that processes divide",
        "remove extra.lora, or parallel.expert",
    ),
    "expert-optimizer": Rule(
        "optimizer.name",
        lambda r, _: _divides(r) and not r.optimizer.traits.divisible,
        "{r.optimizer.name} looks at whole tensors or blocks of them, of which each process has some experts",
        "set optimizer.name=adamw, or remove parallel.expert",
    ),
    "expert-precision": Rule(
        "precision",
        lambda r, _: _divides(r) and r.precision not in ("fp32", "bf16", "pure_bf16"),
        "{r.precision} scales by what a process has of weights or gradients, which are those of some experts",
        "set precision={r.in_bf16}, or remove parallel.expert",
    ),
    "expert-compile": Rule(
        "compile",
        lambda r, _: _divides(r) and r.compile == "layers",
        "layers whose tokens travel between processes have not been compiled",
        "set compile=auto, or remove parallel.expert",
    ),
}
