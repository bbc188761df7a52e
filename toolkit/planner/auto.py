"""What `auto` in a recipe stands for: the fastest setting that fits, with the reason.

The candidates of `search` are planned, also those that have to be traced first: an answer that depended on what was
planned before would differ between the processes of a launch. The alternative, to try micro-batches until one runs out
of memory, takes minutes on the rented devices and finds no strategy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from operator import attrgetter

from toolkit.common import UserError
from toolkit.distributed.device_limits import check_device
from toolkit.planner.advice import remedies, same_training, stated
from toolkit.planner.hardware import Hardware
from toolkit.planner.layouts import FREE, fewest
from toolkit.planner.search import (
    EVERY,
    MODE,
    TIE,
    TILES,
    Candidate,
    Changes,
    Estimate,
    as_arguments,
    explore,
    fastest,
    layers_recomputed,
    least,
)
from toolkit.recipe import Recipe
from toolkit.recipe.errors import RecipeError, as_text
from toolkit.recipe.rules import check

_SECTIONS = {
    "parallel": "nothing fits otherwise",
    "strategy": "no other goes with these devices and the rest of the recipe",
    "activation_checkpointing": "it fits with nothing recomputed",
    "batch": "the most that divides the batch and keeps a device busy",
}
"""Sections in the order in which they are decided, with the reason of a choice that had no rival."""
_RECOMPUTED = {
    "none": "recomputing nothing",
    "elementwise": "recomputing element-wise work",
    "selective": "recomputing all but attention",
    "full": "recomputing {}",
    "offload": "recomputing {} with its input held in host memory",
}


def resolve(recipe: Recipe, hardware: Hardware, estimate: Estimate) -> tuple[Recipe, dict[str, str]]:
    """Decides what an undecided recipe leaves to the plan; always the same for the same recipe on the same hardware.

    Settings whose plans are not known yet are traced, or the answer would depend on what was planned before.

    Returns:
        A recipe that can run, and the decided keys with value and reason, such as `zero2: ddp would not fit (163.0 of
        139.8 GiB of device memory)`.

    Raises:
        UserError: If nothing fits, with the least that is needed and what to change (a recipe that names its strategy
            gets what needs least); or if the devices cannot take the recipe at all.
    """
    traced = functools.partial(estimate, may_trace=True)
    explored = [
        dataclasses.replace(each, changes=_decided(recipe, each))
        for each in explore(recipe, hardware, traced, recipe.undecided)
    ]
    best = fastest(explored)
    if best is None and not set(FREE).difference(recipe.undecided):
        # Where the recipe states one of these, that may be what does not fit.
        divided = fewest(recipe, hardware, traced, recipe.undecided)
        explored += [dataclasses.replace(each, changes=_decided(recipe, each)) for each in divided]
        best = fastest(explored)
    if best is None and explored and recipe.strategy.name != "auto":
        # Nothing more would make it fit, and the plan says what is missing and what to change.
        best = least(explored)
    if best is None:
        raise _nothing_fits(recipe, hardware, estimate, explored)
    return best.recipe, _reasons(best, explored)


def fastest_precision(recipe: Recipe, hardware: Hardware) -> tuple[Recipe, dict[str, str]]:
    """Decides `precision: auto` by the speed of the device's matrix products, which needs no plan.

    Returns:
        See `resolve`. Where none goes with the rest of the recipe it is the fastest; the plan then says what is wrong.
    """
    if recipe.precision != "auto":
        return recipe, {}
    speeds, title, names = hardware.speeds, hardware.device.title, hardware.precisions
    each = {name: recipe.with_values({"precision": name}) for name in names}
    name = next((name for name in names if not check(each[name]) and _trains_on(each[name], hardware)), names[0])
    times = speeds[name] / speeds["fp32"]
    halved = ", in half the bytes" if times <= 1 else ""
    fast = "nothing shorter is faster" if name == "fp32" else f"computed {times:.2g} times as fast as fp32{halved}"
    return each[name], {"precision": f"{name}: {fast} on {title}"}


def _trains_on(recipe: Recipe, hardware: Hardware) -> bool:
    device = hardware.device
    try:
        check_device(recipe, device.kind, device.capability, device.title)
    except UserError:
        return False
    return True


def _decided(recipe: Recipe, each: Candidate) -> Changes:
    """What a candidate changes, with all that the recipe leaves to the plan."""
    return {**each.changes, **{path: attrgetter(path)(each.recipe) for path in recipe.undecided}}


def _reasons(best: Candidate, explored: Sequence[Candidate]) -> dict[str, str]:
    """Value and reason of each decided key; keys that only follow from another one of their section say so."""
    reasons: dict[str, str] = {}
    for section, unrivalled in _SECTIONS.items():
        part = _part(best, section)
        reasons |= dict.fromkeys(part, f"goes with {section}")
        if EVERY in part:
            reasons[EVERY] = _in_words(part)
        if part:
            reasons[next(iter(part))] = "; ".join(_rivals(section, best, explored)) or unrivalled
        # What is decided later is compared within what is decided already.
        explored = [each for each in explored if _part(each, section) == part]
    return {path: f"{as_text(value)}: {reasons[path]}" for path, value in best.changes.items()}


def _part(each: Candidate, section: str) -> Changes:
    return {path: value for path, value in each.changes.items() if path.startswith(f"{section}.")}


def _in_words(part: Changes) -> str:
    """`zero2 with offload_optimizer=cpu`, `recomputing every 2nd layer`."""
    if mode := part.get(MODE):
        recomputed = _RECOMPUTED[mode].format(layers_recomputed(part.get(EVERY, 1)))
        return f"{recomputed}, MLPs in {part[TILES]} tiles" if TILES in part else recomputed
    if not part:
        return "dividing nothing"
    if all(path.startswith("parallel.") for path in part):
        return as_arguments(part).replace("parallel.", "")
    # An engine's name before its settings.
    first, *others = sorted(part.items(), key=lambda item: item[0] != "strategy.name")
    return " with ".join([as_text(first[1]), *(f"{path.partition('.')[2]}={as_text(value)}" for path, value in others)])


def _rivals(section: str, best: Candidate, explored: Sequence[Candidate]) -> list[str]:
    """Why not other values: those that do not fit, then the nearest in speed; three at most."""
    others: dict[str, list[Candidate]] = {}
    for each in explored:
        if (part := _part(each, section)) != _part(best, section):
            others.setdefault(_in_words(part), []).append(each)
    texts: list[tuple[float, str]] = []
    alike = []
    for value, candidates in others.items():
        rival = fastest(candidates)
        if rival is None or rival.tries > best.tries * (1 + TIE):
            same_batch = [each for each in candidates if each.recipe.batch == best.recipe.batch]
            rival = rival or least(same_batch or candidates)
            lacks = f"might not fit ({_most(rival)})" if rival.fits == "tight" else f"would not fit ({rival.need})"
            if rival.fits == best.fits == "tight":
                lacks = f"leaves less room ({rival.need})"
            slower = best.seconds / rival.seconds - 1
            text = f"{slower:.0%} slower than {value}, which {lacks}" if slower > best.tie else f"{value} {lacks}"
            texts.append((0, text))
        elif (ratio := rival.seconds / best.seconds) > 1 + TIE:
            texts.append((ratio, f"{value} would take {ratio:.2f} times as long"))
        elif ratio < 1 - TIE:
            more = (rival.total - best.total) / 2**30
            texts.append((ratio, f"{value} would be {1 - ratio:.0%} faster at most and take {more:.1f} GiB more"))
        else:
            alike.append(value)
    if alike:
        texts.append((1, f"{' and '.join(alike)} would be no faster"))
    return [text for _, text in sorted(texts, key=lambda pair: pair[0])][:3]


def _most(each: Candidate) -> str:
    """What a candidate needs at the upper end of its range, which is what does not fit of one that might."""
    fit = each.plan.fit
    return f"up to {each.most / 2**30:.1f} of {fit.available / 2**30:.1f} GiB of {fit.where}"


def _nothing_fits(recipe: Recipe, hardware: Hardware, estimate: Estimate, explored: Sequence[Candidate]) -> UserError:
    if not explored:
        # A recipe that was loaded without being checked.
        if problems := check(recipe):
            return RecipeError("", problems)
        kept = {f"strategy.{key}": value for key, value in recipe.strategy.model_dump(exclude_defaults=True).items()}
        kept.pop("strategy.name", None)
        without = f"leave out {as_arguments(kept)}, which few strategies have, or " if kept else ""
        return UserError(
            f"{' and '.join(recipe.undecided)} cannot be decided: no setting goes with the rest of the recipe on "
            f"{hardware.name}",
            f"{without}set these keys; `toolkit validate` then says what stands against them",
        )
    nearest, same = least(explored), same_training(recipe, hardware, estimate)
    found = [*filter(None, [same]), *remedies(nearest.recipe, hardware, estimate)]
    ways = [f"{as_arguments(stated(recipe, way.changes))} ({way.need})" for way in found]
    smaller = "lower batch.seq_len, or take a smaller model or more or larger devices"
    nothing = "nothing fits as asked" if same else "nothing that trains the same fits"
    return UserError(
        f"{nothing} on {hardware.name}: the least that is needed is {nearest.need}, with "
        f"{as_arguments(nearest.changes)}",
        f"set {', or '.join(ways)}" if ways else smaller,
    )
