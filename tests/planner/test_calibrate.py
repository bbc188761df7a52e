"""Calibration really measures, and plans take what it found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import yaml
from ranks import Ranks

from toolkit.planner.hardware import find, this_machine
from toolkit.planner.hardware.calibrate import _Bench, calibrate
from toolkit.planner.hardware.calibration import describe, load

# As `torchrun -m toolkit.planner.hardware.calibrate` runs it.
LAUNCHED = """
import runpy

def main(arguments):
    runpy.run_module("toolkit.planner.hardware.calibrate", run_name="__main__")
    return 0
"""


class Small(_Bench):
    """The same measurements on less: where bf16 is emulated, the usual products take minutes."""

    def __init__(self, on_gpu: bool, seconds: float) -> None:
        super().__init__(on_gpu, seconds)
        self.scale = 64


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE", str(folder))
        patch.setattr("toolkit.planner.hardware.calibrate._Bench", Small)
        return calibrate(seconds=1)


def test_figures_are_those_of_this_machine(stored: Path) -> None:
    found = load(stored)
    left = torch.randn(512, 512)
    left @ left
    started = time.perf_counter()
    for _ in range(5):
        left @ left
    here = 5 * 2 * 512**3 / (time.perf_counter() - started)
    # One thread here against all cores there, and other programs on the machine.
    assert here / 100 < found.matmul["fp32"][0] < here * 100
    for value, low, high in (*found.matmul.values(), *found.attention.values(), found.bandwidth, found.optimizer):
        assert 0 < low <= value <= high
    assert 1e8 < found.bandwidth[0] < 2e12
    assert 1e-7 < found.launch_seconds[0] < 1e-3
    assert found.skipped == {} and found.pcie is None
    assert found.versions["torch"] == torch.__version__


def test_plans_and_people_get_them(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(stored.parent.parent))
    device = this_machine().device
    found = load(stored)
    reached = device.flops["fp32"] * device.efficiency.matmul_in("fp32").value
    assert reached == pytest.approx(found.matmul["fp32"][0])
    assert device.bandwidth * device.efficiency.bandwidth.value == pytest.approx(found.bandwidth[0])
    assert device.efficiency.matmul.measured and not find("h100").device.efficiency.matmul.measured
    text = describe(stored)
    assert device.title in text and "matrix products, bf16" in text and "of peak" in text


def test_figures_that_cannot_be_kept_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file"))
    started = time.process_time()
    with pytest.raises(NotADirectoryError):
        calibrate(seconds=3)
    assert time.process_time() - started < 1


def test_several_processes_add_what_passes_between_them(stored: Path, ranks: Ranks, tmp_path: Path) -> None:
    before = yaml.safe_load(stored.read_text())
    (tmp_path / "launched.py").write_text(LAUNCHED)
    done = ranks.run(tmp_path, processes=2, entry="launched", TOOLKIT_CACHE=str(stored.parent.parent))
    assert done.returncode == 0, done.stderr
    after = load(stored)
    assert after.processes == 2 and after.link is not None and after.link[0] > 1e6
    assert after.matmul == before["matmul"]
    assert "all-reduce of 2" in done.stdout
