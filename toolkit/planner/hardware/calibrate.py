"""`toolkit calibrate`: measures what training reaches on this machine's devices.

One process measures a device. Started with several, also on several nodes, it measures what passes between them and
adds that to the figures of the device: `torchrun --nproc-per-node 8 -m toolkit.planner.hardware.calibrate`.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
import math
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

import toolkit
from toolkit.cache import writable
from toolkit.common import UserError, first_line
from toolkit.files import write_atomically
from toolkit.models import device
from toolkit.planner.hardware import layer
from toolkit.planner.hardware.calibration import (
    FIGURES_VERSION,
    LAYERS_VERSION,
    Calibration,
    busy,
    describe,
    known,
    path_of,
    used,
    was_busy,
)
from toolkit.planner.hardware.detect import detect
from toolkit.planner.hardware.specs import Figure

__all__ = ["calibrate", "describe"]

_log = logging.getLogger("toolkit.planner")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES |= {"tf32": torch.float32, "fp8": torch.bfloat16}
_FP8 = torch.float8_e4m3fn
_ADAMW_BYTES = 28
"""Per fp32 parameter: weight, gradient and two moments are read, weight and moments written, 4 bytes each."""
_BACKWARD_ATTENTION = 2
"""Matrix products of the backward pass for one of the forward pass, as traces count them (`tracker.backward_flops`) and
plans divide them by what is measured here: that kernels form Q K^T once more is in their time alone."""
_MODEL_BANDWIDTH = 0.85
"""What the element-wise kernels of a model reach of these: they read strided rows and two dtypes, and most are short.
On an H100 (torch 2.11) it was 0.7 to 0.75 for full fine-tuning and 0.87 to 0.89 for adapters, where more of it are
plain sums; matrix products, which share the power with them there, were a sixth faster than these alone."""
_MODEL_LAUNCH = 1.4
"""Time of an operation of a Transformers layer under autocast, relative to LayerNorm alone, on the same machine: 48
microseconds against 33, of a 160M model that the host's Python held up."""

Work = Callable[[], object]


def calibrate(seconds: float = 60.0) -> Path:
    """Measures, and stores the figures where plans on such devices find them.

    Args:
        seconds: About how long it may take.

    Returns:
        The stored file.

    Raises:
        UserError: If torch cannot use this machine's GPU.
        OSError: If the figures cannot be kept; before anything is measured.
    """
    hardware = detect()
    on_gpu = hardware.device.kind != "cpu"
    if on_gpu != torch.cuda.is_available():
        sees = "no GPU" if on_gpu else f"a {torch.cuda.get_device_name()}"
        raise UserError(
            f"the driver says that this machine has {hardware.device.title}, and torch sees {sees}",
            "install a build of torch that fits the driver; `toolkit doctor` shows both",
        )
    path = writable(path_of(hardware.device))
    path.parent.mkdir(parents=True, exist_ok=True)
    # What cannot be kept need not be measured.
    with tempfile.TemporaryFile(dir=path.parent):
        pass
    stored = known(hardware.device)
    before = stored.model_dump() if stored and stored.title == hardware.device.title else {}
    measured: dict[str, Any]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        measured = before | _between_processes(on_gpu, seconds)
    else:
        kept = {key: before[key] for key in ("link", "network", "processes") if key in before}
        # A launcher may have left one thread to this process; a CPU is measured as a whole.
        with layer.threads(hardware.node.cores):
            loaded, before_it = not on_gpu and busy(), used()
            figures = _Bench(on_gpu, seconds, loaded).measure()
            # They may have begun in the middle of it.
            loaded = loaded or (not on_gpu and was_busy(before_it))
            measured = {"processes": 1, "busy": loaded} | kept | figures
        if loaded:
            _log.warning("other programs run on this machine: measure again once they have ended")
    versions = {"toolkit": toolkit.__version__, "torch": torch.__version__}
    if on_gpu and torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    measured |= {"device": hardware.device.name, "title": hardware.device.title, "versions": versions}
    measured["figures_version"] = FIGURES_VERSION
    measured["date"] = datetime.date.today().isoformat()
    if os.environ.get("LOCAL_RANK", "0") == "0":  # Each node plans for itself.
        checked = Calibration.model_validate(measured).model_dump(exclude_none=True)
        write_atomically(path, yaml.safe_dump(checked, sort_keys=False, default_flow_style=None))
    return path


class _Bench:
    """The measurements on one device.

    Args:
        on_gpu: Whether it is a GPU, else the CPU.
        seconds: For all of them together.
        loaded: Whether other programs run.
    """

    def __init__(self, on_gpu: bool, seconds: float, loaded: bool) -> None:
        self.on_gpu, self.loaded = on_gpu, loaded
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.skipped: dict[str, str] = {}
        memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else 0
        # A CPU is some thousand times slower; a GPU of a few GiB takes less at once.
        self.scale = 1 if on_gpu and memory > 12 * 2**30 else 4 if on_gpu else 16
        self.has_bf16 = not on_gpu or device.has_bf16()
        # That of training comes first.
        exists = {"bf16": self.has_bf16, "tf32": device.has_tf32()}
        self.dtypes = [dtype for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8") if exists.get(dtype, True)]
        # Three sizes of product per dtype, three lengths of attention, and five others.
        self.seconds, self.each = seconds, seconds / (3 * len(self.dtypes) + 3 + 5)

    def measure(self) -> dict[str, Any]:
        """All figures of `Calibration` that one process can know, and why others are missing."""
        if not self.on_gpu:
            layers, self.skipped = layer.measure(("fp32", "bf16"), self.seconds / 2, self.loaded)
            figures = {"layers": layers, "layers_version": LAYERS_VERSION, "skipped": self.skipped}
            return {**figures, **self._tried({"optimizer": self._optimizer})}
        products = {dtype: functools.partial(self._products, dtype) for dtype in self.dtypes}
        attention = {dtype: functools.partial(self._attention, dtype) for dtype in self.dtypes[:1]}
        others = {"bandwidth": self._bandwidth, "optimizer": self._optimizer, "launch_seconds": self._launches}
        others["pcie"] = self._copies
        figures = {"matmul": self._tried(products, "matmul "), "attention": self._tried(attention, "attention ")}
        return figures | self._tried(others) | {"skipped": self.skipped}

    def _tried(self, works: Mapping[str, Callable[[], Figure]], what: str = "") -> dict[str, Any]:
        """Kernels and dtypes are missing on some devices, in ways that only trying shows."""
        figures = {}
        for name, work in works.items():
            try:
                figures[name] = work()
            except (RuntimeError, NotImplementedError, ValueError, ImportError, AttributeError) as error:
                self.skipped[what + name] = first_line(error)[:160]
            if self.on_gpu:
                torch.cuda.empty_cache()
        return figures

    def _times(self, work: Work) -> list[float]:
        """Seconds of each repetition within the budget; at least three after two to warm up.

        A GPU gets them without a pause: under the load of training it is slower than after a rest.
        """
        for _ in range(2):
            work()
        if self.on_gpu:
            torch.cuda.synchronize()
        times: list[float] = []
        end = time.perf_counter() + self.each
        while len(times) < 3 or (time.perf_counter() < end and len(times) < 5000):
            times += self._queued(work) if self.on_gpu else [timeit.timeit(work, number=1)]
        return times

    def _queued(self, work: Work) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        marks[-1].synchronize()
        return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]

    def _rates(self, works: Sequence[tuple[float, Work]]) -> Figure:
        """Amount per second: of the middle one of some works, with the slowest and the fastest as the range."""
        rates = [amount / statistics.median(self._times(work)) for amount, work in works]
        return _figure(statistics.median_low(rates), rates)

    def _products(self, dtype: str) -> Figure:
        """A layer's projection to four times its width, for three widths; with its gradients, but in fp8."""
        tokens = 8192 // self.scale
        kind = _DTYPES[dtype]

        def work_of(width: int) -> tuple[float, Work]:
            channels = width // self.scale * (1 if self.on_gpu else 2)
            inputs = torch.randn(tokens, channels, device=self.device).to(kind)
            weight = torch.randn(4 * channels, channels, device=self.device).to(kind)
            flops = 2.0 * tokens * channels * 4 * channels
            if dtype == "fp8":
                return flops, self._fp8_product(inputs, weight)

            def products() -> None:
                out = inputs @ weight.T
                out @ weight, out.T @ inputs

            return 3 * flops, products

        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        try:
            return self._rates([work_of(width) for width in (2048, 4096, 8192)])
        finally:
            torch.set_float32_matmul_precision(precision)

    def _fp8_product(self, left: torch.Tensor, right: torch.Tensor) -> Work:
        """By itself: what casts move is planned by its bytes."""
        one = torch.ones((), device=self.device)
        rows, weight = left.to(_FP8), right.to(_FP8).t()
        return lambda: torch._scaled_mm(rows, weight, scale_a=one, scale_b=one, out_dtype=left.dtype)

    def _attention(self, dtype: str) -> Figure:
        """Causal attention over documents of three lengths, forward and backward."""
        heads, size, tokens = 32 // min(self.scale, 8), 128, 16384 // min(self.scale, 4)
        varlen = self.on_gpu and torch.version.cuda and self.has_bf16
        works = []
        for length in (tokens // 32, tokens // 16, tokens // 4):
            shape = (tokens, heads, size)
            inputs = [torch.randn(shape, device=self.device).to(_DTYPES[dtype]).requires_grad_() for _ in range(3)]
            work = self._varlen(inputs, length) if varlen else _dense(inputs, length)
            # Two products over half of all pairs of positions, each of a multiplication and an addition.
            forward = 2 * 2.0 * heads * size * tokens * length / 2
            works.append((forward * (1 + _BACKWARD_ATTENTION), work))
        return self._rates(works)

    def _varlen(self, inputs: list[torch.Tensor], length: int) -> Work:
        from torch.nn.attention.varlen import varlen_attn

        tokens = inputs[0].shape[0]
        bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=self.device)
        upstream = torch.randn_like(inputs[0])

        def work() -> None:
            query, key, value = inputs
            out: Any = varlen_attn(query, key, value, bounds, bounds, length, length, window_size=(-1, 0))
            torch.autograd.grad(out, inputs, upstream)

        return work

    def _bandwidth(self) -> Figure:
        """A copy, a sum, and the gate of a feed-forward layer, in the dtype that training computes in."""
        numbers = 2**28 // self.scale
        kind = torch.bfloat16 if self.has_bf16 and self.on_gpu else torch.float32
        first, second = (torch.randn(numbers, device=self.device).to(kind) for _ in range(2))
        out = torch.empty_like(first)
        size = numbers * first.element_size()
        share = _MODEL_BANDWIDTH if self.on_gpu else 1.0
        return self._rates(
            [
                (2.0 * size * share, lambda: out.copy_(first)),
                (3.0 * size * share, lambda: torch.add(first, second, out=out)),
                (5.0 * size * share, lambda: torch.mul(torch.sigmoid(first), second, out=out)),
            ]
        )

    def _optimizer(self) -> Figure:
        works = []
        for count in (64, 16, 4):
            size = 2**26 // self.scale // count
            parameters = [torch.nn.Parameter(torch.randn(size, device=self.device)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            works.append((float(_ADAMW_BYTES) * size * count, torch.optim.AdamW(parameters, lr=1e-5, fused=True).step))
        return self._rates(works)

    def _copies(self) -> Figure:
        size = 2**28
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(size, dtype=torch.uint8, device=self.device)
        to, back = (lambda: device.copy_(host, non_blocking=True), lambda: host.copy_(device, non_blocking=True))
        return self._rates([(float(size), to), (float(size), back)])

    def _launches(self) -> Figure:
        """Seconds per operation, of operations too small to take any time themselves."""
        small, count = torch.ones(8, device=self.device), 200
        leaf = torch.ones(8, device=self.device, requires_grad=True)
        norm = torch.nn.LayerNorm(8, device=self.device)

        def plain() -> None:
            for _ in range(count):
                small.add_(1)

        def graph() -> None:
            value = leaf
            for _ in range(count // 2):
                value = value * 2
            value.sum().backward()

        def modules() -> None:
            value = leaf
            for _ in range(count // 2):
                value = norm(value)
            value.sum().backward()

        # Nothing here is worth sharing, and to wait for another thread takes longer than all of it.
        with layer.threads(1):
            least, _, real = (statistics.median(self._times(work)) / count for work in (plain, graph, modules))
        return _figure(_MODEL_LAUNCH * real, (least, 2 * _MODEL_LAUNCH * real))


def _dense(inputs: list[torch.Tensor], length: int) -> Work:
    """Attention where there is no kernel for documents of different lengths."""
    tokens, heads, size = inputs[0].shape
    batch = [each.view(tokens // length, length, heads, size).transpose(1, 2) for each in inputs]
    upstream = torch.randn_like(batch[0])

    def work() -> None:
        query, key, value = batch
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, inputs, upstream, retain_graph=True)

    return work


def _figure(value: float, measured: Sequence[float]) -> Figure:
    """A figure with its range, in four digits."""
    return [float(f"{each:.4g}") for each in (value, min(measured), max(measured))]


def _between_processes(on_gpu: bool, seconds: float) -> dict[str, Any]:
    """Bus bandwidth of all-reduces of three sizes: what each process sends in a ring, 2 (n - 1) / n of the data, or
    over nodes what each of them sends (`speed.communication` has plans take both so).

    Source: NCCL's own tests, doc/PERFORMANCE.md. All processes repeat alike, as often as the first one says.
    """
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    count, world = 20, dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    rates = []
    for mebibytes in (16, 64, 256) if on_gpu else (1, 4, 16):
        data = torch.ones(mebibytes * 2**18, device=device)
        times = []
        end = time.perf_counter() + seconds / 3
        for turn in range(count + 2):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(data)
            if on_gpu:
                torch.cuda.synchronize()
            if turn >= 2:
                times.append(time.perf_counter() - started)
            going = torch.tensor([float(turn < 4 or time.perf_counter() < end)], device=device)
            dist.broadcast(going, 0)
            if not going.item():
                break
        rates.append(sent(data.numel() * 4, world, local) / statistics.median(times))
    # Nodes that plan alike need the same figures.
    shared = torch.tensor(rates, dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    rates = shared.tolist()
    dist.destroy_process_group()
    return {"network" if world > local else "link": _figure(rates[-1], rates), "processes": world}


def sent(size: float, world: int, local: int) -> float:
    """Bytes that each node sends in an all-reduce, `local` of `world` processes on each; on one node, each process."""
    parties = math.ceil(world / local) if world > local else world
    return 2 * size * (parties - 1) / parties


if __name__ == "__main__":
    stored = calibrate()
    if os.environ.get("RANK", "0") == "0":
        print(f"{describe(stored)}\nstored in {stored}")
