"""Which attention runs on a device, and whether compiling layers is worthwhile there.

Both depend on what was measured: on CPUs which attention is faster changes with the length of rows, the dtype and the
machine. What is installed where the plan's device is, is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from toolkit.data.statistics import DataStatistics
from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import batch_layout
from toolkit.models.attention import backends
from toolkit.planner.hardware import Hardware
from toolkit.planner.speed.step import DTYPES
from toolkit.recipe import Recipe

EAGER = "attention: eager"
"""How the reason begins for which `auto` takes it."""
UNCOMPILED = "layers are not compiled: "
"""How the note begins that says what this machine lacks for it."""


def backend(
    recipe: Recipe, hardware: Hardware, config: Mapping[str, Any], statistics: DataStatistics | None
) -> tuple[str, str]:
    """The attention backend, and for which reason it is eager where `sdpa` could run.

    It is decided for the longest row of a usual micro-batch, or full rows where the data is not known.
    """
    requested, compute, device = recipe.model.attention, dtypes(recipe).compute, hardware.device
    shares_by = recipe.parallel.shares_by
    best = backends.planned(requested, config, compute, device.kind, device.capability, shares_by, recipe.headed)
    # Selective checkpointing keeps what fused kernels return.
    selective = recipe.activation_checkpointing.mode == "selective"
    open_to_eager = not selective and not backends.unfit("eager", config, compute)
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
