"""Names a process that is regularly slower than the others by its own work, while the training goes on.

All processes of a step end it together, so its time says nothing of who is slow: the slow one is the one that waits
least. Each adds up what it does not wait: the time of a step on its host, less that in collective operations, in DDP's
wait for the sum of gradients, and in the question after each step whether anybody was told to stop. Nothing is sent in
a step, no device is waited for, and an operation costs two looks at the clock; the watchdog shows the sums to the first
process. On GPUs this is the time of the host: what its data, its loop or other processes of the machine take. A GPU
that computes slowly is not told from the others, whose hosts wait for theirs as long.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed import Work
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from toolkit.report.run_view import straggler_text
from toolkit.train.session import Session

_log = logging.getLogger("toolkit.train")

WINDOW_SECONDS = 10.0
"""How long the processes are watched before they are compared."""
_FEWEST_STEPS = 5
"""Fewer steps are not compared."""
_WINDOWS = 3
"""In so many windows in a row a process is slower before it is named: once is chance."""
_SLOWER = 1.25
"""What is slow, in times of the others' median."""
_SHARE = 0.1
"""What it costs the others at least, as a share of a step."""
_WAITS = 0.5
"""Who waits for a larger share of a step holds nobody up, as a host that waits for its GPU."""


@dataclass
class Totals:
    """What one process has done in all steps so far.

    Args:
        seconds: In steps, from the first look for a batch to the end of the step.
        waited: Of them, those in which it waited for others.
        data: Of them, those in which it waited for its data.
        tokens: With padding.
        pairs: Tokens, each times the longest row beside it: the other end of how work can grow with length.
    """

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    data: float = 0.0
    tokens: int = 0
    pairs: int = 0

    def per_step(self, since: Totals) -> Totals:
        """The mean of the steps after others."""
        steps = self.steps - since.steps
        values = {each.name: (getattr(self, each.name) - getattr(since, each.name)) / steps for each in fields(self)}
        return Totals(**values)

    @property
    def own(self) -> float:
        """Seconds in which it did not wait for others."""
        return self.seconds - self.waited


class Pace(TrainerCallback):
    """Measures one process. To come last, so that the step has ended for all."""

    def __init__(self, session: Session) -> None:
        global _pace
        trainer = session.trainer
        self.totals, self._running = Totals(), Totals()
        self._began = self._waited_before = 0.0
        if trainer.accelerator.num_processes == 1:
            return
        _pace = self
        _time_collectives()
        trainer.get_batch_samples = self._around_data(trainer.get_batch_samples)
        trainer.training_step = self._around_batch(trainer.training_step)
        if trainer.accelerator.distributed_type.name.startswith("MULTI"):
            trainer.accelerator.backward = _around_backward(trainer.accelerator.backward)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = self._running
        done.steps += 1
        done.seconds += time.monotonic() - self._began
        done.waited += waiting.waited - self._waited_before
        # Another thread reads them.
        self.totals = Totals(**vars(done))

    def _around_data(self, get: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(get)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._began, self._waited_before = time.monotonic(), waiting.waited
            found = get(*args, **kwargs)
            self._running.data += time.monotonic() - self._began - (waiting.waited - self._waited_before)
            return found

        return timed

    def _around_batch(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def counted(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            for name in ("input_ids", "labels"):
                if name not in inputs or inputs[name].dim() < 2:  # Of whole texts there are no labels of tokens.
                    continue
                tokens = inputs[name].numel()
                self._running.tokens += tokens
                self._running.pairs += tokens * inputs.get("max_length_k", inputs[name].shape[-1])
            return step(model, inputs, *args, **kwargs)

        return counted


class Clock:
    """Adds up the time of the outermost of nested waits."""

    def __init__(self) -> None:
        self.waited = self._began = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.waited += time.monotonic() - self._began


waiting = Clock()
"""Around what takes as long as the slowest process does."""
_pace: Pace | None = None
_found: list[dict[str, Any]] = []


@functools.cache
def _time_collectives() -> None:
    """All that Python starts, which is what FSDP, DeepSpeed and accelerate do, ends in `Work.wait`. In C++, DDP sends
    the first process's buffers before a forward pass, and each waits for its neighbours."""
    for owner, name in ((Work, "wait"), (DistributedDataParallel, "_sync_buffers")):
        setattr(owner, name, _waits(getattr(owner, name)))


def _waits(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with waiting:
            return call(*args, **kwargs)

    return timed


def _around_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """DDP waits in C++, when all gradients are there: in a callback that it queues then, after the one of here."""

    @functools.wraps(backward)
    def timed(loss: torch.Tensor, **kwargs: Any) -> None:
        computed: list[float] = []

        def note(gradient: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: computed.append(time.monotonic()))

        hook = loss.register_hook(note)
        backward(loss, **kwargs)
        hook.remove()
        if computed:
            waiting.waited += time.monotonic() - computed[0]

    return timed


def pace() -> dict[str, Any] | None:
    """What this process has done so far, as others are shown it."""
    return vars(_pace.totals) if _pace else None


class Comparison:
    """Compares the processes, on the first one.

    Args:
        host: Where a rank is.
    """

    def __init__(self, host: Callable[[int], str]) -> None:
        self._host, self._since = host, time.monotonic()
        self._before: dict[int, Totals] = {}
        self._slow: dict[int, int] = {}

    def look(self, states: Callable[[], Mapping[int, Mapping[str, Any]]]) -> None:
        """Compares what all have published, when a window has passed."""
        if not _pace or time.monotonic() - self._since < WINDOW_SECONDS:
            return
        now = {rank: Totals(**state["pace"]) for rank, state in states().items() if state.get("pace")}
        before = {rank: self._before.get(rank, Totals()) for rank in now}
        if any(now[rank].steps - before[rank].steps < _FEWEST_STEPS for rank in now):
            return
        self._since, self._before = time.monotonic(), now
        steps = {rank: now[rank].per_step(before[rank]) for rank in now}
        slow = {rank: found for rank in steps if (found := slower(rank, steps))}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        _found.extend(
            {"rank": rank, "host": self._host(rank).split()[0], **found}
            for rank, found in slow.items()
            if self._slow[rank] == _WINDOWS
        )


def slower(rank: int, steps: Mapping[int, Totals]) -> dict[str, float]:
    """How much slower a process is by its own work than the median of the others; empty if it is not.

    Work grows with the tokens of a batch, and at most as their pairs. Who has more of either has more time.
    """
    own, others = steps[rank], [each for other, each in steps.items() if other != rank]
    if not others:
        return {}

    def median(name: str) -> float:
        return statistics.median(getattr(each, name) for each in others)

    more = (getattr(own, name) / max(1.0, median(name)) for name in ("tokens", "pairs"))
    due = median("own") * max(1.0, *more)
    late = own.own - due
    if own.own < _SLOWER * due or late < _SHARE * own.seconds or own.waited > _WAITS * own.seconds:
        return {}
    figures = {"seconds": own.own, "data_seconds": own.data}
    figures |= {"others_seconds": median("own"), "others_data_seconds": median("data")}
    return {name: round(value, 4) for name, value in figures.items()}


def found() -> list[dict[str, Any]]:
    """The processes that have newly been found slow, on the first process, which says so."""
    new = _found[:]
    del _found[: len(new)]
    for each in new:
        _log.warning("%s", straggler_text(each))
    return new
