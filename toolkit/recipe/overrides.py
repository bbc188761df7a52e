"""`key=value` of the command line in Hydra's grammar, forced in so that pydantic alone decides what exists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from toolkit.recipe.errors import COMMAND_LINE, Problem, RecipeError, did_you_mean, literals
from toolkit.recipe.files import NAME, locate, options
from toolkit.recipe.schema import Recipe, leaf_paths, sections

_INSTEAD = {
    "schedule.max_steps": ("schedule.num_epochs",),
    "schedule.num_epochs": ("schedule.max_steps",),
    "schedule.warmup_steps": ("schedule.warmup_ratio",),
    "schedule.warmup_ratio": ("schedule.warmup_steps",),
    "checkpoint.save_steps": ("checkpoint.save_epochs",),
    "checkpoint.save_epochs": ("checkpoint.save_steps",),
    "batch.global_batch_size": ("batch.tokens_per_step",),
    "batch.tokens_per_step": ("batch.global_batch_size",),
}
"""Keys that say the same in another way: one on the command line replaces the other one in the files."""

_ABOUT_SOURCES = ("data.format", "data.columns", "data.eval_sources")
"""Keys that describe the data a file names; `data=OTHER` does not inherit them."""

_FORM = re.compile(r"(?P<sign>~|\+{0,2})(?P<key>[A-Za-z_][\w.]*)(?P<equals>=?)(?P<text>.*)", re.DOTALL)


@dataclass
class Overrides:
    """What the command line changes.

    Args:
        groups: Group to the option chosen.
        values: Dotted key to the text of its value, in Hydra's grammar, in the order given; the last one wins.
        removed: Dotted keys that go back to their defaults.
        problems: What is wrong with the rest.
    """

    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def for_hydra(self, choices: Mapping[str, Any]) -> list[str]:
        """Arguments for `compose`. All keys are forced in, for pydantic to judge.

        Args:
            choices: Groups for which the files have chosen an option; another one is replaced, not added.
        """
        groups = [f"{'' if group in choices else '+'}{group}={option}" for group, option in self.groups.items()]
        return groups + [f"++{key}={text}" for key, text in self.values.items()]


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Splits `recipe=NAME key=value …` into the name and the overrides."""
    names = [argument.partition("=")[2] for argument in arguments if argument.startswith("recipe=")]
    if len(names) != 1 or not names[0]:
        bare = [argument for argument in arguments if NAME.fullmatch(argument)]
        hint = f"did you mean recipe={bare[0]}?" if bare and not names else "recipe=NAME; `toolkit ls` lists them"
        raise RecipeError("", [Problem("recipe", "name one recipe", given=" ".join(arguments), hint=hint)])
    return names[0], [argument for argument in arguments if not argument.startswith("recipe=")]


def parse(arguments: Sequence[str], search: list[Path]) -> Overrides:
    """Reads `key=value` texts.

    `section=option` chooses a group's option, `section=value` sets the section's main key, a key that stands in one
    section only may be written without it, and `~key` puts a key or section back to its defaults.

    Args:
        search: Folders in which the options of groups are looked up.
    """
    result = Overrides()
    for argument in arguments:
        match = _FORM.fullmatch(argument)
        if not match or bool(match["equals"]) == (match["sign"] == "~"):
            result.problems.append(Problem(argument, "is not an override", COMMAND_LINE, allowed="key=value, or ~key"))
            continue
        try:
            key = _full_key(match["key"])
            if match["sign"] == "~":
                _remove(key, result)
            elif key in sections():
                _set_section(key, match["text"], search, result)
            else:
                _set(key, _value(key, match["text"])[0], result)
        except _Refused as refused:
            result.problems.append(refused.problem)
    for key, others in _INSTEAD.items():
        if result.values.get(key, "null") != "null":
            result.removed += [other for other in others if other not in {**result.values, **result.groups}]
    return result


class _Refused(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def _full_key(key: str) -> str:
    """The dotted key that a key such as `seq_len` means."""
    head, dot, rest = key.partition(".")
    if re.search(r"\.\d", key):
        whole = re.split(r"\.\d", key)[0]
        hint = f"write all of it: {whole}=[…]"
        raise _Refused(Problem(key, "one entry of a list cannot be set", COMMAND_LINE, hint=hint))
    if head == "hydra":
        raise _Refused(Problem(key, "unknown key: Hydra's own settings are no part of a recipe", COMMAND_LINE))
    if head in Recipe.model_fields:
        return key
    places = leaf_paths().get(head, [])
    if len(places) > 1:
        allowed = ", ".join(place + dot + rest for place in places)
        what = "stands in several sections"
        raise _Refused(Problem(key, what, COMMAND_LINE, allowed=allowed, hint="write the section too"))
    return (places[0] if places else head) + dot + rest


def _value(key: str, text: str) -> tuple[str, Any]:
    """The value as Hydra writes it, and as it reads it. What its grammar cannot read is plain text."""
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException as error:
        if text.lstrip().startswith(("[", "{", "(", "'", '"')):
            why = str(error).splitlines()[0]
            hint = f"close every bracket and quote; text with commas or brackets is written {key}='\"a, [b]\"'"
            raise _Refused(Problem(key, f"cannot be read: {why}", COMMAND_LINE, text, hint=hint)) from None
        return QuotedString(text, Quote.single).with_quotes(), text
    if parsed.is_sweep_override():
        hint = f"for a list: {key}=[{text}], for text: {key}='\"{text}\"'"
        raise _Refused(Problem(key, "a recipe takes one value", COMMAND_LINE, text, hint=hint))
    return text, parsed.value()


def _set(key: str, text: str, result: Overrides) -> None:
    result.removed = [removed for removed in result.removed if removed != key]
    # Set again, it moves to the end: a later `data={…}` must not be undone by an earlier `data.packing=…`.
    result.values.pop(key, None)
    result.values[key] = text


def _remove(key: str, result: Overrides) -> None:
    section, _, leaf = key.partition(".")
    known = sections()[section].model_fields if section in sections() else None
    if section not in Recipe.model_fields or (leaf and known is not None and leaf.split(".")[0] not in known):
        close = did_you_mean(leaf or section, known or Recipe.model_fields)
        hint = f"did you mean `~{section + '.' if leaf else ''}{close}`?" if close else ""
        raise _Refused(Problem(key, "unknown key", COMMAND_LINE, hint=hint))
    result.groups.pop(key, None)
    kept = [one for one in result.values if one != key and not one.startswith(f"{key}.")]
    result.values = {one: result.values[one] for one in kept}
    result.removed.append(key)


def _set_section(section: str, text: str, search: list[Path], result: Overrides) -> None:
    """`section=…`: an option of the group, a mapping, or a value for the section's main key."""
    main_key = sections()[section].main_key
    if NAME.fullmatch(text) and locate(f"{section}/{text}", search):
        if main_key:
            result.values.pop(f"{section}.{main_key}", None)
        result.removed = [removed for removed in result.removed if removed != section]
        result.groups[section] = text
        return
    written, value = _value(section, text)
    if isinstance(value, dict):
        return _set(section, written, result)
    if main_key is None or value is None:
        allowed = ", ".join(f"{section}.{field}" for field in sections()[section].model_fields)
        hint = f"~{section} puts all of it back to its defaults" if value is None else ""
        raise _Refused(Problem(section, "is a section", COMMAND_LINE, text, allowed, hint))
    known = [*options(section, search), *literals(section, main_key)]
    if known and _is_word(text) and text not in known and not Path(text).exists():
        close = did_you_mean(text, known)
        hint = f"did you mean `{close}`?" if close else f"for something else write {section}.{main_key}={text}"
        problem = Problem(section, "is not known", COMMAND_LINE, text, ", ".join(dict.fromkeys(known)), hint)
        raise _Refused(problem)
    if main_key == "sources":
        written = written if isinstance(value, list) else f"[{written}]"
        result.removed += [key for key in _ABOUT_SOURCES if key not in result.values]
    _set(f"{section}.{main_key}", written, result)


def _is_word(text: str) -> bool:
    """Whether a value can only be meant as a name: paths and hub ids have a slash, files a suffix."""
    return bool(re.fullmatch(r"[\w-]+", text))
