"""Which attention runs on a device, and whether compiling layers is worthwhile there.

Both depend on what was measured: on CPUs which attention is faster changes with the length of rows, the dtype and the
machine. What is installed where the plan's device is, is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from toolkit.data.statistics import DataStatistics
from toolkit.distributed.engines import dtypes, teacher_dtype
from toolkit.distributed.layout import batch_layout
from toolkit.models.attention import backends
from toolkit.planner.hardware import Hardware
from toolkit.planner.speed.step import DTYPES
from toolkit.recipe import Recipe
from toolkit.recipe.teaching import of_teacher

EAGER = "attention: eager"
"""How the reason begins for which `auto` takes it."""
UNCOMPILED = "layers are not compiled: "
"""How the note begins that says what this machine lacks for it."""


def backend(
    recipe: Recipe,
    hardware: Hardware,
    config: Mapping[str, Any],
    statistics: DataStatistics | None,
    taught_by: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """The attention backend, and for which reason it is eager where `sdpa` could run.

    It is decided for the longest row of a usual micro-batch, or full rows where the data is not known.

    Args:
        taught_by: The config of the teacher, where there is one.
    """
    requested, compute, device = recipe.model.attention, dtypes(recipe).compute, hardware.device
    shares_by = recipe.parallel.shares_by
    unfit: dict[str, str] = {}
    if taught_by and (teaches := of_teacher(recipe)):
        unfit = backends.unfit_to_teach(taught_by, teacher_dtype(teaches), device.kind)
    best = backends.planned(requested, config, compute, device.kind, device.capability, shares_by, recipe.headed, unfit)
    # Selective checkpointing keeps what fused kernels return.
    selective = recipe.activation_checkpointing.mode == "selective"
    open_to_eager = not selective and not backends.unfit("eager", config, compute) and "eager" not in unfit
    if (requested, best) != ("auto", "sdpa") or not (open_to_eager and hardware.attention):
        return best, ""
    layout = batch_layout(recipe, hardware.devices)
    dealt = statistics and statistics.dealt(layout.global_batch_size, layout.micro_batches, False)
    length = dealt.longest if dealt else layout.seq_len
    why = hardware.eager_is_faster(DTYPES[compute], length)
    return ("eager", f"{EAGER}, for rows of {math.ceil(length):,} tokens {why} on this CPU") if why else (best, "")


def may_compile(hardware: Hardware) -> bool:
    """Whether compiling may pay on such devices: Triton needs compute capability 7.0; AMD's GPUs were not measured."""
    device = hardware.device
    return device.kind == "cpu" or (device.kind == "cuda" and float(device.capability or 0) >= 7)
