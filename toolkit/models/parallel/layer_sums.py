"""The processes that divide layers (`tensor_parallel`), and what they sum, join and compare.

All are operations of their own, so that compilers leave them whole and a trace knows what is sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from toolkit.models.parallel.process_groups import neighbours

_GROUP: dict[str, Any] = {}


def divide_processes(size: int) -> list[Any]:
    """Puts each `size` processes of neighbouring ranks into a group that divides layers, and those that have the same
    parts into another, over which gradients are averaged. All processes call this.

    Returns:
        The groups of this process: `size` members, and as many as there are groups of that kind.
    """
    _GROUP["layers"], _GROUP["replicas"] = neighbours(size)
    return [_GROUP["layers"], _GROUP["replicas"]]


def dividing() -> int:
    """How many processes divide layers with this one, itself included."""
    return dist.get_world_size(_GROUP["layers"]) if _GROUP else 1


def layer_group() -> Any:
    """The group of the processes that divide layers with this one."""
    return _GROUP["layers"]


def replicas() -> Any:
    """The group of the processes that have the same parts as this one."""
    return _GROUP["replicas"]


class Sum(torch.autograd.Function):
    """Sums over the processes that divide layers; all of them have the whole gradient of it."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, size: int) -> torch.Tensor:
        return sum_of_parts(part, size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class SumGradient(torch.autograd.Function):
    """The same numbers on all processes that divide layers, each of which gives a part of their gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_of_parts(gradient, ctx.size), None


class Join(torch.autograd.Function):
    """Joins columns of the processes that divide layers; all of them have the whole gradient of it."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, size: int, index: int) -> torch.Tensor:
        ctx.size, ctx.index = size, index
        return _join(part, size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        width = gradient.shape[-1] // ctx.size
        return gradient.narrow(-1, ctx.index * width, width), None, None


@torch.library.custom_op("toolkit::join_parts", mutates_args=())
def _join(part: torch.Tensor, size: int) -> torch.Tensor:
    """(…, columns) of (…, columns / size) that each process has."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=_GROUP["layers"])
    return torch.cat(parts, -1)


@_join.register_fake
def _(part: torch.Tensor, size: int) -> torch.Tensor:
    return part.new_empty((*part.shape[:-1], size * part.shape[-1]))


@torch.library.custom_op("toolkit::sum_parts", mutates_args=())
def sum_of_parts(part: torch.Tensor, size: int) -> torch.Tensor:
    """The sum over the processes that divide layers, of which there are `size`."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_GROUP["layers"])
    return total


@sum_of_parts.register_fake
def _(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


@torch.library.custom_op("toolkit::largest_part", mutates_args=())
def _largest(part: torch.Tensor, size: int) -> torch.Tensor:
    """The largest, element by element, of what the processes have that divide layers, of which there are `size`."""
    largest = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_GROUP["layers"])
    return largest


@_largest.register_fake
def _(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


SUMS = (torch.ops.toolkit.sum_parts.default, torch.ops.toolkit.largest_part.default)
"""The operations, by which a trace knows what is sent."""


def sum_over_parts(number: torch.Tensor) -> torch.Tensor:
    """The sum of what each of the processes that divide layers has of something."""
    return sum_of_parts(number, dividing())


def largest_over_parts(number: torch.Tensor) -> torch.Tensor:
    """The largest of what each of them has."""
    return _largest(number, dividing())


def one_for_parts(whole: torch.Tensor) -> torch.Tensor:
    """The same numbers, read by the part of something that each of them has: their gradient is summed."""
    return SumGradient.apply(whole, dividing())
