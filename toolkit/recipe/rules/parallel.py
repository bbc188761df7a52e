"""Rules on what beside rows is divided over processes."""

from __future__ import annotations

from toolkit.recipe.errors import Config, Rule
from toolkit.recipe.model_configs import attention_widths
from toolkit.recipe.schema import VARLEN_ATTENTION, Recipe

_MOST = 1024
"""More processes than this are not looked for that divide a model's heads."""


def _divides(recipe: Recipe) -> bool:
    return recipe.parallel.sequence > 1


def nearest_heads(recipe: Recipe, config: Config) -> str:
    """The nearest sizes of `parallel.sequence` that divide the heads."""
    heads, size = attention_widths(config)[0], recipe.parallel.sequence
    fit = [number for number in range(1, min(heads, _MOST) + 1) if heads % number == 0]
    near = [number for number in fit if number < size][-1:] + [number for number in fit if number > size][:1]
    return " or ".join(map(str, near))


PARALLEL_RULES = {
    "sequence-heads": Rule(
        "parallel.sequence",
        lambda r, c: _divides(r) and bool(attention_widths(c)[0] % r.parallel.sequence),
        "the model's {attention_heads} attention heads do not divide among so many processes",
        "set parallel.sequence={nearest_heads}",
        reference="(https://arxiv.org/abs/2309.14509)",
    ),
    "sequence-seq2seq": Rule(
        "parallel.sequence",
        lambda r, _: _divides(r) and r.objective == "seq2seq",
        "encoder-decoders attend over padded rows, whose parts cannot be exchanged for heads",
        "remove parallel.sequence",
    ),
    "sequence-attention": Rule(
        "model.attention",
        lambda r, _: _divides(r) and r.model.attention not in ("auto", *VARLEN_ATTENTION),
        "parallel.sequence needs a backend that takes the boundaries of documents instead of a mask",
        "set model.attention=auto, or remove parallel.sequence",
    ),
    "sequence-streaming": Rule(
        "data.streaming",
        lambda r, _: _divides(r) and r.data.streaming,
        "processes that share rows must read the same ones, and each reads its own of a stream",
        "set data.streaming=false, or remove parallel.sequence",
    ),
    "sequence-eva": Rule(
        "method.init_lora_weights",
        lambda r, _: _divides(r) and r.method.name == "lora" and r.method.init_lora_weights == "eva",
        "EVA reads whole rows, and with parallel.sequence every process has another part of them",
        "set method.init_lora_weights=default, or remove parallel.sequence",
    ),
    "sequence-neftune": Rule(
        "extra.training_arguments",
        lambda r, _: _divides(r) and bool(r.extra.training_arguments.get("neftune_noise_alpha")),
        "the noise of NEFTune depends on the length of rows, and a process sees a part of them",
        "remove extra.training_arguments.neftune_noise_alpha, or parallel.sequence",
    ),
}
