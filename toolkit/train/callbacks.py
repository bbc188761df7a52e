"""What happens around the steps of a training: metrics, progress, evaluation, sealed checkpoints, and a clean stop.

The Trainer calls these after a step in the order log, evaluate, save; all that takes no step is kept out of tokens per
second. Evaluation is a callback of our own, because the Trainer's gathers logits and rounds its mean over batches.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from toolkit.files import as_json, set_aside, write_atomically
from toolkit.report.load import parse_row, read_metrics
from toolkit.report.rewards import reward_text
from toolkit.report.scores import vector_text
from toolkit.report.teacher import teacher_text
from toolkit.train.checkpoints.storage import is_gone, unwritable
from toolkit.train.energy import EnergyMeter, energy_meter
from toolkit.train.evaluation.evaluate import evaluate
from toolkit.train.evaluation.row_losses import RowLosses
from toolkit.train.evaluation.untrained import evaluate_untrained
from toolkit.train.health.finite import check_weights
from toolkit.train.health.stragglers import found, waiting
from toolkit.train.process import ONE_SIGNAL_SECONDS, peak_host_bytes, stop_signals
from toolkit.train.selection import Chosen, metrics_of
from toolkit.train.session import Session
from toolkit.train.time_left import TimeLeft
from toolkit.train.trainers.rollouts import drop_answers

_log = logging.getLogger("toolkit.train")


def step_tokens(session: Session) -> Callable[[int, int], tuple[int, float | None]]:
    """Counts tokens, padding left out, of the steps after a first one up to and including a last one, and the share of
    padding in what is computed.

    They are known from the order of rows, without touching a device. Those of a stream are counted in its batches.
    """
    batches, layout = session.trainer.batches, session.layout
    if session.recipe.writes:  # Answers are counted when they are there.
        return lambda first, last: (session.trainer.take_tokens(), None)
    if batches is None:
        return lambda first, last: session.trainer.waiting.take_streamed()

    def count(first: int, last: int) -> tuple[int, float]:
        tokens = batches.tokens(first, last)
        # Of pairs the sources are counted, and both are padded.
        counted = tokens.sum() if layout.answers > 1 else tokens[0]
        return int(counted), 1 - float(tokens.sum()) / max(1.0, float(batches.padded(first, last).sum()))

    return count


class Meter(TrainerCallback):
    """Writes `metrics.jsonl` and feeds the progress line. Only the process that talks to the user has one.

    Args:
        further: What else stands in a row of metrics.
    """

    def __init__(self, session: Session, further: Callable[[], dict[str, Any]] = dict) -> None:
        guard, every = session.guard, session.recipe.evaluation.every_steps
        self._file = session.folder.path / "metrics.jsonl"
        self._world, self._further, self.energy = session.world, further, EnergyMeter([])
        self._length, self._progress, self._tokens = session.length, session.progress, step_tokens(session)
        self.time_left = TimeLeft(
            session.length.total_steps,
            guard.plan.work.step_seconds.value if guard else None,
            every if session.prepared.eval is not None else None,
            session.length.save_steps,
        )
        self._started = self._step_time = self._step_end = time.monotonic()
        self._step = self._total_tokens = 0
        self._paused = 0.0
        # Encoder-decoders say no more.
        self._said = lambda: getattr(session.trainer, "said", ())
        self._counts_itself = session.recipe.writes or session.trainer.batches is None
        self._trainer, self._work = session.trainer, guard.plan.work if guard else None
        self.last: dict[str, Any] = {}
        self._unwritten = b""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step
        known = sum(row["step"] == state.global_step and "eval_loss" in row for row in state.log_history)
        earlier, self.last = _keep_until(self._file, state.global_step, known)
        drop_answers(self._file.parent, state.global_step)
        self._started = time.monotonic() - earlier.get("seconds", 0.0)
        self.energy = energy_meter(self._world, torch.cuda.is_available(), earlier.get("energy_kwh", 0.0))
        if self._counts_itself:
            self._total_tokens = self.last.get("tokens", 0)
        else:
            self._total_tokens, _ = self._tokens(0, self._step)
        self._step_time = time.monotonic()
        self._progress.start(state.max_steps, step=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs or state.global_step == self._step:
            return
        tokens, padding = self._tokens(self._step, state.global_step)
        now = self._trainer.row_time or time.monotonic()
        seconds = max(1e-9, now - self._step_time - self._paused)
        rate = tokens / seconds
        steps = state.global_step - self._step
        self.time_left.steps(steps, seconds)
        self._total_tokens += tokens
        waited, trained = self._trainer.waiting.take()
        self._step, self._step_time, self._step_end, self._paused = state.global_step, now, now, 0.0
        row = {
            "loss": logs["loss"],
            "learning_rate": logs.get("learning_rate"),
            "grad_norm": logs.get("grad_norm"),
            "tokens_per_second": round(rate, 1),
            "trained_tokens_per_second": round(trained / seconds, 1),
            "step_seconds": round(seconds / steps, 4),
            "data_wait": round(waited / seconds, 4),
            "tokens": self._total_tokens,
            "padding": None if padding is None else round(padding, 4),
            "memory_bytes": peak_host_bytes(),
        }
        if self._work:
            share = tokens / self._work.tokens_per_step / seconds
            row["model_flops"] = self._work.model_flops_per_step * share
            row["mfu"] = round(self._work.mfu * self._work.step_seconds.value * share, 6)
        if torch.cuda.is_available():
            row["device_memory_bytes"] = torch.cuda.max_memory_allocated()
        row |= {name: round(logs[name], 6) for name in self._said() if name in logs}
        row |= self._further()
        if slow := found():
            row["stragglers"] = slow
        self.write(state.global_step, row)
        self.last = row
        left = self.time_left.after(self._step)
        reward = logs.get("reward")
        self._progress.update(state.global_step, logs["loss"], rate, left, reward)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_end = time.monotonic()
        self.energy.read()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer logs, evaluates and saves after a step, in this order; the last of them ended here.
        seconds = time.monotonic() - self._step_end
        self._paused += seconds
        self.time_left.pause("save", seconds)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.energy.read()
        self._progress.close()

    def seconds(self) -> float:
        """Time since training began, that of earlier sessions included."""
        return time.monotonic() - self._started

    def first_evaluation(self) -> dict[str, float] | None:
        """The evaluation before the first step, of an earlier session."""
        return next((row for row in read_metrics(self._file)[1] if row["step"] == 0), None)

    def evaluated(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Records an evaluation; its time does not count against tokens per second."""
        self._paused += seconds
        self._step_end = time.monotonic()
        self.time_left.pause("evaluation", seconds)
        self.write(step, metrics)
        scores = teacher_text(metrics) or vector_text(metrics)
        said = metrics.get("eval_accuracy"), reward_text(metrics), scores
        self._progress.evaluation(step, metrics["eval_loss"], *said)

    def pause(self, seconds: float) -> None:
        """Leaves out time that no step took."""
        self._paused += seconds

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Appends one line to `metrics.jsonl`."""
        per_epoch = self._length.steps_per_epoch
        head = {
            "step": step,
            "epoch": round(step / per_epoch, 4) if per_epoch else None,
            "seconds": round(self.seconds(), 3),
        }
        if self.energy.kwh is not None:
            head["energy_kwh"] = self.energy.kwh
        first, self._unwritten = not self._unwritten, self._unwritten + as_json({**head, **row}).encode() + b"\n"
        size: int | None = None
        try:
            with self._file.open("ab", buffering=0) as stream:
                size = stream.tell()
                if stream.write(self._unwritten) < len(self._unwritten):
                    raise OSError(errno.ENOSPC, "")
        except OSError as error:
            reason = None if is_gone(self._file.parent) else unwritable(self._file.parent, error, writing=True)
            if not reason:
                raise
            if first:
                what = "%s; training goes on, and metrics from step %d on are written when they can be"
                _log.warning(what, reason.what, step)
            # The disk may have room again by the next row, which must not begin within this one. Of a file that could
            # not be opened, all stays.
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._file, size)
        else:
            self._unwritten = b""


class Evaluator(TrainerCallback):
    """Evaluates the held-out rows before the first step, every so many steps and after the last one.

    Args:
        meter: Where the results go; None on processes that do not talk to the user.
    """

    def __init__(self, session: Session, meter: Meter | None) -> None:
        self._session, self._settings, self._meter = session, session.recipe.evaluation, meter
        self.rows = RowLosses(session)
        self.first: dict[str, float] | None = None
        self.last: dict[str, float] | None = None
        self._evaluated_step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._settings.at_start and state.global_step == 0:
            self.first = self._run(state.global_step)
        elif self._meter:
            self.first = self._meter.first_evaluation()
        for row in state.log_history:
            if row["step"] == state.global_step > 0 and "eval_loss" in row:  # Before the checkpoint of this step.
                self._evaluated_step, self.last = row["step"], metrics_of(row)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Ask for the step's metrics now, so that `metrics.jsonl` stays in order whatever the logging interval.
        if self._due(state):
            control.should_log = self._session.trainer.row_at_once = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._due(state):
            self._run(state.global_step)

    def finish(self, step: int, chosen: Chosen | None) -> None:
        """Evaluates the published model, unless this has been done.

        Args:
            chosen: That model, if it may be another one than the last.
        """
        if chosen and chosen.metrics:
            self.last = chosen.metrics
        elif chosen or step != self._evaluated_step:
            self._run(step)

    def _due(self, state: Any) -> bool:
        step = state.global_step
        every = self._settings.every_steps
        # Of all models that the best is looked for among, the last one is one.
        chooses = self._session.recipe.checkpoint.keep_best and step == state.max_steps
        return bool(every and (step % every == 0 or chooses) and step != self._evaluated_step)

    def _run(self, step: int) -> dict[str, float]:
        self._evaluated_step = step
        started = time.monotonic()
        self.last, rows = evaluate(self._session) if step else evaluate_untrained(self._session)
        # Trackers take numbers, and no tables.
        self._session.trainer.log({key: value for key, value in self.last.items() if isinstance(value, int | float)})
        if self._meter:
            self.rows.keep(step, rows)
            self._meter.evaluated(step, self.last, time.monotonic() - started)
        return self.last


class Seal(TrainerCallback):
    """Has a checkpoint that all processes have written made to count."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._session.trainer
        check_weights(self._session, state.global_step)
        trainer.saves.complete(trainer.accelerator, state.global_step)


class CleanStop(TrainerCallback):
    """The first Ctrl-C, SIGTERM or SIGHUP saves a checkpoint after the running step and stops; a second Ctrl-C stops at
    once.

    With several processes all agree before stopping, otherwise one would wait for the others for ever.

    Args:
        saves: Whether a checkpoint can be saved: not where each node would keep its part to itself.
    """

    def __init__(self, accelerator: Any, tell: Callable[[str], None], saves: bool = True) -> None:
        self._accelerator, self._tell, self._saves = accelerator, tell, saves
        self._asked_at: float | None = None
        self._previous: dict[int, Any] = {}
        self.stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number in (signal.SIGINT, *stop_signals()):
            self._previous[number] = signal.signal(number, self._handle)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if asked := self.asked():
            self.stopped = True
            control.should_save = self._saves
            control.should_training_stop = True
        # Whatever the logging interval, the metrics end with the last step.
        control.should_log = control.should_log or asked or state.global_step >= state.max_steps

    def asked(self) -> bool:
        """Whether any process has been asked to stop. All must call this."""
        asked = self._asked_at is not None
        if self._accelerator.num_processes > 1:
            flag = torch.tensor([float(asked)], device=self._accelerator.device)
            with waiting:
                asked = bool(self._accelerator.reduce(flag, reduction="sum").item())
        return asked

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            with contextlib.suppress(RuntimeError):  # In the middle of another line, Python writes no second one.
                saving = " and saving a checkpoint" if self._saves else ""
                self._tell(f"Stopping after this step{saving}. Press Ctrl-C again to stop at once.")
        elif number == signal.SIGINT and now - self._asked_at > ONE_SIGNAL_SECONDS:
            raise KeyboardInterrupt


def _keep_until(file: Path, step: int, evaluations: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Drops the lines of steps that will be taken again, and a line that a kill cut off.

    Args:
        evaluations: How many of this step there were; what came after them will be done again too.

    Returns:
        The last line that is left, whose seconds and energy are those of the training up to there; the last of a step.
    """
    if not file.is_file():
        return {}, {}
    *lines, _ = file.read_bytes().split(b"\n")
    rows = [row for row in map(_metrics_row, lines) if row]
    if len(rows) < len(lines):
        _log.warning(
            "%s cannot be read in %d lines and is kept as %s", file, len(lines) - len(rows), set_aside(file).name
        )
    kept = [row for row in rows if row["step"] <= step]
    again = [row for row in kept if row["step"] == step and "eval_loss" in row][evaluations:]
    kept = [row for row in kept if row not in again]
    write_atomically(file, "".join(as_json(row) + "\n" for row in kept))
    return next(reversed(kept), {}), next((row for row in reversed(kept) if "loss" in row), {})


def _metrics_row(line: bytes) -> dict[str, Any]:
    """A line of `metrics.jsonl`; empty if it is damaged."""
    row = parse_row(line)
    return row if isinstance(row.get("step"), int) and isinstance(row.get("seconds"), int | float) else {}
