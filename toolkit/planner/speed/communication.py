"""What one rank sends in an optimizer step: to the other ranks, to the host, to NVMe.

Collectives are counted as their ring algorithms send them (Patarasuk & Yuan 2009): gathering a tensor of S bytes over N
ranks sends (N-1)/N S from each, so does reducing and scattering it, and an all-reduce is both, 2(N-1)/N S. Over nodes
of L ranks, (L-1)/L S of it stay within the node, and (n-1)/n S / L cross the network between n nodes; their sum is
(N-1)/N S again. On top comes what each step of a ring or tree takes however little it sends, by NCCL's own model.

Which collectives an engine runs is read from torch 2.13 (DDP, FSDP2), accelerate 1.15 and DeepSpeed 0.19.8. The papers'
volumes (Rajbhandari et al. 2020, section 7: 2P for ZeRO-1 and 2, 3P for ZeRO-3) follow where their assumptions do: one
micro-batch, all in one dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from toolkit.distributed.engines import reshards_after_forward
from toolkit.planner.hardware import End, Hardware
from toolkit.planner.memory.offload import kept_from_nvme
from toolkit.planner.memory.states import states
from toolkit.planner.memory.zero import ALL_REDUCE
from toolkit.planner.pipeline import hops, tied_bytes
from toolkit.planner.trace.types import Tensors
from toolkit.planner.workload import WIDTH, Workload

HOST, NVME, NETWORK = "PCIe to the host", "NVMe", "network"
BUCKET = 25 * 2**20
"""Bytes of gradients that DDP reduces at a time (`bucket_cap_mb`)."""
_START = 8.4e-6
_RING = {"NVLink": 3.4e-6, "xGMI": 3.4e-6, "PCIe": 5.7e-6, NETWORK: 14e-6}
_TREE = {"NVLink": 4.0e-6, "xGMI": 4.0e-6, "PCIe": 4.0e-6, NETWORK: 14e-6}
"""Seconds before a collective sends anything, and of each of its steps over a link: `baseLat` and `hwLat` of the Simple
protocol in NCCL's src/graph/tuning.cc (github.com/NVIDIA/nccl). RCCL's are taken to be alike; gloo's are not known, and
left out."""
During = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Transfer:
    """Something that is sent.

    Args:
        during: While what is computed; a `step` is the optimizer's.
        times: How often in an optimizer step: once, or with every micro-batch.
        sent: Name of the link to bytes that one rank sends over it, each time. Links work at the same time.
        hidden: Whether the device computes meanwhile.
        latency: Seconds that it takes beside, each time, however little is sent.
    """

    during: During
    times: int
    sent: Mapping[str, float]
    hidden: bool = True
    latency: float = 0.0

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


def link_rate(name: str, hardware: Hardware, end: End = "value") -> float:
    """Bytes/s that one rank gets of a link, one direction. The devices of a node share its network and its drives."""
    device, node = hardware.device, hardware.node
    rates = device.efficiency
    if name == NETWORK:
        return node.network / hardware.devices_per_node * getattr(rates.network, end)
    if name == NVME:
        return node.nvme / hardware.devices_per_node
    if name == HOST:
        return device.pcie * getattr(rates.pcie, end)
    return (device.link or device.pcie) * getattr(rates.link, end)


def transfers(workload: Workload, boundary: float, tokens: float, scored: float) -> list[Transfer]:
    """All that one rank sends in a step.

    Args:
        boundary: Bytes of the hidden states between two layers.
        tokens: Of a rank's micro-batch, with padding.
        scored: Of them those that reach the output head.
    """
    sent = [*_collectives(workload), *_offloads(workload, boundary), *exchanges(workload, tokens)]
    sent += sums(workload, tokens, scored) if workload.layout.tensor > 1 else ()
    sent += travels(workload, tokens) if workload.layout.expert > 1 else ()
    sent += _through(workload, boundary, tokens) if workload.place is not None else ()
    return [each for each in sent if any(each.sent.values())]


def latency(hardware: Hardware, reduces: bool = False, within: bool = True, across: bool = True) -> float:
    """Seconds that a collective over the ranks takes to send nothing, as NCCL estimates it (`ncclTopoTuneModel`).

    Args:
        reduces: Whether it is an all-reduce, for which NCCL also has trees: chains within nodes, binary between them.
        within: Whether the ranks of a node take part together.
        across: Whether nodes do.
    """
    link = inner_link(hardware)
    inner, nodes = hardware.devices_per_node if within else 1, hardware.nodes if across else 1
    if link not in _RING or inner * nodes == 1:
        return 0.0
    around = (inner * nodes - nodes) * _RING[link] + (nodes - 1) * _RING[NETWORK]
    if not reduces:
        return _START + around
    up = (inner - 1) * _TREE[link] + math.log2(nodes) * _TREE[NETWORK]
    return _START + 2 * min(around, up)


def _collectives(workload: Workload) -> Iterator[Transfer]:
    strategy, types, trace, trained = workload.strategy, workload.types, workload.trace, workload.trained
    every, reduced = workload.layout.gradient_accumulation_steps, trained * WIDTH[types.reduce]
    gather = functools.partial(_gathered, workload)
    peers = _peers(workload)
    once, both = latency(peers), latency(peers, reduces=True)
    buckets = math.ceil(trained / strategy.reduce_bucket_size)
    if strategy.name in ("single", "ddp"):
        # Accelerate's `no_sync` leaves all but the last micro-batch local (Li et al. 2020, section 3.2.4).
        size = (trained - workload.apart) * WIDTH[types.local]
        # A pipeline averages when it has run empty.
        hidden = workload.place is None
        yield Transfer("backward", 1, gather(2 * size), hidden, math.ceil(size / BUCKET) * both)
        yield from _replicas(workload)
    elif strategy.zero_stage in (1, 2):
        # `average_tensor` all-reduces, although each rank keeps only its part: `use_multi_rank_bucket_allreduce`.
        # Stage 2 drops what is not its own after each micro-batch, and so has to reduce each.
        times, hidden = every if strategy.zero_stage == 2 else 1, strategy.overlap_comm
        if workload.reduces_at_the_end:
            # `buffered_allreduce_fallback`, on the stream that computes.
            buckets, hidden = math.ceil(trained / ALL_REDUCE), False
        yield Transfer("backward", times, gather(2 * reduced), hidden, buckets * both)
        gathers = math.ceil(trained / strategy.allgather_bucket_size)
        yield Transfer("step", 1, gather(trained * WIDTH[types.local]), False, gathers * once)
    elif strategy.zero_stage == 3:
        whole = sum(_bytes(workload, each) for each in trace.tensors if _divided(workload, each))
        small = sum(_bytes(workload, each) for each in trace.tensors if each.trained and not _divided(workload, each))
        prefetched = strategy.prefetch_bucket_size > 0
        again = max(0.0, 1 - workload.kept_for_backward / max(1, trace.elements()))
        # A bucket ahead, or where that is larger a layer.
        ahead = math.ceil(trace.elements() / strategy.prefetch_bucket_size) if prefetched else 0
        gathers = max(trace.layers, ahead)
        yield Transfer("forward", every, gather(whole), prefetched, gathers * once)
        yield Transfer("backward", every, gather(whole * again), prefetched, again * gathers * once)
        yield Transfer("backward", every, gather(reduced), strategy.overlap_comm, buckets * once)
        yield Transfer("step", 1, gather(small), False, once)
    else:
        yield from _fsdp(workload)


def exchanges(workload: Workload, tokens: float) -> Iterator[Transfer]:
    """Between processes that share rows, in each layer's attention: parts of rows for heads and back
    (`models.parallel.sequence_parallel`), or keys and values (`models.parallel.context_parallel`)."""
    layout, hardware = workload.layout, workload.hardware
    across = layout.together > hardware.devices_per_node
    link = NETWORK if across else inner_link(hardware)
    once = workload.trace.layers * latency(hardware, across=across) * (2 if layout.context > 1 else 4)
    forward, backward = workload.exchanged
    passes: dict[During, float] = {"forward": forward, "backward": backward}
    for during, sent in passes.items():
        size, waiting = workload.trace.layers * tokens * sent, once * sent / forward if forward else 0.0
        yield Transfer(during, layout.gradient_accumulation_steps, {link: size}, hidden=False, latency=waiting)


def sums(workload: Workload, tokens: float, scored: float) -> Iterator[Transfer]:
    """Of what processes that divide layers sum, as the trace has seen it: hidden states, figures of logits, gradients
    of what is whole beside them. Two sums stand in each layer of a pass, and wait for each other."""
    parts, hardware, every = workload.layout.tensor, workload.hardware, workload.layout.gradient_accumulation_steps
    across = parts > hardware.devices_per_node
    link = NETWORK if across else inner_link(hardware)
    waiting = 2 * workload.trace.layers * latency(hardware, reduces=True, across=across)
    # A divided head sums three figures of each token that it scores, and its hidden state's gradient.
    head = next((each for each in workload.trace.tensors if each.place == "embeddings" and each.parts > 1), None)
    computed = WIDTH[workload.types.compute]
    state = 0 if head is None else head.shape[1] * (computed if workload.over.parameters > 1 else workload.width(head))
    passes: tuple[tuple[During, float], ...] = (("forward", 3.0 * 4 * (state > 0)), ("backward", state))
    for during, of_scored in passes:
        summed = workload.trace.passes[during].summed
        whole = summed.of(workload.trace.layers, tokens, 0) + of_scored * (scored - tokens)
        yield Transfer(during, every, {link: 2 * whole * (parts - 1) / parts}, hidden=False, latency=waiting)


def _through(workload: Workload, boundary: float, tokens: float) -> Iterator[Transfer]:
    """From stage to stage, while neither computes. Of several nodes each has stages of its own, as far as it goes."""
    hardware, every = workload.hardware, workload.layout.gradient_accumulation_steps
    link = NETWORK if hardware.nodes > 1 else inner_link(hardware)
    passes: tuple[During, During] = ("forward", "backward")
    for during, size in zip(passes, hops(workload, boundary, tokens), strict=True):
        waiting = _START + _RING[link] if link in _RING and size else 0.0
        yield Transfer(during, every, {link: size}, hidden=False, latency=waiting)
    yield Transfer("step", 1, {link: tied_bytes(workload)}, hidden=False)


def travels(workload: Workload, tokens: float) -> Iterator[Transfer]:
    """Of tokens that travel between processes that divide experts, as the trace has seen it for even routing: of what a
    process exchanges it keeps the share of its own experts. In each layer with experts processes agree on what they
    send, rows travel and their weights, and results come back; gradients go the same way."""
    parts, hardware, every = workload.layout.expert, workload.hardware, workload.layout.gradient_accumulation_steps
    inner = min(parts, hardware.devices_per_node)
    layers = _with_experts(workload)
    for during, collectives in (("forward", 4), ("backward", 3)):
        done = workload.trace.passes[during]
        size = done.exchanged.of(workload.trace.layers, tokens, 0) / parts
        sent = {inner_link(hardware): size * (inner - 1), NETWORK: size * (parts - inner)}
        # What is recomputed waits as long once more.
        again = workload.trace.passes["recompute"].exchanged.of(workload.trace.layers, tokens, 0)
        repeats = again / max(1.0, workload.trace.passes["forward"].exchanged.of(workload.trace.layers, tokens, 0))
        rounds = layers * (collectives + (4 * repeats if during == "backward" else 0))
        waiting = rounds * latency(hardware, across=parts > inner)
        yield Transfer(during, every, sent, hidden=False, latency=waiting)  # type: ignore[arg-type]


def _with_experts(workload: Workload) -> int:
    """Layers whose experts are divided."""
    tensors = (each for each in workload.trace.tensors if each.parts == workload.layout.expert and each.kind == "base")
    return max((each.count for each in tensors if len(each.shape) == 3), default=0)


def _replicas(workload: Workload) -> Iterator[Transfer]:
    """Gradients of divided experts, which each process sums with those that have the same, one tensor at a time."""
    if size := workload.apart * WIDTH[workload.types.local]:
        parts = workload.layout.expert
        divided = (each.count for each in workload.trace.tensors if each.trained and each.parts == parts)
        waiting = sum(divided) * latency(_peers(workload, parts), reduces=True)
        if workload.layout.world_size > parts:
            yield Transfer("backward", 1, _gathered(workload, 2 * size, parts=parts), latency=waiting)


def _gathered(
    workload: Workload, size: float, within_nodes: bool = False, parts: int | None = None
) -> dict[str, float]:
    """Sent by gathering `size` bytes, or by reducing and scattering them; an all-reduce does both.

    Args:
        parts: See `_peers`.
    """
    peers = _peers(workload, parts)
    inner, nodes = peers.devices_per_node, peers.nodes
    across = {} if within_nodes else {NETWORK: size * (nodes - 1) / nodes / inner}
    return {inner_link(peers): size * (inner - 1) / inner, **across}


def _peers(workload: Workload, parts: int | None = None) -> Hardware:
    """The devices of those that gather and reduce together. Each process that divides layers does it with those that
    have the same parts, and each of a pipeline with those of the same stages, which are of neighbouring ranks.

    Args:
        parts: Of how many processes one takes part, where that is another number.
    """
    hardware, layout = workload.hardware, workload.layout
    if workload.place is not None:
        ranks = layout.world_size // layout.pipeline
        inner = min(ranks, hardware.devices_per_node)
    else:
        parts = parts or layout.tensor
        ranks, inner = hardware.devices // parts, max(1, hardware.devices_per_node // parts)
    return dataclasses.replace(hardware, devices_per_node=inner, nodes=max(1, ranks // inner))


def _fsdp(workload: Workload) -> Iterator[Transfer]:
    """FSDP2 gathers in the compute dtype and reduces in `reduce_dtype`, once per step unless `sync_each_batch`."""
    types, trace, hardware = workload.types, workload.trace, workload.hardware
    every, hybrid = workload.layout.gradient_accumulation_steps, workload.strategy.sharding == "hybrid_shard"
    gather = functools.partial(_gathered, workload, within_nodes=hybrid)
    whole = sum(_bytes(workload, each, types.compute) for each in trace.tensors)
    # Final norm and head are not released between the passes; tied, the head is the embedding.
    heads = trace.elements(place="head") or trace.elements(place="embeddings")
    kept = heads * WIDTH[types.compute]
    reduced = workload.trained * WIDTH[types.reduce]
    # Each layer is a unit, and so are the embeddings and the head.
    units = trace.layers + 2
    waiting = units * latency(_peers(workload), across=not hybrid)
    yield Transfer("forward", every, gather(whole), latency=waiting)
    if reshards_after_forward(workload.recipe):
        yield Transfer("backward", every, gather(max(0, whole - kept)), latency=waiting)
    yield Transfer("backward", workload.reductions, gather(reduced), latency=waiting)
    if hybrid:
        # Each rank all-reduces the shard that it holds with its peers in the other nodes.
        peers = hardware.nodes
        size = 2 * reduced / hardware.devices_per_node * (peers - 1) / peers
        waiting = units * latency(hardware, reduces=True, within=False)
        yield Transfer("backward", workload.reductions, {NETWORK: size}, latency=waiting)


def _bytes(workload: Workload, tensors: Tensors, dtype: str | None = None) -> float:
    """Of parameters, as they are kept or in another dtype. The constants of quantization stay whole on each rank."""
    types = workload.types
    width = WIDTH[dtype or (types.local if tensors.trained else types.load)]
    stored = {"nf4": 0.5, "int8": 1.0, "fp8": 1.0, "int4": 34 / 64}
    return tensors.numel * tensors.count * stored.get(tensors.kind, width)


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
        fetched = {HOST: part}
        if strategy.offload_param == "nvme":
            fetched[NVME] = max(0.0, part - kept_from_nvme(workload) * local)
        yield Transfer("forward", every, fetched)
        yield Transfer("backward", every, fetched)
        if strategy.name == "fsdp":
            yield Transfer("backward", workload.reductions, {HOST: owned * local})
        if strategy.offload_param == "nvme":
            yield Transfer("step", 1, {NVME: (owned - kept_from_nvme(workload)) * local}, hidden=False)
    checkpointing = workload.recipe.activation_checkpointing
    if checkpointing.mode == "offload":
        kept = boundary * -(-trace.layers // checkpointing.every_n_layers)
        # torch's `save_on_cpu` copies on the stream that computes.
        yield Transfer("forward", every, {HOST: kept}, hidden=False)
        yield Transfer("backward", every, {HOST: kept}, hidden=False)


def _divided(workload: Workload, tensors: Tensors) -> bool:
    """Whether each rank holds a part: ZeRO-3 leaves small parameters whole, FSDP none."""
    return workload.strategy.name == "fsdp" or tensors.numel > workload.strategy.param_persistence_threshold
