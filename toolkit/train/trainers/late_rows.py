"""Metrics of a step on a GPU, read when the next step has been launched.

To read a loss the host waits until the GPU has ended the step, and from then on the GPU waits for the host: to write
the metrics, to fetch a batch, to launch the first kernels of the next step. A profile of 8B with LoRA on an H200 showed
7 ms of each step without a kernel there, and 20 ms where the base is in fp8 and the host launches kernels hardly faster
than they run. So the numbers are copied to the host behind the kernels of their step and read a step later, while the
GPU computes. Where something happens between two steps, such as an evaluation or a checkpoint, nothing is late.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback


@dataclass(frozen=True)
class _Late:
    """What is known of a step when it has been launched.

    Args:
        numbers: Loss, trained tokens, those of a stream (3), norm of the gradients, and what is told of rows: on the
            host, once `ready`.
        ready: The end of the step on the device.
        normed: Whether there is a norm.
        logs: Already known.
        steps: That the loss is the sum of.
        step: Number of the step.
        epoch: At its end.
        waited: Seconds, see `Waiting`.
        started: As `Trainer.log` wants it.
    """

    numbers: torch.Tensor
    ready: torch.cuda.Event
    normed: bool
    logs: dict[str, float]
    steps: int
    step: int
    epoch: float | None
    waited: float
    started: float


class LateRows:
    """Goes before a trainer. Metrics of several processes are never late: after each step they ask each other whether
    to go on, and wait for the device anyway."""

    row_at_once = False
    """Set before a step's metrics by who needs them before the next step, or adds to them what is not copied here."""
    row_time: float | None = None
    """While late metrics are logged: when the device ended their step, by `time.monotonic`."""
    args: Any
    control: Any
    state: Any
    accelerator: Any
    waiting: Any
    _globalstep_last_logged: int
    _total_loss_scalar: float
    _seen: torch.Tensor | None = None
    _late: _Late | None = None
    _clock: tuple[torch.cuda.Event, float] | None = None

    def begin_step(self) -> None:
        """Notes the time on host and device, if metrics may be late."""
        if self._clock is None and self.args.device.type == "cuda":
            self._clock = _now(), time.monotonic()

    def tell_late(self) -> None:
        """Logs the step before, if that has not been done."""
        late, self._late = self._late, None
        if late is None or self._clock is None:
            return
        late.ready.synchronize()
        before, at = self._clock
        ended = min(time.monotonic(), at + before.elapsed_time(late.ready) / 1e3)
        self._clock = late.ready, ended
        loss, *known = late.numbers.tolist()
        tokens, seen = known[:4], known[4:]
        self._total_loss_scalar += loss
        logs = {"loss": loss / late.steps} | ({"grad_norm": seen.pop(0)} if late.normed else {}) | late.logs
        with self._as_of(late, tokens, seen, ended):
            self.log(logs, late.started)  # type: ignore[attr-defined]

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        self.tell_late()  # Of the last step of an epoch.
        # Who goes on from a checkpoint has no losses of the steps before it.
        self.control.should_log = self.control.should_log or self.control.should_save
        asked = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if asked and learning_rate is not None and self._may_be_late(tr_loss):
            self._late = self._take(tr_loss, grad_norm, {"learning_rate": learning_rate}, start_time)
        else:
            if asked:
                # The host waits for the device here, and their times are compared anew.
                self._clock = None
            super()._maybe_log_save_evaluate(  # type: ignore[misc]
                tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
            )
        self.row_at_once = False

    def _may_be_late(self, tr_loss: torch.Tensor) -> bool:
        control = self.control
        between = control.should_save or control.should_evaluate or control.should_training_stop or self.row_at_once
        return bool(tr_loss.is_cuda and not between and self.accelerator.num_processes == 1)

    def _take(self, tr_loss: torch.Tensor, norm: Any, logs: dict[str, float], started: float) -> _Late:
        state, waiting = self.state, self.waiting
        norms = [] if norm is None else [norm.full_tensor() if isinstance(norm, DTensor) else norm]
        seen = [] if self._seen is None else [self._seen]
        numbers = [torch.as_tensor(each, dtype=torch.float64).reshape(-1)
                   for each in (tr_loss, waiting.trained, *waiting.streamed, *norms, *seen)]  # fmt: skip
        host = torch.empty(sum(map(len, numbers)), dtype=torch.float64, pin_memory=True)
        for place, number in zip(host.split([*map(len, numbers)]), numbers, strict=True):
            place.copy_(number, non_blocking=True)
        steps = state.global_step - self._globalstep_last_logged
        known = (bool(norms), logs, steps, state.global_step, state.epoch, waiting.seconds, started)
        late = _Late(host, _now(), *known)
        tr_loss.zero_()
        waiting.seconds, waiting.trained, waiting.streamed, self._seen = 0.0, 0, (0, 0, 0), None
        self._globalstep_last_logged = state.global_step
        self.store_flos()  # type: ignore[attr-defined]
        self.control.should_log = False
        return late

    @contextlib.contextmanager
    def _as_of(self, late: _Late, tokens: list[float], seen: list[float], ended: float) -> Iterator[None]:
        """While this lasts, all is as it was after a step, and what is logged is no answer to who asks for metrics."""
        state, waiting = self.state, self.waiting
        asked, now = self.control.should_log, (state.global_step, state.epoch)
        since = (waiting.seconds, waiting.trained, waiting.streamed, self._seen)
        state.global_step, state.epoch, self.row_time = late.step, late.epoch, ended
        waiting.seconds, waiting.trained, waiting.streamed = late.waited, tokens[0], tokens[1:]
        self._seen = torch.tensor(seen, dtype=torch.float64) if seen else None
        try:
            yield
        finally:
            state.global_step, state.epoch = now
            waiting.seconds, waiting.trained, waiting.streamed, self._seen = since
            self.row_time, self.control.should_log = None, asked


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TellLate(TrainerCallback):
    """To come before all that takes time between steps, which is none of the step before."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.tell_late()
