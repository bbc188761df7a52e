"""What a plan needs to know of a machine: peaks, and what share of each is reached, with a range.

`catalogue.yaml` and a user's `_hardware.yaml` state the same, in units that their keys name (`memory_gib`). Here sizes
are in bytes, speeds in bytes/s or FLOP/s, times in seconds. Shares are estimates until `toolkit calibrate` measures
them on such a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetPydanticSchema, PositiveInt, ValidationInfo, field_validator
from pydantic_core.core_schema import no_info_after_validator_function

from toolkit.recipe import Section
from toolkit.recipe.precisions import PRECISIONS

DOCUMENTS = "torch_varlen"
"""Attention that works through pairs within documents alone."""
_LEAST_GAIN = 1.1
_SHORTER = 1.25
"""For how much slower products a shorter type makes up."""

Kind = Literal["cuda", "rocm", "cpu"]
Dtype = Literal["bf16", "fp16", "fp8", "tf32", "fp32"]
End = Literal["value", "low", "high"]
"""The best guess of a rate, or an end of its range."""


@dataclass(frozen=True)
class Rate:
    """What is reached of a peak, as a share of it, or an absolute figure; with the range it is believed to lie in.

    Args:
        value: The best guess.
        low: Lower end.
        high: Upper end.
        measured: Whether it was measured on this kind of device, or is an estimate.
    """

    value: float
    low: float
    high: float
    measured: bool = False


def _in_order(figures: list[float]) -> list[float]:
    value, low, high = figures
    if not low <= value <= high:
        raise ValueError("value, low, high, in which the value lies between the others")
    return figures


def _peaks(tflops: dict[Dtype, float]) -> dict[str, float]:
    if "fp32" not in tflops:
        raise ValueError("fp32 among them, at whose peak runs what has none of its own")
    return {dtype: peak * 1e12 for dtype, peak in tflops.items()}


def _stated(form: Any, convert: Callable[[Any], Any]) -> GetPydanticSchema:
    """Files state it in another form."""
    return GetPydanticSchema(lambda _, handler: no_info_after_validator_function(convert, handler(form)))


_Positive = Annotated[float, Field(gt=0)]
Figure = Annotated[list[_Positive], Field(min_length=3, max_length=3), AfterValidator(_in_order)]
_Range = Annotated[Rate, _stated(Figure, lambda figure: Rate(*figure))]
_Gib = Annotated[int, _stated(_Positive, lambda gib: int(gib * 2**30))]
_Gb = Annotated[float, _stated(_Positive, lambda gb: gb * 1e9)]
_Gbit = Annotated[float, _stated(_Positive, lambda gbit: gbit * 1e9 / 8)]
_Tb = Annotated[int, _stated(_Positive, lambda tb: int(tb * 1e12))]
_Flops = Annotated[dict[str, float], _stated(dict[Dtype, _Positive], _peaks)]


class Efficiency(Section):
    """What training reaches of a device's peaks, as shares but for `launch_seconds` and `half`.

    Files state `[value, low, high]`.

    Args:
        matmul: Large matrix products in the compute dtype, sustained, of `Device.flops`.
        attention: Fused attention, forward and backward together, of `Device.flops`; what a backward pass computes once
            more is not counted.
        bandwidth: Element-wise operations, of `Device.bandwidth`.
        optimizer: A fused optimizer step, of `Device.bandwidth`.
        link: Collectives within a node, of `Device.link` (or `pcie`, where there is no link).
        pcie: Copies between pinned host memory and the device, of `Device.pcie`.
        network: Collectives between nodes, of `Node.network`.
        launch_seconds: Python and dispatch of one operation, in seconds; what matters where kernels are shorter.
        half: Length of a matrix product's side at which it reaches half the speed of endless ones; None: not known.
        fp8: Matrix products in fp8 with their casts, and so on, where their share differs from `matmul`.
    """

    matmul: _Range
    attention: _Range
    bandwidth: _Range
    optimizer: _Range
    link: _Range
    pcie: _Range
    network: _Range
    launch_seconds: _Range
    half: _Range | None = None
    fp8: _Range | None = None
    bf16: _Range | None = None
    fp16: _Range | None = None
    tf32: _Range | None = None
    fp32: _Range | None = None

    def matmul_in(self, dtype: str) -> Rate:
        """Matrix products in one dtype."""
        return getattr(self, dtype) or self.matmul


class Node(Section):
    """One machine; in the catalogue a usual one for a device.

    Args:
        devices: In one.
        ram: Of the host.
        ram_limit: What keeps a run from using more of it, such as `ulimit -v`; empty where nothing does.
        cores: Physical ones.
        network: To other nodes, one direction, all adapters together.
        nvme: Its local drives together, mean of reading and writing.
        nvme_bytes: Their size; None if unknown.
        co2: Grams for each kilowatt-hour of the grid that feeds it; None if unknown.
        source: Where the figures come from.
    """

    devices: PositiveInt
    ram: _Gib = Field(validation_alias="ram_gib")
    cores: PositiveInt
    network: _Gbit = Field(validation_alias="network_gbit_s")
    nvme: _Gb = Field(validation_alias="nvme_gb_s")
    nvme_bytes: _Tb | None = Field(None, validation_alias="nvme_tb")
    co2: _Positive | None = Field(None, validation_alias="co2_g_kwh")
    source: str = ""
    ram_limit: str = ""

    def part(self, share: float) -> Node:
        """What comes with some of its devices: one of eight is rented with an eighth of the host."""
        size = int(self.nvme_bytes * share) if self.nvme_bytes else None
        part = {"ram": int(self.ram * share), "cores": max(1, int(self.cores * share)), "nvme_bytes": size}
        return self.model_copy(update=part | {"network": self.network * share, "nvme": self.nvme * share})


class Device(Section):
    """One GPU, or one process on a CPU.

    Args:
        name: As in `hardware=`.
        title: For people.
        kind: Which build of torch runs on it.
        reported: Names that the driver reports.
        memory: What torch sees (`total_memory`), which is less than the label says. On a CPU the host's RAM, which all
            processes share.
        flops: Dense peak of matrix products that accumulate in fp32, by dtype; one that is missing is not supported,
            but for fp32, which must be there.
        bandwidth: Of its memory.
        link: To the other devices of the node (NVLink, xGMI), one direction, all links together; None if there is only
            PCIe.
        pcie: To the host, one direction.
        power: Watts that it may draw; None if unknown.
        capability: CUDA's compute capability, `9.0`.
        measured: Which efficiencies were measured.
        efficiency: What training reaches of the peaks.
        sources: Where the peaks come from.
        node: A usual machine.
    """

    # In a file it stands before the entry.
    name: str = Field(validation_alias="_name")
    title: str
    kind: Kind = "cuda"
    reported: list[str] = Field(default_factory=list)
    memory: _Gib = Field(validation_alias="memory_gib")
    flops: _Flops = Field(validation_alias="tflops")
    bandwidth: _Gb = Field(validation_alias="bandwidth_gb_s")
    link: _Gb | None = Field(None, validation_alias="link_gb_s")
    pcie: _Gb = Field(validation_alias="pcie_gb_s")
    power: _Positive | None = Field(None, validation_alias="power_w")
    capability: str | None = None
    measured: list[str] = Field(default_factory=list)
    efficiency: Efficiency
    sources: list[str] = Field(default_factory=list)
    node: Node

    @field_validator("efficiency")
    @classmethod
    def _marked(cls, efficiency: Efficiency, info: ValidationInfo) -> Efficiency:
        rates = {
            key: replace(rate, measured=True)
            for key, rate in efficiency
            if rate and key in info.data.get("measured", ())
        }
        return efficiency.model_copy(update=rates)


@dataclass(frozen=True)
class Hardware:
    """Some devices in some nodes.

    Args:
        name: `h200x8x4` is four nodes of eight.
        device: All are of this kind.
        node: What one node's share of devices comes with.
        devices_per_node: In each node.
        nodes: How many.
        unused: Devices beside them in this machine, which a run would not see.
        by_dtype: What is reached in each dtype, where that was measured, as on CPUs.
        attention: FLOP/s of attention by dtype, backend and tokens of a row, where they were measured.
        lacks: What this machine lacks to compile layers; empty if nothing, and of other machines.
    """

    name: str
    device: Device
    node: Node
    devices_per_node: int = 1
    nodes: int = 1
    unused: int = 0
    by_dtype: Mapping[str, Efficiency] = field(default_factory=dict)
    attention: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)
    lacks: str = ""

    @property
    def devices(self) -> int:
        """All of them, which is the number of processes."""
        return self.devices_per_node * self.nodes

    def node_of(self, devices: int) -> Node:
        """A node with so many of these devices. What is there for some of a machine's is there for all of them."""
        known = self.devices_per_node
        return self.node.part(devices / min(max(devices, known), known + self.unused))

    @property
    def speeds(self) -> Mapping[str, float]:
        """FLOP/s of matrix products, by dtype: their peaks, and of a CPU what was measured. One that has instructions
        for bf16, but no units that multiply tiles, may take twice as long in it as in fp32."""
        flops = self.device.flops
        if self.nodes > 1:
            # Each node may have measured its own otherwise, and all must come to the same answer.
            return flops
        reached = {dtype: each.matmul_in(dtype).value for dtype, each in self.by_dtype.items()}
        return {dtype: peak * reached.get(dtype, reached.get("fp32", 1)) for dtype, peak in flops.items()}

    @property
    def precisions(self) -> list[str]:
        """Those of `PRECISIONS` that the device has, by its matrix products, the fastest first; one with shorter
        numbers, which take less memory and are moved quicker, also before what multiplies a little faster."""
        speeds = self.speeds
        worth = {name: speed * (1 if name == "fp32" else _SHORTER) for name, speed in speeds.items()}
        return sorted((name for name in PRECISIONS if name in speeds), key=lambda name: -worth[name])

    def efficiency(self, dtype: str) -> Efficiency:
        """What is reached in one dtype."""
        return self.by_dtype.get(dtype, self.device.efficiency)

    def eager_is_faster(self, dtype: str, length: float) -> str:
        """Why eager attention is taken for rows of a length, by what was measured; empty where `sdpa` is.

        It holds all scores, so it must be faster by a tenth. In bf16 on a CPU with AMX it shortened LoRA steps of
        80-token rows by a fifth; in fp32 on one with AVX2 `sdpa` was as fast or faster from 32 to 1,024 tokens, so
        nothing is assumed of a CPU that was not measured.
        """
        rates = {name: between(each, length) for name, each in self.attention.get(dtype, {}).items()}
        gain = rates["eager"] / rates["sdpa"] if rates else 0.0
        return f"measured {gain:.2f} times as fast as sdpa" if gain > _LEAST_GAIN else ""


def between(rates: Mapping[int, float], length: float) -> float:
    """The rate for rows of a length, from those of some lengths; beyond them that of the nearest."""
    lengths = sorted(rates)
    for low, high in itertools.pairwise(lengths):
        if low <= length <= high:
            share = math.log(length / low) / math.log(high / low)
            return rates[low] ** (1 - share) * rates[high] ** share
    return rates[lengths[0] if length < lengths[0] else lengths[-1]]
