"""Groups of processes that divide something, and of those that have the same part of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def neighbours(size: int) -> tuple[Any, Any]:
    """Puts each `size` processes of neighbouring ranks into a group, and those at the same place into another.
    All processes call this.

    Returns:
        The groups of this process: `size` members, and as many as there are groups of that kind.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    near = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
    alike = [dist.new_group(range(first, world, size)) for first in range(size)]
    return near[rank // size], alike[rank % size]
