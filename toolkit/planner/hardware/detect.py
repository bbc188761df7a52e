"""What this machine has, asked without torch: the one place that discovers GPUs.

NVIDIA's are asked of the driver's library (NVML, through `nvidia-ml-py`), AMD's of sysfs; a machine without either is
its CPU, whose speed follows from cores, clock and vector units. It takes milliseconds. To ask torch would take seconds
and start CUDA in a process that may not want it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from toolkit.common import UserError, bytes_text, usable_cores
from toolkit.models.compilers import missing
from toolkit.planner.hardware.catalogue import document, known
from toolkit.planner.hardware.host_memory import host_memory, read_text
from toolkit.planner.hardware.specs import Device, Efficiency, Hardware, Kind, Node, Rate

# Operations per cycle of one core: two fused multiply-adds per vector.
_PER_CYCLE = {"avx512f": 64, "avx2": 32, "asimd": 16}
_BF16_FACTOR = {"amx_bf16": 16.0, "avx512_bf16": 2.0, "avx512f": 0.5, "asimd": 0.5}
_CORE_BANDWIDTH, _HOST_BANDWIDTH = 20e9, 100e9


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it.

    Args:
        name: Of the product; of AMD's the PCI vendor and device, as no product name is sure to be there.
        memory: Bytes.
        exact: Whether `memory` leaves out what the driver reserves, as torch's `total_memory` does.
        uuid: For `CUDA_VISIBLE_DEVICES`.
        capability: CUDA's, or None.
    """

    name: str
    memory: int
    exact: bool = True
    uuid: str = ""
    capability: str | None = None


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs that a process with these variables, by default this one's, would see, NVIDIA's or else AMD's; empty
    without a driver."""
    variables = os.environ if environment is None else environment
    return nvidia(variables) or amd(variables)


def nvidia(environment: Mapping[str, str]) -> list[Gpu]:
    """NVIDIA's GPUs in the order of the PCI bus; empty where the driver is missing or broken.

    Of a card that is divided (MIG), CUDA shows a process one part: the one that is named, or the first.
    """
    try:
        pynvml.nvmlInit()
        try:
            cards = [_from_driver(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return _selected(cards, environment.get("CUDA_VISIBLE_DEVICES"))


def answering(names: Sequence[str]) -> list[str]:
    """Those of these NVIDIA GPUs, named as in `CUDA_VISIBLE_DEVICES`, that the driver can still reach."""

    def answers(name: str) -> bool:
        try:
            by_name = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            pynvml.nvmlDeviceGetMemoryInfo(by_name(int(name) if name.isdigit() else name))
        except pynvml.NVMLError as error:
            # Others mean that it is named or counted otherwise here, as a shortened name or a part of a card is.
            gone = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN)
            unplugged = pynvml.NVML_ERROR_INVALID_ARGUMENT if name.isdigit() else None
            return error.value not in (*gone, unplugged)
        return True

    try:
        pynvml.nvmlInit()
        try:
            return [name for name in names if answers(name)]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return list(names)


def driver_version() -> str:
    """Version of NVIDIA's driver; `unknown` if it does not answer."""
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "unknown"


def amd(environment: Mapping[str, str], root: Path = Path("/sys")) -> list[Gpu]:
    """AMD's GPUs from sysfs."""
    cards = []
    for folder in sorted((root / "class" / "drm").glob("card[0-9]*"), key=lambda each: (len(each.name), each.name)):
        memory, vendor, identity = (
            read_text(folder / "device" / key) for key in ("mem_info_vram_total", "vendor", "device")
        )
        if vendor == "0x1002" and memory:
            cards.append([Gpu(f"1002:{identity.removeprefix('0x')}", int(memory))])
    keys = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    return _selected(cards, next((environment[key] for key in keys if key in environment), None))


def _from_driver(card: Any) -> list[Gpu]:
    """A card, or the parts into which it is divided."""
    capability = "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(card))
    gpus = []
    for handle in _parts(card):
        name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
        gpus.append(Gpu(name, *_memory(handle), uuid, capability))
    return gpus


def _parts(card: Any) -> list[Any]:
    try:
        divided = pynvml.nvmlDeviceGetMigMode(card)[0]
    except pynvml.NVMLError:  # Most cards cannot be.
        divided = False
    if not divided:
        return [card]
    parts = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            parts.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index))
    return parts


def _memory(handle: Any) -> tuple[int, bool]:
    """`memory` and `exact` of a `Gpu`."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return memory.total - memory.reserved, True
    except pynvml.NVMLError:  # An old driver does not tell what it reserves.
        with contextlib.suppress(pynvml.NVMLError_NotSupported):
            return pynvml.nvmlDeviceGetMemoryInfo(handle).total, False
        return ram(), True  # It shares the host's, as a GB10 does.


def _selected(cards: Sequence[Sequence[Gpu]], selection: str | None) -> list[Gpu]:
    """What a list of numbers or identifiers leaves; as CUDA does, the first one that does not exist ends the list."""
    gpus = [card[0] for card in cards if card]
    if selection is None:
        return gpus
    kept = []
    for entry in (text.strip() for text in selection.split(",")):
        if entry.isdigit():
            match = gpus[int(entry)] if int(entry) < len(gpus) else None
        else:
            match = next((gpu for card in cards for gpu in card if entry and gpu.uuid.startswith(entry)), None)
        if match is None:
            break
        kept.append(match)
    return kept


def detect(folder: Path | None = None) -> Hardware:
    """The devices that a run on this machine would use, before any calibration.

    Args:
        folder: The user's recipes folder, whose devices are known too.

    Raises:
        UserError: If the GPUs differ.
    """
    gpus = visible_gpus()
    if not gpus:
        return cpu(1)
    products = sorted({gpu.name for gpu in gpus})
    if len(products) > 1:
        raise UserError(
            f"this machine has different GPUs: {', '.join(products)}",
            "choose alike ones with CUDA_VISIBLE_DEVICES=0,1,…, or name the hardware: hardware=NAMExCOUNT",
        )
    smallest = min(gpus, key=lambda gpu: gpu.memory)
    node = host(len(gpus))
    device = _known(smallest, known(folder)) or _unknown(smallest, node)
    name = device.name + (f"x{len(gpus)}" if len(gpus) > 1 else "")
    unused = max(0, len(visible_gpus({})) - len(gpus))
    return Hardware(name, device, node, len(gpus), unused=unused, lacks=missing(device.kind))


def _known(gpu: Gpu, devices: Mapping[str, Device]) -> Device | None:
    same = [each for each in devices.values() if gpu.name in each.reported]
    if not same:
        return None
    # Cards of one name are sold with different memory.
    alike = [each for each in same if 0.9 < gpu.memory / each.memory < 1.1]
    device = (alike or same)[-1]
    # The driver's count without its own reserve is torch's; where it could not tell the reserve, the catalogue knows.
    nearly = not gpu.exact and gpu.memory <= device.memory * 1.03
    changes: dict[str, Any] = {"memory": min(gpu.memory, device.memory) if nearly else gpu.memory}
    if not alike:
        # With other chips on as wide a bus, or with as many on another.
        ratio, rate = gpu.memory / device.memory, device.efficiency.bandwidth
        wide = Rate(rate.value, rate.low * min(1, ratio), rate.high * max(1, ratio))
        changes["efficiency"] = device.efficiency.model_copy(update={"bandwidth": wide})
        other = f"the catalogue knows one of {bytes_text(device.memory)}, whose speeds are taken"
        changes["title"] = f"{gpu.name} of {bytes_text(gpu.memory)} ({other})"
    return device.model_copy(update=changes)


def _unknown(gpu: Gpu, node: Node) -> Device:
    """A GPU that the catalogue lacks: guesses by its generation, with a wide range."""
    kind: Kind = "cuda" if gpu.capability else "rocm"
    flops = {"fp16": 60e12, "fp32": 15e12}
    if int((gpu.capability or "8.0").split(".")[0]) >= 8:
        flops |= {"bf16": 60e12, "tf32": 30e12}
    # As wide as the guess of the peaks.
    usual = _estimates("generic")
    rates = {key: Rate(rate.value, rate.low / 3, rate.high * 3) for key, rate in usual if rate}
    return Device.model_construct(
        name=re.sub(r"[^a-z0-9]+", "_", gpu.name.lower()).strip("_"),
        title=f"{gpu.name} (not in the catalogue: speeds are guesses)",
        kind=kind,
        memory=gpu.memory,
        flops=flops,
        bandwidth=500e9,
        pcie=15.75e9,
        capability=gpu.capability,
        efficiency=usual.model_copy(update=rates),
        node=node,
    )


def _estimates(kind: str) -> Efficiency:
    return Efficiency.model_validate(document()["estimates"][kind])


def cpu(processes: int) -> Hardware:
    """Processes on this machine's CPU, which share its cores and its RAM."""
    node, flags = host(processes), _cpuinfo("flags", "Features").split()
    per_cycle = next((value for flag, value in _PER_CYCLE.items() if flag in flags), 8)
    fp32 = node.cores * per_cycle * float(_cpuinfo("cpu MHz") or 2500) * 1e6 / processes
    # AMX multiplies tiles, 16 times as much as AVX-512 does in fp32. AVX-512 alone converts bf16 first; without it
    # torch falls back to plain loops (two cores with AVX2: 0.75 GFLOP/s in bf16 where fp32 reaches 74).
    bf16 = fp32 * next((factor for flag, factor in _BF16_FACTOR.items() if flag in flags), 0.01)
    bandwidth = min(node.cores * _CORE_BANDWIDTH, _HOST_BANDWIDTH) / processes
    title = _cpuinfo("model name", "Model") or platform.processor() or platform.machine()
    device = Device.model_construct(
        name="cpu",
        title=f"{title}, {node.cores} core{'s' if node.cores > 1 else ''}",
        kind="cpu",
        memory=node.ram,
        flops={"fp32": fp32, "bf16": bf16, "fp16": fp32 * 0.5},
        bandwidth=bandwidth,
        link=bandwidth,
        pcie=bandwidth,
        sources=["/proc/cpuinfo: cores, clock and vector units"],
        efficiency=_estimates("cpu"),
        node=node,
    )
    return Hardware(f"cpux{processes}" if processes > 1 else "cpu", device, node, processes, lacks=missing("cpu"))


def host(processes: int) -> Node:
    """This machine around its devices, for so many processes; network and drives are guessed, their size is not
    known."""
    cores = usable_cores()
    physical = min(psutil.cpu_count(logical=False) or cores, cores)
    memory = host_memory(processes)
    own = {"ram": memory.bytes, "ram_limit": memory.limit, "cores": physical, "nvme_bytes": None}
    return Node.model_validate(document()["node"]).model_copy(update=own)


def ram(root: Path = Path("/")) -> int:
    """Bytes of RAM that a process here may use."""
    return host_memory(root=root).bytes


def _cpuinfo(*keys: str) -> str:
    """The value of the first of these keys; empty where the system does not say."""
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""
