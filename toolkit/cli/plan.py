"""The plans that one command line asks for: one, several to compare, or a sweep over values."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.cli.local_data import local_problems, row_lengths
from toolkit.common import UserError
from toolkit.distributed.device_limits import check_engine
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import World
from toolkit.planner.build import config_of, estimate, estimate_layouts
from toolkit.planner.hardware import Hardware, find, once_measured, this_machine
from toolkit.planner.plan import Plan, Refused
from toolkit.recipe import Loaded, Recipe, load, split_arguments
from toolkit.recipe.dotted import split_outside
from toolkit.recipe.problem import warn
from toolkit.recipe.rules import check, load_checked


def questions(
    arguments: Sequence[str], compare: Sequence[str] | None, sweeps: Sequence[tuple[str, Sequence[str]]] | None
) -> list[list[str]]:
    """The arguments of every plan asked for, each as for a single one.

    Args:
        arguments: `recipe=NAME hardware=… key=value …`; they hold for all.
        compare: `NAME`, or `NAME key=value …` as one text: further recipes, with changes of their own. A lone
            `key=value` among them is one of `arguments`, so that it may stand last.
        sweeps: Keys with values; every combination is planned. A key may be `recipe` and `hardware` too.

    Raises:
        UserError: If what is to be compared has no name.
    """
    compare = compare or []
    common = [*arguments, *(text for text in compare if _is_change(text))]
    texts = [text for text in compare if text.strip() and not _is_change(text)]
    named = [list(filter(None, split_outside(text, string.whitespace))) for text in texts]
    if compare and not named:
        raise UserError(
            f"--compare names no recipe: {' '.join(compare)}",
            "write --compare NAME …, 'NAME key=value' for changes of its own, or --sweep KEY=V1,V2 for one recipe",
        )
    own = [argument for argument in common if argument.startswith("recipe=")]
    shared = [argument for argument in common if not argument.startswith("recipe=")]
    bases = [own + shared] if own or not named else []
    bases += [[f"recipe={name.removeprefix('recipe=')}", *shared, *changes] for name, *changes in named]
    choices = [[f"{key}={value}" for value in values] for key, values in sweeps or []]
    rows = []
    for base, chosen in itertools.product(bases, itertools.product(*choices)):
        picked = any(choice.startswith("recipe=") for choice in chosen)
        rows.append([*(text for text in base if not (picked and text.startswith("recipe="))), *chosen])
    return [list(row) for row in dict.fromkeys(map(tuple, rows))]


def answer(arguments: Sequence[str], folder: str | None, price: float | None, serve: int | None = None) -> Plan:
    """One plan of `recipe=NAME hardware=… key=value …`, with advice; the price is that of a GPU-hour.

    Args:
        serve: Context length at which the trained model is to run, in tokens.

    Raises:
        UserError: With every problem of the recipe, or for unknown hardware.
    """
    loaded, overrides, hardware = _parts(arguments, folder, load_checked)
    warn([*loaded.warnings, *local_problems(loaded)])
    _check_launch(loaded.recipe, hardware)
    hardware = _measured(loaded.recipe, hardware)
    figures = row_lengths(loaded.recipe)
    return estimate(
        loaded.recipe, loaded.name, hardware, overrides=overrides, price=price, context=serve, statistics=figures
    )


def answers_or_reasons(
    rows: Sequence[Sequence[str]], folder: str | None, price: float | None, serve: int | None = None
) -> list[Plan | Refused]:
    """Several plans, without advice. What cannot run is a row with its reason; what is misspelt is an error, before
    the first is planned, which may take minutes.

    Raises:
        UserError: For unknown keys, recipes and hardware, and values of a wrong type; with those of all rows.
    """
    read, wrong = list[tuple[Loaded, list[str], Hardware]](), dict[str, UserError]()
    for arguments in rows:
        try:
            read.append(_parts(arguments, folder, load))
        except UserError as error:
            wrong.setdefault(str(error), error)
    if len(wrong) > 1:
        changes = dict.fromkeys(each.change for each in wrong.values())
        several = UserError("\n".join(each.what for each in wrong.values()), "\n".join(filter(None, changes)))
        several.exit_code = max(each.exit_code for each in wrong.values())
        raise several
    for only in wrong.values():
        raise only
    return [_answer_or_reason(*parts, price, serve) for parts in read]


def _answer_or_reason(
    loaded: Loaded, overrides: list[str], hardware: Hardware, price: float | None, serve: int | None
) -> Plan | Refused:
    reason = "\n".join(
        f"{problem.path}: {problem.what}" + (f"; {problem.hint}" if problem.hint else "")
        for problem in check(loaded.recipe, loaded.origins)
    )
    if not reason:
        try:
            _check_launch(loaded.recipe, hardware)
            hardware = _measured(loaded.recipe, hardware)
            return estimate(
                loaded.recipe,
                loaded.name,
                hardware,
                overrides=overrides,
                price=price,
                advice=False,
                context=serve,
                statistics=row_lengths(loaded.recipe),
            )
        except UserError as error:
            reason = f"{error.what}; {error.change}" if error.change else error.what
    return Refused(recipe=loaded.name, overrides=overrides, hardware=hardware.name, reason=reason)


def layouts(arguments: Sequence[str], folder: str | None, price: float | None, serve: int | None = None) -> list[Plan]:
    """A plan of every way to divide a recipe over the devices, the fastest first; raises as `answer`."""
    loaded, overrides, hardware = _parts(arguments, folder, load_checked)
    warn([*loaded.warnings, *local_problems(loaded)])
    hardware = _measured(loaded.recipe, hardware)
    figures = row_lengths(loaded.recipe)
    return estimate_layouts(
        loaded.recipe, loaded.name, hardware, overrides=overrides, price=price, context=serve, statistics=figures
    )


def _parts(
    arguments: Sequence[str], folder: str | None, read: Callable[[str, Sequence[str], str | None], Loaded]
) -> tuple[Loaded, list[str], Hardware]:
    """The recipe, what was changed in it, and the hardware."""
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("hardware=")]
    rest = [argument for argument in arguments if not argument.startswith("hardware=")]
    name, overrides = split_arguments(rest)
    own = Path(folder) if folder else None
    hardware = find(named[-1], own) if named else None
    loaded = read(name, overrides, folder)
    return loaded, overrides, hardware or this_machine(own)


def _measured(recipe: Recipe, hardware: Hardware) -> Hardware:
    """The hardware with figures of this CPU, which takes seconds once, so that a model that cannot be read is said
    before."""
    return once_measured(hardware, before=lambda: config_of(recipe))


def _check_launch(recipe: Recipe, hardware: Hardware) -> None:
    """Refuses a recipe that so many processes cannot take; one that is undecided will take none of those."""
    if recipe.knows_engine:
        check_engine(recipe, hardware.device.kind, hardware.devices)
        check_launch(recipe, World(0, 0, hardware.devices, hardware.devices_per_node), {})


def _is_change(text: str) -> bool:
    return ("=" in text.partition(" ")[0] and not text.startswith("recipe=")) or text.startswith("~")
