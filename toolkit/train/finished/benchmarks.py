"""Benchmarks of lm-eval (EleutherAI's Language Model Evaluation Harness) for a run, before and after training.

The model is the run's own, as it is loaded to answer, so adapters, quantized bases and the run's template count. What a
task asks and how it is scored are lm-eval's; shares of right answers get Wilson's interval, which holds also where all
or none are right, other means Student's, and the rest lm-eval's standard error.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np

from toolkit.common import UserError, in_a_line
from toolkit.data.auditing.audit import Audit
from toolkit.data.encoding.chat_spans import as_read
from toolkit.distributed.engines import dtypes
from toolkit.models.load import ModelSource
from toolkit.recipe.load import load_resolved
from toolkit.recipe.spelling import did_you_mean
from toolkit.report.evaluation import Interval, Score, Task
from toolkit.report.held_out_rows import of_mean
from toolkit.train.evaluation.scoring import Z, paired_shares, wilson
from toolkit.train.finished.export import read_audit
from toolkit.train.finished.held_out import before_and_after

_log = logging.getLogger("toolkit.train")
Found = Mapping[str, Any]
"""What `lm_eval.simple_evaluate` returns."""


def evaluate_tasks(
    run: Path,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None,
    limit: int | None,
    include_path: str | None,
    batch_size: int,
    chat_template: bool | None,
    before: bool,
) -> list[Task]:
    """Asks a run's model, and the one that it began with, the tasks.

    Args:
        tasks: Names of tasks, groups or tags of lm-eval, or of `include_path`.
        num_fewshot: Examples in each prompt; None for what each task says. Tasks that say 0 keep it.
        limit: Samples of each task, at most.
        include_path: A folder with tasks of one's own.
        chat_template: Whether prompts are conversations; None for as the run's rows were.
        before: Whether the model that the run began with is asked too.

    Raises:
        UserError: If lm-eval or a module that a task needs is not installed, a task is not known, or its data cannot
            be had.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("lm-eval, which asks benchmarks, is not installed", "run `pip install lm-eval`") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include_path and not Path(include_path).is_dir():
        raise UserError(f"include_path: there is no folder {include_path}", "name one that holds YAML files of tasks")
    manager = TaskManager(include_path=include_path)
    for name in tasks:
        if name not in manager.all_tasks and not Path(name).is_file():
            close = did_you_mean(name, manager.all_tasks)
            hint = (
                f"did you mean `{close}`? `lm-eval ls tasks` lists them" if close else "`lm-eval ls tasks` lists them"
            )
            raise UserError(f"lm-eval has no task `{name}`", f"{hint}; tasks of your own need include_path=FOLDER")
    recipe = load_resolved(run / "recipe.yaml")
    audit: Audit = read_audit(run)
    chat = audit.chat_template.needed if chat_template is None else chat_template
    source = ModelSource.open(recipe)
    tokenizer = source.tokenizer(saved=run / "final")
    stops = source.stop_tokens(tokenizer)

    def ask(model: Any, who: str) -> Found:
        _log.info("%s: %s", who, ", ".join(tasks))
        # Besides the end token, which lm-eval adds by itself.
        model.generation_config.eos_token_id = sorted(stops) or None
        return _found(
            model,
            tokenizer,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            batch_size=batch_size,
            task_manager=manager,
            apply_chat_template=chat,
            backend="seq2seq" if recipe.objective == "seq2seq" else "causal",
            autocast=dtypes(recipe).autocast,
            chat_template_args=recipe.data.chat_template_kwargs,
        )

    first, last = before_and_after(run, ask, before)
    return [_task(name, first, last, chat) for name in last["results"]]


def _found(
    model: Any,
    tokenizer: Any,
    *,
    backend: str,
    autocast: str | None,
    batch_size: int,
    chat_template_args: dict[str, Any],
    **settings: Any,
) -> Found:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    class AsTrained(HFLM):
        """Asks with prompts as those of training: see `chat_spans.as_read`."""

        def apply_chat_template(self, chat_history: list[Any], add_generation_prompt: bool = True) -> str:
            read = as_read(tokenizer.get_chat_template(), chat_history)
            return str(super().apply_chat_template(read, add_generation_prompt))

    harness = AsTrained(
        pretrained=model,
        tokenizer=tokenizer,
        backend=backend,
        batch_size=batch_size,
        mixed_precision_dtype=autocast,
        chat_template_args=chat_template_args,
    )
    leave = functools.partial(patch.object, evaluator)
    try:
        # It would ask git and the machine, for a report that is not read.
        with leave("get_git_commit_hash", lambda: ""), leave("add_env_info", lambda results: None):
            found: Found | None = evaluator.simple_evaluate(harness, **settings)
    except ModuleNotFoundError as error:
        raise UserError(
            f"lm-eval cannot ask {', '.join(settings['tasks'])}: the module {error.name} is not installed",
            "lm-eval names what some tasks need in extras: `pip install 'lm-eval[tasks]'` has that of all of them",
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"lm-eval cannot ask {', '.join(settings['tasks'])}: {in_a_line(error)}",
            "without a network, a task's data has to be in the cache of the hub's libraries, or in local files",
        ) from error
    assert found, "only ranks other than the first get nothing"
    return found


def _task(name: str, first: Found | None, last: Found, chat: bool) -> Task:
    leaves = list(_leaves(name, last))
    counts = [last["n-samples"][leaf] for leaf in leaves]
    scores = [
        _score(key, leaves, first["results"][name] if first else None, first, last["results"][name], last)
        for key in last["results"][name]
        if "," in key and not key.partition(",")[0].endswith("_stderr")
    ]
    return Task(
        name=name,
        samples=sum(count["effective"] for count in counts),
        of_samples=sum(count["original"] for count in counts),
        num_fewshot=max(last["n-shot"][leaf] for leaf in leaves),
        chat_template=chat,
        scores=scores,
    )


def _leaves(name: str, found: Found) -> Sequence[str]:
    """The tasks of a group; of a task itself."""
    if name in found["n-samples"]:
        return [name]
    return [leaf for each in found["group_subtasks"][name] for leaf in _leaves(each, found)]


def _score(key: str, leaves: Sequence[str], was: Found | None, first: Found | None, now: Found, last: Found) -> Score:
    metric, _, filtered = key.partition(",")
    after = _values(key, leaves, now, last)
    score = Score(
        name=metric if filtered == "none" else f"{metric} ({filtered})",
        after=_interval(key, now, after),
        higher_is_better=bool(last["higher_is_better"].get(leaves[0], {}).get(metric, True)),
    )
    if was is not None and first is not None:
        before = _values(key, leaves, was, first)
        score.before = _interval(key, was, before)
        score.change = _change(now[key] - was[key], before, after)
    return score


def _values(key: str, leaves: Sequence[str], result: Found, found: Found) -> np.ndarray | None:
    """What each sample scored, where the result is the mean of that."""
    metric, _, filtered = key.partition(",")
    samples = [each for leaf in leaves for each in found["samples"][leaf] if each["filter"] == filtered]
    values = [each.get(metric) for each in sorted(samples, key=lambda each: each["doc_id"])]
    if not values or not all(isinstance(each, int | float) for each in values):
        return None
    array = np.array(values, dtype=np.float64)
    return array if math.isclose(array.mean(), result[key], abs_tol=1e-9) else None


def _is_share(values: np.ndarray | None) -> bool:
    return values is not None and bool(np.isin(values, (0, 1)).all())


def _interval(key: str, result: Found, values: np.ndarray | None) -> Interval:
    if values is not None:
        return wilson(int(values.sum()), len(values)) if _is_share(values) else _around(*of_mean(values))
    metric, _, filtered = key.partition(",")
    # Such as that of a score of all samples together, which lm-eval draws anew.
    error = result.get(f"{metric}_stderr,{filtered}")
    return _around(float(result[key]), Z * error if isinstance(error, float | int) else math.nan)


def _change(value: float, before: np.ndarray | None, after: np.ndarray | None) -> Interval:
    """With the interval of the samples' own changes, where a result is their mean; they are the same samples."""
    if before is None or after is None or len(before) < 2:
        return Interval(value=value)
    if _is_share(before) and _is_share(after):
        return paired_shares(before > 0, after > 0)
    return _around(value, of_mean(after - before).half)


def _around(value: float, half: float) -> Interval:
    return Interval(value=value, low=value - half, high=value + half) if math.isfinite(half) else Interval(value=value)
