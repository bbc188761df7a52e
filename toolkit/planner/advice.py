"""What to change: the fastest and the cheapest setting that fits, and what other changes would buy and cost.

Settings come from `search` and every figure from a plan; here they are compared, picked and put into words. Only
plans of known traces are asked for, so that advice takes about a second; of a model that was never planned before, it
knows the recipe as it stands and what `build` traces to find something that fits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from toolkit.common import UserError, seconds_text
from toolkit.planner.hardware import Hardware
from toolkit.planner.layouts import FREE, fewest
from toolkit.planner.plan import Advice, Kind, Plan
from toolkit.planner.search import (
    EVERY,
    MODE,
    TIE,
    TILES,
    Candidate,
    Changes,
    Estimate,
    cheapest,
    explore,
    fastest,
    fitting,
    layers_recomputed,
)
from toolkit.recipe import Recipe
from toolkit.recipe.errors import as_text
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.recipe.precisions import PURE

MOST = 6
"""Entries of a list of advice."""
_WORTH = 0.05
"""The share of time, memory or money that a change has to save to be worth a line."""
_COUNTS = (1, 2, 4, 8)


def advise(recipe: Recipe, hardware: Hardware, plan: Plan, estimate: Estimate) -> list[Advice]:
    """At most `MOST` settings: that of a decided recipe or the smallest change that fits, then faster and cheaper ones.

    The fastest and the cheapest train the same: global batch, method, precision and optimizer are the recipe's. The
    cheapest has the least device-seconds per token, if need be on fewer devices. An option changes what is trained or
    with how many devices, and what must go with that.
    """
    asked = Candidate({}, recipe, plan)
    explored = [asked, *_as_auto_takes(recipe, explore(recipe, hardware, estimate, FREE))]
    counts = (count for count in _COUNTS if count < hardware.devices)
    fewer = [each for count in counts for each in _with_devices(recipe, hardware, estimate, count)]
    options = _options(recipe, hardware, estimate)
    first = asked if asked.fits != "no" else _nearest(recipe, hardware, estimate, explored) or _smallest(options)
    # A setting that cannot run is no measure of others.
    base = first or asked
    kind: Kind = "as asked" if first is asked else "option" if any(first is each for each in options) else "nearest"
    picked = [(kind, first)] if first else []
    quick, cheap = fastest(explored), cheapest([*explored, *fewer])
    if quick and (quick.seconds < base.seconds * (1 - TIE) or (base.fits, quick.fits) == ("tight", "yes")):
        picked.append(("fastest", quick))
    if cheap and all(cheap.cost < each.cost * (1 - _WORTH) for _, each in picked):
        picked.append(("cheapest", cheap))
    worth = [
        each
        for each in fitting(options)
        if _saves(each, base, _WORTH) and all(_saves(each, other) for _, other in picked)
    ]
    worth.sort(key=lambda each: -(base.seconds / each.seconds) * (base.total / each.total))
    picked += [("option", each) for each in worth]
    entries = {
        as_text(each.changes): _entry(kind, each, asked if each is first else base) for kind, each in reversed(picked)
    }
    return [*reversed(entries.values())][:MOST]


def remedies(recipe: Recipe, hardware: Hardware, estimate: Estimate) -> list[Candidate]:
    """The options that make a recipe fit which does not, those with the fewest changes first."""
    there = fitting(_options(recipe, hardware, estimate))
    return sorted(there, key=lambda each: (len(each.changes), each.total))


def same_training(recipe: Recipe, hardware: Hardware, estimate: Estimate) -> Candidate | None:
    """The smallest change of what a recipe states, beside what it leaves to the plan, that trains the same and fits."""
    explored = _as_auto_takes(recipe, explore(recipe, hardware, estimate, FREE))
    return _nearest(recipe, hardware, estimate, explored)


def _nearest(recipe: Recipe, hardware: Hardware, estimate: Estimate, explored: list[Candidate]) -> Candidate | None:
    """The smallest change that trains the same and fits: one key before several, and the same groups of processes
    before others."""
    sizes = explore(recipe, hardware, estimate, FREE[:1]) if recipe.knows_engine else []
    singles = [each for key in FREE for each in explore(recipe, hardware, estimate, {key, *recipe.undecided})]
    same_groups = _smallest([*sizes, *_as_auto_takes(recipe, singles)]) or _smallest(explored)
    return same_groups or _smallest(_divided(recipe, hardware, estimate))


def _smallest(candidates: list[Candidate]) -> Candidate | None:
    """The candidate that fits with the fewest changes; among several, the fastest."""
    there = fitting(candidates)
    fewest_changes = min((len(each.changes) for each in there), default=0)
    return fastest(each for each in there if len(each.changes) == fewest_changes)


def stated(recipe: Recipe, changes: Changes) -> Changes:
    """What must be typed of some changes: not what the recipe leaves to the plan, nor what goes with that."""
    left = {path.partition(".")[0] for path in recipe.undecided}
    return {path: value for path, value in changes.items() if path.partition(".")[0] not in left}


def _as_auto_takes(recipe: Recipe, candidates: list[Candidate]) -> list[Candidate]:
    """One candidate for each group that differs only in what the recipe leaves to the plan: the one that `auto` would
    choose."""
    groups: dict[str, list[Candidate]] = {}
    for each in candidates:
        if changes := stated(recipe, each.changes):
            groups.setdefault(as_text(changes), []).append(dataclasses.replace(each, changes=changes))
    return [best for group in groups.values() if (best := fastest(group))]


def _options(recipe: Recipe, hardware: Hardware, estimate: Estimate) -> list[Candidate]:
    """The recipe with each option, undecided keys as `auto` takes them; where none fits so, with what makes it fit."""
    options = []
    for changes in _other_trainings(recipe, hardware):
        changed = recipe.with_values(changes)
        best = fastest(explore(changed, hardware, estimate, changed.undecided))
        further = stated(changed, best.changes) if best else {}
        if best is None and (best := fastest(explore(changed, hardware, estimate, FREE))):
            further = best.changes
        if best:
            options.append(dataclasses.replace(best, changes={**changes, **further}))
    # The smallest number of further devices that fits speaks for all.
    more = (_with_devices(recipe, hardware, estimate, count) for count in _COUNTS if count > hardware.devices)
    there = [best for candidates in more if (best := fastest(candidates))]
    return options + fitting(there)[:1]


def _divided(recipe: Recipe, hardware: Hardware, estimate: Estimate) -> list[Candidate]:
    """What fits where as few processes as possible divide rows, layers or experts; of gathered keys and values there is
    a trace for each number of processes, and so it is made."""

    def traced(recipe: Recipe, hardware: Hardware, may_trace: bool = False) -> Plan | None:
        return estimate(recipe, hardware, may_trace=may_trace or recipe.parallel.context > 1)

    for free in (recipe.undecided, FREE):
        if there := fewest(recipe, hardware, traced, free):
            return [dataclasses.replace(each, changes=stated(recipe, each.changes)) for each in there]
    return []


def _other_trainings(recipe: Recipe, hardware: Hardware) -> Iterator[Changes]:
    method = recipe.method
    if name := recipe.optimizer.traits.eight_bit:
        other = OPTIMIZERS[name].fsdp_alternative if recipe.strategy.name == "fsdp" else ""
        yield {"optimizer.name": other or name}
    if method.name == "full":
        yield {"method.name": "lora"}
        yield {"method.name": "lora", "method.quantization": "nf4"}
        if without := PURE.get(recipe.precision):
            yield {"precision": without}
    elif method.quantization in ("none", "fp8"):
        yield {"method.quantization": "nf4"}
    precision, flops = recipe.precision, hardware.device.flops
    if precision == "fp32" and (shorter := next((each for each in ("bf16", "fp16") if each in flops), "")):
        yield {"precision": shorter}
    elif precision == "bf16" and flops.get("bf16", math.inf) < flops["fp32"]:
        yield {"precision": "fp32"}
    if recipe.model.attention != "auto":
        yield {"model.attention": "auto"}


def _with_devices(recipe: Recipe, hardware: Hardware, estimate: Estimate, count: int) -> list[Candidate]:
    """The settings on so many devices: in one node, or in whole nodes where one does not hold them."""
    if hardware.device.kind == "cpu" or recipe.batch.sequences_per_step % count:
        return []
    # A machine may hold more than is usual.
    inside = min(count, max(hardware.device.node.devices, hardware.devices_per_node))
    nodes, rest = divmod(count, inside)
    if rest:
        return []
    sizes = f"x{inside}" * (count > 1) + f"x{nodes}" * (nodes > 1)
    other = dataclasses.replace(
        hardware,
        name=hardware.device.name + sizes,
        node=hardware.node_of(inside),
        devices_per_node=inside,
        nodes=nodes,
    )
    try:
        explored = explore(recipe, other, estimate, FREE)
    except UserError:
        return []  # So many cannot take the recipe: hybrid sharding needs several nodes.
    return [dataclasses.replace(each, changes={"hardware": other.name, **each.changes}) for each in explored]


def _saves(each: Candidate, other: Candidate, share: float = 0.0) -> bool:
    """Whether one figure at least is smaller, by more than a share of the other's."""
    return any(new < old * (1 - share) for new, old in zip(each.figures, other.figures, strict=True))


def _entry(kind: Kind, each: Candidate, asked: Candidate) -> Advice:
    return Advice(
        kind=kind,
        changes={path: as_text(value) for path, value in each.changes.items()},
        buys=_buys(each, asked),
        costs=_costs(each, asked),
        fits=each.fits,
        total=each.total,
        step_seconds=each.seconds,
        gpu_seconds_per_token=each.cost,
    )


_GIB = 2**30
_NOTES = {
    # Biderman et al. 2024, "LoRA Learns Less and Forgets Less".
    ("method.name", "lora"): (
        "only adapters are trained, which learn less from much data and want about ten times the learning rate"
    ),
    ("method.quantization", "nf4"): "the frozen base is rounded to 4 bits and expanded again for every pass",
    **{
        ("precision", each): "no fp32 masters: most updates of a small learning rate are lost" for each in PURE.values()
    },
    ("precision", "bf16"): "matrix products in bf16, which has 8 significant bits",
    ("precision", "fp32"): "weights and activations of twice the size",
    ("precision", "fp16"): "fp16 with loss scaling, as these devices have no fast bf16",
    (MODE, "full"): "layers are computed twice",
    (MODE, "elementwise"): "what matrix products read of element-wise work is written to memory twice",
    (MODE, "selective"): "all but attention is computed twice",
    (MODE, "offload"): "layers are computed twice, and their inputs cross to the host and back",
}
"""What a value costs that the figures do not show."""
_SHARING = "devices that share a row exchange tensors in the attention of every layer"
_WAYS = {
    "sequence": _SHARING,
    "context": _SHARING,
    "tensor": "devices that divide layers sum hidden states in every layer",
    "expert": "devices that divide experts exchange tokens in every layer that has them",
    "pipeline": "devices wait until a pipeline is full, and while it runs empty",
}
"""The same of what `parallel` says."""


def _buys(each: Candidate, asked: Candidate) -> str:
    """What is better than with another setting, the one that was asked for as a rule."""
    parts = [*_compared(each, asked)]
    if asked.fits == "no":
        same = each.plan.fit.where == asked.plan.fit.where
        before = f"{asked.plan.fit.needed / _GIB:.1f}" if same else asked.need
        parts.insert(0, f"fits: needs {each.need} instead of {before}")
    return "; ".join(parts) or "nothing"


def _costs(each: Candidate, asked: Candidate) -> str:
    """What is worse."""
    parts = [*_compared(each, asked, worse=True), *_notes(each.changes)]
    if each.fits == "tight":
        parts.append(f"tight: may need more than the {each.plan.fit.available / _GIB:.1f} GiB there are")
    return "; ".join(parts) or "nothing"


def _compared(each: Candidate, asked: Candidate, worse: bool = False) -> Iterator[str]:
    """The figures that differ in one direction by more than two plans can tell."""

    def differs(new: float, old: float) -> bool:
        return new > old * (1 + TIE) if worse else new < old * (1 - TIE)

    new, old = each.seconds, asked.seconds
    if differs(new, old):
        times = f"{new / old:.2f} times as long" if worse else f"{old / new:.2f} times as fast"
        yield f"{times}: {seconds_text(new)} a step instead of {seconds_text(old)}"
    if differs(each.cost, asked.cost) and each.plan.devices != asked.plan.devices:
        yield f"{abs(1 - each.cost / asked.cost):.0%} {'more' if worse else 'less'} device time per token"
    for new, old, what in (
        (each.total, asked.total, "memory on a device"),
        (each.plan.host.peak, asked.plan.host.peak, "host memory"),
    ):
        # Of a setting that does not fit it has been said what it needs.
        if differs(new, old) and abs(new - old) > _GIB / 10 and (worse or asked.fits != "no"):
            more = f"{abs(new - old) / _GIB:.1f} GiB {'more' if worse else 'less'} {what}"
            yield f"{more} ({new / _GIB:.1f} instead of {old / _GIB:.1f})"


def _notes(changes: Changes) -> Iterator[str]:
    """What the figures do not show."""
    if "optimizer.name" in changes:
        yield "the optimizer's moments are rounded to 8 bits"
    for way, text in _WAYS.items():
        if f"parallel.{way}" in changes:
            yield text
    if TILES in changes:
        yield "MLPs are computed once more, a tile of a row at a time"
    every = changes.get(EVERY, 1)
    for (path, value), text in _NOTES.items():
        if changes.get(path) == value:
            yield f"{layers_recomputed(every)} is computed twice" if path == MODE and every > 1 else text
    if "nvme" in changes.values():
        yield "wear of the drive"
    elif "cpu" in (changes.get("strategy.offload_optimizer"), changes.get("strategy.offload_param")):
        yield "state waits in host memory and crosses to it in every step"
