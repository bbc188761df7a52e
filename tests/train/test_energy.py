"""Measured electricity: which counters are read, and that none of their turns is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from toolkit.distributed.layout import World
from toolkit.planner.hardware.detect import Gpu
from toolkit.train import energy
from toolkit.train.energy import EnergyMeter, cpu_counters, energy_meter

MEGAJOULE = 10**12
"""In microjoules."""


def package(powercap: Path, folder: str, name: str, used: int, wraps_at: int = 262 * MEGAJOULE // 1000) -> Path:
    place = powercap / folder
    place.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", used), ("max_energy_range_uj", wraps_at)):
        (place / file).write_text(f"{value}\n")
    return place / "energy_uj"


def test_packages_of_the_cpu_are_added_up_across_the_end_of_their_range(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", "package-0", 10 * MEGAJOULE, 20 * MEGAJOULE)
    second = package(tmp_path, "intel-rapl:1", "package-1", 0)
    for part in ("intel-rapl:0:0", "intel-rapl:2", "intel-rapl-mmio:0"):
        package(tmp_path, part, {"intel-rapl:2": "psys"}.get(part, "package-0" if "mmio" in part else "core"), 7)
    meter = EnergyMeter(cpu_counters(tmp_path), nodes=2, earlier=1.0)
    assert meter.kwh == 1.0
    for value in (18, 3, 8):  # 8 MJ, then 5 across the end, then 5.
        first.write_text(str(value * MEGAJOULE))
        second.write_text(str(int(second.read_text()) + 36 * MEGAJOULE // 1000))
        meter.read()
    assert meter.kwh == pytest.approx(1.0 + 2 * (18 + 3 * 0.036) / 3.6)


def test_what_cannot_be_read_is_not_measured(tmp_path: Path) -> None:
    assert EnergyMeter(cpu_counters(tmp_path)).kwh is None
    counter = package(tmp_path, "intel-rapl:0", "package-0", 5)
    counter.unlink()
    assert cpu_counters(tmp_path) == []
    counter.write_text("5")
    meter = EnergyMeter(cpu_counters(tmp_path))
    counter.unlink()
    meter.read()
    assert meter.kwh is None


def test_gpus_of_the_run_are_read_from_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: Iterator[int] = iter([1_000_000, 2_000_000, 1_000_000, 2_000_000, 1_900_000, 2_900_000])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: next(shown))
    monkeypatch.setattr(energy, "nvidia", lambda environment: [Gpu("H100", 80 * 2**30, uuid=name) for name in "abc"])
    meter = energy_meter(World(0, 0, 2, 2), on_gpus=True)
    meter.read()
    assert meter.kwh == pytest.approx(2 * 900 / 3.6e6)
    # A launcher that shows each process its own GPU: those of the others are not seen, so nothing is said.
    assert energy_meter(World(0, 0, 4, 4), on_gpus=True).kwh is None

    def too_old(handle: str) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", too_old)
    assert energy_meter(World(0, 0, 2, 2), on_gpus=True).kwh is None
