"""Which model of a training is published: the last one, the best by a metric of held-out rows, or the mean of the last
ones; and when training stops early.

Nothing is noted beside what is there in any case. Weights that may be published are kept as `snapshots`, each whole and
sealed before the checkpoint of its step is; the metrics of all evaluations are in every checkpoint. A run that is
continued finds both as they were at its step, and drops what came after it, which is trained anew. One that goes on
from another's checkpoint takes that one's weights along.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from toolkit.common import UserError, in_background
from toolkit.files import UNANSWERED
from toolkit.report.manifest import Published
from toolkit.seal import fault
from toolkit.train.checkpoints import snapshots
from toolkit.train.checkpoints.staging import MOST_FAILURES
from toolkit.train.checkpoints.storage import unanswered, unwritable
from toolkit.train.session import Session

_log = logging.getLogger("toolkit.train")


@dataclass(frozen=True)
class Chosen:
    """The model that is published.

    Args:
        published: What the manifest says of it.
        metrics: Of its evaluation; None if it has not been evaluated.
        weights: Its weights, nothing on other processes than the first; None for those that the model has now.
    """

    published: Published
    metrics: dict[str, float] | None
    weights: dict[str, torch.Tensor] | None


def metrics_of(row: dict[str, Any]) -> dict[str, float]:
    """Of an evaluation, as the Trainer's state has it."""
    return {key: value for key, value in row.items() if key.startswith("eval_")}


def evaluations_by(state: Any, metric: str) -> dict[int, float]:
    """The metric of each evaluation in training, by step, so that more is better; what is no number is the worst."""
    sign = -1.0 if metric == "eval_loss" else 1.0
    rows = (row for row in state.log_history if row["step"] > 0 and metric in row)
    return {row["step"]: -math.inf if math.isnan(row[metric]) else sign * row[metric] for row in rows}


class EarlyStopping(TrainerCallback):
    """Ends training when the newest evaluations were no better than the best one before them."""

    def __init__(self, session: Session) -> None:
        self._settings, self._tell = session.recipe.schedule, session.progress.message
        self._metric = session.recipe.checkpoint.keep_best or "eval_loss"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A checkpoint of the step after which training stopped may be the newest.
        self._judge(state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._metric in (logs or {}):
            self._judge(state, control)

    def _judge(self, state: Any, control: Any) -> None:
        best, without = -math.inf, 0
        for value in evaluations_by(state, self._metric).values():
            if value > best + self._settings.early_stopping_min_delta:
                best, without = value, 0
            else:
                without += 1
        if without >= (self._settings.early_stopping_patience or math.inf) and not control.should_training_stop:
            control.should_training_stop = True
            said = f"{self._metric} has not improved in {without} evaluations"
            self._tell(f"Stopping early after step {state.global_step} of {state.max_steps}: {said}.")


class Selection(TrainerCallback):
    """Keeps the weights that would be published if training ended now, or at a step that has a checkpoint.

    Args:
        pause: Is told of seconds in which no step was taken.
    """

    def __init__(self, session: Session, pause: Callable[[float], None]) -> None:
        self._session, self._trainer, self._pause = session, session.trainer, pause
        self._metric, self._average = session.recipe.checkpoint.keep_best, session.recipe.checkpoint.average_last
        self._folder = session.folder.path / "snapshots"
        self._kept: dict[int, float] = {}
        self._failures = 0
        self._newest: tuple[int, float] | None = None
        self._written: Future[tuple[str, str] | None] | None = None
        self._over = False
        self._tried_from = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        values = evaluations_by(state, self._metric) if self._metric else {}
        if self._session.leads and (values or self._average):
            self._take_along(state.global_step)
        box: list[Any] = [self._found(state.global_step) if self._session.leads else None]
        broadcast_object_list(box)
        values = values if self._metric else dict.fromkeys(box[0], 0.0)
        self._kept = {step: values[step] for step in box[0] if step in values}
        published = self._session.folder.is_trained  # Then nothing is chosen any more.
        if not published and max(values.values(), default=-math.inf) > max(self._kept.values(), default=-math.inf):
            self._tried_from = state.global_step
            if self._session.leads:
                _log.warning(
                    "the model of step %d, the best so far by %s, was not kept: the best of the following ones is "
                    "published",
                    max(values, key=lambda step: values[step]),
                    self._metric,
                )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._average and self._saves(state):
            started = time.monotonic()
            self._keep(state.global_step, 0.0)
            self._pause(time.monotonic() - started)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._metric in (logs or {}) and not self._over:
            self._settle()
            value = evaluations_by(state, str(self._metric)).get(state.global_step, -math.inf)
            if value > max(self._kept.values(), default=-math.inf):
                self._keep(state.global_step, value)

    def _saves(self, state: Any) -> bool:
        every = self._session.length.save_steps or state.max_steps
        return bool(state.global_step % every == 0 or state.global_step == state.max_steps)

    def choose(self) -> Chosen | None:
        """The model to publish; None if it is the last one. Every process must call this, when training is over."""
        state, self._over = self._trainer.state, True
        if self._average and not self._saves(state):  # It stopped early.
            self._keep(state.global_step, 0.0)
        self._settle()
        box: list[Any] = [self._whole(state.global_step) if self._session.leads else None]
        broadcast_object_list(box)
        if not (steps := box[0]):
            _log.warning("no weights were kept to choose from: the last model is published")
            return None
        leads, folders = self._session.leads, [self._place(step) for step in steps]
        if self._average:
            what = f"the mean of the models after steps {', '.join(map(str, steps))}"
            published = Published(step=state.global_step, what=what)
            return Chosen(published, None, snapshots.mean(folders) if leads else {})
        rows = [row for row in state.log_history if str(self._metric) in row]
        row = next(row for row in rows if row["step"] == steps[0])
        tried = sum(row["step"] > self._tried_from for row in rows)
        what = f"the best of {tried:,} evaluations by {self._metric}, after step {steps[0]:,}"
        is_last = steps[0] == state.global_step
        weights = None if is_last else snapshots.mean(folders) if leads else {}
        return Chosen(Published(step=steps[0], what=what), metrics_of(row), weights)

    def clear(self) -> None:
        """Deletes what no checkpoint needs any more, once the model is published."""
        self._prune([])

    def _keep(self, step: int, value: float) -> None:
        """Takes the weights, and has them written before the checkpoint of this step counts; behind the steps, where
        checkpoints are copied behind them."""
        self._settle()
        saves, self._newest = self._trainer.saves, (step, value)
        state = snapshots.take(self._trainer, self._session.dtypes)
        if self._session.leads:
            self._written = saves.before = in_background(lambda: self._write(step, state))
        if not saves.fast:
            self._settle()

    def _settle(self) -> None:
        """Waits for the newest weights, and counts them if they could be written. Every process must call this.

        Raises:
            UserError: If they are the second in a row that could not be.
        """
        if self._newest is None:
            return
        (step, value), leads = self._newest, self._session.leads
        box = [self._written.result() if self._written else None]
        self._newest = self._written = None
        broadcast_object_list(box)
        if reason := box[0]:
            self._failures += 1
            if self._failures == MOST_FAILURES:
                raise UserError(*reason)
            if leads:
                _log.warning(
                    "%s; the weights after step %d are not kept to be published, training goes on, and the next "
                    "failure ends it: %s",
                    *(reason[0], step, reason[1]),
                )
            return
        self._failures, self._kept[step] = 0, value
        if leads:
            # The checkpoint before this step may still be on its way, as may the one of this step later.
            every = self._session.length.save_steps or step
            self._prune([step, (step - 1) // every * every])

    def _write(self, step: int, state: dict[str, torch.Tensor]) -> tuple[str, str] | None:
        """Why the disk does not do, and what to change, if it does not."""
        try:
            snapshots.write(state, self._place(step), {"step": step})
        except Exception as error:
            if not (reason := unwritable(self._session.folder.path, error, writing=True)):
                raise
            return reason.whole, reason.change
        return None

    def _prune(self, ends: list[int]) -> None:
        """Deletes what would not be published if training ended at one of these steps or of the checkpoints'."""
        ends = [*ends, *map(_step, self._session.folder.checkpoints.glob("checkpoint-*"))]
        needed = {step for end in ends for step in self._published(end)}
        for step in [step for step in self._kept if step not in needed]:
            del self._kept[step]
            shutil.rmtree(self._place(step), ignore_errors=True)

    def _published(self, end: int) -> list[int]:
        """The steps whose weights are published if training ends after a step."""
        steps = sorted(step for step in self._kept if step <= end)
        return steps[-self._average :] if self._average else sorted(steps, key=lambda step: -self._kept[step])[:1]

    def _whole(self, end: int) -> list[int]:
        """The same, but for those that are damaged."""
        while damaged := {step: why for step in self._published(end) if (why := _fault(self._place(step)))}:
            for step, why in damaged.items():
                del self._kept[step]
                _log.warning("%s %s, and is not published", self._place(step), why)
        return self._published(end)

    def _take_along(self, start: int) -> None:
        """Has what another run kept up to a step, where this one goes on from a checkpoint of that run."""
        begun = self._session.folder.resume_from
        if begun is None or begun.resolve().parent == self._session.folder.checkpoints.resolve():
            return
        for place in (begun.resolve().parents[1] / self._folder.name).glob("step-*"):
            own = self._place(_step(place))
            if 0 < _step(place) <= start and not own.exists() and not _fault(place):
                partial = own.with_name(f"{own.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(place, partial, copy_function=_linked)
                partial.rename(own)

    def _found(self, start: int) -> list[int]:
        """Steps up to one, whose weights are there as a whole; what else is there goes."""
        found = []
        for place in self._folder.glob("*"):
            reason = "is of steps that are trained anew" if _step(place) > start else _fault(place)
            if not reason and place == self._place(_step(place)):
                found.append(_step(place))
                continue
            _log.log(logging.INFO if _step(place) > start else logging.WARNING, "%s %s, and goes", place, reason)
            shutil.rmtree(place, ignore_errors=True)
        return sorted(found)

    def _place(self, step: int) -> Path:
        return self._folder / f"step-{step}"


def _fault(place: Path) -> str:
    """Why a snapshot does not count; what cannot be read now, and may be whole, must not go."""
    try:
        return fault(place, UNANSWERED)
    except OSError as error:
        raise unanswered(error) from error


def _linked(source: str, target: str) -> None:
    """The same file in another place: nothing is written to one that is sealed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _step(place: Path) -> int:
    """Of the name of a checkpoint or a snapshot; -1 for other names."""
    digits = place.name.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() else -1
