"""Where the time of a step goes: a few steps under torch's profiler, as a trace to look at and as a small table.

The trace opens in Perfetto. The table adds up the time that each operation takes by itself: on a GPU that of its
kernels, on a CPU that of the processor. Three steps after those that warm up are enough, and one where a step has many
micro-batches: a trace has some 50,000 events for each micro-batch of a large model. The profiler slows what it watches.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from toolkit.common import seconds_text, table
from toolkit.report.load import WARM_UP_STEPS
from toolkit.train.session import Session
from toolkit.train.trainers.trainer import WAITING

FILE = "profile.json.gz"
_MOST = 24
"""Micro-batches of three steps up to which all three are watched."""
_REST = "between operations: Python, launches, waiting"
_RANGES = {WAITING: WAITING, "Optimizer.": "the optimizer"}
"""Beginnings of the names of ranges, which have all that runs in them."""
_KINDS = {
    "communication between processes": ("c10d::", "nccl", "gloo:"),
    "attention kernels": ("attention", "attn"),
    "matrix products": ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "_mm", "mkldnn", "gemm", "aten::dot"),
    "copies and changes of type": (
        "aten::copy_",
        "aten::_to_copy",
        "aten::clone",
        "aten::cat",
        "aten::index",
        "Memcpy",
    ),
    "compiled code": ("Compiled", "triton_", "graph_", "Inductor"),
    "element-wise and other operations": ("aten::", "trl::", "bitsandbytes::"),
}
"""The first kind of which a part is in an operation's name."""


class Profiler(TrainerCallback):
    """Watches the steps of the process that talks to the user.

    Args:
        pause: Told the seconds that no step took, but what is made of the steps.
    """

    def __init__(self, session: Session, pause: Callable[[float], None]) -> None:
        self._session, self._pause = session, pause
        self._steps = 3 if 3 * session.layout.gradient_accumulation_steps <= _MOST else 1
        self._begin, self._waited = -1, 0.0
        self._profile: profile | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session, now, last = self._session, state.global_step, state.max_steps - self._steps
        evaluations = session.recipe.evaluation.every_steps if session.prepared.eval is not None else None
        pauses = [every for every in (evaluations, session.length.save_steps) if every]

        def undisturbed(begin: int) -> bool:
            return all(step % every for step in range(begin + 1, begin + self._steps) for every in pauses)

        begins = range(max(now, min(now + WARM_UP_STEPS, last)), max(now, last) + 1)
        self._begin = next(filter(undisturbed, begins), begins[0])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._begin:
            # The batches of the first step are there already.
            self._waited = self._session.trainer.waiting.newest
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profile and state.global_step in (self._begin + self._steps, state.max_steps):
            self._finish(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profile:
            self._finish(state.global_step)

    def _finish(self, step: int) -> None:
        assert self._profile
        if torch.cuda.is_available():
            # What the device has still to do belongs to the step, and not to the pause.
            torch.cuda.synchronize()
        watched, self._profile, started = self._profile, None, time.monotonic()
        watched.stop()
        file = self._session.folder.path / FILE
        watched.export_chrome_trace(str(file))
        events = watched.events() or []
        self._session.progress.message(_text(events, self._begin, step, self._waited, file))
        self._pause(time.monotonic() - started)


def _text(events: Iterable[Any], begin: int, end: int, waited: float, file: Path) -> str:
    """What is printed of the steps after `begin` up to `end`."""
    seconds, whole = seconds_by_kind(list(events), waited)
    steps = end - begin
    rows = [
        (name, f"{seconds_text(value / steps):>8}  {value / whole:5.1%}")
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
        if value / whole >= 0.0005
    ]
    which = f"steps {begin + 1} to {end}" if steps > 1 else f"step {end}"
    head = f"Where a step goes, {seconds_text(whole / steps)} under the profiler ({which})"
    return f"{head}\n{table(rows, indent=2).plain}\nAll of it is in {file}: open it in https://ui.perfetto.dev"


def seconds_by_kind(events: list[Any], waited: float = 0.0) -> tuple[dict[str, float], float]:
    """Seconds by kind of operation, and in all.

    Args:
        events: Of the profiler.
        waited: Seconds for data before the first event.
    """
    on_gpu = any(event.kernels for event in events)
    kinds: dict[int, str] = {}

    def kind(event: Any) -> str:
        if event.id not in kinds:
            outer = kind(event.cpu_parent) if event.cpu_parent else _REST
            own = next((to for start, to in _RANGES.items() if event.name.startswith(start)), None)
            kinds[event.id] = own or (outer if outer in _RANGES.values() else _kind(event.name))
        return kinds[event.id]

    seconds = defaultdict[str, float](float)
    for event in events:
        on_host = "CPU" in str(event.device_type)
        seconds[kind(event)] += (_of_kernels(event) if on_gpu else event.self_cpu_time_total) / 1e6 * on_host
    whole = (max(event.time_range.end for event in events) - min(event.time_range.start for event in events)) / 1e6
    seconds[WAITING] += waited
    seconds[_REST] += max(0.0, whole + waited - sum(seconds.values()))
    return {name: value for name, value in seconds.items() if value}, sum(seconds.values())


def _of_kernels(event: Any) -> float:
    """Microseconds of the kernels that an event launched. A range is drawn on the GPU, too, by its own name, from its
    first kernel to its last: the time of kernels in it, once more. Each call of a compiled layer is such a range."""
    own = (kernel for kernel in event.kernels if not (event.is_user_annotation and kernel.name == event.name))
    return float(sum(kernel.duration for kernel in own))


def _kind(name: str) -> str:
    return next((kind for kind, parts in _KINDS.items() if any(part in name for part in parts)), _REST)
