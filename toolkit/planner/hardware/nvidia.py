"""NVIDIA's GPUs, from the driver's management library or its command."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_COMMAND = [
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.reserved,uuid,compute_cap",
    "--format=csv,noheader,nounits",
]
_MIB = 2**20


@dataclass(frozen=True)
class Found:
    """A GPU as its driver describes it.

    Args:
        name: Of the product.
        memory: Bytes.
        uuid: For `CUDA_VISIBLE_DEVICES`.
        capability: CUDA's, or None.
        exact: Whether `memory` leaves out what the driver reserves, as torch's `total_memory` does.
    """

    name: str
    memory: int
    uuid: str
    capability: str | None
    exact: bool


def visible(environment: Mapping[str, str]) -> list[Found]:
    """Those that `CUDA_VISIBLE_DEVICES` lets a process see, in the order of the PCI bus; empty without a driver."""
    with contextlib.suppress(OSError, AttributeError, _DriverError):
        return chosen(list(_from_library()), environment.get("CUDA_VISIBLE_DEVICES"))
    try:
        answer = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=20, check=True).stdout
        return chosen(list(_from_command(answer)), environment.get("CUDA_VISIBLE_DEVICES"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def chosen(found: list[Found], selection: str | None) -> list[Found]:
    """What a list of numbers or identifiers leaves; as CUDA does, the first one that does not exist ends the list."""
    if selection is None:
        return found
    kept = []
    for entry in (text.strip() for text in selection.split(",")):
        if entry.isdigit():
            match = found[int(entry)] if int(entry) < len(found) else None
        else:
            match = next((gpu for gpu in found if entry and gpu.uuid.startswith(entry)), None)
        if match is None:
            break
        kept.append(match)
    return kept


class _DriverError(Exception):
    """NVML answered with an error."""


class _Memory(ctypes.Structure):
    """`nvmlMemory_v2_t` of NVML's API reference."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _OldMemory(ctypes.Structure):
    """`nvmlMemory_t`; its total holds what the driver reserves."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _from_library() -> Iterator[Found]:
    library = ctypes.CDLL(_LIBRARY)

    def ask(function: str, *arguments: object) -> None:
        status = getattr(library, function)(*arguments)
        if status:
            raise _DriverError(f"{function} answers {status}")

    def text(function: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(96)
        ask(function, handle, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode()

    ask("nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            major, minor = ctypes.c_int(), ctypes.c_int()
            ask("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
            try:
                ask("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
                size, exact = memory.total - memory.reserved, True
            except (AttributeError, _DriverError):
                old = _OldMemory()
                ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(old))
                size, exact = old.total, False
            name, uuid = text("nvmlDeviceGetName", handle), text("nvmlDeviceGetUUID", handle)
            yield Found(name, size, uuid, f"{major.value}.{minor.value}", exact)
    finally:
        library.nvmlShutdown()


def _from_command(answer: str) -> Iterator[Found]:
    for line in answer.strip().splitlines():
        name, total, reserved, uuid, capability = (part.strip() for part in line.split(","))
        exact = reserved.isdigit()
        size = (int(total) - (int(reserved) if exact else 0)) * _MIB
        yield Found(name, size, uuid, capability, exact)
