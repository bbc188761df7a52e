"""Where a step goes, as the profiler's events tell it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from toolkit.distributed.layout import BatchLayout, Length
from toolkit.train.profiler import FILE, Profiler, seconds_by_kind
from toolkit.train.run_folder import RunFolder
from toolkit.train.trainers.trainer import WAITING, Waiting

NAMES = ("matrix products", "the optimizer", "waiting for data", "element-wise and other operations")


def session(folder: Path, messages: list[str], every: int | None = None, passes: int = 1) -> Any:
    return SimpleNamespace(
        layout=BatchLayout(2 * passes, 2, passes, 1, 8),
        length=Length(20, None, 0, 50),
        recipe=SimpleNamespace(evaluation=SimpleNamespace(every_steps=every)),
        prepared=SimpleNamespace(eval=[]),
        trainer=SimpleNamespace(waiting=Waiting(newest=0.003)),
        folder=RunFolder(folder),
        progress=SimpleNamespace(message=messages.append),
    )


def train(profiler: Profiler, steps: int, first: int = 0) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = SimpleNamespace(global_step=first, max_steps=steps)
    profiler.on_train_begin(None, state, None)
    for step in range(first, steps):
        with record_function(WAITING):
            batch = torch.randn(8, 64).exp()
        profiler.on_step_begin(None, state, None)
        model(batch).sum().backward()
        optimizer.step()
        state.global_step = step + 1
        profiler.on_step_end(None, state, None)
    profiler.on_train_end(None, state, None)


def test_three_steps_are_traced_and_told_by_kind(tmp_path: Path) -> None:
    messages: list[str] = []
    pauses: list[float] = []
    train(Profiler(session(tmp_path, messages), pauses.append), 8)
    (text,), (pause,) = messages, pauses
    assert pause > 0
    assert "(steps 3 to 5)" in text and str(tmp_path / FILE) in text
    assert all(name in text for name in NAMES)
    events = json.loads(gzip.decompress((tmp_path / FILE).read_bytes()))["traceEvents"]
    assert sum(event["name"] == "Optimizer.step#AdamW.step" for event in events) == 3


@pytest.mark.parametrize(
    ("steps", "first", "every", "passes", "watched"),
    [
        (8, 0, 4, 1, "(steps 5 to 7)"),  # not while it evaluates
        (8, 0, 1, 1, "(steps 3 to 5)"),  # there is no such place
        (4, 0, None, 1, "(steps 2 to 4)"),  # a run too short to warm up
        (2, 0, None, 1, "(steps 1 to 2)"),
        (20, 10, None, 1, "(steps 13 to 15)"),  # continued
        (8, 0, None, 9, "(step 3)"),  # of many micro-batches
    ],
)
def test_which_steps(tmp_path: Path, steps: int, first: int, every: int | None, passes: int, watched: str) -> None:
    messages: list[str] = []
    train(Profiler(session(tmp_path, messages, every, passes), lambda seconds: None), steps, first)
    assert [watched in text for text in messages] == [True]


def test_seconds_add_up_and_belong_to_the_range_they_are_in() -> None:
    weight = torch.randn(256, 256, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        with record_function(WAITING):
            batch = torch.randn(256, 256).exp()
        with record_function("Optimizer.step#Own.step"):
            torch.randn(512, 512) @ torch.randn(512, 512)
        torch.nn.functional.scaled_dot_product_attention(*[batch[None, None]] * 3)
        (batch @ weight).sum().backward()
    seconds, whole = seconds_by_kind(watched.events(), waited=1.0)
    assert sum(seconds.values()) == pytest.approx(whole, rel=1e-3) and whole > 1
    assert seconds["waiting for data"] > 1 and seconds["the optimizer"] > seconds["matrix products"] > 0
    assert seconds["attention kernels"] > 0


def test_on_a_gpu_the_time_of_kernels_counts_once() -> None:
    """Ranges, of which compiled layers are some, stand on the GPU's side as well."""
    events: list[FunctionEvent] = []

    def event(
        name: str, start: float, end: float, kernels: dict[str, float], inside: FunctionEvent | None = None
    ) -> FunctionEvent:
        annotates = name in kernels
        found = FunctionEvent(len(events), name, 1, start, end, use_device="cuda", is_user_annotation=annotates)
        found.cpu_parent = inside
        for kernel, duration in kernels.items():
            found.append_kernel(kernel, 0, duration)
        events.append(found)
        return found

    region = event(
        "## Call CompiledFxGraph 0", 0, 20, {"## Call CompiledFxGraph 0": 3.5e5, "triton_poi_fused_mul": 1e5}
    )
    event("aten::mm", 0, 10, {"sm90_gemm": 2.5e5}, region)
    events.append(FunctionEvent(9, "sm90_gemm", 0, 1e5, 3.5e5, device_type=DeviceType.CUDA, use_device="cuda"))
    step = event("Optimizer.step#AdamW.step", 5e5, 6e5, {"Optimizer.step#AdamW.step": 1e5})
    event("aten::_foreach_add_", 5e5, 6e5, {"multi_tensor_apply": 1e5}, step)
    event("c10d::allreduce_", 6e5, 1e6, {"ncclDevKernel_AllReduce": 2e5})
    seconds, whole = seconds_by_kind(events)
    assert whole == 1.0
    assert seconds == {
        "compiled code": 0.1,
        "matrix products": 0.25,
        "the optimizer": 0.1,
        "communication between processes": 0.2,
        "between operations: Python, launches, waiting": pytest.approx(0.35),
    }
