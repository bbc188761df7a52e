"""Measures the bytes of live tensors in real trainings on a CPU, phase by phase.

A dispatch mode sees the result of every operation and follows its storage until that is freed. Results are counted once
per storage, without rounding; files that are mapped into memory are not counted.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BETWEEN = ("/torch/utils/", "/torch/_ops", "/torch/_compile", "/torch/_dynamo", "tracker.py")
"""Files whose frames say nothing about where a tensor was made."""


@dataclass
class Peak:
    """The largest sum of live bytes in one phase, and at `explain` what it was made of: place of creation to bytes."""

    bytes: int = 0
    parts: Counter[str] = field(default_factory=Counter)


class Tracker(TorchDispatchMode):
    """Follows every storage that an operation makes while it is active.

    Args:
        explain: Keep for each phase where the bytes at its peak were made (slow).
        limit: Bytes beyond which the next operation runs out of memory, as a device of this size would.
    """

    def __init__(self, explain: bool = False, limit: float = math.inf) -> None:
        super().__init__()
        self.limit = limit
        self.current, self.phase, self.explain = 0, "load", explain
        self.peaks: dict[str, Peak] = {}
        self.ends: dict[str, int] = {}
        self.exchanged: Counter[str] = Counter()
        self.scored: Counter[str] = Counter()
        self.micro_batches: list[int] = []
        """Tokens of those that a pipeline has taken."""
        self._live: dict[int, tuple[int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current > self.limit:
            raise torch.OutOfMemoryError(f"{self.current:,} bytes are live")
        result = func(*args, **(kwargs or {}))
        # One of the parts stays.
        if str(func) == "toolkit.all_to_all.default":
            self.exchanged[self.phase] += args[0].nbytes * (len(args[0]) - 1) // len(args[0])
        elif str(func) in ("toolkit.all_gather.default", "toolkit.reduce_scatter.default"):
            self.exchanged[self.phase] += abs(args[0].nbytes - result.nbytes)
        elif str(func) in ("toolkit.sum_parts.default", "toolkit.largest_part.default"):
            part, size = args
            if "largest" in str(func):  # Of each token whose label is scored.
                self.scored[self.phase] += part.numel()
            self.exchanged[self.phase] += 2 * part.nbytes * (size - 1) // size
        elif str(func) == "c10d.send.default" and self.phase == "pipeline":
            # Not the votes of the first step.
            self.exchanged[self.phase] += sum(each.nbytes for each in args[0] if each.is_floating_point())
        elif str(func) == "c10d.allreduce_.default":
            self.exchanged[f"gradients {self.phase}"] += 2 * _of_others(args[0], args[1])
        elif str(func) in ("c10d.allgather_.default", "c10d._allgather_base_.default"):
            self.exchanged[f"weights {self.phase}"] += _of_others(args[0], args[2])
        elif str(func) == "toolkit.send_rows.default":
            rows, sent, _ = args
            mine = sent[torch.distributed.get_rank() % len(sent)]
            self.exchanged[self.phase] += rows.nbytes // max(1, len(rows)) * (len(rows) - mine)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.add(each, str(func))
        return result

    def add(self, tensor: torch.Tensor, maker: str = "before") -> None:
        """Counts the storage of a tensor, unless it is counted already or lies in a file."""
        if isinstance(tensor, torch.distributed.tensor.DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != "cpu" or type(tensor).__name__ == "FakeTensor":
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # Subclasses without a storage of their own: what they wrap is seen by itself.
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = (0, "")
        self._set(key, storage.nbytes(), self._where(maker))
        weakref.finalize(storage, self._freed, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """To be called after a storage was resized in place."""
        if storage._cdata in self._live:
            self._set(storage._cdata, storage.nbytes(), self._where("resize_"))

    @contextmanager
    def during(self, phase: str, after: str | None = None) -> Iterator[None]:
        """Counts peaks for this phase, and then for `after` or the phase before; notes what is live when it ends."""
        before, self.phase = self.phase, phase
        self._peak()
        try:
            yield
        finally:
            self.ends[phase] = self.current
            self.phase = after or before

    def _set(self, key: int, size: int, where: str) -> None:
        self.current += size - self._live[key][0]
        self._live[key] = (size, where)
        self._peak()

    def _freed(self, key: int) -> None:
        size, _ = self._live.pop(key, (0, ""))
        self.current -= size

    def _peak(self) -> None:
        peak = self.peaks.setdefault(self.phase, Peak())
        if self.current > peak.bytes:
            peak.bytes = self.current
            if self.explain:
                peak.parts = Counter()
                for size, where in self._live.values():
                    peak.parts[where] += size

    def _where(self, maker: str) -> str:
        if not self.explain:
            return maker
        frame, places = sys._getframe(2), []
        while frame is not None and len(places) < 5:
            name = frame.f_code.co_filename
            if not any(part in name for part in _BETWEEN):
                places.append(f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
        return f"{self.phase} {maker.removeprefix('aten.')} < " + " < ".join(places)


def _of_others(whole: Any, group: Any) -> int:
    """Bytes of whole tensors less the share of one process of a group. Norms and flags are no such tensors."""
    size = torch.distributed.ProcessGroup.unbox(group).size()
    numbers = (each for each in tree_leaves(whole) if each.is_floating_point() and each.numel() > 1)
    return sum(each.nbytes for each in numbers) * (size - 1) // size


@contextmanager
def phases(tracker: Tracker) -> Iterator[None]:
    """Names the parts of a training for the tracker, by wrapping the libraries' methods."""
    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine
    from transformers import Trainer

    from toolkit.models.load import ModelSource
    from toolkit.models.parallel.stage import Stage
    from toolkit.train import train
    from toolkit.train.evaluation import evaluate
    from toolkit.train.trainers import heads, pipelined, trainer

    replaced: list[tuple[Any, str, Any]] = []

    def wrap(
        owner: Any, name: str, phase: str, after: str | None = None, note: Callable[..., None] | None = None
    ) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if note:
                note(*args)
            with tracker.during(phase, after):
                result = original(*args, **kwargs)
            if phase == "load":
                # Read from mapped files, without an operation.
                for tensor in (*result.parameters(), *result.buffers()):
                    tracker.add(tensor)
            return result

        replaced.append((owner, name, original))
        setattr(owner, name, wrapped)

    wrap(ModelSource, "load", "load")
    wrap(Trainer, "_load_optimizer_and_scheduler", "resume")
    wrap(Trainer, "_run_epoch", "step", "end")
    for kind in (trainer.CausalTrainer, trainer.EncoderDecoderTrainer, heads.HeadTrainer):
        wrap(kind, "compute_loss", "forward")
    wrap(Accelerator, "backward", "backward")
    wrap(
        pipelined.Pipeline,
        "step",
        "pipeline",
        note=lambda _, batches, count: tracker.micro_batches.extend(each["input_ids"].numel() for each in batches),
    )
    wrap(Stage, "forward_one_chunk", "forward")
    wrap(Stage, "backward_one_chunk", "backward")
    wrap(DeepSpeedEngine, "step", "step")
    wrap(evaluate, "held_out_loss", "evaluation")
    wrap(Trainer, "_save_checkpoint", "save")
    wrap(train, "publish", "save")
    wait = torch.distributed.Work.wait

    def settled(work: torch.distributed.Work, *args: Any) -> bool:
        done = wait(work, *args)
        # Gloo's thread says that it is done before it lets go of what it has reduced.
        time.sleep(0.002)
        return done

    replaced.append((torch.distributed.Work, "wait", wait))
    torch.distributed.Work.wait = settled  # type: ignore[method-assign,assignment]
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        for owner, name, original in replaced:
            setattr(owner, name, original)


def tracked(run: Callable[[], int], explain: bool = False, limit: float = math.inf) -> tuple[int, Tracker]:
    """Runs a training under a tracker."""
    tracker = Tracker(explain, limit)
    gc.collect()
    with phases(tracker), tracker:
        code = run()
    return code, tracker


def main(arguments: Sequence[str]) -> int:
    """What `toolkit/run.py` does, and beside it `peaks-RANK.json` in the current folder: phase to peak in bytes,
    `exchanged PHASE` to those that were sent to processes that share rows or divide layers (`exchanged gradients PHASE`
    and `exchanged weights PHASE`: by ZeRO), and `scored PHASE` to the tokens whose logits such processes have parts of.
    """
    from cpu_engines import use_cpu_processes

    from toolkit.train.health import watchdog
    from toolkit.train.main import main as train

    use_cpu_processes()
    # It looks where the main thread is, and keeps what that holds there for as long as it looks.
    watchdog.TICK_SECONDS = 3600.0
    explain = bool(os.environ.get("TRACKER_EXPLAIN"))
    code, tracker = tracked(lambda: train(arguments), explain, float(os.environ.get("TRACKER_LIMIT", "inf")))
    rows: dict[str, Any] = {phase: peak.bytes for phase, peak in tracker.peaks.items()}
    rows |= {f"exchanged {what}": size for what, size in tracker.exchanged.items()}
    rows |= {f"scored {phase}": count for phase, count in tracker.scored.items()}
    rank = os.environ.get("RANK", "0")
    Path(f"peaks-{rank}.json").write_text(json.dumps(rows))
    Path(f"micro-batches-{rank}.json").write_text(json.dumps(tracker.micro_batches))
    if explain:
        parts = {phase: peak.parts.most_common() for phase, peak in tracker.peaks.items()}
        Path(f"parts-{rank}.json").write_text(json.dumps({"parts": parts, "ends": tracker.ends}))
    return code


def planned(*arguments: str, processes: int = 1) -> Any:
    """The plan's `Memory` of the fullest rank, for a training in the current folder on processes on a CPU."""
    from toolkit.planner.build import estimate
    from toolkit.planner.hardware import find
    from toolkit.recipe import split_arguments
    from toolkit.recipe.rules import load_checked

    loaded = load_checked(*split_arguments(list(arguments)))
    hardware = find("cpu" if processes == 1 else f"cpux{processes}")
    return estimate(loaded.recipe, loaded.name, hardware, advice=False).memory[0]


def measured(folder: Path, processes: int) -> dict[str, int]:
    """Phase to the largest peak of all ranks, as `main` has written them."""
    found: Counter[str] = Counter()
    for rank in range(processes):
        for phase, peak in json.loads((folder / f"peaks-{rank}.json").read_text()).items():
            found[phase] = max(found[phase], peak)
    return dict(found)
