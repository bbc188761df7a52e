"""The catalogue against the chips' own arithmetic, words to machines, detection, and measured figures."""

from __future__ import annotations

import copy
import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pynvml
import pytest
import yaml
from harness import leave_unmeasured

from toolkit.common import UserError
from toolkit.distributed.layout import World
from toolkit.planner.hardware import Hardware, between, driver_version, find, once_measured, this_machine, visible_gpus
from toolkit.planner.hardware.calibration import FIGURES_VERSION, LAYERS_VERSION, Calibration, busy, path_of
from toolkit.planner.hardware.catalogue import shipped
from toolkit.planner.hardware.detect import amd, cpu, detect, ram
from toolkit.planner.speed.communication import link_rate
from toolkit.recipe import RecipeError, list_recipes

GIB = 2**30

# Multiprocessors (AMD: compute units), boost clock in GHz, dense 16-bit operations of one per cycle with fp32
# accumulation, gigabytes on the label. From the makers' architecture papers and TechPowerUp's database of GPUs, not the
# datasheets of the catalogue.
CHIPS = {
    "v100": (80, 1.53, 1024, 16),
    "v100_32gb": (80, 1.53, 1024, 32),
    "t4": (40, 1.59, 1024, 16),
    "a10": (72, 1.695, 1024, 24),
    "a10g": (80, 1.71, 512, 24),
    "l4": (58, 2.04, 1024, 24),
    "l40": (142, 2.49, 512, 48),
    "l40s": (142, 2.52, 1024, 48),
    "l20": (92, 2.52, 512, 48),
    "a40": (84, 1.74, 1024, 48),
    "a4000": (48, 1.56, 1024, 16),
    "a5000": (64, 1.695, 1024, 24),
    "a6000": (84, 1.8, 1024, 48),
    "rtx2060": (30, 1.68, 512, 6),
    "rtx2070": (36, 1.62, 512, 8),
    "rtx2080": (46, 1.71, 512, 8),
    "rtx2080ti": (68, 1.545, 512, 11),
    "rtx3060": (28, 1.777, 512, 12),
    "rtx3060_8gb": (28, 1.777, 512, 8),
    "rtx3070": (46, 1.725, 512, 8),
    "rtx3070ti": (48, 1.77, 512, 8),
    "rtx3080": (68, 1.71, 512, 10),
    "rtx3080_12gb": (70, 1.71, 512, 12),
    "rtx3080ti": (80, 1.665, 512, 12),
    "rtx3090": (82, 1.695, 512, 24),
    "rtx3090ti": (84, 1.86, 512, 24),
    "rtx6000_ada": (142, 2.505, 1024, 48),
    "rtx4060": (24, 2.46, 512, 8),
    "rtx4060ti": (34, 2.535, 512, 16),
    "rtx4060ti_8gb": (34, 2.535, 512, 8),
    "rtx4070": (46, 2.475, 512, 12),
    "rtx4070_super": (56, 2.475, 512, 12),
    "rtx4070ti": (60, 2.61, 512, 12),
    "rtx4070ti_super": (66, 2.61, 512, 16),
    "rtx4080": (76, 2.505, 512, 16),
    "rtx4080_super": (80, 2.55, 512, 16),
    "rtx4090": (128, 2.52, 512, 24),
    "rtx4090d": (114, 2.52, 512, 24),
    "rtx5060": (30, 2.497, 512, 8),
    "rtx5060ti": (36, 2.572, 512, 16),
    "rtx5060ti_8gb": (36, 2.572, 512, 8),
    "rtx5070": (48, 2.512, 512, 12),
    "rtx5070ti": (70, 2.452, 512, 16),
    "rtx5080": (84, 2.617, 512, 16),
    "rtx5090": (170, 2.407, 512, 32),
    "rtxpro6000": (188, 2.617, 1024, 96),
    "rtxpro6000_maxq": (188, 2.288, 1024, 96),
    "rtxpro6000_server": (188, 2.43, 1024, 96),
    "a100": (108, 1.41, 2048, 80),
    "a100_40gb": (108, 1.41, 2048, 40),
    "a100_pcie": (108, 1.41, 2048, 80),
    "a800": (108, 1.41, 2048, 80),
    "h100": (132, 1.83, 4096, 80),
    "h100_pcie": (114, 1.62, 4096, 80),
    "h100_nvl": (132, 1.545, 4096, 94),
    "h800": (132, 1.83, 4096, 80),
    "h20": (78, 1.83, 1024, 96),
    "gh200": (132, 1.83, 4096, 96),
    "h200": (132, 1.83, 4096, 141),
    "b200": (148, 1.85, 8192, 180),
    "b300": (148, 1.85, 8192, 288),
    "gb200": (152, 2.0, 8192, 186),
    "gb300": (152, 2.0, 8192, 288),
    "mi210": (104, 1.7, 1024, 64),
    "mi250": (104, 1.7, 1024, 64),
    "mi250x": (110, 1.7, 1024, 64),
    "mi300x": (304, 2.1, 2048, 192),
    "mi325x": (304, 2.1, 2048, 256),
    "mi350x": (256, 2.2, 4096, 288),
    "mi355x": (256, 2.4, 4096, 288),
}


def test_every_device_has_a_chip_here() -> None:
    assert set(CHIPS) == set(shipped())


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_peaks_are_dense_with_fp32_accumulation(name: str) -> None:
    processors, gigahertz, per_cycle, _ = CHIPS[name]
    flops = find(name).device.flops
    assert flops["fp16"] == pytest.approx(processors * gigahertz * 1e9 * per_cycle, rel=0.03)
    before_ampere = find(name).device.capability in ("7.0", "7.5")
    assert flops.get("bf16") == (None if before_ampere else flops["fp16"])
    if "fp8" in flops:
        assert flops["fp8"] == pytest.approx(2 * flops["fp16"], rel=0.03)
    if "tf32" in flops:
        assert flops["tf32"] == pytest.approx(flops["fp16"] / 2, rel=0.03)


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_entries_are_complete_and_say_where_they_come_from(name: str) -> None:
    entry, device = shipped()[name], find(name).device
    label = CHIPS[name][3]
    # 24 GB on a label are 24 GiB of chips (HBM of Hopper and Blackwell: 10^9); ECC and the driver take up to a tenth.
    assert 0.88 * label * GIB < device.memory < label * GIB
    assert device.sources and all(source.startswith("https://") for source in device.sources)
    assert entry.node.source and entry.reported
    assert device.kind == ("rocm" if name.startswith("mi") else "cuda")
    for key in ("matmul", "attention", "bandwidth", "optimizer", "link", "pcie", "network"):
        rate = getattr(device.efficiency, key)
        assert 0 < rate.low < rate.value < rate.high <= 1, key
        assert rate.measured == (name == "h200" and key == "matmul"), key
    assert 1e-6 < device.efficiency.launch_seconds.value < 1e-4


def test_words_say_devices_and_nodes() -> None:
    one, eight, many = find("h200"), find("H200x8"), find("h200x8x4")
    assert [each.devices for each in (one, eight, many)] == [1, 8, 32]
    assert (many.name, many.devices_per_node, many.nodes) == ("h200x8x4", 8, 4)
    assert one.device == many.device
    # One GPU of eight is rented with an eighth of the host; a whole node is the same node in a cluster.
    assert one.node.ram * 8 == eight.node.ram == many.node.ram
    assert one.node.cores * 8 == eight.node.cores
    assert eight.node.network == pytest.approx(8 * 400e9 / 8)
    # Names may end in what looks like a count.
    assert find("mi300xx8").devices == 8 and find("rtx4090").devices == 1


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("4090", "`rtx4090`"),
        ("geforce_rtx_4090x2", "`rtx4090x2`"),
        ("rxt4090", "`rtx4090`"),
        ("rtx4090super", "`rtx4090`"),
        ("rtx4070tisuper", "`rtx4070ti_super`"),
        ("h100nvlx2", "`h100_nvlx2`"),
        ("rtx_pro_6000", "`rtxpro6000`"),
        ("pro6000", "`rtxpro6000`"),
        ("6000ada", "`rtx6000_ada`"),
        ("mi300", "`mi300x`"),
        ("A100-40GBx2", "`a100_40gbx2`"),
        ("a100-80gbx8", "`a100x8`"),
        ("a100_pcie_80gb", "`a100_pcie`"),
        ("h200x8x4x2", "`h200x8x4`"),
        ("cup", "`cpu`"),
        ("", "known are v100, "),
        ("8xh200", "write h200x8"),
        ("h200x16", "write h200x8x2"),
        ("h200x0", "NAMExDEVICES"),
        ("cpux2x2", "cpux2"),
        ("abacus", "known are v100, "),
        ("rtx4090,h100", "--sweep hardware=rtx4090,h100"),
    ],
)
def test_wrong_words_are_answered_with_right_ones(text: str, change: str) -> None:
    with pytest.raises(UserError) as error:
        find(text)
    assert change in error.value.change


@pytest.mark.parametrize(
    "text", ["p100", "h21", "h2000x8", "a900", "b400", "rtx3050", "rtx1080ti", "rtx3050x2", "gtx1660"]
)
def test_another_number_is_another_device(text: str) -> None:
    """A name that is spelled alike would plan for a card of other speed and memory."""
    with pytest.raises(UserError) as error:
        find(text)
    assert "did you mean" not in error.value.change and "recipes/_hardware.yaml" in error.value.change


def own(folder: Path, text: str) -> Path:
    recipes = folder / "recipes"
    recipes.mkdir()
    (recipes / "_hardware.yaml").write_text(text, encoding="utf-8")
    return recipes


def test_users_add_devices_and_change_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own(
        tmp_path,
        """
devices:
  lab:
    like: rtx4090
    title: Our box
    node: {devices: 10, ram_gib: 512}
  half:
    like: lab
    efficiency: {matmul: [0.4, 0.3, 0.5]}
  h200:
    like: h200
    node: {devices: 16}
  new:
    title: Something new
    memory_gib: 64
    tflops: {bf16: 400, fp32: 50}
    bandwidth_gb_s: 2000
    pcie_gb_s: 63
""",
    )
    lab = find("labx10", folder)
    assert lab.device.flops == find("rtx4090").device.flops
    assert (lab.node.ram, lab.device.title) == (512 * GIB, "Our box")
    half = find("half", folder).device
    assert half.efficiency.matmul.value == 0.4 and half.efficiency.attention == lab.device.efficiency.attention
    larger, usual = (find("h200x16", folder).device, find("h200").device)
    assert larger.node.devices == 16 and larger.model_copy(update={"node": usual.node}) == usual
    assert find("new", folder).device.flops == {"bf16": 400e12, "fp32": 50e12}
    monkeypatch.chdir(tmp_path)
    assert find("lab").device == lab.device
    assert "_hardware" not in list_recipes([folder])


def test_mistakes_in_a_users_file_are_all_named(tmp_path: Path) -> None:
    folder = own(
        tmp_path,
        """devices:
  one:
    like: h2o0
  two:
    like: h200
    memory_gb: 80
    node: {ram: 12}
  three:
    title: Three
  four:
    like: five
  five:
    like: four
  Six: {like: h100}
  seven:
    like: h100
    tflops: {bf16: fast}
    efficiency: {matmul: [0.5]}
  eight:
    like: h100
    tflops: {bf16: 148}
    efficiency: {matmul: [0.5, 0.8, 0.9]}
  nine: h100
  ten: {like: nine}
  eleven: {like: [h100]}
  12: {like: h100}
""",
    )
    with pytest.raises(RecipeError) as error:
        find("h200", folder)
    found = {problem.path: problem for problem in error.value.problems}
    assert found["devices.one.like"].hint == "did you mean `h200`?"
    assert found["devices.one.like"].where == f"{folder / '_hardware.yaml'}:3"
    assert found["devices.two.memory_gb"].hint == "did you mean `memory_gib`?"
    assert found["devices.two.node.ram"].where.endswith(":7") and "ram_gib" in found["devices.two.node.ram"].allowed
    assert found["devices.three.tflops"].what == "is required"
    assert found["devices.four.like"].what == "leads back to itself"
    assert "devices.Six" in found
    assert {"devices.nine", "devices.12"} <= set(found)
    assert {found[f"devices.{name}.like"].what for name in ("ten", "eleven")} == {"there is no such device"}
    assert {"devices.seven.tflops.bf16", "devices.seven.efficiency.matmul"} <= set(found)
    # Without it there is no peak for a recipe in fp32.
    assert "fp32" in found["devices.eight.tflops"].allowed
    assert "low" in found["devices.eight.efficiency.matmul"].allowed


@pytest.mark.parametrize("text", ["devices: [a", "devices: [h100]", "machines: {}"], ids=["yaml", "list", "key"])
def test_a_users_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"_hardware\.yaml"):
        find("h200", own(tmp_path, text))


# --- this machine


@pytest.mark.skipif(bool(visible_gpus({})), reason="this machine has a GPU")
def test_this_machine_is_its_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    here = this_machine()
    assert (here.name, here.device.kind, here.devices) == ("cpu", "cpu", 1)
    assert 0 < here.device.memory <= psutil.virtual_memory().total
    assert here.device.memory == here.node.ram
    # Wide: nothing was measured.
    rate = here.device.efficiency.matmul
    assert not here.device.efficiency.matmul.measured and rate.high / rate.low > 4
    two = find("cpux2")
    assert two.devices == 2 and two.device.memory == here.device.memory
    assert two.device.flops["fp32"] == pytest.approx(here.device.flops["fp32"] / 2)


@pytest.mark.parametrize(("flags", "bf16_over_fp32"), [("avx2", 0.01), ("avx2 avx512f", 0.5), ("avx512f amx_bf16", 16)])
def test_a_cpu_without_instructions_for_bf16_is_planned_slow(
    monkeypatch: pytest.MonkeyPatch, flags: str, bf16_over_fp32: float
) -> None:
    monkeypatch.setattr("toolkit.planner.hardware.detect._cpuinfo", lambda *keys: flags if "flags" in keys else "")
    flops = cpu(1).device.flops
    assert flops["bf16"] == pytest.approx(flops["fp32"] * bf16_over_fp32)


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_containers_limit_counts(tmp_path: Path, file: str) -> None:
    limit = tmp_path / "sys/fs/cgroup" / file
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n" if file == "memory.max" else f"{2**63 - 4096}\n")
    assert ram(tmp_path) == psutil.virtual_memory().total
    limit.write_text(f"{3 * GIB}\n")
    assert ram(tmp_path) == 3 * GIB


WHOLE = """int nvmlDeviceGetMemoryInfo_v2(void *h, Memory *m) {
    if (m->version != (sizeof(Memory) | 2u << 24)) return 25;
    const char *name = *(const char **)h;
    m->total = (strstr(name, "MIG") ? atoi(strchr(name, '.') + 1) * 1000ull : 143771ull) << 20;
    m->reserved = 616ull << 20; return 0; }"""
OLD = """int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { m[0] = 24564ull << 20; return 0; }"""
NVML = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
static const char *names[] = {NAMES};
int nvmlInitWithFlags(unsigned flags) { return STATUS; }
int nvmlShutdown(void) { return 0; }
static unsigned all = sizeof names / sizeof *names;
int nvmlDeviceGetCount_v2(unsigned *count) {
    for (*count = 0; *count < all && !strstr(names[*count], "MIG"); ++*count); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(names + index); return 0; }
int nvmlDeviceGetName(void *h, char *out, unsigned n) { strncpy(out, *(const char **)h, n); return 0; }
int nvmlDeviceGetUUID(void *h, char *out, unsigned n) {
    strncpy(out, strstr(*(const char **)h, "MIG") ? "MIG-00" : "GPU-00", n);
    out[5] = '0' + ((const char **)h - names); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *then) {
    unsigned cards; nvmlDeviceGetCount_v2(&cards);
    if (cards == all) return 3; *now = *then = (const char **)h == names + cards - 1; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned index, void **part) {
    unsigned cards; nvmlDeviceGetCount_v2(&cards); *part = names + cards + index - 1;
    return 0 < index && cards + index <= all ? 0 : 6; }
MEMORY
"""
"""Names with `MIG` come last: the parts into which the card before them is divided."""
SHARED = """int nvmlDeviceGetMemoryInfo_v2(void *h, Memory *m) { return 3; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { return 3; }"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Builds a management library that knows some GPUs; its functions have the signatures of NVML's reference."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def build(*gpus: str, memory: str = WHOLE, status: int = 0) -> None:
        # The loader knows libraries by their path: each is another one.
        source, library = tmp_path / "nvml.c", tmp_path / f"libnvml{len(list(tmp_path.glob('*.so')))}.so"
        listed = ", ".join(f'"{gpu}"' for gpu in gpus)
        source.write_text(NVML.replace("NAMES", listed).replace("MEMORY", memory).replace("STATUS", str(status)))
        subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source], check=True)
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    return build


def test_gpus_are_known_by_their_drivers_name(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("NVIDIA H200", "NVIDIA H200", "NVIDIA H200", "NVIDIA H200")
    here = this_machine()
    assert (here.name, here.devices, here.device.title) == ("h200x4", 4, "NVIDIA H200 SXM 141 GB")
    # What the driver reserves is not there for torch; the host is this one.
    assert here.device.memory == (143771 - 616) * 2**20
    assert here.node.ram <= psutil.virtual_memory().total
    for selection, devices in [("0,2", 2), ("GPU-03", 1), ("1,9,0", 1)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
        assert this_machine().devices == devices, selection
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().device.kind == "cpu"


def test_all_gpus_of_a_machine_have_no_more_of_its_host_than_some(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(*["NVIDIA H200"] * 4)
    whole = this_machine()
    assert whole.node_of(4) == whole.node and whole.node_of(8).ram == 2 * whole.node.ram
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    one = this_machine()
    assert one.node.ram == whole.node.ram
    assert [one.node_of(count).ram for count in (1, 2, 4, 8)] == [one.node.ram] * 3 + [2 * one.node.ram]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    two = this_machine()
    assert [two.node_of(count).ram for count in (1, 2, 4, 8)] == [
        two.node.ram // 2,
        *[two.node.ram] * 2,
        2 * two.node.ram,
    ]


def test_variables_are_read_anew_where_a_library_has_replaced_the_environment(driver, monkeypatch) -> None:
    """Datasets does so when it maps with several processes."""
    driver("NVIDIA H200", "NVIDIA H200")
    monkeypatch.setattr(os, "environ", copy.deepcopy(os.environ))
    for key, value in {"CUDA_VISIBLE_DEVICES": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setitem(os.environ, key, value)
    assert len(visible_gpus()) == this_machine().devices == 1
    assert World.from_environment().rank == 1


def test_unknown_gpus_are_guessed_widely_and_different_ones_refused(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("NVIDIA Quadro X9")
    device = this_machine().device
    assert (device.name, device.kind, device.memory) == ("nvidia_quadro_x9", "cuda", (143771 - 616) * 2**20)
    rate = device.efficiency.matmul
    assert "not in the catalogue" in device.title and not rate.measured and rate.high / rate.low > 10
    driver("NVIDIA H200", "NVIDIA L4")
    with pytest.raises(UserError, match="NVIDIA H200, NVIDIA L4") as error:
        this_machine()
    assert "CUDA_VISIBLE_DEVICES" in error.value.change
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert this_machine().name == "l4"


def test_an_old_driver_does_not_tell_what_it_reserves(driver) -> None:
    driver("NVIDIA GeForce RTX 4090", memory=OLD)
    machine = detect()
    assert machine.name == "rtx4090"
    assert machine.device.memory == find("rtx4090").device.memory


@pytest.mark.parametrize(
    ("selection", "gpus"), [(None, 2), ("0", 1), ("1", 1), ("MIG-02", 1), ("MIG-03", 1), ("GPU-01", 0)]
)
def test_a_part_of_a_card_is_a_gpu_with_its_own_memory(driver, selection, gpus, monkeypatch) -> None:
    """Without them a run there would be planned for a CPU."""
    driver("NVIDIA H200", "NVIDIA H200", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 MIG 3g.71gb")
    environment = {} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}
    found = visible_gpus(environment)
    assert len(found) == gpus
    if selection in ("1", "MIG-02", "MIG-03"):
        size = 71 if selection == "MIG-03" else 18
        assert (found[0].name[-4:], found[0].memory, found[0].capability) == (
            f"{size}gb",
            (size * 1000 - 616) * 2**20,
            "9.0",
        )
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
        device = this_machine().device
        assert (device.kind, device.memory) == ("cuda", found[0].memory) and "speeds are guesses" in device.title


def test_a_gpu_without_memory_of_its_own_has_that_of_the_host(driver) -> None:
    driver("NVIDIA GB10", memory=SHARED)
    device = this_machine().device
    assert (device.kind, device.memory, device.capability) == ("cuda", ram(), "9.0")


@pytest.mark.parametrize(
    ("product", "gib", "name", "said"),
    [
        ("NVIDIA GeForce RTX 3060", 12, "rtx3060", "NVIDIA GeForce RTX 3060 12 GB"),
        ("NVIDIA GeForce RTX 3060", 8, "rtx3060_8gb", "NVIDIA GeForce RTX 3060 8 GB"),
        ("NVIDIA GeForce RTX 4090", 48, "rtx4090", "knows one of 23.5 GiB"),
        ("NVIDIA H100 80GB HBM3", 64, "h100", "knows one of 79.2 GiB"),
    ],
)
def test_cards_of_one_name_are_told_apart_by_their_memory(driver, product: str, gib: int, name: str, said: str) -> None:
    """Their bandwidth differs too: of a size that is not known the range reaches as far as the memory differs."""
    driver(product, memory=WHOLE.replace("143771", str(gib * 1000)))
    here, usual = this_machine(), find(name)
    assert (here.name, said in here.device.title) == (name, True)
    assert here.device.memory == (gib * 1000 - 616) * 2**20
    rate, known = here.device.efficiency.bandwidth, usual.device.efficiency.bandwidth
    ratio = here.device.memory / usual.device.memory if "knows" in said else 1.0
    assert (rate.low, rate.high) == pytest.approx((known.low * min(1, ratio), known.high * max(1, ratio)))


def test_a_broken_driver_is_none(driver) -> None:
    driver("NVIDIA H200", status=9)
    assert visible_gpus() == [] and driver_version() == "unknown"
    assert detect().device.kind == "cpu"


def test_what_is_lacked_to_compile_is_known_of_this_machine_alone(
    driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver("NVIDIA H200")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert "no C compiler (gcc)" in this_machine().lacks and find("h200").lacks == ""
    assert "no C++ compiler (g++)" in find("cpux2").lacks


def test_amds_gpus_are_found_in_sysfs(tmp_path: Path) -> None:
    for index, vendor in enumerate(["0x1002", "0x1a03", "0x1002"]):
        folder = tmp_path / "class/drm" / f"card{index}" / "device"
        folder.mkdir(parents=True)
        for name, text in {"vendor": vendor, "device": "0x74a1", "mem_info_vram_total": f"{192 * GIB}"}.items():
            (folder / name).write_text(f"{text}\n")
    found = amd({}, tmp_path)
    assert [gpu.memory for gpu in found] == [192 * GIB] * 2
    assert found[0].name in shipped()["mi300x"].reported
    assert len(amd({"HIP_VISIBLE_DEVICES": "1"}, tmp_path)) == 1


# --- measured figures


def store(device: str, **figures: object) -> None:
    file = path_of(find(device).device)
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {"device": device, "title": "as reported", "processes": 1, "date": "2026-01-01", "versions": {}}
    facts["figures_version"] = FIGURES_VERSION
    file.write_text(yaml.safe_dump({**facts, **figures}), encoding="utf-8")


def test_measured_figures_replace_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    before: Hardware = find("a100x8")
    store(
        "a100",
        matmul={"bf16": [234e12, 218.4e12, 249.6e12], "fp8": [1e12, 1e12, 1e12]},
        attention={"bf16": [156e12, 125e12, 172e12]},
        bandwidth=[1.6e12, 1.5e12, 2.2e12],
        link=[240e9, 200e9, 250e9],
        launch_seconds=[4e-6, 3e-6, 5e-6],
    )
    after = find("a100x8")
    rates = after.device.efficiency
    assert rates.matmul.measured and not before.device.efficiency.matmul.measured
    assert (rates.matmul.value, rates.matmul.low, rates.matmul.high) == pytest.approx((0.75, 0.70, 0.80))
    assert rates.attention.value == pytest.approx(0.5)
    assert rates.link.value == pytest.approx(0.8)
    assert rates.launch_seconds.value == 4e-6
    # A peak that was passed was no peak; a dtype that the device lacks is no capability.
    assert after.device.bandwidth == 2.2e12 and rates.bandwidth.high == 1
    assert "fp8" not in after.device.flops
    # What was not measured stays an estimate; other devices do too.
    assert rates.pcie == before.device.efficiency.pcie
    assert not find("h100").device.efficiency.matmul.measured


def test_figures_that_earlier_versions_counted_otherwise_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    before = find("a100x8x2")
    stored = {"matmul": {"bf16": [234e12, 218e12, 249e12]}, "link": [240e9, 200e9, 250e9], "processes": 8}
    store("a100", **stored, attention={"bf16": [156e12, 125e12, 172e12]}, network=[9e9, 8e9, 9e9], figures_version=0)
    after = find("a100x8x2")
    old, rates = before.device.efficiency, after.device.efficiency
    assert rates.matmul.measured and rates.link.value == pytest.approx(0.8)
    assert (rates.attention, rates.network, after.node.network) == (old.attention, old.network, before.node.network)
    find("a100")
    (said,) = caplog.messages
    assert "a100.yaml: attention and network, as" in said and "calibrate again" in said
    store("h100", **stored, figures_version=0)
    assert find("h100").device.efficiency.matmul.measured and len(caplog.messages) == 1


def test_what_passes_the_peak_of_another_figure_is_taken_as_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two RTX 3090 with a bridge between them, of which the catalogue does not know: devices are taken to use PCIe."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    store(
        "rtx3090",
        matmul={"bf16": [60e12, 55e12, 65e12]},
        attention={"bf16": [70e12, 60e12, 80e12]},
        link=[46e9, 44e9, 47e9],
        optimizer=[1e12, 0.9e12, 1.1e12],
    )
    after = find("rtx3090x2")
    device, rates = after.device, after.device.efficiency
    assert device.pcie < 44e9 and device.flops["bf16"] < 80e12
    for end, link, attention in (("value", 46e9, 70e12), ("low", 44e9, 60e12), ("high", 47e9, 80e12)):
        assert link_rate("PCIe", after, end) == pytest.approx(link)  # type: ignore[arg-type]
        assert getattr(rates.attention, end) * device.flops["bf16"] == pytest.approx(attention)
    assert rates.optimizer.high * device.bandwidth == pytest.approx(1.1e12)


def test_another_cpus_figures_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    rates = {32: 1e10, 512: 4e10}
    layers = {"matmul": 1e12, "half": 20, "bandwidth": 5e9, "launch_seconds": 6e-5, "attention": {"sdpa": rates}}
    slow = layers | {"matmul": 2e11, "bandwidth": 5e11}
    store("cpu", layers={"bf16": layers, "fp32": slow})
    one, two = find("cpu"), find("cpux2")
    for hardware, processes in ((one, 1), (two, 2)):
        # Processes share the cores, but each launches its own operations.
        for dtype, matmul, moved in (("bf16", 1e12, 5e9), ("fp32", 2e11, 5e11)):
            rates, device = hardware.efficiency(dtype), hardware.device
            assert rates.matmul_in(dtype).value * device.flops[dtype] == pytest.approx(matmul / processes)
            assert rates.bandwidth.value * device.bandwidth == pytest.approx(moved / processes)
            assert (rates.launch_seconds.value, rates.half.value, rates.matmul.measured) == (6e-5, 20, True)
        assert between(hardware.attention["bf16"]["sdpa"], 128) * processes == pytest.approx(2e10)
    assert between({32: 1.0, 512: 4.0}, 8) == 1 and between({32: 1.0, 512: 4.0}, 4096) == 4
    monkeypatch.setattr(
        "toolkit.planner.hardware.detect._cpuinfo", lambda *keys: "another" if "model name" in keys else ""
    )
    assert not find("cpu").device.efficiency.matmul.measured


@pytest.mark.parametrize("age", [pytest.param(601, id="later"), pytest.param(-86_400, id="clock set back")])
def test_a_cpu_is_measured_once_when_it_is_planned_for_and_a_gpu_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, age: int
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    asked: list[str] = []
    state = {"busy": True, "code": 1}

    def measure(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(command[-3:]))
        if not state["code"]:
            leave_unmeasured(tmp_path)
            path = path_of(find("cpu").device)
            path.write_text(path.read_text().replace("{device", f"{{busy: {str(state['busy']).lower()}, device"))
        return subprocess.CompletedProcess(command, state["code"], "", "no memory")

    monkeypatch.setattr("toolkit.planner.hardware.calibration.subprocess.run", measure)
    monkeypatch.setattr("toolkit.planner.hardware.calibration.busy", lambda: state["busy"])
    once_measured(find("h200x8"))
    assert not asked
    once_measured(find("cpu"))
    assert (
        asked == ["calibrate --seconds 5"] and "could not be measured, so times are estimates: no memory" in caplog.text
    )
    state["code"] = 0
    once_measured(find("cpu"))
    once_measured(find("cpu"))
    assert len(asked) == 2
    # What was measured beside other programs is measured again once they have ended, and not at each of their pauses.
    state["busy"] = False
    once_measured(find("cpu"))
    assert len(asked) == 2
    os.utime(path_of(find("cpu").device), (time.time() - age,) * 2)
    once_measured(find("cpux2"))
    once_measured(find("cpu"))
    assert len(asked) == 3


class Times(NamedTuple):
    user: float
    guest: float
    idle: float
    steal: float


@pytest.mark.parametrize(("all_of_them", "own", "expected"), [(1.2, 0, True), (1.9, 1, True), (1, 0.9, False)])
def test_only_other_programs_keep_a_machine_busy(
    all_of_them: float, own: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processors all programs together keep so many, and this process its own."""
    clock = {"now": 100.0}

    def sleep(seconds: float) -> None:
        clock["now"] += seconds

    def times() -> Times:
        now = clock["now"]
        return Times(user=all_of_them * now, guest=0.0, idle=(2 - all_of_them) * now, steal=now)

    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(time, "process_time", lambda: own * clock["now"])
    assert busy() == expected


def test_a_broken_file_of_figures_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    store("h100", matmul={"bf16": [1e12]})
    with pytest.raises(UserError, match=r"h100\.yaml") as error:
        find("h100")
    assert "calibrate" in error.value.change


def test_no_framework_is_imported() -> None:
    code = "import sys; from toolkit.planner.hardware import find, this_machine; find('h200'); this_machine(); "
    check = code + "assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_page_shows_the_catalogue() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
    rows = {cells[0].strip("`"): cells[1:] for line in page.splitlines() if (cells := _cells(line))}
    assert set(rows) == set(shipped())
    for name, cells in rows.items():
        device, node = find(name).device, shipped()[name].node
        flops = [device.flops.get(dtype, 0) / 1e12 for dtype in ("bf16", "fp16", "fp8")]
        wanted = [device.memory / GIB, *flops, device.bandwidth / 1e9, (device.link or 0) / 1e9, device.pcie / 1e9]
        assert [float(cell or 0) for cell in cells[:7]] == pytest.approx(wanted, rel=0.005), name
        assert cells[7] == f"{node.devices} x, {node.ram / GIB:.0f} GiB"
        rate = device.efficiency.matmul
        text = f"{rate.value:.0%} ({rate.low:.0%} to {rate.high:.0%})"
        assert cells[8] == (f"**{text}**" if rate.measured else text)


def test_the_pages_example_works(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
    folder = own(tmp_path, page.partition("```yaml\n")[2].partition("```")[0])
    assert find("labx10", folder).node.ram == 512 * GIB
    assert find("h200x16", folder).devices == 16
    custom = find("a100_64gbx4", folder)
    assert custom.device.link == find("a100").device.link and custom.device.efficiency.matmul.value == 0.75


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| `") else []


_CPU = "{device: cpu, title: x, processes: 1, date: never, versions: {}"
_LAYERS = "matmul: 1.0e+12, half: 10, bandwidth: 1.0e+10, launch_seconds: 1.0e-5"


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1]", "device: [", "\x00", "title: cpu"),
        f"{_CPU}, optimizer: [1.0e+9, 5.0e+9, 2.0e+9]}}",
        f"{_CPU}, layers: {{fp32: {{{_LAYERS}, attention: {{sdpa: {{0: 1.0e+9}}}}}}}}}}",
    ],
)
def test_broken_figures_of_a_cpu_are_set_aside_and_measured_again(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    leave_unmeasured(tmp_path)
    path = path_of(find("cpu").device)
    whole = path.read_text()
    path.write_text(content)

    def measure(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        path.write_text(whole)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("toolkit.planner.hardware.calibration.subprocess.run", measure)
    once_measured(find("cpu"))
    assert path.read_text() == whole and path.with_name(f"{path.name}.damaged").read_text() == content
    assert caplog.text.count("not a calibration") == 1


def test_layers_that_were_measured_otherwise_are_measured_again() -> None:
    layers = {"matmul": 1e12, "half": 10, "bandwidth": 1e10, "launch_seconds": 1e-5, "attention": {}}
    facts = {"device": "cpu", "title": "x", "processes": 1, "date": "2026-01-01", "versions": {}}
    older = Calibration.model_validate({**facts, "layers": {"fp32": layers}})
    assert older.again and not older.model_copy(update={"layers_version": LAYERS_VERSION}).again
    # Several processes measure what passes between them alone; where nothing could be measured, nothing will be.
    assert Calibration.model_validate(facts).again
    assert not Calibration.model_validate({**facts, "layers_version": LAYERS_VERSION}).again
