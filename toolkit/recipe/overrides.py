"""`key=value` of the command line, and what a section given as a word means, there and in a file.

Values are read by Hydra's override grammar, so that lists, mappings and quotes are written as its users know them.
Which keys exist is not asked: pydantic alone decides that.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.errors import HydraException

from toolkit.recipe import hydra_habits
from toolkit.recipe.dotted import typed
from toolkit.recipe.errors import COMMAND_LINE, RecipeError, literals
from toolkit.recipe.files import EXTENDS, NAME, locate, options, texts_of
from toolkit.recipe.other_tools import habit, is_accepted, translation
from toolkit.recipe.problem import UNKNOWN_KEY, Problem
from toolkit.recipe.schema import Recipe, leaf_paths, sections
from toolkit.recipe.slips import DEEPEST
from toolkit.recipe.spelling import did_you_mean

_EITHER = (
    ("schedule.max_steps", "schedule.num_epochs"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
    ("checkpoint.save_steps", "checkpoint.save_epochs"),
    ("batch.global_batch_size", "batch.tokens_per_step"),
)
"""Keys that say the same in two ways: a new one replaces the other one of what it changes."""

_ALL_KEYS = "`toolkit show --help` lists all keys"


class _TwiceError(HydraException):
    """A key that stands twice in one mapping."""


class _Visitor(HydraOverrideVisitor):
    """Of Hydra's own, the last value of such a key wins in silence."""

    def visitDictContainer(self, ctx: Any) -> dict[str, Any]:
        names: set[Any] = set()
        for place in range(1, ctx.getChildCount() - 1, 2):
            if (name := self.visitDictKey(ctx.getChild(place).getChild(0))) in names:
                raise _TwiceError(str(name))
            names.add(name)
        return super().visitDictContainer(ctx)


overrides_parser.HydraOverrideVisitor = _Visitor  # type: ignore[misc]

_FORM = re.compile(r"(?P<sign>~|\+{0,2})(?P<key>[A-Za-z_]\w*(?:\.\w+)*)(?P<equals>=?)(?P<text>.*)", re.DOTALL)


@dataclass
class Overrides:
    """What the command line changes."""

    groups: dict[str, str] = field(default_factory=dict)
    """Group to the option chosen."""
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key to its value, in the order given; the last one wins."""
    removed: list[str] = field(default_factory=list)
    """Dotted keys that go back to their defaults before the values are set."""
    texts: dict[str, str] = field(default_factory=dict)
    """Dotted key to its value as it was typed."""
    others: set[str] = field(default_factory=set)
    """Sections that were given as a word; other data and models do not inherit all: see `Layer.leave`."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with the rest."""


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
            form = "key=value, or ~key"
            hint = hydra_habits.hint(argument) or _repaired(argument)
            result.problems.append(Problem(argument, "is not an override", COMMAND_LINE, allowed=form, hint=hint))
            continue
        if (parts := match["key"].count(".") + 1) > DEEPEST:
            what = f"has {parts:,} parts"
            result.problems.append(Problem(match["key"], what, COMMAND_LINE, allowed=f"at most {DEEPEST}"))
            continue
        try:
            key = full_key(match["key"])
            if match["sign"] == "~":
                _remove(key, result)
            elif key in sections():
                _set_section(key, match["text"], search, result)
            elif key.partition(".")[0] in sections() and key.endswith(".option"):
                _choose(key.removesuffix(".option"), match["text"], result)
            else:
                _set(key, _value(key, match["text"]), result)
                result.texts |= texts_of(match["text"], key) | {key: match["text"]}
        except RecipeError as error:
            result.problems += error.problems
    result.removed += replaced(result.values)
    return result


def _habit(section: str, value: Any, where: str) -> str:
    return typed(habit(section, value)) if where == COMMAND_LINE else habit(section, value)


def _repaired(argument: str) -> str:
    """What to write for an argument that means a key of ours and is not written as an override."""
    match = re.fullmatch(
        r"(?:--|\.)?(?P<key>[A-Za-z][\w.\-/\[\]]*?) ?(?:(?P<sign>[=:]) ?(?P<text>.*))?", argument.strip()
    )
    key = re.sub(r"\[(\d+)\]", r".\1", match["key"]).replace("-", "_").replace("/", ".") if match else ""
    key = re.sub(r"\.+", ".", key).rstrip(".")
    if not match or key.split(".")[0] not in (*leaf_paths(), *Recipe.model_fields):
        value = match["text"] if match and match["sign"] else "VALUE"
        if answer := translation(key, yaml.safe_load(value) if _is_plain(value) else value, value):
            return typed(answer)
        return f"write key=value, e.g. seq_len=512; {_ALL_KEYS}"
    if entry := re.search(r"\.\d", key):
        return f"write all of it: {key[: entry.start()]}=[…]"
    return f"write {key}={match['text'] if match['sign'] else 'VALUE'}"


def _is_plain(text: str) -> bool:
    """Whether a text is a word or a number, which YAML can read."""
    return re.fullmatch(r"[\w.+/-]+", text) is not None


def section_word(section: str, text: str, value: Any, where: str, search: list[Path]) -> str | dict[str, Any]:
    """What a section given as a word means: an option of its group, else a value of its main key.

    Args:
        section: The section's name.
        text: The word as it was written.
        value: The same as YAML or Hydra's grammar reads it.
        where: `file:line`, or `command line`.
        search: Folders in which options are looked up.

    Returns:
        The name of an option, or the main key with its value.

    Raises:
        RecipeError: The section has no main key, or the word can only be the name of an option that does not exist.
    """
    if NAME.fullmatch(text) and locate(f"{section}/{text}", search):
        return text
    main_key = sections()[section].main_key
    values = literals(section, main_key) if main_key else []
    known = list(dict.fromkeys([*options(section, search), *values]))
    # Paths and hub ids have a slash, files a suffix; anything else can only be meant as a name.
    is_name = re.fullmatch(r"[\w-]+", text) and value is not None and not Path(text).exists()
    if known and is_name and text not in known:
        close = did_you_mean(text, known)
        hint = f"did you mean `{close}`?" if close else _habit(section, value, where)
        if not hint and main_key and not values:
            form = f"{section}.{main_key}={text}" if where == COMMAND_LINE else f"{section}: {{{main_key}: {text}}}"
            hint = f"for something else write {form}"
        hint = hint or "take one of these"
        raise RecipeError("", [Problem(section, "is not known", where, text, ", ".join(known), hint)])
    if main_key is None or value is None:
        allowed = ", ".join(f"{section}.{field}" for field in sections()[section].model_fields)
        hint = _habit(section, value, where) or "name the key that is meant"
        if value is None:
            hint = f"~{section} puts all of it back to its defaults"
        raise RecipeError("", [Problem(section, "is a section", where, text, allowed, hint)])
    return {main_key: [value] if main_key == "sources" and not isinstance(value, list) else value}


def replaced(stated: Mapping[str, Any]) -> list[str]:
    """Dotted keys that mean the same as stated ones in another way, and so give way to them."""
    either = [*_EITHER, *(pair[::-1] for pair in _EITHER)]
    return [other for key, other in either if stated.get(key) is not None and other not in stated]


def full_key(key: str) -> str:
    """The dotted key that a key such as `seq_len` means.

    Raises:
        RecipeError: If it can mean several, or is none of a recipe.
    """
    head, dot, rest = key.partition(".")
    if re.search(r"\.\d", key):
        whole = re.split(r"\.\d", key)[0]
        hint = f"write all of it: {whole}=[…]"
        raise RecipeError("", [Problem(key, "one entry of a list cannot be set", COMMAND_LINE, hint=hint)])
    if head == "hydra":
        what = "unknown key: Hydra's own settings are no part of a recipe"
        raise RecipeError("", [Problem(key, what, COMMAND_LINE, hint=hydra_habits.hint(key))])
    if head in (*EXTENDS, "defaults"):
        hint = "a command takes one recipe, recipe=NAME; `toolkit cp recipe=NAME NEW` writes a file that extends it"
        raise RecipeError("", [Problem(key, UNKNOWN_KEY, COMMAND_LINE, hint=hint)])
    if head in Recipe.model_fields:
        return key
    places = leaf_paths().get(head, [])
    if len(places) > 1:
        allowed = ", ".join(place + dot + rest for place in places)
        what = "can mean several keys"
        raise RecipeError("", [Problem(key, what, COMMAND_LINE, allowed=allowed, hint="write all of it")])
    return (places[0] if places else head) + dot + rest


def _value(key: str, text: str) -> Any:
    """The value as Hydra's grammar reads it. What it cannot read is plain text."""
    try:
        parsed = overrides_parser.OverridesParser.create().parse_override(f"{key}={text}")
    except _TwiceError as error:
        where = Problem(f"{key}.{error}", "is given twice", COMMAND_LINE, text, hint="remove one of them")
        raise RecipeError("", [where]) from None
    except (HydraException, ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and re.search(r"\d{100}", text):  # Python reads no number of thousands.
            what = "holds a number of more than 64 bits"
            raise RecipeError("", [Problem(key, what, COMMAND_LINE, hint="write a smaller number")]) from None
        if text.lstrip().startswith(("[", "{", "(", "'", '"')):
            why = str(error).splitlines()[0].partition(" expecting")[0]
            hint = _quoted(key, text)
            hint = hint or f"close every bracket and quote; text with commas or brackets is written {key}='\"a, [b]\"'"
            raise RecipeError("", [Problem(key, f"cannot be read: {why}", COMMAND_LINE, text, hint=hint)]) from None
        return text
    if parsed.is_sweep_override():
        hint = _one_value(key, text)
        raise RecipeError("", [Problem(key, "a recipe takes one value", COMMAND_LINE, text, hint=hint)])
    if _is_deep(value := parsed.value()):
        hint = "close brackets sooner"
        raise RecipeError(
            "", [Problem(key, f"is nested more than {DEEPEST} levels deep", COMMAND_LINE, text, hint=hint)]
        )
    return value


def _quoted(key: str, text: str) -> str:
    """What to write for a list that only YAML can read, such as `[<a>, b]`; empty for anything else."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return ""
    if not isinstance(values, list) or any(isinstance(each, list | dict) for each in values):
        return ""
    return "quote each: " + shlex.quote(f"{key}={json.dumps(values, ensure_ascii=False, default=str)}")


def _is_deep(value: Any) -> bool:
    """Whether lists and mappings lie in each other more often than those of a file may."""
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for each in level if isinstance(each, list | dict) for inner in _entries(each)]
    return bool(level)


def _entries(content: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _one_value(key: str, text: str) -> str:
    """What to write for several values of a key."""
    values = hydra_habits.swept_values(f"{key}={text}")
    if values is None:
        return f"write one value; {hydra_habits.UNSUPPORTED}"
    place = f"{key}.{sections()[key].main_key}" if key in sections() else key
    asked = shlex.quote(f"{key}={','.join(values)}")
    ways = [f"for a list: {shlex.quote(f'{key}=[{text}]')}"] if is_accepted(place, values) else []
    ways += [f"for text: {key}='\"{text}\"'"] if is_accepted(place, text) or place == "data.sources" else []
    return ", ".join([*ways, f"for each: toolkit sweep … {asked}, or toolkit plan … --sweep {asked}"])


def _set(key: str, value: Any, result: Overrides) -> None:
    # Set again, it moves to the end: a later `args={…}` must not be undone by an earlier `args.nesterov=…`.
    result.values.pop(key, None)
    result.values[key] = value


def _remove(key: str, result: Overrides) -> None:
    section, _, leaf = key.partition(".")
    known = sections()[section].model_fields if section in sections() else None
    if section not in Recipe.model_fields or (leaf and known is not None and leaf.split(".")[0] not in known):
        close = did_you_mean(leaf or section, known or Recipe.model_fields)
        hint = f"did you mean `~{section + '.' if leaf else ''}{close}`?" if close else _ALL_KEYS
        raise RecipeError("", [Problem(key, UNKNOWN_KEY, COMMAND_LINE, hint=hint)])
    result.groups.pop(key, None)
    kept = [one for one in result.values if one != key and not one.startswith(f"{key}.")]
    result.values = {one: result.values[one] for one in kept}
    for around, value in result.values.items():
        if key.startswith(f"{around}.") and isinstance(value, dict):
            value.pop(key.removeprefix(f"{around}."), None)
    result.removed.append(key)


def _choose(section: str, option: str, result: Overrides) -> None:
    result.values.pop(f"{section}.{sections()[section].main_key}", None)
    result.removed = [removed for removed in result.removed if removed != section]
    result.others.discard(section)
    result.groups[section] = option


def _set_section(section: str, text: str, search: list[Path], result: Overrides) -> None:
    """`section=…`: an option of the group, a mapping, or a value for the section's main key."""
    value = None if NAME.fullmatch(text) and locate(f"{section}/{text}", search) else _value(section, text)
    if isinstance(value, dict):
        result.texts |= texts_of(text, section)
        if "option" in value:
            _choose(section, str(value.pop("option")), result)
        for key, part in value.items():
            _set(f"{section}.{key}", part, result)
        return
    word = section_word(section, text, value, COMMAND_LINE, search)
    if isinstance(word, str):
        return _choose(section, word, result)
    result.others.add(section)
    for key, main in word.items():
        _set(f"{section}.{key}", main, result)
        result.texts |= texts_of(text, f"{section}.{key}")
