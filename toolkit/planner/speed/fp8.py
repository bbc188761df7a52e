"""Which of a step's matrix products are in fp8, and what that moves: by `models.fp8` those of a frozen base that is
stored so, where the device multiplies in it, and by `models.fp8_products` those of trained layers."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.planner.workload import Load, Workload
from toolkit.recipe.precisions import FP8_SCALING

_RESTORING = 7
"""Bytes moved for a number in fp8 that is restored: cast, 1 read and 2 written, and scaled in place, 2 and 2."""
_CASTING = {"frozen": 13, "trained": 40}
"""Bytes moved for a number of a product's input, or of its result's gradient, that is scaled and cast to fp8 by
operations of their own: twice where weights are trained, as the gradients of these read both by columns. What is left
of it in compiled layers, 4 and 12, is what kernels of an H200 took longer beside bf16 (8B with a frozen base, 1.2B in
full)."""


@dataclass(frozen=True)
class InFp8:
    """What of a micro-batch's matrix products is in fp8.

    Args:
        share: Of all their work.
        stored: Numbers of weights that are stored so, which a trace has restored.
        inputs: Bytes of a token that casts of inputs move, in a forward pass of the layers.
        results: The same of gradients, in the backward pass.
    """

    share: float = 0.0
    stored: int = 0
    inputs: float = 0.0
    results: float = 0.0

    def moved(self, tokens: float, rounds: int, forward: int, backward: bool, traced: bool) -> float:
        """Bytes that a pass moves beside those of the same products in 16 bits; fewer where nothing is restored.

        Args:
            rounds: How often the pass has the products of a forward pass, those of gradients included.
            forward: How often it computes layers forward.
            backward: Whether it has gradients.
            traced: Whether the trace restores what is stored: once in a pass, twice where it recomputes layers.
        """
        casts = tokens * (forward * self.inputs + backward * self.results)
        return casts - (_RESTORING * self.stored * rounds if traced and self.share else 0)


def in_fp8(workload: Workload, load: Load, experts: tuple[int, int]) -> InFp8:
    """Of linear layers whose frozen weights are in fp8, where the device's peak is known, and of those that are trained
    in it, between the first and the last layer."""
    device, trace, (count, active) = workload.hardware.device, workload.trace, experts
    if device.kind != "cuda" or "fp8" not in device.flops or workload.types.compute != "bfloat16":
        return InFp8()
    tensors = [each for each in trace.tensors if len(each.shape) > 1]
    head = any(each.place == "head" for each in tensors)
    trained = max(trace.layers - 2, 0) / trace.layers if workload.recipe.precision in FP8_SCALING else 0.0
    low = whole = inputs = results = 0.0
    stored = 0
    for each in tensors:
        if each.place == "embeddings" and head:
            continue
        rows = load.scored if each.place in ("embeddings", "head") else load.padded
        times = each.count * (active / count if each.shape[0] == count > 1 else 1.0)
        whole += rows * each.numel * times
        if len(each.shape) > 2 or any(side % 16 for side in each.shape):
            continue
        if each.kind == "fp8":
            share, casting = 1.0, _CASTING["frozen"]
            stored += each.numel * each.count
        elif each.place == "layer":
            share, casting = trained, _CASTING["trained"]
        else:
            continue
        low += share * rows * each.numel * times
        inputs += share * casting * times * each.shape[-1]
        results += share * casting * times * each.shape[-2]
    return InFp8(low / whole if whole else 0.0, stored, inputs, results)
