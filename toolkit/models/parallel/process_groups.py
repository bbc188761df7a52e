"""Groups of processes that divide something, and of those that have the same part of it; how long groups wait."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def limit_waiting(seconds: float) -> None:
    """Has the processes of each group that is made from here on wait so long for each other.

    Engines make groups of their own and say no time, which then is ten minutes with NCCL, whatever the first group was
    given: DeepSpeed sums gradients and gathers weights in one of them. Of a large model one process writes and hashes
    the weights for longer than that while the others wait in it.
    """
    distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=seconds)
    distributed_c10d.default_pg_nccl_timeout = datetime.timedelta(seconds=seconds)


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
