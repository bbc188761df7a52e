"""Rules on checkpoints, evaluation and output: what a run keeps, measures and publishes."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path, PurePath

from toolkit.files import too_long
from toolkit.recipe.embedding import COSENT, RANKING
from toolkit.recipe.errors import Rule
from toolkit.recipe.schema import Recipe
from toolkit.recipe.sections import CORRELATIONS, RETRIEVAL


def _of_vectors(recipe: Recipe) -> str | None:
    """The loss of vectors beside which the metric of `checkpoint.keep_best` is measured; None where any may be."""
    metric = (recipe.checkpoint.keep_best or "").removeprefix("eval_")
    return RANKING if metric in RETRIEVAL else COSENT if metric in CORRELATIONS else None


def evaluation_keys(recipe: Recipe) -> list[str]:
    """Keys that ask for an evaluation."""
    keys = ("every_steps", "batch_size", "generation_metrics")
    return [f"evaluation.{key}" for key in recipe.evaluation.changed() if key in keys]


def _judged_by_evaluations(key: str) -> Rule:
    """A key that takes evaluations in training."""
    asked = attrgetter(key)

    def broken(recipe: Recipe) -> bool:
        held_out = recipe.data.eval_split is not None or recipe.data.eval_sources
        return asked(recipe) is not None and not (held_out and recipe.evaluation.every_steps)

    return Rule(
        key,
        lambda r, _: broken(r),
        "models are compared by evaluations in training, and there are none",
        "set data.eval_split=0.05 and evaluation.every_steps=100, or remove it",
    )


def _inside(name: PurePath) -> bool:
    """Whether a folder of this name lies in another one, and is not that one itself."""
    return bool(name.parts) and not name.is_absolute() and ".." not in name.parts


def _long_names(recipe: Recipe) -> list[str]:
    """Keys of the output that are too long by themselves."""
    names = {"output.dir": recipe.output.dir, "output.name": recipe.output.name or ""}
    return [key for key, name in names.items() if too_long(Path(name))]


RESULT_RULES = {
    "checkpoint-both-intervals": Rule(
        "checkpoint.save_epochs",
        lambda r, _: r.checkpoint.save_steps and r.checkpoint.save_epochs,
        "save_steps and save_epochs state the interval twice",
        "keep one; on the command line checkpoint.save_steps=null removes the other",
    ),
    "resume-path": Rule(
        "checkpoint.resume",
        lambda r, _: r.checkpoint.resume not in ("auto", "never") and not Path(r.checkpoint.resume).is_dir(),
        "is neither `auto`, `never` nor the folder of a checkpoint",
        "name an existing checkpoint folder",
    ),
    "staging-relative": Rule(
        "checkpoint.staging",
        lambda r, _: r.checkpoint.staging not in ("auto", "none") and not Path(r.checkpoint.staging).is_absolute(),
        "is neither `auto`, `none` nor a path that is the same wherever a process starts",
        "write it from / on, such as checkpoint.staging=/dev/shm",
    ),
    "best-unevaluated": _judged_by_evaluations("checkpoint.keep_best"),
    "best-metric": Rule(
        "checkpoint.keep_best",
        lambda r, _: (
            r.checkpoint.keep_best in ("eval_bleu", "eval_chrf", "eval_exact_match")
            and not r.evaluation.generation_metrics
        ),
        "is a metric of generated targets, and none are generated",
        "set checkpoint.keep_best=eval_loss, or, for objective seq2seq, evaluation.generation_metrics=true",
    ),
    "best-accuracy": Rule(
        "checkpoint.keep_best",
        lambda r, _: r.checkpoint.keep_best == "eval_accuracy" and (r.embeds or not (r.prefers or r.headed)),
        "is the share of answers preferred, or classes told, rightly, which this objective has none of",
        "set checkpoint.keep_best=eval_loss, or objective=dpo",
    ),
    "best-f1": Rule(
        "checkpoint.keep_best",
        lambda r, _: r.checkpoint.keep_best == "eval_macro_f1" and not r.classifies,
        "is the mean F1 of classes, which only objectives that classify have",
        "set checkpoint.keep_best=eval_loss, or objective=classification",
    ),
    "best-entities": Rule(
        "checkpoint.keep_best",
        lambda r, _: r.checkpoint.keep_best == "eval_entity_f1" and r.objective != "token_classification",
        "is the F1 of entities, which only words with tags have",
        "set checkpoint.keep_best=eval_loss, or objective=token_classification",
    ),
    "best-vectors": Rule(
        "checkpoint.keep_best",
        lambda r, _: _of_vectors(r) is not None and not (r.embeds and _of_vectors(r) == r.embedding.loss),
        "measures vectors of texts: eval_spearman and eval_pearson of pairs with scores, the others of what belongs "
        "together",
        "set checkpoint.keep_best=eval_loss",
    ),
    "best-or-mean": Rule(
        "checkpoint.average_last",
        lambda r, _: r.checkpoint.average_last and r.checkpoint.keep_best,
        "one model is published: the best one, or the mean of the last ones",
        "keep one; on the command line checkpoint.keep_best=null removes the other",
    ),
    "mean-without-checkpoints": Rule(
        "checkpoint.average_last",
        lambda r, _: r.checkpoint.average_last and not r.checkpoint.saves,
        "the mean is that of models at checkpoints, and none are saved",
        "set checkpoint.save_steps=100, or remove it",
    ),
    "mean-of-means": Rule(
        "checkpoint.average_last",
        lambda r, _: r.checkpoint.average_last and r.optimizer.traits.family == "schedule_free",
        "optimizer {r.optimizer.name} averages all weights since the first step already",
        "remove checkpoint.average_last, or set optimizer.name=adamw",
    ),
    "early-stopping-unevaluated": _judged_by_evaluations("schedule.early_stopping_patience"),
    "evaluation-without-data": Rule(
        "evaluation",
        lambda r, _: evaluation_keys(r) and r.data.eval_split is None and not r.data.eval_sources,
        "no rows are held out, so this has no effect: {evaluation_keys}",
        "set data.eval_split (0.05, or the name of a split) or data.eval_sources, or remove these keys",
        keys=evaluation_keys,
    ),
    "metrics-need-seq2seq": Rule(
        "evaluation.generation_metrics",
        lambda r, _: r.evaluation.generation_metrics and r.objective != "seq2seq",
        "generation metrics compare whole targets, which only objective seq2seq has",
        "set evaluation.generation_metrics=false",
    ),
    "beams-without-metrics": Rule(
        "evaluation.num_beams",
        lambda r, _: r.evaluation.num_beams > 1 and not r.evaluation.generation_metrics,
        "beams are used for generation metrics only",
        "remove evaluation.num_beams, or, for objective seq2seq, set evaluation.generation_metrics=true",
    ),
    "prompts-left-out": Rule(
        "evaluation.num_prompts",
        lambda r, _: len(r.evaluation.prompts) > r.evaluation.num_prompts,
        "evaluation.prompts has {num_prompts} prompts, some would not be answered",
        "set evaluation.num_prompts={num_prompts}",
    ),
    "output-name": Rule(
        "output.name",
        lambda r, _: r.output.name and not _inside(PurePath(r.output.name)),
        "the run folder must lie inside output.dir",
        "set output.dir for the place, and output.name to a name",
    ),
    "output-too-long": Rule(
        "output",
        lambda r, _: too_long(Path(r.output.dir, r.output.name or "")),
        "the run folder's path, or a name in it, is longer than this file system takes",
        "shorten output.name or output.dir",
        keys=_long_names,
    ),
}
