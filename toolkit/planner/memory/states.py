"""Bytes of weights, gradients, masters and optimizer state: arithmetic that can be checked against a paper.

Mixed precision with Adam takes 16 bytes per parameter: 2 for the weight, 2 for its gradient, 4 for the fp32 master and
4 + 4 for the moments (Rajbhandari et al. 2020, "ZeRO", section 3.1). ZeRO divides over N ranks the last 12 of them
(stage 1), the gradient too (stage 2), the weight too (stage 3); see `zero_paper`. Our runs differ in two points:
gradients are summed over micro-batches and ranks in fp32 unless the recipe says otherwise, and what an engine really
allocates beside its share is in `engines`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.distributed import Dtypes
from toolkit.planner.trace.types import Tensors, Trace
from toolkit.recipe import Recipe
from toolkit.recipe.optimizers import OPTIMIZERS, Traits
from toolkit.recipe.sections import Optimizer

WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element."""

BLOCK, SMALLEST = 256, 4096
"""8-bit state: elements that share an fp32 scale, and the fewest elements of a tensor that is stored so; smaller ones
keep 32 bits (bitsandbytes 0.50, `Optimizer2State.init_state`; torchao's `AdamW8bit` has the same)."""
BLOCK_4BIT = 128
"""torchao's `AdamW4bit`: elements that share an fp32 scale."""
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
        return 4.0 * (numel // shape[-1] + numel // shape[-2]) if matrix else 4.0 * numel
    return traits.moments * numel * _moment_width(traits, numel, master, embedding and matrix)


def _moment_width(traits: Traits, numel: int, master: str, embedding: bool) -> float:
    """Bytes of an element of one moment."""
    torchao = traits.module == "torchao"
    if traits.bits == 32:
        return WIDTH[traits.state_dtype(master)]
    block = BLOCK_4BIT if traits.bits == 4 else BLOCK
    if numel < SMALLEST or (torchao and numel % block) or (embedding and not torchao):
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
        return projection + 4.0 * (columns + rank)
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
    """
    if tensors.kind == "nf4":
        scales = math.ceil(tensors.numel / 64)
        table = 16 * 4
        if double_quantization:
            return math.ceil(tensors.numel / 2) + scales + 4 * math.ceil(scales / 256) + table + 256 * 4 + 4
        return math.ceil(tensors.numel / 2) + 4 * scales + table
    if tensors.kind == "int8":
        return tensors.numel + 4 * tensors.shape[0]
    return tensors.numel * width


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

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.adapters + self.masters + self.gradients + self.optimizer


def per_parameter(
    optimizer: Optimizer, weights: str = "float32", gradients: str = "float32", masters: str | None = None
) -> States:
    """Bytes per parameter of a large matrix that is trained in full.

    Args:
        optimizer: The recipe's section `optimizer`.
        weights: Dtype the model computes with.
        gradients: Dtype gradients are kept in.
        masters: Dtype of separate masters, or None where the weights are their own.
    """
    numel = 2**22
    moments = moment_bytes(optimizer, (numel,), masters or weights) / numel
    return States(WIDTH[weights], 0, WIDTH[masters] if masters else 0, WIDTH[gradients], moments)


def zero_paper(
    parameters: float, devices: int, stage: int, weights: int = 2, gradients: int = 2, optimizer: int = 12
) -> float:
    """Bytes of states per device: figure 1 and table 1 of Rajbhandari et al. 2020.

    Args:
        stage: What is divided: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.
        weights: Bytes per parameter, likewise `gradients` and `optimizer` (master and moments).
    """
    shares = (weights / (devices if stage >= 3 else 1), gradients / (devices if stage >= 2 else 1),
              optimizer / (devices if stage >= 1 else 1))  # fmt: skip
    return parameters * sum(shares)


@dataclass(frozen=True)
class Division:
    """Over how many ranks each state is divided.

    Args:
        parameters: Of weights.
        gradients: Of gradients.
        optimizer: Of masters and moments.
    """

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1


def division(recipe: Recipe, ranks: int, ranks_per_node: int) -> Division:
    """What the recipe's strategy divides; see `zero_paper`."""
    strategy = recipe.strategy
    if strategy.name == "fsdp":
        ranks = ranks_per_node if strategy.sharding == "hybrid_shard" else ranks
        return Division(ranks, ranks, ranks)
    stage = strategy.zero_stage
    return Division(*(ranks if stage >= least else 1 for least in (3, 2, 1)))


def states(recipe: Recipe, types: Dtypes, trace: Trace, over: Division) -> States:
    """One rank's share, between the last backward pass and the optimizer's step.

    ZeRO-1 and 2 divide one vector of all trained parameters, padded to twice the ranks (DeepSpeed's
    `nccl_start_alignment_factor`); ZeRO-3 each parameter by itself, and FSDP2 each along its first dimension, rounded
    up.
    """
    zero, fsdp = recipe.strategy.zero_stage > 0, recipe.strategy.name == "fsdp"
    sums = {"parameters": 0.0, "adapters": 0.0, "masters": 0.0, "gradients": 0.0, "optimizer": 0.0, "paged": 0.0}
    for each in trace.tensors:
        width = parameter_width(each, types)
        whole = stored_bytes(each, width, recipe.method.double_quantization)
        part = "adapters" if each.kind == "adapter" else "parameters"
        sums[part] += each.count * shard(each, whole, over.parameters, fsdp)
        if not each.trained:
            continue
        share = _share(each, over.optimizer, fsdp)
        numel = math.prod(share)
        sums["masters"] += each.count * numel * WIDTH[types.master] if zero else 0
        sums["gradients"] += each.count * shard(
            each, each.numel * WIDTH[types.reduce if zero else types.local], over.gradients, fsdp
        )
        if not zero:
            state = moment_bytes(recipe.optimizer, share, types.master, place=each.place)
            sums["optimizer"] += each.count * state
            embedding = each.place == "embeddings" and len(each.shape) > 1
            sums["paged"] += each.count * (paged_bytes(recipe.optimizer, share) if not embedding else 0)
    if zero:
        flat = (math.ceil(trace.elements(trained=True) / over.optimizer),)
        sums["optimizer"] = moment_bytes(recipe.optimizer, flat, types.master, True)
        sums["paged"] = paged_bytes(recipe.optimizer, flat, True)
    return States(**sums)


def whole_model(recipe: Recipe, types: Dtypes, trace: Trace) -> float:
    """Bytes of what is published, in the dtypes of training: the whole model, or its adapters."""
    return sum(
        each.count * stored_bytes(each, parameter_width(each, types), recipe.method.double_quantization)
        for each in trace.tensors
        if each.trained or recipe.method.name == "full"
    )


def parameter_width(tensors: Tensors, types: Dtypes) -> int:
    """Bytes of an element of a parameter that is not quantized, as the model holds it between steps."""
    return WIDTH[types.local if tensors.trained or tensors.kind == "adapter" else types.load]


def shard(tensors: Tensors, whole: float, ranks: int, by_rows: bool) -> float:
    """One rank's share of something that goes with each element of a parameter, rounded up as the engine does."""
    if ranks == 1:
        return whole
    numel = math.prod(_share(tensors, ranks, by_rows))
    return whole * numel / max(1, tensors.numel)


def _share(tensors: Tensors, ranks: int, by_rows: bool) -> tuple[int, ...]:
    """Shape of one rank's share."""
    if ranks == 1:
        return tensors.shape
    if by_rows:
        return (math.ceil((tensors.shape[0] if tensors.shape else 1) / ranks), *tensors.shape[1:])
    return (math.ceil(tensors.numel / ranks),)
