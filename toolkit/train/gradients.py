"""The norm of gradients over all processes, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.models.parts import sum_of_squares


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales the gradients down to a norm of at most `max_norm`, and returns the norm that they had.

    torch's own norm on a CPU is off by 5e-6 of a gradient of 500,000 numbers in fp32, so engines would not agree.
    """
    updated = [(each, each.grad) for each in parameters if each.grad is not None]
    gradients = [gradient for _, gradient in updated]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    norms = torch._foreach_norm(local, 2, dtype=torch.float64)
    squares = torch.stack(norms).square() if norms else torch.zeros(0, dtype=torch.float64)
    total = sum_of_squares([each for each, _ in updated], squares)
    for group in _sharded_over(gradients):
        torch.distributed.all_reduce(total, group=group)
    norm = total.sqrt()
    # torch and DeepSpeed divide by a norm that is larger by this much.
    scale = max_norm / (norm.item() + 1e-6)
    if scale < 1:
        torch._foreach_mul_(local, scale)
    return norm.float()


def _sharded_over(gradients: list[Any]) -> list[Any]:
    """The process groups over which FSDP has divided the gradients: one, for all of them."""
    for each in gradients:
        if isinstance(each, DTensor):
            dimensions = enumerate(each.placements)
            return [each.device_mesh.get_group(index) for index, placement in dimensions if placement.is_shard()]
    return []
