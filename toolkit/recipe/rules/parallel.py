"""Rules on what beside rows is divided over processes."""

from __future__ import annotations

from toolkit.recipe.errors import Config, Rule
from toolkit.recipe.model_configs import attention_widths
from toolkit.recipe.schema import VARLEN_ATTENTION, Recipe

_MOST = 1024
"""More processes than this are not looked for that divide a model's heads."""


def _shares(recipe: Recipe, way: str) -> bool:
    return getattr(recipe.parallel, way) > 1


def nearest_heads(recipe: Recipe, config: Config) -> str:
    """The nearest sizes of `parallel.sequence` that divide the heads."""
    heads, size = attention_widths(config)[0], recipe.parallel.sequence
    fit = [number for number in range(1, min(heads, _MOST) + 1) if heads % number == 0]
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
        lambda r, c: _shares(r, "sequence") and bool(attention_widths(c)[0] % r.parallel.sequence),
        "the model's {attention_heads} attention heads do not divide among so many processes",
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
}
