"""Electricity that a run takes, by the counters of the devices it runs on: NVML's of its GPUs, or RAPL's of the CPU.

As in the plan, hosts of GPUs and cooling are left out. The first process reads the counters of its node and takes other
nodes to be alike. RAPL's wrap around after minutes, so they are read after every step, which takes microseconds. To
sample watts, as trackers of emissions do, would need a thread and miss what lies between the samples.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from toolkit.distributed.layout import World
from toolkit.planner.hardware.detect import nvidia

POWERCAP = Path("/sys/class/powercap")
_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Counter:
    """One device's counter: what it shows in joules, and after how many it begins at zero again."""

    read: Callable[[], float]
    wraps_at: float


class EnergyMeter:
    """Adds up counters from when it is made; nothing is measured without any, or once one cannot be read.

    Args:
        nodes: Machines that use as much as the one that is read.
        earlier: Kilowatt-hours of earlier sessions of the same run.
    """

    def __init__(self, counters: Sequence[Counter], nodes: int = 1, earlier: float = 0.0) -> None:
        self._counters, self._nodes, self._kwh = list(counters), nodes, earlier
        self._before = [counter.read() for counter in counters]

    @property
    def kwh(self) -> float | None:
        """Kilowatt-hours up to the last reading."""
        return self._kwh if self._counters else None

    def read(self) -> None:
        """Adds what was used since the last reading."""
        try:
            now = [counter.read() for counter in self._counters]
        except (OSError, ValueError, pynvml.NVMLError):
            self._counters = []
            return
        pairs = zip(self._counters, self._before, now, strict=True)
        joules = sum((after - before) % counter.wraps_at for counter, before, after in pairs)
        self._kwh += joules / _JOULES_PER_KWH * self._nodes
        self._before = now


def energy_meter(world: World, on_gpus: bool, earlier: float = 0.0) -> EnergyMeter:
    """The meter of a run."""
    counters = gpu_counters(world.local_world_size) if on_gpus else cpu_counters(POWERCAP)
    return EnergyMeter(counters, world.num_nodes, earlier)


def gpu_counters(count: int) -> list[Counter]:
    """Of the first GPUs that this process may use; none where it sees fewer, or the driver does not count for one."""
    try:
        # Stays open as long as the process.
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in nvidia(os.environ)[:count]]
        if len(handles) < count:
            # Launchers may show each process its own GPU only.
            return []
        return [_readable(functools.partial(_gpu_joules, handle), 2**64 / 1e3) for handle in handles]
    except pynvml.NVMLError:
        return []


def cpu_counters(powercap: Path) -> list[Counter]:
    """Of the CPU's packages; none where this user may not read one of them."""
    try:
        return [
            _readable(functools.partial(_joules, folder / "energy_uj"), _joules(folder / "max_energy_range_uj"))
            for folder in sorted(powercap.glob("intel-rapl:*"))
            # Those with a second number are parts of a package, and `psys` is the whole board.
            if folder.name.count(":") == 1 and (folder / "name").read_text().startswith("package")
        ]
    except (OSError, ValueError):
        return []


def _readable(read: Callable[[], float], wraps_at: float) -> Counter:
    """A counter that has been read once; raises as `read` does."""
    read()
    return Counter(read, wraps_at)


def _gpu_joules(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def _joules(file: Path) -> float:
    return int(file.read_text()) / 1e6
