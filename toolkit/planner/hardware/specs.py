"""What a plan needs to know of a machine: peaks, and what share of each is reached, with a range.

Sizes in bytes, speeds in bytes/s or FLOP/s, times in seconds. Shares are estimates until `toolkit calibrate` measures
them on such a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["cuda", "rocm", "cpu"]
Dtype = Literal["bf16", "fp16", "fp8", "tf32", "fp32"]


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


@dataclass(frozen=True)
class Efficiency:
    """What training reaches of a device's peaks. All are shares, but for `launch_seconds`.

    Args:
        matmul: Large matrix products in the compute dtype, sustained, of `Device.flops`.
        attention: Fused attention, forward and backward together, of `Device.flops`.
        bandwidth: Element-wise operations, of `Device.bandwidth`.
        optimizer: A fused optimizer step, of `Device.bandwidth`.
        link: Collectives within a node, of `Device.link` (or `pcie`, where there is no link).
        pcie: Copies between pinned host memory and the device, of `Device.pcie`.
        network: Collectives between nodes, of `Node.network`.
        launch_seconds: Python and dispatch of one operation, in seconds; what matters where kernels are shorter.
        dtypes: Matrix products in other dtypes, where their share differs.
    """

    matmul: Rate
    attention: Rate
    bandwidth: Rate
    optimizer: Rate
    link: Rate
    pcie: Rate
    network: Rate
    launch_seconds: Rate
    dtypes: Mapping[str, Rate] = field(default_factory=dict)

    def matmul_in(self, dtype: str) -> Rate:
        """Matrix products in one dtype."""
        return self.dtypes.get(dtype, self.matmul)


@dataclass(frozen=True)
class Device:
    """One GPU, or one process on a CPU.

    Args:
        name: As in `hardware=`.
        title: For people.
        kind: Which build of torch runs on it.
        memory: What torch sees (`total_memory`), which is less than the label says. On a CPU the host's RAM, which all
            processes share.
        flops: Dense peak of matrix products that accumulate in fp32, by dtype; one that is missing is not supported.
        bandwidth: Of its memory.
        link: To the other devices of the node (NVLink, xGMI), one direction, all links together; None if there is only
            PCIe.
        pcie: To the host, one direction.
        capability: CUDA's compute capability, `9.0`.
        sources: Where the figures come from.
        efficiency: What training reaches of them.
    """

    name: str
    title: str
    kind: Kind
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    link: float | None
    pcie: float
    capability: str | None
    sources: tuple[str, ...]
    efficiency: Efficiency


@dataclass(frozen=True)
class Node:
    """One machine.

    Args:
        ram: Of the host.
        cores: Physical ones.
        network: To other nodes, one direction, all adapters together.
        nvme: Its local drives together, mean of reading and writing.
        nvme_bytes: Their size; None if unknown.
    """

    ram: int
    cores: int
    network: float
    nvme: float
    nvme_bytes: int | None

    def part(self, share: float) -> Node:
        """What comes with some of its devices: one of eight is rented with an eighth of the host."""
        return replace(
            self,
            ram=int(self.ram * share),
            cores=max(1, int(self.cores * share)),
            network=self.network * share,
            nvme=self.nvme * share,
            nvme_bytes=int(self.nvme_bytes * share) if self.nvme_bytes else None,
        )


@dataclass(frozen=True)
class Hardware:
    """Some devices in some nodes.

    Args:
        name: `h200x8x4` is four nodes of eight.
        device: All are of this kind.
        node: What one node's share of devices comes with.
        devices_per_node: In each node.
        nodes: How many.
    """

    name: str
    device: Device
    node: Node
    devices_per_node: int = 1
    nodes: int = 1

    @property
    def devices(self) -> int:
        """All of them, which is the number of processes."""
        return self.devices_per_node * self.nodes
