"""Rules on groups of processes that share rows or divide layers."""

from __future__ import annotations

import math

from toolkit.recipe.errors import Config, Rule
from toolkit.recipe.model_configs import attention_widths, inner_width
from toolkit.recipe.schema import VARLEN_ATTENTION, Recipe

_MOST = 1024
"""More processes than this are not looked for that divide a model's heads."""


def _shares(recipe: Recipe, way: str) -> bool:
    return getattr(recipe.parallel, way) > 1


def _parts(recipe: Recipe) -> bool:
    return recipe.parallel.tensor > 1


def nearest_heads(recipe: Recipe, config: Config) -> str:
    """The nearest sizes of `parallel.sequence` that divide the heads that processes have which divide layers."""
    return nearest(attention_widths(config)[0] // recipe.parallel.tensor, recipe.parallel.sequence)


def layer_parts(config: Config) -> int:
    """The most processes that can divide a model's layers, heads and inner width; 0 where the config states none."""
    heads, shared, _ = attention_widths(config)
    return math.gcd(heads, shared, inner_width(config))


def layer_widths(config: Config) -> str:
    """What `layer_parts` divides, of which configs may leave some to their classes."""
    heads, shared, _ = attention_widths(config)
    named = {"attention heads": heads, "heads of keys and values": shared, "inner width": inner_width(config)}
    return ", ".join(f"{what} {number}" for what, number in named.items() if number)


def nearest_parts(recipe: Recipe, config: Config) -> str:
    """The nearest sizes of `parallel.tensor` that divide all of them."""
    return nearest(layer_parts(config), recipe.parallel.tensor)


def nearest(whole: int, size: int) -> str:
    """The nearest numbers that divide a whole, beside one that does not."""
    fit = [number for number in range(1, min(whole, _MOST) + 1) if whole % number == 0]
    near = [number for number in fit if number < size][-1:] + [number for number in fit if number > size][:1]
    return " or ".join(map(str, near))


def _of_shared_rows(way: str) -> dict[str, Rule]:
    """What goes with no way of sharing rows; `way` is its key in `parallel`."""
    key = f"parallel.{way}"
    return {
        f"{way}-seq2seq": Rule(
            key,
            lambda r, _: _shares(r, way) and r.objective == "seq2seq",
            "encoder-decoders attend over padded rows, whose parts no attention takes",
            f"remove {key}",
        ),
        f"{way}-attention": Rule(
            "model.attention",
            lambda r, _: _shares(r, way) and r.model.attention not in ("auto", *VARLEN_ATTENTION),
            f"{key} needs a backend that takes the boundaries of documents instead of a mask",
            f"set model.attention=auto, or remove {key}",
        ),
        f"{way}-streaming": Rule(
            "data.streaming",
            lambda r, _: _shares(r, way) and r.data.streaming,
            "processes that share rows must read the same ones, and each reads its own of a stream",
            f"set data.streaming=false, or remove {key}",
        ),
        f"{way}-eva": Rule(
            "method.init_lora_weights",
            lambda r, _: _shares(r, way) and r.method.name == "lora" and r.method.init_lora_weights == "eva",
            f"EVA reads whole rows, and with {key} every process has another part of them",
            f"set method.init_lora_weights=default, or remove {key}",
        ),
        f"{way}-neftune": Rule(
            "extra.training_arguments",
            lambda r, _: _shares(r, way) and bool(r.extra.training_arguments.get("neftune_noise_alpha")),
            "the noise of NEFTune depends on the length of rows, and a process sees a part of them",
            f"remove extra.training_arguments.neftune_noise_alpha, or {key}",
        ),
    }


PARALLEL_RULES = {
    "sequence-heads": Rule(
        "parallel.sequence",
        lambda r, c: (
            _shares(r, "sequence") and bool(attention_widths(c)[0] % (r.parallel.sequence * r.parallel.tensor))
        ),
        "the model's {attention_heads} attention heads do not divide among parallel.sequence x parallel.tensor of them",
        "set parallel.sequence={nearest_heads}, or parallel.context instead, which divides no heads",
        reference="(https://arxiv.org/abs/2309.14509)",
    ),
    **_of_shared_rows("sequence"),
    "context-sequence": Rule(
        "parallel.context",
        lambda r, _: _shares(r, "context") and _shares(r, "sequence"),
        "rows are shared either by exchanging heads or by gathering keys and values",
        "remove parallel.context, or parallel.sequence",
        reference="(https://arxiv.org/abs/2407.21783, section 3.3.2)",
    ),
    **_of_shared_rows("context"),
    "tensor-widths": Rule(
        "parallel.tensor",
        lambda r, c: _parts(r) and bool(layer_parts(c) % r.parallel.tensor),
        "these do not all divide evenly among so many processes: {layer_widths}",
        "set parallel.tensor={nearest_parts}",
        reference="(https://arxiv.org/abs/1909.08053)",
    ),
    "tensor-strategy": Rule(
        "strategy.name",
        lambda r, _: _parts(r) and r.strategy.name not in ("ddp", "zero1", "zero2", "fsdp"),
        "{r.strategy.name} has not been tried with layers that processes divide",
        "set strategy.name=ddp, zero1, zero2 or fsdp, or remove parallel.tensor",
    ),
    "tensor-hybrid": Rule(
        "strategy.sharding",
        lambda r, _: _parts(r) and r.strategy.name == "fsdp" and r.strategy.sharding == "hybrid_shard",
        "copies of what processes of a node shard have not been tried with layers that processes divide",
        "set strategy.sharding=full_shard, or remove parallel.tensor",
    ),
    "tensor-offload": Rule(
        "strategy.offload_param",
        lambda r, _: _parts(r) and r.strategy.offload_param != "none",
        "offloading has not been tried with layers that processes divide",
        "set strategy.offload_param=none, or remove parallel.tensor",
    ),
    "tensor-seq2seq": Rule(
        "parallel.tensor",
        lambda r, _: _parts(r) and r.objective == "seq2seq",
        "Transformers has no plan to divide the layers of encoder-decoders",
        "remove parallel.tensor",
    ),
    "tensor-streaming": Rule(
        "data.streaming",
        lambda r, _: _parts(r) and r.data.streaming,
        "processes that divide layers must read the same rows, and each reads its own of a stream",
        "set data.streaming=false, or remove parallel.tensor",
    ),
    "tensor-quantization": Rule(
        "method.quantization",
        lambda r, _: _parts(r) and r.method.quantization != "none",
        "weights in fewer bits are stored in blocks, which are not divided",
        "set method.quantization=none, or remove parallel.tensor",
    ),
    "tensor-dora": Rule(
        "method.use_dora",
        lambda r, _: _parts(r) and r.method.use_dora,
        "DoRA measures whole weights, of which each process has a part",
        "set method.use_dora=false, or remove parallel.tensor",
    ),
    "tensor-init": Rule(
        "method.init_lora_weights",
        lambda r, _: _parts(r) and r.method.name == "lora" and r.method.init_lora_weights != "default",
        "adapters that begin by weights or rows have not been tried with layers that processes divide",
        "set method.init_lora_weights=default, or remove parallel.tensor",
    ),
    "tensor-extra-lora": Rule(
        "extra.lora",
        lambda r, _: _parts(r) and bool(r.extra.lora),
        "further settings of PEFT have not been tried with layers that processes divide",
        "remove extra.lora, or parallel.tensor",
    ),
    "tensor-optimizer": Rule(
        "optimizer.name",
        lambda r, _: _parts(r) and not r.optimizer.traits.divisible,
        "{r.optimizer.name} looks at whole matrices or blocks of them, of which each process has a part",
        "set optimizer.name=adamw, or remove parallel.tensor",
    ),
    "tensor-precision": Rule(
        "precision",
        lambda r, _: _parts(r) and r.precision not in ("fp32", "bf16", "pure_bf16"),
        "{r.precision} scales by what a process has of a weight or gradient, which is a part",
        "set precision={r.in_bf16}, or remove parallel.tensor",
    ),
    "tensor-compile": Rule(
        "compile",
        lambda r, _: _parts(r) and r.compile == "layers",
        "layers that processes divide have not been compiled",
        "set compile=auto, or remove parallel.tensor",
    ),
}
