"""Rules on data, batch, schedule, checkpoints and evaluation: what goes in, for how long, and what is looked at."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from toolkit.recipe.errors import Rule
from toolkit.recipe.schema import Recipe
from toolkit.recipe.sections import SCHEDULES


def evaluation_keys(recipe: Recipe) -> list[str]:
    """Keys that ask for an evaluation."""
    keys = ("every_steps", "batch_size", "generation_metrics")
    return [f"evaluation.{key}" for key in recipe.evaluation.changed() if key in keys]


def micro_batch(recipe: Recipe) -> int:
    """The micro-batch as far as the recipe states one."""
    size = recipe.batch.micro_batch_size
    return size if isinstance(size, int) else 1


def _is_number(text: object) -> bool:
    return isinstance(text, str) and bool(re.fullmatch(r"[\d.]+(e-?\d+)?%?", text))


def _warms_up(recipe: Recipe) -> bool:
    return bool(recipe.schedule.warmup_steps or recipe.schedule.warmup_ratio)


DATA_RULES = (
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
        "eval-split-number",
        "data.eval_split",
        lambda r, _: _is_number(r.data.eval_split),
        "is text, so it would be taken for the name of a split",
        "write a number between 0 and 1 without quotes",
    ),
    Rule(
        "eval-split-is-train",
        "data.eval_split",
        lambda r, _: (
            not _is_number(r.data.eval_split) and r.data.eval_split in [source.split for source in r.data.sources]
        ),
        "the training rows would be their own held-out rows",
        "name another split, or a fraction: data.eval_split=0.05",
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
)

BATCH_RULES = (
    Rule(
        "batch-both-sizes",
        "batch.tokens_per_step",
        lambda r, _: bool(r.batch.tokens_per_step and r.batch.global_batch_size),
        "global_batch_size and tokens_per_step state the same thing twice",
        "keep one of them; on the command line batch.global_batch_size=null removes the other",
    ),
    Rule(
        "batch-tokens-division",
        "batch.tokens_per_step",
        lambda r, _: bool(r.batch.tokens_per_step and r.batch.tokens_per_step % r.batch.seq_len),
        "tokens_per_step must be a multiple of batch.seq_len",
        "set batch.tokens_per_step={nearest_tokens}",
    ),
    Rule(
        "batch-micro-over-global",
        "batch.micro_batch_size",
        lambda r, _: micro_batch(r) > r.batch.sequences_per_step,
        "a micro-batch cannot be larger than the global batch, which has {r.batch.sequences_per_step} sequences",
        "set batch.micro_batch_size={r.batch.sequences_per_step} or less",
    ),
    Rule(
        "batch-micro-division",
        "batch.micro_batch_size",
        lambda r, _: micro_batch(r) <= r.batch.sequences_per_step and bool(r.batch.sequences_per_step % micro_batch(r)),
        "the global batch of {r.batch.sequences_per_step} sequences does not divide into micro-batches of this size",
        "set batch.micro_batch_size={nearest_micro}",
    ),
)

SCHEDULE_RULES = (
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
        "keep one; on the command line schedule.warmup_ratio=null removes the other",
    ),
    Rule(
        "schedule-constant-warmup",
        "schedule.name",
        lambda r, _: r.schedule.name == "constant" and _warms_up(r) and r.optimizer.traits.family != "schedule_free",
        "a constant learning rate has no warm-up",
        "set schedule.name=constant_with_warmup",
    ),
    Rule(
        "schedule-unknown-args",
        "schedule.args",
        lambda r, _: not set(r.schedule.args) <= SCHEDULES[r.schedule.name],
        "schedule {r.schedule.name} takes these arguments: {schedule_args}",
        "remove the others",
    ),
    Rule(
        "schedule-min-lr",
        "schedule.args",
        lambda r, _: (
            r.schedule.name.endswith("with_min_lr") and len({"min_lr", "min_lr_rate"} & set(r.schedule.args)) != 1
        ),
        "schedule {r.schedule.name} needs its lowest learning rate, once: "
        "min_lr, or min_lr_rate as a share of the peak",
        "set schedule.args.min_lr_rate=0.1",
    ),
    Rule(
        "schedule-decay-steps",
        "schedule.args",
        lambda r, _: r.schedule.name == "warmup_stable_decay" and "num_decay_steps" not in r.schedule.args,
        "warmup_stable_decay must know how many steps the decay at the end takes",
        "set schedule.args.num_decay_steps",
    ),
    Rule(
        "schedule-free",
        "schedule.name",
        lambda r, _: r.optimizer.traits.family == "schedule_free" and r.schedule.name != "constant",
        "this optimizer replaces the schedule; a second one would fight it",
        "set schedule.name=constant; schedule.warmup_steps is then the optimizer's own",
    ),
)

LOOKING_RULES = (
    Rule(
        "checkpoint-both-intervals",
        "checkpoint.save_epochs",
        lambda r, _: bool(r.checkpoint.save_steps and r.checkpoint.save_epochs),
        "save_steps and save_epochs state the interval twice",
        "keep one; on the command line checkpoint.save_steps=null removes the other",
    ),
    Rule(
        "resume-path",
        "checkpoint.resume",
        lambda r, _: r.checkpoint.resume not in ("auto", "never") and not Path(r.checkpoint.resume).is_dir(),
        "is neither `auto`, `never` nor the folder of a checkpoint",
        "name an existing checkpoint folder",
    ),
    Rule(
        "evaluation-without-data",
        "evaluation",
        lambda r, _: bool(evaluation_keys(r)) and r.data.eval_split is None and not r.data.eval_sources,
        "no rows are held out, so this has no effect: {evaluation_keys}",
        "set data.eval_split (0.05, or the name of a split) or data.eval_sources, or remove these keys",
    ),
    Rule(
        "metrics-need-seq2seq",
        "evaluation.generation_metrics",
        lambda r, _: r.evaluation.generation_metrics and r.objective != "seq2seq",
        "generation metrics compare whole targets, which only objective seq2seq has",
        "set evaluation.generation_metrics=false",
    ),
    Rule(
        "beams-without-metrics",
        "evaluation.num_beams",
        lambda r, _: r.evaluation.num_beams > 1 and not r.evaluation.generation_metrics,
        "beams are used for generation metrics only",
        "set evaluation.generation_metrics=true, or remove evaluation.num_beams",
    ),
    Rule(
        "prompts-left-out",
        "evaluation.num_prompts",
        lambda r, _: len(r.evaluation.prompts) > r.evaluation.num_prompts,
        "evaluation.prompts has {num_prompts} prompts, some would not be answered",
        "set evaluation.num_prompts={num_prompts}",
    ),
    Rule(
        "output-name",
        "output.name",
        lambda r, _: PurePath(r.output.name or "").is_absolute() or ".." in PurePath(r.output.name or "").parts,
        "the run folder must lie inside output.dir",
        "set output.dir for the place, and output.name to a name",
    ),
)
