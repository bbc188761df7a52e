"""How often each expert of a mixture is chosen while it trains, counted on the device.

A micro-batch adds its choices to one small tensor, and no process waits for it; what is asked for is summed over the
processes where metrics are logged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from toolkit.models.parallel import expert_parallel
from toolkit.models.parallel.pipeline import piped, pipeline_group


@torch.library.custom_op("toolkit::count_experts", mutates_args=("counts",))
def _count(counts: torch.Tensor, experts: torch.Tensor) -> None:
    """Adds choices (tokens, chosen) to counts (experts,). What is computed a second time, for a backward pass, was
    counted before."""
    if torch._C._current_graph_task_id() == -1:
        chosen = experts.reshape(-1)
        counts.scatter_add_(0, chosen, counts.new_ones(()).expand_as(chosen))


@_count.register_fake
def _(counts: torch.Tensor, experts: torch.Tensor) -> None:
    return None


@dataclass(frozen=True)
class Load:
    """How evenly tokens were spread, over all processes; those of padding are computed and count.

    Args:
        most: Tokens of the expert that was chosen most often, in means of its layer, averaged over the layers.
        worst: The same of the layer where it is largest.
        idle: Share of the experts that no token met.
        process: As `most`, of the processes that divide experts, each with all of its own; None where none do.
    """

    most: float
    worst: float
    idle: float
    process: float | None

    @classmethod
    def of(cls, counts: list[list[int]], parts: int) -> Load | None:
        """Of choices by layer and expert; None where none were made.

        Args:
            parts: Processes that divide the experts of a layer.
        """
        seen = [layer for layer in counts if sum(layer)]
        if not seen:
            return None
        ratios, held = [_ratio(layer) for layer in seen], []
        for layer in seen:
            width = len(layer) // parts
            held.append([sum(layer[first : first + width]) for first in range(0, len(layer), width)])
        return cls(
            most=sum(ratios) / len(ratios),
            worst=max(ratios),
            idle=sum(layer.count(0) for layer in seen) / sum(map(len, seen)),
            process=sum(map(_ratio, held)) / len(held) if parts > 1 else None,
        )


def _ratio(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts)


class Routing:
    """Counts what the experts of a model meet in training, from now on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(_experts(model))
        self._experts = [count for _, count in self._modules]
        self._counts: torch.Tensor | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to count; in a pipeline, on any of its processes, once all have begun."""
        return bool(self._experts)

    def begin(self, device: torch.device) -> None:
        """Starts counting on the device on which the model is. All processes call this."""
        first = 0
        if piped() > 1:
            first = self._place_among_stages(device)
        if not self._experts:
            return
        self._counts = torch.zeros((len(self._experts), max(self._experts)), dtype=torch.int64, device=device)
        for (module, _), counts in zip(self._modules, self._counts[first:], strict=False):
            module.register_forward_pre_hook(_counting(counts))

    def _place_among_stages(self, device: torch.device) -> int:
        """Notes the layers of all processes of a pipeline, of which each has others or none; returns the first of this
        one."""
        own = torch.tensor([len(self._modules)], device=device)
        layers = own.new_empty(piped())
        dist.all_gather(list(layers.split(1)), own, group=pipeline_group())
        first = int(layers[: dist.get_rank(pipeline_group())].sum())
        experts = own.new_zeros(int(layers.sum()))
        experts[first : first + len(self._modules)] = torch.tensor(self._experts, dtype=torch.int64, device=device)
        dist.all_reduce(experts, group=pipeline_group())
        self._experts = experts.tolist()
        return first

    def take(self) -> Load | None:
        """What there was since this was last called. All processes call this; the device is waited for."""
        counts = self._counts
        if counts is None:
            return None
        total = counts.clone()
        counts.zero_()
        if dist.is_initialized():
            dist.all_reduce(total)
        by_layer = [row[:count] for row, count in zip(total.tolist(), self._experts, strict=True)]
        return Load.of(by_layer, expert_parallel.dividing())


def _counting(counts: torch.Tensor) -> Any:
    def count(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module.training:
            torch.ops.toolkit.count_experts(counts, args[1])

    return count


def _experts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int]]:
    """Modules that are called with the experts of each token, adapters around them included, and how many experts a
    layer has. Of those that Transformers calls otherwise nothing is known."""
    inside: set[int] = set()
    for module in model.modules():
        inner: Any = module
        while hasattr(inner, "base_layer"):
            inner = inner.base_layer
        if id(module) not in inside and hasattr(inner, "_is_expert_parallel") and hasattr(inner, "num_experts"):
            inside |= {id(each) for each in module.modules()}
            yield module, inner.num_experts * expert_parallel.dividing()
