"""The settings in which a recipe trains the same with other speed and memory, and the best of them.

The global batch, the method, the precision and the optimizer stay as they are; the strategy, activation checkpointing
and the micro-batch vary. Nothing here computes bytes or seconds: every setting is judged by its plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from toolkit.common import UserError
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import World, batch_layout, micro_batch_sizes
from toolkit.planner.hardware import Hardware
from toolkit.planner.plan import Answer, Plan, Work
from toolkit.recipe import Recipe
from toolkit.recipe.errors import as_text
from toolkit.recipe.rules import check
from toolkit.recipe.rules.strategy import foreign_keys

Changes = dict[str, Any]
"""Dotted key to value."""

TIE = 0.03
"""Two plans whose times differ by less than this share are taken to be equally fast."""
TIE_ON_CPU = 0.06
"""The same on a CPU, whose caches a plan does not know: of micro-batches of 1, 2 and 4 packed rows of 512 tokens on two
cores (SmolLM2-135M, full fine-tuning) 2 were the fastest, 4% ahead of 4, where the plan has 4 ahead by 5%."""
_RECOMPUTING = 0.2
"""The share of the time that it computes by which recomputing all layers lengthens a step, at least: a third in full
fine-tuning, half where the base is frozen, less the output head and the optimizer."""
MODE, EVERY = "activation_checkpointing.mode", "activation_checkpointing.every_n_layers"
TILES = "activation_checkpointing.mlp_tiles"
_LONG_ROW, _TILES = 32_768, 8
"""Tokens of a row from which on computing MLPs in tiles is tried too, and in how many. With eight, an eighth of inner
activations is left, which is less than what enters and leaves an MLP."""
_SHARDED = ("zero1", "zero2", "fsdp", "zero3")
_PLAIN: Changes = {
    "strategy.sync_each_batch": False,
    "strategy.offload_optimizer": "none",
    "strategy.offload_param": "none",
    "strategy.nvme_path": None,
    "strategy.pin_memory": True,
}
_OFFLOADING = ("strategy.nvme_path", "strategy.name", "strategy.offload_optimizer", "strategy.offload_param")
_REDUCED_EACH_TIME: Changes = {"strategy.name": "fsdp", "strategy.sync_each_batch": True}
_OFFLOADED = (
    (None, "zero2", "cpu", "none"),
    (None, "fsdp", "none", "cpu"),
    (None, "zero3", "cpu", "none"),
    (None, "zero3", "cpu", "cpu"),
)
"""Values of these keys, without NVMe."""


class Estimate(Protocol):
    """The plan of a recipe on some hardware, without advice.

    None where its trace is not known, unless a new one may be made, which takes seconds.
    """

    def __call__(self, recipe: Recipe, hardware: Hardware, may_trace: bool = False) -> Plan | None: ...


@dataclass(frozen=True)
class Candidate:
    """One setting and its plan.

    Args:
        changes: What differs from the recipe that was asked for.
        rank: Place in the order from simple to involved; decides between equals.
        tie: The share of its time up to which another one is as fast.
    """

    changes: Changes
    recipe: Recipe
    plan: Plan
    rank: tuple[int, int] = (0, 0)
    tie: float = TIE

    @property
    def fits(self) -> Answer:
        """Whether it fits, by the plan."""
        return self.plan.fit.answer

    @property
    def seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.plan.work.step_seconds.value

    @property
    def cost(self) -> float:
        """Device-seconds per token."""
        return self.seconds * self.plan.devices / self.plan.work.tokens_per_step

    @property
    def most(self) -> float:
        """Bytes needed of what is scarcest at the upper end of the range of memory."""
        total = self.plan.memory[0].total
        return self.plan.fit.needed * total.high / total.value

    @property
    def tries(self) -> float:
        """How many times its time it costs, as memory may end it: half of all runs need more than the estimate, and
        none more than the upper end of its range; 1 where that is there."""
        if self.fits == "yes":
            return 1.0
        fit = self.plan.fit
        room = max(0, fit.margin) / (self.most - fit.needed) if self.most > fit.needed else 0.0
        return 2 / (1 + min(1.0, room))

    @property
    def total(self) -> int:
        """Bytes of device memory on the fullest rank."""
        return int(max(memory.total.value for memory in self.plan.memory))

    @property
    def figures(self) -> tuple[float, float, float]:
        """What is better the less it is: seconds, memory and device time per token."""
        return self.seconds, self.total, self.cost

    @property
    def need(self) -> str:
        """What is needed of what is scarcest, as text."""
        fit = self.plan.fit
        return f"{fit.needed / 2**30:.1f} of {fit.available / 2**30:.1f} GiB of {fit.where}"


def as_arguments(changes: Changes) -> str:
    """Changes as one types them: `strategy.name=zero2 batch.micro_batch_size=4`."""
    return " ".join(f"{path}={as_text(value)}" for path, value in changes.items())


def layers_recomputed(every: int) -> str:
    """`every layer`, `every 2nd layer`, `every 21st layer`."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(every % 10 if every // 10 % 10 != 1 else 0, "th")
    return f"every {every}{ending} layer" if every > 1 else "every layer"


def explore(recipe: Recipe, hardware: Hardware, estimate: Estimate, free: Collection[str]) -> list[Candidate]:
    """Plans of the settings in which some keys are free; offloading is tried where nothing else fits.

    Args:
        free: Of `strategy.name` (with offloading), `activation_checkpointing.mode` and `batch.micro_batch_size`. Where
            the recipe leaves the strategy to the plan, its other keys of that section stand; where it names one, they
            go with it.

    Raises:
        UserError: See `_search`.
    """
    places = _strategies(recipe, hardware, False) if "strategy.name" in free else [{}]
    modes = _recomputations(recipe, hardware) if MODE in free else [{}]
    sizes = _micro_batches(recipe, hardware.devices) if "batch.micro_batch_size" in free else [{}]
    candidates = _search(recipe, hardware, estimate, places, modes, sizes)
    if "strategy.name" in free and not any(each.fits == "yes" for each in candidates):
        candidates += _search(recipe, hardware, estimate, _strategies(recipe, hardware, True), modes, sizes)
    return candidates


def _strategies(recipe: Recipe, hardware: Hardware, offload: bool) -> list[Changes]:
    """Strategies for these devices: those that the recipe allows, or first what it asks for, then what differs from it.

    Args:
        offload: Those that hold something in host memory, or those that do not.
    """
    settings = _offloading_strategies(recipe, hardware) if offload else _plain_strategies(recipe, hardware)
    section = type(recipe.strategy).model_fields
    if recipe.strategy.name == "auto":
        return [
            changes
            for changes in settings
            if all(
                attrgetter(path)(recipe) in (value, section[path.partition(".")[2]].default)
                for path, value in changes.items()
                if path != "strategy.name"
            )
        ]
    for changes in settings:
        # What the new strategy would ignore goes back to its default.
        foreign = foreign_keys(recipe.with_values(changes))
        changes |= {f"strategy.{key}": section[key].default for key in foreign}
    return [{}, *(changes for changes in settings if _changed(recipe, changes))]


def _plain_strategies(recipe: Recipe, hardware: Hardware) -> list[Changes]:
    """The simple ones first. On a single device stages of sharding are the same, so it is given the first alone."""
    names = ["single" if recipe.strategy.name == "single" and hardware.devices == 1 else "ddp"]
    # Accelerate offers its engines on GPUs only.
    sharded = hardware.devices > 1 and hardware.device.kind != "cpu"
    settings = [{"strategy.name": name, **_PLAIN} for name in (*names, *(_SHARDED if sharded else ()))]
    if sharded:
        settings.append(_PLAIN | _REDUCED_EACH_TIME)
    if hardware.nodes > 1 and sharded:
        settings.append({"strategy.name": "fsdp", "strategy.sharding": "hybrid_shard", **_PLAIN})
    return settings


def _offloading_strategies(recipe: Recipe, hardware: Hardware) -> list[Changes]:
    if hardware.device.kind == "cpu":
        return []
    each_time = [_REDUCED_EACH_TIME | {"strategy.offload_param": "cpu"}] if hardware.devices > 1 else []
    path = recipe.strategy.nvme_path
    drives = [(path, "zero3", "nvme", place) for place in ("none", "cpu", "nvme")] if path else []
    return [*each_time, *(dict(zip(_OFFLOADING, values, strict=True)) for values in (*_OFFLOADED, *drives))]


def _recomputations(recipe: Recipe, hardware: Hardware) -> list[Changes]:
    """Activation checkpointing, from none to all, and on a GPU that which needs host memory beside.

    `every_n_layers` stands where the recipe states one.
    """
    every = recipe.activation_checkpointing.every_n_layers
    if recipe.activation_checkpointing.mode == "auto" and every > 1:
        pairs = [("full", every)]
    else:
        some = [("full", number) for number in sorted({4, 2, every} - {1}, reverse=True)]
        pairs = [("none", 1), ("elementwise", 1), *some, ("selective", 1), ("full", 1)]
    pairs += [("offload", every)] if hardware.device.kind != "cpu" else []
    changes: list[Changes] = [{MODE: mode, EVERY: number} for mode, number in pairs]
    if recipe.batch.seq_len >= _LONG_ROW and recipe.activation_checkpointing.mlp_tiles == 1:
        changes += [
            {**each, TILES: _TILES} for each in changes if each[MODE] in ("full", "offload") and each[EVERY] == 1
        ]
    return changes


def _micro_batches(recipe: Recipe, devices: int, row_tokens: float | None = None) -> list[Changes]:
    """Sizes of a micro-batch that are worth a plan, and the one that the recipe asks for where it divides the batch."""
    sizes = set(micro_batch_sizes(recipe, devices, row_tokens))
    with contextlib.suppress(UserError):
        sizes.add(batch_layout(recipe, devices).micro_batch_size)
    return [{"batch.micro_batch_size": size} for size in sorted(sizes)]


def _changed(recipe: Recipe, changes: Changes) -> Changes:
    return {path: value for path, value in changes.items() if attrgetter(path)(recipe) != value}


def _search(
    recipe: Recipe,
    hardware: Hardware,
    estimate: Estimate,
    strategies: Sequence[Changes],
    modes: Sequence[Changes],
    sizes: Sequence[Changes],
) -> list[Candidate]:
    """Plans of all combinations that the rules allow and that could be the best.

    A larger micro-batch needs more memory, and where nothing is padded it is never slower, so of each combination the
    largest that fits is looked for. What a strategy would take without recomputing, be there room or not, and what
    recomputing adds, are the least that it takes with recomputing, and what that takes is the least with offloading;
    where that is no gain, it is not tried.

    Args:
        modes: From the least to the most that is recomputed.
        sizes: From the smallest to the largest.

    Raises:
        UserError: If these devices can take none of the combinations, with the reason for the first.
    """
    world = World(0, 0, hardware.devices, hardware.devices_per_node)
    candidates: list[Candidate] = []
    refused: list[UserError] = []
    quickest: dict[tuple[int, Any, Any, Any], Work] = {}
    # All strategies without recomputing come first.
    combinations = itertools.product(range(len(strategies)), range(len(modes)))
    for place, level in sorted(combinations, key=lambda pair: pair[1] > 0):
        changes = {**strategies[place], **modes[level]}
        mode, every, tiles = changes.get(MODE), changes.get(EVERY, 1), changes.get(TILES, 1)
        best, plain, least_seconds = fastest(candidates), quickest.get((place, "none", 1, 1)), 0.0
        if mode == "elementwise":
            if plain is None or not plain.compile_seconds:
                continue  # It is done in graphs, and layers are left as they are.
            # Of equally fast ones the simpler strategy is taken.
            least_seconds = plain.step_seconds.value * (1 + TIE if best and best.rank[0] <= place else 1)
        elif (mode == "offload" or tiles > 1) and (
            known := quickest.get((place, mode if tiles > 1 else "full", every, 1))
        ):
            least_seconds = known.step_seconds.value * (1 + TIE)
        elif plain:
            least_seconds = plain.step_seconds.value + _RECOMPUTING * plain.compute_seconds.value / every
        if best and best.fits == "yes" and best.seconds < least_seconds:
            continue
        setting = recipe.with_values({**changes, **sizes[0]})
        if check(setting):
            continue
        try:
            check_launch(setting, world, {})
        except UserError as error:
            refused.append(error)
            continue
        try:
            tried = _micro_batches_worth(recipe, hardware, estimate, [{**changes, **size} for size in sizes])
        except UserError:
            if tiles == 1:
                raise
            continue  # Not every model has MLPs that can be computed in tiles, which only its trace shows.
        candidates += [dataclasses.replace(each, rank=(place, level)) for each in tried]
        # The largest is tried first; its plan may not be known.
        if tried and tried[0].recipe == recipe.with_values({**changes, **sizes[-1]}):
            quickest[place, mode, every, tiles] = min(tried, key=attrgetter("seconds")).plan.work
    if refused and not candidates:
        raise refused[0]
    return candidates


def _micro_batches_worth(
    recipe: Recipe, hardware: Hardware, estimate: Estimate, settings: Sequence[Changes]
) -> list[Candidate]:
    """All that were tried to find the largest that fits, by bisection, and the fastest; without those whose plans are
    not known.

    The first plan says how long the sequences of counted data are: short ones allow larger micro-batches. In smaller
    ones less is padded, so they are tried as long as they are faster; on a CPU, which has little to gain from large
    products, as long as they are not slower.
    """
    tried: list[Candidate] = []

    def halve(settings: Sequence[Changes]) -> None:
        low, high = 0, len(settings) - 1
        while low <= high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(settings[middle]) else (low, middle - 1)

    def fits(changes: Changes) -> bool:
        candidate = consider(recipe, hardware, estimate, changes)
        tried.extend([candidate] if candidate else [])
        return candidate is not None and candidate.fits == "yes"

    if not fits(settings[-1]):
        halve(settings[:-1])
    if not tried or "batch.micro_batch_size" not in settings[-1]:
        return tried
    counted, on_cpu = tried[0].plan.work.tokens_from == "counted", hardware.device.kind == "cpu"
    if not (counted or on_cpu):
        return tried
    row_tokens = tried[0].plan.work.tokens_per_step / recipe.batch.sequences_per_step if counted else None
    sizes = [{**settings[-1], **size} for size in _micro_batches(recipe, hardware.devices, row_tokens)]
    if counted and tried[0].fits == "yes":
        halve([size for size in sizes if size["batch.micro_batch_size"] > _micro_batch_size(tried[0])])
    largest = max((each for each in tried if each.fits == "yes"), key=_micro_batch_size, default=None)
    smaller = [size for size in sizes if largest and 1 < size["batch.micro_batch_size"] < _micro_batch_size(largest)]
    seconds = largest.seconds if largest else 0.0
    for changes in reversed(smaller):
        candidate = consider(recipe, hardware, estimate, changes)
        if candidate is None or candidate.seconds > seconds * (1 + TIE_ON_CPU if on_cpu else 1 - TIE):
            break
        tried.append(candidate)
        seconds = min(seconds, candidate.seconds)
    return tried


def _micro_batch_size(candidate: Candidate) -> int:
    size = candidate.recipe.batch.micro_batch_size
    assert size != "auto"
    return size


def consider(recipe: Recipe, hardware: Hardware, estimate: Estimate, changes: Changes) -> Candidate | None:
    """One setting with its plan; None if that is not known."""
    changed = recipe.with_values(changes)
    plan = estimate(changed, hardware)
    if plan is None:
        return None
    differences, size = _changed(recipe, changes), changed.batch.micro_batch_size
    if recipe.batch.micro_batch_size == "auto" and size == batch_layout(recipe, hardware.devices).micro_batch_size:
        # It would have been taken anyway.
        differences.pop("batch.micro_batch_size", None)
    return Candidate(differences, changed, plan, tie=TIE_ON_CPU if hardware.device.kind == "cpu" else TIE)


def fitting(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that fit with room to spare; if there are none, those that fit by the estimate alone."""
    candidates = list(candidates)
    return [each for each in candidates if each.fits == "yes"] or [each for each in candidates if each.fits == "tight"]


def fastest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest that fits; of equally fast ones the simplest, then the one with the least memory. Where none fits for
    sure, time counts with the risk: one that takes a little longer and leaves some room is taken."""
    there = fitting(candidates)
    limit = min((each.seconds * each.tries * (1 + each.tie) for each in there), default=0.0)
    equal = [each for each in there if each.seconds * each.tries <= limit]
    return min(equal, key=lambda each: (each.rank, each.total, each.seconds), default=None)


def cheapest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The one that fits with the least device-seconds per token; of equally cheap ones the fastest."""
    there = fitting(candidates)
    limit = min((each.cost * each.tries for each in there), default=0.0) * (1 + TIE)
    return fastest(each for each in there if each.cost * each.tries <= limit)


def least(candidates: Iterable[Candidate]) -> Candidate:
    """The one with the least memory, whether it fits or not; there must be one."""
    return min(candidates, key=lambda each: (each.total, each.seconds, each.rank))
