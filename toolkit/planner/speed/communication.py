"""What one rank sends in an optimizer step: to the other ranks, to the host, to NVMe.

Collectives are counted as their ring algorithms send them (Patarasuk & Yuan 2009): gathering a tensor of S bytes over N
ranks sends (N-1)/N S from each, so does reducing and scattering it, and an all-reduce is both, 2(N-1)/N S. Over nodes
of L ranks, (L-1)/L S of it stay within the node, and (n-1)/n S / L cross the network between n nodes; their sum is
(N-1)/N S again.

Which collectives an engine runs is read from torch 2.13 (DDP, FSDP2), accelerate 1.15 and DeepSpeed 0.19.8. The papers'
volumes (Rajbhandari et al. 2020, section 7: 2P for ZeRO-1 and 2, 3P for ZeRO-3) follow where their assumptions do: one
micro-batch, all in one dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from toolkit.distributed.engines import reshards_after_forward
from toolkit.planner.hardware import Hardware
from toolkit.planner.memory.states import states
from toolkit.planner.trace.types import Tensors
from toolkit.planner.workload import WIDTH, Workload

HOST, NVME, NETWORK = "PCIe to the host", "NVMe", "network"
During = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Transfer:
    """Something that is sent.

    Args:
        during: While what is computed; a `step` is the optimizer's.
        times: How often in an optimizer step: once, or with every micro-batch.
        sent: Name of the link to bytes that one rank sends over it, each time. Links work at the same time.
        hidden: Whether the device computes meanwhile.
    """

    during: During
    times: int
    sent: Mapping[str, float]
    hidden: bool = True

    @property
    def to_host(self) -> bool:
        """Whether it leaves the device for the host, and not for other devices."""
        return HOST in self.sent or NVME in self.sent


def inner_link(hardware: Hardware) -> str:
    """What connects the devices of a node."""
    device = hardware.device
    if device.kind == "cpu":
        return "memory"
    if device.link is None:
        return "PCIe"
    return "xGMI" if device.kind == "rocm" else "NVLink"


def transfers(workload: Workload, boundary: float) -> list[Transfer]:
    """All that one rank sends in a step; `boundary` are the bytes of the hidden states between two layers."""
    sent = [*_collectives(workload), *_offloads(workload, boundary)]
    return [each for each in sent if any(each.sent.values())]


def _collectives(workload: Workload) -> Iterator[Transfer]:
    strategy, types, trace, trained = workload.strategy, workload.types, workload.trace, workload.trained
    every, reduced = workload.layout.gradient_accumulation_steps, trained * WIDTH[types.reduce]
    gather = functools.partial(_gathered, workload)
    if strategy.name in ("single", "ddp"):
        # Accelerate's `no_sync` leaves all but the last micro-batch local (Li et al. 2020, section 3.2.4).
        yield Transfer("backward", 1, gather(2 * trained * WIDTH[types.local]))
    elif strategy.zero_stage in (1, 2):
        # `average_tensor` all-reduces, although each rank keeps only its part: `use_multi_rank_bucket_allreduce`.
        # Stage 2 drops what is not its own after each micro-batch, and so has to reduce each.
        times = every if strategy.zero_stage == 2 else 1
        yield Transfer("backward", times, gather(2 * reduced), hidden=strategy.overlap_comm)
        yield Transfer("step", 1, gather(trained * WIDTH[types.local]), hidden=False)
    elif strategy.zero_stage == 3:
        whole = sum(_bytes(workload, each) for each in trace.tensors if _divided(workload, each))
        small = sum(_bytes(workload, each) for each in trace.tensors if each.trained and not _divided(workload, each))
        prefetched = strategy.prefetch_bucket_size > 0
        # What is used again within `max_reuse_distance` is kept: twice the elements that follow a layer lie between
        # its forward and its backward pass.
        again = max(0.0, 1 - strategy.max_reuse_distance / 2 / max(1, trace.elements()))
        yield Transfer("forward", every, gather(whole), hidden=prefetched)
        yield Transfer("backward", every, gather(whole * again), hidden=prefetched)
        yield Transfer("backward", every, gather(reduced), hidden=strategy.overlap_comm)
        yield Transfer("step", 1, gather(small), hidden=False)
    else:
        yield from _fsdp(workload)


def _gathered(workload: Workload, size: float, within_nodes: bool = False) -> dict[str, float]:
    """Sent by gathering `size` bytes, or by reducing and scattering them; an all-reduce does both."""
    inner, nodes = workload.hardware.devices_per_node, workload.hardware.nodes
    across = {} if within_nodes else {NETWORK: size * (nodes - 1) / nodes / inner}
    return {inner_link(workload.hardware): size * (inner - 1) / inner, **across}


def _fsdp(workload: Workload) -> Iterator[Transfer]:
    """FSDP2 gathers in the compute dtype and reduces once per step, in `reduce_dtype` (accelerate defers the rest)."""
    types, trace, hardware = workload.types, workload.trace, workload.hardware
    every, hybrid = workload.layout.gradient_accumulation_steps, workload.strategy.sharding == "hybrid_shard"
    gather = functools.partial(_gathered, workload, within_nodes=hybrid)
    whole = sum(_bytes(workload, each, types.compute) for each in trace.tensors)
    # Final norm and head are not released between the passes; tied, the head is the embedding.
    heads = trace.elements(place="head") or trace.elements(place="embeddings")
    kept = heads * WIDTH[types.compute]
    reduced = workload.trained * WIDTH[types.reduce]
    yield Transfer("forward", every, gather(whole))
    if reshards_after_forward(workload.recipe):
        yield Transfer("backward", every, gather(max(0, whole - kept)))
    yield Transfer("backward", 1, gather(reduced))
    if hybrid:
        # Each rank all-reduces the shard that it holds with its peers in the other nodes.
        peers = hardware.nodes
        yield Transfer("backward", 1, {NETWORK: 2 * reduced / hardware.devices_per_node * (peers - 1) / peers})


def _bytes(workload: Workload, tensors: Tensors, dtype: str | None = None) -> float:
    """Of parameters, as they are kept or in another dtype. The constants of quantization stay whole on each rank."""
    types = workload.types
    width = WIDTH[dtype or (types.local if tensors.trained else types.load)]
    return tensors.numel * tensors.count * {"nf4": 0.5, "int8": 1.0}.get(tensors.kind, width)


def _offloads(workload: Workload, boundary: float) -> Iterator[Transfer]:
    strategy, types, trace, owned = workload.strategy, workload.types, workload.trace, workload.owned
    every = workload.layout.gradient_accumulation_steps
    reduced, local, master = WIDTH[types.reduce], WIDTH[types.local], WIDTH[types.master]
    if strategy.offload_optimizer != "none":
        on_device = strategy.zero_stage < 3 and types.reduce == "float32" != types.compute
        if not on_device and (every > 1 or strategy.zero_stage == 3):
            # Sums of gradients lie on the host and come back for each micro-batch. Stages 1 and 2 sum in a partition
            # on the device where gradients are summed in fp32 (`_use_compact_grad_partition_buffer`).
            yield Transfer("backward", every, {HOST: 2 * owned * reduced})
        yield Transfer("backward", 1, {HOST: owned * master})
        if strategy.offload_param == "none":
            yield Transfer("step", 1, {HOST: owned * local}, hidden=False)
    if strategy.offload_optimizer == "nvme":
        # Masters, moments and the gradient that waits for them are written and read.
        state = states(workload)
        yield Transfer("step", 1, {NVME: 2 * (state.masters + state.optimizer + owned * master)}, hidden=False)
    if strategy.offload_param != "none":
        divided = sum(_bytes(workload, each) for each in trace.tensors if _divided(workload, each))
        part = divided / workload.over.parameters
        fetched = {HOST: part, NVME: part} if strategy.offload_param == "nvme" else {HOST: part}
        yield Transfer("forward", every, fetched)
        yield Transfer("backward", every, fetched)
        if strategy.name == "fsdp":
            yield Transfer("backward", 1, {HOST: owned * local})
        if strategy.offload_param == "nvme":
            yield Transfer("step", 1, {NVME: owned * local}, hidden=False)
    checkpointing = workload.recipe.activation_checkpointing
    if checkpointing.mode == "offload":
        kept = boundary * -(-trace.layers // checkpointing.every_n_layers)
        yield Transfer("forward", every, {HOST: kept})
        yield Transfer("backward", every, {HOST: kept})


def _divided(workload: Workload, tensors: Tensors) -> bool:
    """Whether each rank holds a part: ZeRO-3 leaves small parameters whole, FSDP none."""
    return workload.strategy.name == "fsdp" or tensors.numel > workload.strategy.param_persistence_threshold
