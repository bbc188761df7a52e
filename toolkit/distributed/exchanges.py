"""Small examples of the collectives of a group of processes, whose results are known in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Exchange = Callable[[Any, torch.device], bool]
"""Takes a group, None for all processes, and a device; whether this process got the right result."""


def sums(group: Any, device: torch.device) -> bool:
    """An all-reduce."""
    ranks = _ranks(group)
    numbers = torch.tensor([1.0, dist.get_rank()], device=device)
    dist.all_reduce(numbers, group=group)
    return numbers.tolist() == [len(ranks), sum(ranks)]


def parts(group: Any, device: torch.device) -> bool:
    """An all-to-all."""
    ranks, own = _ranks(group), dist.get_rank()
    sent = torch.tensor([[own, other] for other in ranks], device=device, dtype=torch.float32)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.tolist() == [[other, own] for other in ranks]


def gathering(group: Any, device: torch.device) -> bool:
    """An all-gather, and the way back: a sum of which each process gets its part."""
    ranks, own = _ranks(group), dist.get_rank()
    part = torch.tensor([float(own)], device=device)
    whole = torch.empty(len(ranks), device=device)
    dist.all_gather_into_tensor(whole, part, group=group)
    right = whole.tolist() == ranks
    dist.reduce_scatter_tensor(part, torch.tensor(ranks, device=device, dtype=torch.float32), group=group)
    return right and part.tolist() == [len(ranks) * own]


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)
