"""Calibration really measures, and plans take what it found."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from arithmetic import recipe
from ranks import Ranks

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import find, this_machine
from toolkit.planner.hardware.calibrate import Work, _Bench, calibrate, sent
from toolkit.planner.hardware.calibration import Calibration, calibrated, describe, load
from toolkit.planner.speed.communication import NETWORK, inner_link, link_rate, transfers
from toolkit.planner.trace.tracker import Tracker
from toolkit.planner.trace.types import Amount, Tensors, Trace
from toolkit.planner.workload import WIDTH, Workload

MODEL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
# As `torchrun -m toolkit.planner.hardware.calibrate` runs it.
LAUNCHED = """
import runpy

def main(arguments):
    runpy.run_module("toolkit.planner.hardware.calibrate", run_name="__main__")
    return 0
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE", str(folder))
        patch.setattr("toolkit.planner.hardware.layer._LENGTHS", (16, 128))
        patch.setattr("toolkit.planner.hardware.layer._MODEL", MODEL)
        patch.setattr("toolkit.planner.hardware.layer._WIDE", MODEL | {"hidden_size": 256, "intermediate_size": 512})
        return calibrate(seconds=1)


def test_layers_are_traced_where_nothing_else_was_imported() -> None:
    code = "from toolkit.planner.hardware import layer; import torch; "
    code += "print(layer._Layers(torch.float32, 0.01, 1.0)._layers(layer._NARROW, layer._FEW)[1]['launches'])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert float(done.stdout) > 100


def test_figures_are_those_of_this_machine(stored: Path) -> None:
    found = load(stored)
    left = torch.randn(512, 512)
    left @ left
    started = time.perf_counter()
    for _ in range(5):
        left @ left
    here = 5 * 2 * 512**3 / (time.perf_counter() - started)
    layers = found.layers["fp32"]
    # One thread here against all cores there, and other programs on the machine.
    assert here / 100 < layers.matmul < here * 100
    assert 1e8 < layers.bandwidth < 2e12 and 1e-7 < layers.launch_seconds < 1e-3
    assert set(layers.attention) == {"eager", "sdpa", "torch_varlen"} and set(layers.attention["sdpa"]) == {16, 128}
    assert found.optimizer and found.pcie is None
    assert set(found.layers) | {name.removeprefix("layers, ") for name in found.skipped} == {"fp32", "bf16"}
    assert found.versions["torch"] == torch.__version__


def test_plans_and_people_get_them(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(stored.parent.parent))
    hardware = this_machine()
    device, found = hardware.device, load(stored)
    for dtype, layers in found.layers.items():
        rates = hardware.efficiency(dtype)
        assert device.flops[dtype] * rates.matmul_in(dtype).value == pytest.approx(layers.matmul)
        assert device.bandwidth * rates.bandwidth.value == pytest.approx(layers.bandwidth)
        assert hardware.attention[dtype] == layers.attention
    assert device.efficiency.matmul.measured and not find("h100").device.efficiency.matmul.measured
    text = describe(stored)
    assert device.title in text and "products in layers, fp32" in text and "attention eager, fp32" in text


def test_figures_that_cannot_be_kept_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file"))
    started = time.process_time()
    with pytest.raises(NotADirectoryError):
        calibrate(seconds=3)
    assert time.process_time() - started < 1


def test_several_processes_add_what_passes_between_them(stored: Path, ranks: Ranks, tmp_path: Path) -> None:
    before = yaml.safe_load(stored.read_text())
    earlier = before | {"figures_version": 0, "network": [9e9, 8e9, 9e9]}
    stored.write_text(yaml.safe_dump(earlier))
    (tmp_path / "launched.py").write_text(LAUNCHED)
    done = ranks.run(tmp_path, processes=2, entry="launched", TOOLKIT_CACHE=str(stored.parent.parent))
    assert done.returncode == 0, done.stderr
    after = load(stored)
    assert after.processes == 2 and after.link is not None and after.link[0] > 1e6
    assert after.layers["fp32"].matmul == before["layers"]["fp32"]["matmul"]
    assert after.figures_version and after.network is None, "an earlier version's is not kept as one of this"
    assert "all-reduce of 2" in done.stdout


def test_each_node_keeps_what_was_measured_between_nodes(stored: Path, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "launched.py").write_text(
        "import os\n"
        f"os.environ['TOOLKIT_CACHE'] = {str(tmp_path)!r} + '/' + os.environ['RANK']\n"
        "os.environ |= {'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}\n" + LAUNCHED
    )
    done = ranks.run(tmp_path, processes=2, entry="launched")
    assert done.returncode == 0, done.stderr
    first, second = (load(tmp_path / node / "calibration" / stored.name) for node in "01")
    assert first.network is not None and first.network == second.network


def test_attention_is_measured_by_the_products_that_plans_divide_by_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _Bench(on_gpu=False, seconds=1, loaded=False)
    works: list[tuple[float, Work]] = []
    monkeypatch.setattr(bench, "_rates", works.extend)
    bench._attention("fp32")
    tracker = Tracker([], [])
    timeline = tracker.begin()
    flops, work = works[0]
    with tracker:
        work()
    # A trace counts all pairs, and a plan half of them where a causal mask hides the others.
    assert timeline.work["attention"] / 2 == flops


@pytest.mark.parametrize("devices", ["h200x8x2", "h200x8x4", "h200x1x4", "h200x8"])
def test_a_plan_takes_as_long_for_an_all_reduce_as_was_measured(devices: str) -> None:
    hardware, measured = find(devices), 0.01
    workload = Workload(
        recipe(batch={"global_batch_size": 64}),
        batch_layout(recipe(batch={"global_batch_size": 64}), hardware.devices),
        hardware,
        Trace(1, (Tensors("layer", (2**20, 2**8), 1, True, "base"),), (), {}, Amount(), 0, None),
    )
    (gradients,) = transfers(workload, 0, 0, 0)
    size = 2**28 * WIDTH[workload.types.local]
    rate = sent(size, hardware.devices, hardware.devices_per_node) / measured
    over = "network" if hardware.nodes > 1 else "link"
    figures = Calibration(
        device="h200", title="H200", processes=hardware.devices, date="today", versions={}, **{over: [rate, rate, rate]}
    )
    name = NETWORK if hardware.nodes > 1 else inner_link(hardware)
    assert gradients.sent[name] / link_rate(name, calibrated(hardware, figures)) == pytest.approx(measured)
