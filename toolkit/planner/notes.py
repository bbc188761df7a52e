"""What a plan says beside its figures: what they leave out, what they rest on, and what of the model they reach."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from typing import Any

from toolkit.common import UserError
from toolkit.distributed.environment import segments_grow
from toolkit.planner.hardware import Hardware
from toolkit.planner.plan import Work
from toolkit.planner.trace.types import Trace
from toolkit.recipe import Recipe, model_configs
from toolkit.recipe.sections import EVA_ROWS, FP8_SCALING

_NOTABLE, _LEAST = 0.05, 60.0
"""The share of a run's time, and the seconds, from which on waiting for checkpoints is worth a note."""


def notes_of(recipe: Recipe, hardware: Hardware, trace: Trace, work: Work, config: Mapping[str, Any]) -> list[str]:
    """The remarks of one plan.

    Args:
        config: The model's `config.json`.
    """
    notes = []
    if trace.origin == "formulas":
        # Libraries name all that they know instead: hundreds of models.
        why = textwrap.shorten(trace.note, 200, placeholder=" …")
        notes.append(f"activations are estimated from the config; the model's code could not be traced: {why}")
    if not trace.fused_head:
        notes.append("the fused output head is not what this model computes: its own forward holds the logits")
    if not hardware.device.efficiency.matmul.measured:
        notes.append(
            f"times rest on estimated efficiencies of {hardware.device.title}; `toolkit calibrate` there measures them"
        )
    if work.compile_seconds:
        less = ", which takes less memory than planned where all activations are kept"
        notes.append(f"layers are compiled{less if hardware.device.kind == 'cpu' else ''}")
    if hardware.device.kind != "cpu" and not segments_grow(os.environ):
        notes.append(
            "PYTORCH_CUDA_ALLOC_CONF is set without expandable_segments:True, with which less memory would be lost"
        )
    if (stored := recipe.method.quantization) != "none":
        notes.append(
            f"{stored}: {_quantized(trace, stored):.1%} of the base is quantized; embeddings and output head are not"
        )
    experts = [each for each in trace.tensors if len(each.shape) == 3 and each.place == "layer" and not each.trained]
    adapters = {each.shape for each in trace.tensors if each.kind == "adapter"}
    if adapters and experts and not any(_reached(each.shape, adapters) for each in experts):
        share = sum(each.numel * each.count for each in experts) / trace.elements()
        notes.append(f"adapters do not reach the experts, which are {share:.0%} of the parameters")
    if (parts := recipe.parallel.expert) > 1:
        others = (parts - 1) * model_configs.meeting_share(*model_configs.experts(config), parts)
        notes.append(
            f"tokens are taken to be spread evenly over the experts, each sent to {others:.1f} other devices in every "
            "layer with experts; a device whose experts are chosen more often needs more memory and time"
        )
    if recipe.method.init_lora_weights == "eva":
        notes.append(
            f"EVA takes up to {EVA_ROWS} rows through the model of every process before step 1, in less memory than a "
            "step; that time is not counted"
        )
    if recipe.method.init_lora_weights == "loftq":
        notes.append("LoftQ reads the model's files once more before step 1, layer by layer; that time is not counted")
    if recipe.method.quantization == "int8":
        notes.append("int8: inputs too large for 8 bits, which are computed in 16, are not counted")
    if hardware.device.kind == "cuda" and (recipe.method.quantization == "fp8" or recipe.precision in FP8_SCALING):
        notes.append("fp8: where the device multiplies in fp8, times rest on its peak; no such training was measured")
    if hardware.device.kind == "cuda" and recipe.method.quantization == "int4":
        notes.append("int4: no such training was measured on a GPU")
    waits, total = work.saves * work.save_seconds, work.total_seconds
    if total and waits > max(_NOTABLE * total.value, _LEAST):
        faster = "" if recipe.checkpoint.in_memory else ", or with checkpoint.staging if output.dir is on a slow disk"
        waiting = f"training waits for checkpoints {waits / total.value:.0%} of the time"
        notes.append(f"{waiting}: less with a larger checkpoint.save_steps{faster}")
    return notes


def require_quantized(recipe: Recipe, trace: Trace) -> None:
    """Refuses what `coverage.require_quantized` would once the model is loaded."""
    stored = recipe.method.quantization
    if stored == "none" or trace.origin == "formulas":
        return
    share = _quantized(trace, stored, "layer")
    if share < model_configs.QUANTIZED_SHARE:
        raise UserError(
            f"method.quantization={stored} reaches {share:.0%} of the parameters in the layers of this model; the "
            "others are no linear layers and stay in 16 bits",
            "set method.quantization=none, and strategy.name=zero3 or fsdp where one device is too small",
        )


def _quantized(trace: Trace, stored: str, place: str | None = None) -> float:
    """The share of the base, or of one place of it, that is quantized."""
    base = trace.elements(place=place) - trace.elements(place=place, kind="adapter")
    return trace.elements(place=place, kind=stored) / base


def _reached(experts: tuple[int, ...], adapters: set[tuple[int, ...]]) -> bool:
    """Whether there are adapters for (experts, rows, columns): those of all experts lie side by side."""
    _, rows, columns = experts
    return any(
        {(rank, columns), (rows, rank)} <= adapters or {(rank, rows), (columns, rank)} <= adapters
        for rank, _ in adapters
        if rank % experts[0] == 0
    )
