"""Trains as on a GPU, on a GPU whose memory is the host's and whose kernels are the CPU's (`host_gpu.cpp`).

Run as a process of its own, with `environment()`, a file and, as JSON, command lines of trainings by name; the file
gets, as JSON, the exit status of each, and how often the host waited for the device at a place, by step, of which those
between steps are negative: a GPU idles then until more is launched.
What GPUs compute faster or round otherwise is not seen, nor what streams would do side by side.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import torch
from filelock import FileLock
from harness import untraced

SOURCE = Path(__file__).with_name("host_gpu.cpp")
MEMORY = 80 * 2**30


def environment() -> dict[str, str]:
    """Variables of a process whose torch has that GPU; `pretend` tells its Python part."""
    place = Path(torch.__file__).parent
    library = Path(os.environ["TOOLKIT_CACHE"], "installed", f"host_gpu_{torch.__version__}.so")
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{library}.lock"):
        if not library.is_file() or library.stat().st_mtime < SOURCE.stat().st_mtime:
            includes = [f"-I{place / 'include'}", f"-I{place / 'include/torch/csrc/api/include'}"]
            links = [f"-L{place / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{place / 'lib'}"]
            command = ["g++", "-shared", "-fPIC", "-std=c++20", *includes, str(SOURCE), "-o", str(library), *links]
            subprocess.run(command, check=True, timeout=600)
    return {"LD_PRELOAD": str(library)}


def properties(major: int, minor: int) -> SimpleNamespace:
    """Of an H100, with another compute capability."""
    return SimpleNamespace(
        major=major, minor=minor, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472, shared_memory_per_block=49152, L2_cache_size=50 * 2**20,
        total_memory=MEMORY, name="NVIDIA H100 80GB HBM3", gcnArchName="", is_integrated=False,
    )  # fmt: skip


class Stream:
    """There is one, and it is never behind."""

    device = torch.device("cuda", 0)
    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


class _Nowhere(contextlib.nullcontext[None]):
    def __init__(self, device: Any = None) -> None:
        super().__init__()


def pretend() -> None:
    """Has the Python part of torch, and NVIDIA's driver, tell of the GPU."""
    card = properties(9, 0)
    none = {"all": dict.fromkeys(("current", "peak", "allocated", "freed"), 0)}
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
    stats = {**dict.fromkeys(kinds, none), "num_ooms": 0, "num_alloc_retries": 0}
    # What torch.cuda asks of its C++ part, which a build for CPUs does not have.
    answers: dict[str, Any] = {
        "getDeviceCount": 1, "getDevice": 0, "setDevice": None, "exchangeDevice": 0, "maybeExchangeDevice": 0,
        "synchronize": None, "memoryStats": stats, "resetPeakMemoryStats": None, "resetAccumulatedMemoryStats": None,
        "emptyCache": None, "isCurrentStreamCapturing": False, "getCurrentRawStream": 0, "hasPrimaryContext": True,
        "isHistoryEnabled": False, "get_sync_debug_mode": 0, "set_sync_debug_mode": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch._C, f"_cuda_{name}", lambda *args, _answer=answer, **kwargs: _answer)
    cuda: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "is_bf16_supported": True, "_lazy_init": None,
        "get_device_properties": card, "get_arch_list": ["sm_80", "sm_90"], "mem_get_info": (MEMORY, MEMORY),
        "current_stream": Stream(), "default_stream": Stream(), "set_stream": None,
    }  # fmt: skip
    for name, answer in cuda.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda stream: stream or Stream()  # type: ignore[assignment]
    torch.cuda.device = torch.cuda._DeviceGuard = torch.cuda.device_of = _Nowhere  # type: ignore[assignment,misc]
    # So that dropout is that of the CPU.
    torch.cuda.default_generators = (torch.default_generator,)
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    torch.version.cuda = "13.0"
    memory = SimpleNamespace(total=MEMORY, reserved=0)
    driver: dict[str, Any] = {
        "Init": None, "Shutdown": None, "DeviceGetCount": 1, "DeviceGetHandleByIndex": 0, "DeviceGetHandleByUUID": 0,
        "DeviceGetName": card.name, "DeviceGetUUID": "GPU-0", "DeviceGetCudaComputeCapability": (9, 0),
        "DeviceGetMemoryInfo": memory, "SystemGetDriverVersion": "580.0", "DeviceGetMigMode": (0, 0),
        "DeviceGetTotalEnergyConsumption": 1000,
    }  # fmt: skip
    for name, answer in driver.items():
        setattr(pynvml, f"nvml{name}", lambda *args, _answer=answer, **kwargs: _answer)


class Kernels:
    """What GPUs have kernels for and CPUs do not: attention over documents, products that return another type."""

    def __init__(self, waits: Places) -> None:
        self._library, self._waits = torch.library.Library("aten", "IMPL"), waits
        self._add("_flash_attention_forward", self._attention)
        self._add("_flash_attention_backward", self._of_attention)
        self._add("_scaled_mm", self._scaled)
        self._add("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype))
        self._add("histc", lambda values, bins, min, max: values.float().cpu().histc(bins, min, max).to(values))
        self._add("_grouped_mm", self._grouped)
        for name in ("_softmax", "_log_softmax"):
            self._add(name, functools.partial(self._normalised, getattr(torch.ops.aten, name).default))
            backward = f"{name}_backward_data"
            self._add(backward, functools.partial(self._of_normalised, getattr(torch.ops.aten, backward).default))
        for name in ("addmm.dtype", "addmm.dtype_out"):
            self._add(name, self._added)

    def _add(self, name: str, kernel: Callable[..., Any]) -> None:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            with self._waits.unseen(), torch.autocast("cuda", enabled=False):
                return kernel(*args, **kwargs)

        self._library.impl(name, quiet, "CUDA")

    @staticmethod
    def _documents(query: torch.Tensor, ends: list[torch.Tensor], most: list[int]) -> Iterator[tuple[slice, slice]]:
        # As FlashAttention would have it; it computes anything beyond.
        assert query.dtype in (torch.bfloat16, torch.float16) and all(each.dtype == torch.int32 for each in ends)
        rows, keys = ([slice(*pair) for pair in zip(each.tolist(), each.tolist()[1:], strict=False)] for each in ends)
        for pair in zip(rows, keys, strict=True):
            assert all(each.stop - each.start <= longest for each, longest in zip(pair, most, strict=True))
            yield pair

    @staticmethod
    def _scores(query: Any, key: Any, causal: bool, scale: float, left: int | None, right: int | None) -> Any:
        scores = query @ key.mT * scale
        rows, columns = scores.shape[-2:]
        ahead = (
            torch.arange(columns, device=query.device)
            - torch.arange(columns - rows, columns, device=query.device)[:, None]
        )
        hidden = ahead > (0 if causal else columns if right is None or right < 0 else right)
        if left is not None and left >= 0:
            hidden |= ahead < -left
        return scores.masked_fill(hidden, -torch.inf)

    def _attention(
        self, query: Any, key: Any, value: Any, ends: Any, key_ends: Any, longest: int, longest_key: int,
        dropout: float, causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None, **others: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """(T, heads, d) of all, keys and values perhaps with fewer heads."""
        scale, groups = scale or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
        out, sums = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
        for rows, keys in self._documents(query, [ends, key_ends], [longest, longest_key]):
            q = query[rows].float().transpose(0, 1)
            k, v = (each[keys].float().repeat_interleave(groups, 1).transpose(0, 1) for each in (key, value))
            scores = self._scores(q, k, causal, scale, window_size_left, window_size_right)
            out[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
            sums[:, rows] = scores.logsumexp(-1)
        nothing = query.new_empty(0)
        return out, sums, query.new_zeros(2, dtype=torch.uint64), nothing, nothing

    def _of_attention(
        self, gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, ends: Any, key_ends: Any,
        longest: int, longest_key: int, dropout: float, causal: bool, seed: Any, unused: Any, *,
        scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        scale, groups = scale or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
        gradients = [torch.zeros_like(each) for each in (query, key, value)]

        def shared(each: torch.Tensor) -> torch.Tensor:
            return each.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)

        for rows, keys in self._documents(query, [ends, key_ends], [longest, longest_key]):
            q, up, result = (each[rows].float().transpose(0, 1) for each in (query, gradient, out))
            k, v = (each[keys].float().repeat_interleave(groups, 1).transpose(0, 1) for each in (key, value))
            weights = self._scores(q, k, causal, scale, window_size_left, window_size_right).softmax(-1)
            of_scores = weights * (up @ v.mT - (up * result).sum(-1, keepdim=True)) * scale
            found = ((of_scores @ k).transpose(0, 1), shared(of_scores.mT @ q), shared(weights.mT @ up))
            for place, part, each in zip(gradients, (rows, keys, keys), found, strict=True):
                place[part] = each.to(place.dtype)
        return tuple(gradients)

    @staticmethod
    def _added(
        to: Any, a: Any, b: Any, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Any = None
    ) -> Any:
        result = torch.addmm(to.to(dtype), a.to(dtype), b.to(dtype), beta=beta, alpha=alpha)
        return result if out is None else out.copy_(result)

    @staticmethod
    def _grouped(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        ends = None if offs is None else offs.cpu()
        return torch.ops.aten._grouped_mm(a.cpu(), b.cpu(), ends, bias, out_dtype).to(a.device)

    @staticmethod
    def _normalised(by_cpu: Any, values: Any, dim: int, half_to_float: bool) -> Any:
        return by_cpu(values.cpu().to(torch.float32 if half_to_float else values.dtype), dim, False).to(values.device)

    @staticmethod
    def _of_normalised(by_cpu: Any, gradient: Any, result: Any, dim: int, dtype: torch.dtype) -> Any:
        return by_cpu(gradient.cpu(), result.cpu(), dim, gradient.dtype).to(gradient.device, dtype)

    @staticmethod
    def _scaled(
        a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, of_result: Any = None, out_dtype: Any = None,
        use_fast_accum: bool = False,
    ) -> Any:  # fmt: skip
        # As cuBLAS would have them.
        assert a.is_contiguous() and b.mT.is_contiguous() and a.shape[1] % 16 == b.shape[1] % 16 == 0
        result = (a.float() * scale_a) @ (b.float() * scale_b)
        return (result if bias is None else result + bias.float()).to(out_dtype)


class Places:
    """Where the host waits for the device."""

    def __init__(self) -> None:
        self.step, self._quiet = 0, False
        self.found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._waited)
        ctypes.CDLL(os.environ["LD_PRELOAD"]).host_gpu_on_wait(self._function)

    def _waited(self, operation: bytes) -> None:
        if not self._quiet:
            stack = traceback.extract_stack()[:-1]
            frames = [f"{Path(each.filename).name}:{each.name}" for each in reversed(stack)]
            self.found[self.step][" < ".join([operation.decode(), *frames[:5]])] += 1

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """While this lasts, waits do not count."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def follow(self) -> None:
        """Has all trainers tell which step they are in."""
        from transformers import Trainer, TrainerCallback

        places, own = self, Trainer.__init__

        class Steps(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                places.step = state.global_step + 1

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                places.step = -state.global_step

        def begun(trainer: Any, *args: Any, **kwargs: Any) -> None:
            own(trainer, *args, **kwargs)
            trainer.add_callback(Steps())

        Trainer.__init__ = begun  # type: ignore[method-assign]


def trained(name: str, command: list[str], waits: Places) -> dict[str, Any]:
    """A training by its command line, in this process; one called as a package of FlashAttention has it installed."""
    from toolkit.models.attention import varlen
    from toolkit.train.main import main

    varlen.installed = lambda: [name] if name in varlen.PACKAGES else []
    waits.step, waits.found = 0, collections.defaultdict(collections.Counter)
    status = main(command)
    steps = {str(step): dict(found) for step, found in waits.found.items() if step}
    return {"status": status, "waits": steps, "package": varlen.used()}


def tried(*args: Any) -> Any:
    """Tries a package in this process, and takes it for faster if it is right."""
    from toolkit.models.attention import varlen_trials

    found = varlen_trials.trial(*args)
    return found if found.fault else dataclasses.replace(found, own=2 * found.seconds, first=0.0)


if __name__ == "__main__":
    from toolkit.models.attention import varlen_trials
    from toolkit.planner.trace import fit, store
    from toolkit.planner.trace.__main__ import answer

    fit.trace, store.ask = untraced, answer
    varlen_trials.tried, varlen_trials._WORTH = tried, 0.0
    pretend()
    places = Places()
    kept = Kernels(places)
    places.follow()
    # Standard output has what trainings say.
    found = {name: trained(name, command, places) for name, command in json.loads(sys.argv[2]).items()}
    Path(sys.argv[1]).write_text(json.dumps(found))
