"""Rules on pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.recipe.errors import Config, Rule
from toolkit.recipe.model_configs import num_layers
from toolkit.recipe.schema import Recipe

_PLAIN = ("fp32", "bf16", "pure_bf16")


def _piped(recipe: Recipe) -> bool:
    return recipe.parallel.pipeline > 1


def _deep(recipe: Recipe, config: Config) -> bool:
    layers = num_layers(config)
    return _piped(recipe) and layers is not None and recipe.parallel.stages > layers


def nearest_pipeline(recipe: Recipe, config: Config) -> int:
    """The most processes that a model's layers can be spread over by the recipe's schedule."""
    each = recipe.parallel.stages // recipe.parallel.pipeline
    return max(1, (num_layers(config) or 1) // each)


def _rule(path: str, broken: Callable[[Recipe], object], why: str, change: str) -> Rule:
    """What goes with no pipeline; the change may always be to have none."""
    either = "remove parallel.pipeline" if path == "parallel.pipeline" else f"{change}, or remove parallel.pipeline"
    return Rule(path, lambda r, _: _piped(r) and bool(broken(r)), why, either)


def _alone(way: str) -> Rule:
    return _rule(
        f"parallel.{way}",
        lambda r: getattr(r.parallel, way) > 1,
        f"parallel.{way} has not been tried with layers that are spread over processes",
        f"remove parallel.{way}",
    )


PIPELINE_RULES = {
    "pipeline-layers": Rule(
        "parallel.pipeline",
        _deep,
        "the model's {num_layers} layers make no {r.parallel.stages} runs of them",
        "set parallel.pipeline={nearest_pipeline}",
        reference="(https://arxiv.org/abs/1811.06965)",
    ),
    "pipeline-strategy": _rule(
        "strategy.name",
        lambda r: r.strategy.name != "ddp",
        "{r.strategy.name} has not been tried with layers that are spread over processes",
        "set strategy.name=ddp",
    ),
    **{f"pipeline-{way}": _alone(way) for way in ("sequence", "context", "tensor", "expert")},
    "pipeline-seq2seq": _rule(
        "parallel.pipeline",
        lambda r: r.objective == "seq2seq",
        "of encoder-decoders each layer needs what the encoder returns, and stages hand on hidden states alone",
        "",
    ),
    "pipeline-streaming": _rule(
        "data.streaming",
        lambda r: r.data.streaming,
        "processes of a pipeline must read the same rows, and each reads its own of a stream",
        "set data.streaming=false",
    ),
    "pipeline-quantization": _rule(
        "method.quantization",
        lambda r: r.method.quantization != "none",
        "weights in fewer bits have not been tried with layers that are spread over processes",
        "set method.quantization=none",
    ),
    "pipeline-modules": _rule(
        "method.modules_to_save",
        lambda r: r.method.name == "lora" and r.method.modules_to_save,
        "PEFT's copies of modules such as embeddings have not been tried where one process has them",
        "set method.modules_to_save=[]",
    ),
    "pipeline-new-tokens": _rule(
        "model.new_tokens",
        lambda r: r.model.new_tokens,
        "rows of embeddings and output head for new tokens lie on different processes, and have not been tried so",
        "set model.new_tokens=[]",
    ),
    "pipeline-init": _rule(
        "method.init_lora_weights",
        lambda r: r.method.name == "lora" and r.method.init_lora_weights != "default",
        "adapters that begin by weights or rows have not been tried with layers that are spread over processes",
        "set method.init_lora_weights=default",
    ),
    "pipeline-extra-lora": _rule(
        "extra.lora",
        lambda r: r.extra.lora,
        "further settings of PEFT have not been tried with layers that are spread over processes",
        "remove extra.lora",
    ),
    "pipeline-adapter": _rule(
        "model.adapter",
        lambda r: r.model.adapter is not None,
        "going on with an adapter has not been tried with layers that are spread over processes",
        "set model.adapter=null",
    ),
    "pipeline-optimizer": _rule(
        "optimizer.name",
        lambda r: not r.optimizer.traits.divisible,
        "{r.optimizer.name} has not been tried with layers that are spread over processes",
        "set optimizer.name=adamw",
    ),
    "pipeline-precision": _rule(
        "precision",
        lambda r: r.precision not in _PLAIN,
        "{r.precision} scales by what a process has of the loss or the gradients, which is a part",
        "set precision={r.in_bf16}",
    ),
    "pipeline-compile": _rule(
        "compile",
        lambda r: r.compile == "layers",
        "layers that are spread over processes have not been compiled",
        "set compile=auto",
    ),
    "pipeline-selective": Rule(
        "activation_checkpointing.mode",
        lambda r, _: (
            _piped(r) and r.parallel.schedule == "zero_bubble" and r.activation_checkpointing.mode == "selective"
        ),
        "zero_bubble goes back through layers twice, and torch recomputes what was selected once",
        "set activation_checkpointing.mode=full, or parallel.schedule=1f1b",
    ),
    "pipeline-offload": _rule(
        "activation_checkpointing.mode",
        lambda r: r.activation_checkpointing.mode == "offload",
        "what is offloaded is fetched in the order of one micro-batch, and in a pipeline several are on their way",
        "set activation_checkpointing.mode=full",
    ),
    "pipeline-neftune": _rule(
        "extra.training_arguments",
        lambda r: r.extra.training_arguments.get("neftune_noise_alpha"),
        "the noise of NEFTune is added to embeddings, which one process has",
        "remove extra.training_arguments.neftune_noise_alpha",
    ),
}
