"""Bytes of weights, gradients, masters and optimizer state: arithmetic that can be checked against a paper.

Mixed precision with Adam takes 16 bytes per parameter: 2 for the weight, 2 for its gradient, 4 for the fp32 master and
4 + 4 for the moments (Rajbhandari et al. 2020, "ZeRO", section 3.1). ZeRO divides over N ranks the last 12 of them
(stage 1), the gradient too (stage 2), the weight too (stage 3). Our runs differ in two points:
gradients are summed over micro-batches and ranks in fp32 unless the recipe says otherwise, and what an engine really
allocates beside its share is in `engines`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.planner.trace.types import Tensors
from toolkit.planner.workload import WIDTH, Division, Workload
from toolkit.recipe.optimizers import OPTIMIZERS, Traits
from toolkit.recipe.sections import Optimizer

BLOCK = 256
"""In few bits: elements that share an fp32 scale. Tensors below `Traits.smallest` keep 32 bits (bitsandbytes 0.50,
`Optimizer2State.init_state`; Transformers gives torchao's the same `block_size`, unless `optimizer.args` does)."""
PAGED = 100_000
"""Elements from which bitsandbytes puts the state of a paged optimizer into unified memory (`get_state_buffer`)."""


def moment_bytes(
    optimizer: Optimizer, shape: tuple[int, ...], master: str = "float32", flat: bool = False, place: str = "layer"
) -> float:
    """Optimizer state of one parameter, without its master.

    Args:
        shape: Of the parameter, or of the shard of it that this rank updates.
        master: Dtype of what the optimizer updates; torch's own optimizers keep their moments in it.
        flat: Whether the engine hands over one long vector instead of matrices (ZeRO).
        place: Of the parameter in the model, see `Tensors`. Embeddings are kept out of 8 bits by Transformers
            (`GlobalOptimManager`), and embeddings and head out of Muon.
    """
    traits, numel = optimizer.traits, math.prod(shape)
    matrix, embedding = len(shape) > 1 and not flat, place == "embeddings"
    if traits.family == "sgd" and optimizer.momentum == 0:
        return 0.0
    if not traits.updates(shape, place):
        traits = OPTIMIZERS[traits.rest]
    if traits.rank and matrix and not embedding:
        return _projected(traits, shape, dict(optimizer.args), WIDTH[master])
    if traits.factored:
        # Sums of squares in fp32, of each row and each column; vectors whole.
        sums = numel // shape[-1] + numel // shape[-2] if matrix else numel
        return 4.0 * (sums + traits.moments * numel)
    block = int(optimizer.args.get("block_size", BLOCK))
    return traits.moments * numel * _moment_width(traits, numel, master, embedding and matrix, block)


def _moment_width(traits: Traits, numel: int, master: str, embedding: bool, block: int = BLOCK) -> float:
    """Bytes of an element of one moment."""
    torchao = traits.module == "torchao"
    if traits.bits == 32:
        return WIDTH[traits.state_dtype(master)]
    if numel < traits.smallest or (torchao and numel % block) or (embedding and not torchao):
        return WIDTH[master] if torchao else 4
    return traits.bits / 8 + 4 * math.ceil(numel / block) / numel


def _projected(traits: Traits, shape: tuple[int, ...], arguments: Mapping[str, Any], width: int) -> float:
    """GaLore (Zhao et al. 2024, table 1) and APOLLO (Zhu et al. 2024): moments of the gradient projected to rank r.

    For an m x n matrix with m <= n that is a projection of m r elements, and moments of n r each.
    """
    rows, columns = sorted((math.prod(shape[:-1]), shape[-1]))
    rank = min(int(arguments.get("rank", traits.rank)), rows)
    projection = rows * rank * width
    if traits.factored:
        return projection + 4.0 * (columns + rank + traits.moments * columns * rank)
    return projection + traits.moments * columns * rank * _moment_width(traits, columns * rank, "float32", False)


def paged_bytes(optimizer: Optimizer, shape: tuple[int, ...], flat: bool = False) -> float:
    """The part of `moment_bytes` in memory that host and device share, where the driver moves pages as needed."""
    paged = optimizer.traits.unpaged and math.prod(shape) >= PAGED
    return moment_bytes(optimizer, shape, flat=flat) if paged else 0.0


def stored_bytes(tensors: Tensors, width: int, double_quantization: bool = True) -> float:
    """One parameter as the model holds it.

    4-bit NormalFloat (Dettmers et al. 2023, section 3): half a byte each and for every 64 an fp32 scale, which is 4.5
    bits; with double quantization the scale takes 8 bits, and every 256 scales an fp32 scale, together 4.127 bits. The
    tables of values stand beside each tensor (bitsandbytes 0.50, `quantize_4bit`: 16 of fp32, for the scales 256 more).
    8 bits (Dettmers et al. 2022, "LLM.int8()"): a byte each, and an fp32 scale for every row.
    fp8 (`models.fp8`): a byte each, and one for the exponent of every row, of which experts have as many each.
    int4 (`models.int4`): 34 bytes for every 64, of which the last are filled up, and one for the factor of every
    column.
    """
    if tensors.kind == "nf4":
        return math.ceil(tensors.numel / 2) + _scales(tensors, double_quantization)
    if tensors.kind == "int8":
        return tensors.numel + 4 * tensors.shape[0]
    if tensors.kind == "fp8":
        return tensors.numel + math.prod(tensors.shape[:-1])
    if tensors.kind == "int4":
        return 34 * math.ceil(tensors.numel / 64) + tensors.numel // tensors.shape[-2]
    return tensors.numel * width


def _scales(tensors: Tensors, double_quantization: bool) -> int:
    """What 4 bits need beside them. It is the module's (`Linear4bit.quant_state`), so no engine divides it."""
    if tensors.kind != "nf4":
        return 0
    scales, table = math.ceil(tensors.numel / 64), 16 * 4
    return scales + 4 * math.ceil(scales / 256) + table + 256 * 4 + 4 if double_quantization else 4 * scales + table


@dataclass(frozen=True)
class States:
    """Bytes of one rank's share of a model's states.

    Args:
        parameters: Weights of the model, as it computes with them or as they wait for being gathered.
        adapters: The same of adapters.
        masters: Copies of the trained weights that the optimizer updates, where they are not the weights themselves.
        gradients: Of all trained parameters, as the optimizer reads them.
        optimizer: Moments.
        paged: The part of `optimizer` in unified memory.
    """

    parameters: float
    adapters: float
    masters: float
    gradients: float
    optimizer: float
    paged: float = 0.0


def states(workload: Workload, over: Division | None = None) -> States:
    """One rank's share, between the last backward pass and the optimizer's step.

    ZeRO-1 and 2 divide one vector of all trained parameters, padded to twice the ranks (DeepSpeed's
    `nccl_start_alignment_factor`); ZeRO-3 each parameter by itself, and FSDP2 each along its first dimension, rounded
    up.

    Args:
        over: Over how many ranks they are divided, where that is not the workload's own division.
    """
    recipe, types, over = workload.recipe, workload.types, over or workload.over
    zero, fsdp = recipe.strategy.zero_stage > 0, recipe.strategy.name == "fsdp"
    sums = dict.fromkeys(("parameters", "adapters", "masters", "gradients", "optimizer", "paged"), 0.0)
    for each in workload.trace.tensors:
        part = "adapters" if each.kind == "adapter" else "parameters"
        beside = _scales(each, recipe.method.double_quantization)
        sums[part] += each.count * (beside + shard(each, stored(workload, each) - beside, over.parameters, fsdp))
        if not each.trained:
            continue
        share, gradients = _share(each, over.optimizer, fsdp), each.numel * WIDTH[types.reduce if zero else types.local]
        sums["gradients"] += each.count * shard(each, gradients, over.gradients, fsdp)
        if zero:
            sums["masters"] += each.count * math.prod(share) * WIDTH[types.master]
            continue
        sums["optimizer"] += each.count * moment_bytes(recipe.optimizer, share, types.master, place=each.place)
        if each.place != "embeddings" or len(each.shape) < 2:
            sums["paged"] += each.count * paged_bytes(recipe.optimizer, share)
    if zero:
        flat = (math.ceil(workload.trained / over.optimizer),)
        sums["optimizer"] = moment_bytes(recipe.optimizer, flat, types.master, True)
        sums["paged"] = paged_bytes(recipe.optimizer, flat, True)
    return States(**sums)


def stored(workload: Workload, tensors: Tensors, width: int | None = None) -> float:
    """Bytes of one whole parameter, by default as the model holds it between steps."""
    width = workload.width(tensors) if width is None else width
    return stored_bytes(tensors, width, workload.recipe.method.double_quantization)


def weights(workload: Workload, tensors: Iterable[Tensors], width: int | None = None) -> float:
    """Bytes of whole parameters."""
    return sum(each.count * stored(workload, each, width) for each in tensors)


def gathered(workload: Workload, tensors: Iterable[Tensors], width: int | None = None) -> float:
    """Bytes of whole parameters, without the constants of quantization, which no engine divides."""
    double = workload.recipe.method.double_quantization
    return sum(each.count * (stored(workload, each, width) - _scales(each, double)) for each in tensors)


def whole_model(workload: Workload) -> float:
    """Bytes of what is published, in the dtypes of training: the whole model, or its adapters."""
    full = workload.recipe.method.name == "full"
    return weights(workload, (each for each in workload.trace.tensors if each.trained or full))


def shard(tensors: Tensors, whole: float, ranks: int, by_rows: bool) -> float:
    """One rank's share of something that goes with each element of a parameter, rounded up as the engine does."""
    return whole if ranks == 1 else whole * math.prod(_share(tensors, ranks, by_rows)) / max(1, tensors.numel)


def _share(tensors: Tensors, ranks: int, by_rows: bool) -> tuple[int, ...]:
    """Shape of one rank's share."""
    if ranks == 1:
        return tensors.shape
    if by_rows:
        return (math.ceil((tensors.shape[0] if tensors.shape else 1) / ranks), *tensors.shape[1:])
    return (math.ceil(tensors.numel / ranks),)
