"""Combinations that cannot work or would train something else than was asked. One table; each rule says why and what to do.

The rules look at the recipe and, where it is known, at the model's `config.json`. They import no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import facts
from toolkit.recipe import Loaded, Problem, Recipe, RecipeError, load, origin_of

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """One combination that is refused.

    Args:
        id: Stable name, used in tests and documentation.
        path: The key the message points at.
        broken: Whether a recipe breaks the rule, given the model's config when it is known (else an empty mapping).
        why: What would happen.
        change: The nearest allowed change.
    """

    id: str
    path: str
    broken: Callable[[Recipe, Config], bool]
    why: str
    change: str


def _adapters_set(recipe: Recipe) -> bool:
    method = recipe.method
    return method.use_dora or method.use_rslora or bool(method.modules_to_save) or method.quantization != "none"


RULES: tuple[Rule, ...] = (
    Rule(
        "batch-both-sizes",
        "batch.tokens_per_step",
        lambda r, _: bool(r.batch.tokens_per_step and r.batch.global_batch_size),
        "global_batch_size and tokens_per_step state the same thing twice",
        "keep one of them",
    ),
    Rule(
        "batch-tokens-division",
        "batch.tokens_per_step",
        lambda r, _: bool(r.batch.tokens_per_step and r.batch.tokens_per_step % r.batch.seq_len),
        "tokens_per_step must be a multiple of batch.seq_len",
        "set batch.tokens_per_step={nearest_tokens}",
    ),
    Rule(
        "schedule-both-lengths",
        "schedule.max_steps",
        lambda r, _: bool(r.schedule.max_steps and r.schedule.num_epochs),
        "max_steps and num_epochs state the length twice",
        "keep one; on the command line schedule.num_epochs=null removes the other",
    ),
    Rule(
        "schedule-both-warmups",
        "schedule.warmup_ratio",
        lambda r, _: r.schedule.warmup_ratio is not None and r.schedule.warmup_steps is not None,
        "warmup_ratio and warmup_steps state the warm-up twice",
        "keep one of them",
    ),
    Rule(
        "checkpoint-both-intervals",
        "checkpoint.save_epochs",
        lambda r, _: bool(r.checkpoint.save_steps and r.checkpoint.save_epochs),
        "save_steps and save_epochs state the interval twice",
        "keep one of them",
    ),
    Rule(
        "streaming-length",
        "data.streaming",
        lambda r, _: r.data.streaming and not r.schedule.max_steps,
        "the number of rows of a stream is not known, so an epoch has no length",
        "set schedule.max_steps",
    ),
    Rule(
        "streaming-epochs",
        "checkpoint.save_epochs",
        lambda r, _: r.data.streaming and r.checkpoint.save_epochs is not None,
        "a stream has no epochs to save at",
        "use checkpoint.save_steps",
    ),
    Rule(
        "streaming-fraction",
        "data.eval_split",
        lambda r, _: r.data.streaming and isinstance(r.data.eval_split, float),
        "a share of a stream cannot be held out, its length is not known",
        "name a split (data.eval_split=validation) or data.eval_sources",
    ),
    Rule(
        "streaming-whole-data",
        "data.streaming",
        lambda r, _: r.data.streaming and (r.data.deduplicate or r.data.max_samples is not None),
        "deduplicate and max_samples of the mixture need all rows at hand",
        "set data.streaming=false, or max_samples per source",
    ),
    Rule(
        "full-adapter-keys",
        "method.name",
        lambda r, _: r.method.name == "full" and _adapters_set(r),
        "quantization, DoRA, rsLoRA and modules_to_save belong to adapters; full fine-tuning would ignore them",
        "set method.name=lora, or remove them",
    ),
    Rule(
        "lora-freeze",
        "method.freeze",
        lambda r, _: r.method.name == "lora" and bool(r.method.freeze),
        "with adapters the base is frozen already",
        "remove method.freeze, or set method.name=full",
    ),
    Rule(
        "quantized-dtype",
        "model.dtype",
        lambda r, _: r.method.quantization != "none" and r.model.dtype != "auto",
        "a quantized base is stored as method.quantization says",
        "remove model.dtype",
    ),
    Rule(
        "int8-dora",
        "method.use_dora",
        lambda r, _: r.method.quantization == "int8" and r.method.use_dora,
        "DoRA needs the norm of the dequantized weight, which 8-bit layers do not give reliably",
        "set method.quantization=nf4 or method.use_dora=false",
    ),
    Rule(
        "full-low-masters",
        "model.dtype",
        lambda r, _: r.method.name == "full" and r.model.dtype in ("bf16", "fp16") and r.precision != "pure_bf16",
        "16-bit masters lose most updates of a small learning rate: at 1e-5 only 16% of the weights move in 50 steps",
        "remove model.dtype, or set precision=pure_bf16 to accept it",
    ),
    Rule(
        "pure-bf16-dtype",
        "model.dtype",
        lambda r, _: r.precision == "pure_bf16" and r.model.dtype not in ("auto", "bf16"),
        "pure_bf16 means that weights are stored in bf16",
        "remove model.dtype, or set precision=bf16",
    ),
    Rule(
        "fp16-weights",
        "precision",
        lambda r, _: r.precision in ("bf16", "fp32") and r.model.dtype == "fp16",
        "fp16 weights under another compute type round twice",
        "set precision=fp16, or remove model.dtype",
    ),
    Rule(
        "split-needs-text",
        "data.over_long",
        lambda r, _: r.data.over_long == "split" and r.objective != "language_modelling",
        "cutting a chat or completion in two would train an answer without its question",
        "use data.over_long=drop or truncate",
    ),
    Rule(
        "lm-trains-all",
        "data.train_on",
        lambda r, _: r.objective == "language_modelling" and r.data.train_on not in ("auto", "all"),
        "language modelling trains every token",
        "remove data.train_on, or set objective=sft",
    ),
    Rule(
        "seq2seq-packing",
        "data.packing",
        lambda r, _: r.objective == "seq2seq" and r.data.packing,
        "packed documents cannot be isolated in the cross-attention of an encoder-decoder",
        "set data.packing=false",
    ),
    Rule(
        "seq2seq-train-on",
        "data.train_on",
        lambda r, _: r.objective == "seq2seq" and r.data.train_on != "auto",
        "an encoder-decoder always trains its whole target",
        "remove data.train_on",
    ),
    Rule(
        "metrics-need-seq2seq",
        "evaluation.generation_metrics",
        lambda r, _: r.evaluation.generation_metrics and r.objective != "seq2seq",
        "generation metrics compare whole targets, which only objective seq2seq has",
        "set evaluation.generation_metrics=false",
    ),
    Rule(
        "architecture-causal",
        "objective",
        lambda r, c: bool(c) and r.objective == "seq2seq" and not facts.is_encoder_decoder(c),
        "this model is decoder-only",
        "set objective=sft or language_modelling",
    ),
    Rule(
        "architecture-seq2seq",
        "objective",
        lambda r, c: bool(c) and r.objective != "seq2seq" and facts.is_encoder_decoder(c),
        "this model is an encoder-decoder",
        "set objective=seq2seq",
    ),
    Rule(
        "positions",
        "batch.seq_len",
        lambda r, c: (facts.max_positions(c) or r.batch.seq_len) < r.batch.seq_len,
        "the model has only {max_positions} positions",
        "set batch.seq_len={max_positions} or less",
    ),
    Rule(
        "resume-path",
        "checkpoint.resume",
        lambda r, _: r.checkpoint.resume not in ("auto", "never") and not Path(r.checkpoint.resume).is_dir(),
        "is neither `auto`, `never` nor the folder of a checkpoint",
        "name an existing checkpoint folder",
    ),
)


def check(recipe: Recipe, origins: Mapping[str, str] | None = None) -> list[Problem]:
    """Every rule the recipe breaks, as problems that name the place to change."""
    config = facts.config_of(recipe.model) or {}
    values = {
        "max_positions": facts.max_positions(config) if config else None,
        "nearest_tokens": _nearest_multiple(recipe.batch.tokens_per_step, recipe.batch.seq_len),
    }
    return [
        Problem(
            rule.path,
            rule.why.format(**values),
            origin_of(rule.path, origins or {}),
            given=_value(recipe, rule.path),
            hint=rule.change.format(**values),
        )
        for rule in RULES
        if rule.broken(recipe, config)
    ]


def load_checked(name: str, overrides: Sequence[str] = (), folder: str | Path | None = None) -> Loaded:
    """Loads a recipe and applies the rules; schema errors and broken rules are reported together.

    Raises:
        RecipeError: With every problem found.
    """
    try:
        loaded = load(name, overrides, folder)
    except RecipeError as error:
        if error.partial is None:
            raise
        broken = check(error.partial, error.origins)
        raise RecipeError(error.name, error.problems + broken, error.partial, error.origins) from None
    if broken := check(loaded.recipe, loaded.origins):
        raise RecipeError(loaded.name, broken, loaded.recipe, loaded.origins)
    return loaded


def _value(recipe: Recipe, path: str) -> str:
    value: Any = recipe
    for part in path.split("."):
        value = getattr(value, part)
    return repr(value)


def _nearest_multiple(number: int | None, base: int) -> int:
    return max(1, round((number or 0) / base)) * base
