"""Keys that have no effect because of the rest of the recipe, although whoever set one expects something of it.

Only values that differ from the default count, so that an option may state a default. A limit of what is switched off
is no more than warned of: `data.eval_split=null` on the command line is enough. What strategies and adapters ignore
stands with their other rules.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from toolkit.recipe.errors import Rule
from toolkit.recipe.schema import Recipe, sections


def _ignored(path: str, reads: Callable[[Recipe], object], why: str, instead: str = "", *, warns: bool = True) -> Rule:
    """A key that has no effect unless `reads`."""
    section, _, key = path.partition(".")
    default = sections()[section].model_fields[key].default

    def broken(recipe: Recipe) -> bool:
        return bool(attrgetter(path)(recipe) != default and not reads(recipe))

    return Rule(path, lambda r, _: broken(r), why, f"remove {path}{instead and f', or set {instead}'}", warns=warns)


def _held_out(recipe: Recipe) -> bool:
    return recipe.data.eval_split is not None or bool(recipe.data.eval_sources)


def _has_chats(recipe: Recipe) -> bool:
    return recipe.objective != "seq2seq"


def _read_by_optimizer(key: str) -> Rule:
    return _ignored(
        f"optimizer.{key}",
        lambda r: key in r.optimizer.traits.reads,
        f"optimizer {{r.optimizer.name}} has no {key} and would ignore it",
        f"optimizer.name={'sgd' if key == 'momentum' else 'adamw'}",
        warns=False,
    )


def _each_has(key: str) -> Callable[[Recipe], bool]:
    return lambda r: any(getattr(source, key) is None for source in [*r.data.sources, *r.data.eval_sources])


IGNORED_RULES = {
    **{f"optimizer-{key}": _read_by_optimizer(key) for key in ("momentum", "beta1", "beta2", "eps")},
    "lone-weight": Rule(
        "data.sources",
        lambda r, _: len(r.data.sources) == 1 and r.data.sources[0].weight is not None,
        "a weight is a share among several sources, and there is one",
        "remove its weight from data.sources",
    ),
    "evaluation-weight": Rule(
        "data.eval_sources",
        lambda r, _: any(source.weight is not None for source in r.data.eval_sources),
        "rows for evaluation are used once each, whatever the weight of their source",
        "remove the weight from data.eval_sources",
    ),
    "micro-batch-tokens": _ignored(
        "batch.micro_batch_tokens",
        lambda r: r.batch.micro_batch_size == "auto",
        "batch.micro_batch_size={r.batch.micro_batch_size} says how large micro-batches are",
        "batch.micro_batch_size=auto",
    ),
    "parallel-schedule": _ignored(
        "parallel.schedule", lambda r: r.parallel.pipeline > 1, "layers are not spread", "parallel.pipeline=2"
    ),
    "eval-max-samples": _ignored("data.eval_max_samples", _held_out, "no rows are held out", "data.eval_split=0.05"),
    "eval-seed": _ignored(
        "data.eval_seed",
        lambda r: r.data.held_out_by_seed,
        "no seed says which rows are held out",
        "data.eval_split to a fraction such as 0.05, or data.eval_max_samples",
    ),
    "evaluation-at-start": _ignored(
        "evaluation.at_start", _held_out, "no rows are held out, so nothing is evaluated", "data.eval_split=0.05"
    ),
    "early-stopping-min-delta": _ignored(
        "schedule.early_stopping_min_delta",
        lambda r: r.schedule.early_stopping_patience,
        "training does not stop early",
        "schedule.early_stopping_patience=3",
    ),
    "max-new-tokens": _ignored(
        "evaluation.max_new_tokens",
        lambda r: r.evaluation.num_prompts or r.evaluation.generation_metrics,
        "no prompt is answered",
        "evaluation.num_prompts=3",
    ),
    "streaming-num-proc": _ignored(
        "data.num_proc", lambda r: not r.data.streaming, "a stream is tokenised as it is read"
    ),
    **{
        name: _ignored(
            f"checkpoint.{name.replace('-', '_')}",
            lambda r: r.checkpoint.saves,
            "no checkpoints are saved but where the run is stopped",
            "checkpoint.save_steps=200",
        )
        for name in ("save-total-limit", "staging")
    },
    "seq2seq-template": _ignored("model.chat_template", _has_chats, "pairs of source and target are no chats"),
    "seq2seq-template-kwargs": _ignored(
        "data.chat_template_kwargs", _has_chats, "pairs of source and target are no chats"
    ),
    **{
        f"faults-{key}": _ignored(
            f"faults.{key}", lambda r: r.faults.on_spike != "ignore", "no loss is a spike", "faults.on_spike=skip"
        )
        for key in ("spike_window", "spike_sigmas")
    },
    "faults-max_skips": _ignored("faults.max_skips", lambda r: r.faults.skips, "no batch is skipped", "on_nan=skip"),
    "data-format": _ignored("data.format", _each_has("format"), "every source has a format of its own"),
    "data-columns": _ignored("data.columns", _each_has("columns"), "every source has columns of its own"),
    "data-ignore": _ignored("data.ignore", _each_has("ignore"), "every source has a list of its own"),
}
