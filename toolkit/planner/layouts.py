"""Ways to divide a recipe's layers, rows and experts over devices, each with the best settings for it.

What a way costs and saves is in its plan; here the ways are listed that devices and rules allow.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator
from operator import attrgetter

from toolkit.common import UserError
from toolkit.planner.hardware import Hardware
from toolkit.planner.search import Candidate, Changes, Estimate, explore, fastest, fitting, least
from toolkit.recipe import Recipe
from toolkit.recipe.parallel import Parallel
from toolkit.recipe.rules import check

FREE = ("batch.micro_batch_size", "activation_checkpointing.mode", "strategy.name")
"""What may change without another training."""
_WAYS = ("sequence", "context", "tensor", "expert")
"""Those that send in every layer, which stay inside a node."""
_SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
_UNDIVIDED: Changes = {f"parallel.{key}": field.default for key, field in Parallel.model_fields.items()}


def divisions(recipe: Recipe, hardware: Hardware) -> Iterator[Changes]:
    """What `parallel` may be on these devices: first nothing, then one way or tensor beside sequence or context, over
    few devices before many."""
    found: list[Changes] = [{}]
    for size in (size for size in range(2, hardware.devices + 1) if hardware.devices % size == 0):
        if hardware.devices_per_node % size == 0:
            found += [{f"parallel.{way}": size} for way in _WAYS]
            for tensor in (part for part in range(2, size) if size % part == 0):
                rows = size // tensor
                found += [{f"parallel.{way}": rows, "parallel.tensor": tensor} for way in ("sequence", "context")]
        # The nodes of a pipeline have the same number of stages each.
        if hardware.nodes == 1 or size % hardware.nodes == 0 or hardware.nodes % size == 0:
            found += [{"parallel.pipeline": size, "parallel.schedule": schedule} for schedule in _SCHEDULES]
    for changes in found:
        whole = {**_UNDIVIDED, **changes}
        # Of strategies these are the ones that go with any of them.
        if any(not check(recipe.with_values({**whole, "strategy.name": name})) for name in ("ddp", "fsdp")):
            yield whole


def layouts(recipe: Recipe, hardware: Hardware, estimate: Estimate) -> list[Candidate]:
    """The best setting of each division, the fastest first; those that do not fit come last, the nearest first.

    Whatever the recipe itself says of `parallel`, and of what is free, is one of them or has been replaced.
    """
    best: dict[tuple[int, ...], list[Candidate]] = {}
    for division in divisions(recipe, hardware):
        if explored := _divided(recipe, hardware, estimate, division, FREE):
            sizes = tuple(value for value in division.values() if isinstance(value, int))
            best.setdefault(sizes, []).append(fastest(explored) or least(explored))
    rows = [fastest(alike) or least(alike) for alike in best.values()]
    return sorted(rows, key=lambda each: (each.fits == "no", each.total if each.fits == "no" else each.seconds))


def fewest(recipe: Recipe, hardware: Hardware, estimate: Estimate, free: Collection[str]) -> list[Candidate]:
    """The settings where as few processes as possible divide something, of which at least one fits; none of a recipe
    that says itself what is divided. Keys and values are gathered only where so many processes cannot exchange heads.

    Args:
        free: See `search.explore`.
    """
    if recipe.parallel.changed():
        return []
    ways = itertools.groupby(divisions(recipe, hardware), key=_size)
    for _, same in (each for each in ways if each[0] > 1):
        allowed = list(same)
        plain = [each for each in allowed if _exchanging(each) not in allowed]
        explored = [each for division in plain for each in _divided(recipe, hardware, estimate, division, free)]
        if fitting(explored):
            return explored
    return []


def _exchanging(division: Changes) -> Changes:
    """The division with exchanged heads instead of gathered keys and values; empty if it gathers none."""
    size = division["parallel.context"]
    return {**division, "parallel.sequence": size, "parallel.context": 1} if size > 1 else {}


def _size(division: Changes) -> int:
    return math.prod(value for value in division.values() if isinstance(value, int))


def _divided(
    recipe: Recipe, hardware: Hardware, estimate: Estimate, division: Changes, free: Collection[str]
) -> list[Candidate]:
    try:
        explored = explore(recipe.with_values(division), hardware, estimate, free)
    except UserError:
        return []  # The batch does not divide among so few groups, or no engine takes these devices.
    changes = {key: value for key, value in division.items() if value != attrgetter(key)(recipe)}
    return [dataclasses.replace(each, changes={**changes, **each.changes}) for each in explored]
