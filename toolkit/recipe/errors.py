"""What is wrong with a recipe: where it stands, what was given, what is allowed, and what to change.

`RecipeError` is all problems at once, `Rule` a combination that is refused. pydantic's findings are
turned into problems: its own messages name neither the file nor the word that was probably meant, and it reports one
finding for each alternative of a union.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from toolkit.common import UserError
from toolkit.recipe.base import SHELL_VARIABLE, Section
from toolkit.recipe.dotted import inline, typed
from toolkit.recipe.other_names import PLACES
from toolkit.recipe.other_tools import habit, is_accepted, moved, translation
from toolkit.recipe.problem import UNKNOWN_KEY, Problem, on_a_screen
from toolkit.recipe.schema import Recipe, leaf_paths, sections
from toolkit.recipe.spelling import did_you_mean, unquoted

Origins = dict[str, str]
"""Dotted key to where its value was written, `file:line` or `command line`; a default has none."""

COMMAND_LINE = "command line"
DEFAULT = "default"
_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_MAIN_KEYS = {section.main_key for section in sections().values()}
_PLAIN: dict[str, list[type]] = {
    "string_type": [str],
    "bool_type": [bool],
    "int_type": [int],
    "float_type": [int, float],
}
"""pydantic's findings about plain values, each with the types that it misses."""
ENOUGH = 250
"""From how many problems on no further ones are looked for."""
_NUMBERS = _PLAIN.keys() - {"string_type"}
_TEXT_KINDS = {"empty_text", "control_character", "shell_variable"}


class RecipeError(UserError):
    """A recipe that cannot be used, with every problem found in it.

    Args:
        name: The recipe's name; empty if it is not known which one is meant.
        problems: All of them, in the order of the recipe.
        partial: The recipe without the offending keys, when that much can be built.
        origins: What the rules need beside it.
    """

    exit_code = 2

    def __init__(
        self, name: str, problems: Iterable[Problem], partial: Recipe | None = None, origins: Origins | None = None
    ) -> None:
        self.name = name
        self.problems = list(problems)
        self.partial = partial
        self.origins = origins or {}
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        count += " or more" if len(self.problems) >= ENOUGH else ""
        super().__init__((f"recipe {name}: " if name else "") + f"{count}\n\n" + "\n".join(on_a_screen(self.problems)))


Config = Mapping[str, Any]
"""The model's `config.json`; empty when it is not known without a download."""


@dataclass(frozen=True)
class Rule:
    """One combination that is refused, or warned of.

    The texts may name figures in braces, see `toolkit.recipe.rules.check`.
    """

    path: str
    """The key the message points at."""
    broken: Callable[[Recipe, Config], object]
    """True, or not empty, for a recipe that breaks the rule."""
    why: str
    """What would happen."""
    change: str
    """The nearest allowed change."""
    warns: bool = False
    """Whether the recipe is trained all the same: it may be meant."""
    own: bool = False
    """Whether only a value counts that the user wrote: what is shipped, or stands in a file while a trial is typed, is
    meant for longer runs."""
    keys: Callable[[Recipe], Iterable[str]] | None = None
    """The keys that break it, where `path` is a section."""
    reference: str = ""
    """Where to read about a failure that a test cannot show without the hardware."""


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Where the value at a dotted path, a part of it, or the nearest part around it was written; empty for defaults."""
    inside = f"{path}."
    if path not in origins and (parts := [place for key, place in origins.items() if key.startswith(inside)]):
        return parts[0]
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return ""


def literals(*location: str) -> list[str]:
    """The words that the value at a location, e.g. `"method", "name"`, can be chosen from; empty for other types."""

    def words(kind: Any) -> list[str]:
        return [word for arg in get_args(kind) for word in ([arg] if isinstance(arg, str) else words(arg))]

    return words(_kind_at(location))


def as_text(value: Any, path: str = "", texts: Mapping[str, str] | None = None) -> str:
    """A value as one would write it in a recipe, shortened.

    Args:
        path: Its dotted key.
        texts: Dotted key to what was written there: 1e-4 stays 1e-4, and an interpolation what it is.
    """
    text = _as_written(value, path, texts) if texts else inline(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _as_written(value: Any, path: str, texts: Mapping[str, str], *, inside: bool = False) -> str:
    if isinstance(value, list):
        entries = [_as_written(each, f"{path}.{index}", texts, inside=True) for index, each in enumerate(value)]
        return f"[{', '.join(entries)}]"
    if isinstance(value, Mapping):
        entries = [f"{key}: {_as_written(each, f'{path}.{key}', texts, inside=True)}" for key, each in value.items()]
        return f"{{{', '.join(entries)}}}"
    text = texts.get(path, "")
    if text and (isinstance(value, bool | int | float) or "${" in text):
        return text
    # Text with a comma is quoted in a list.
    return inline([value])[1:-1] if inside else inline(value)


def from_validation_error(
    error: ValidationError, data: Any, origins: Origins, written: Mapping[str, str], texts: Mapping[str, str]
) -> list[Problem]:
    """Pydantic's findings as problems, one per key (a union reports one finding per alternative).

    Args:
        data: What was validated.
        origins: Where its values were written.
        written: Dotted key to the text of interpolations, which is shown instead of a value that may be secret.
        texts: Dotted key to the text of numbers and such, which YAML may read as something else than was meant.
    """
    by_path: dict[str, list[tuple[Any, Any]]] = {}
    for finding in error.errors():
        location = _existing(finding["loc"], data, missing_leaf=finding["type"] == "missing")
        by_path.setdefault(".".join(map(str, location)), []).append((finding, location))
    for path in [path for path in by_path if any(other.startswith(f"{path}.") for other in by_path)]:
        # Of a list with a wrong entry, that it is no text, which it might have been, too.
        by_path[path] = [each for each in by_path[path] if len(each[0]["loc"]) == len(each[1])]
    by_path = {path: findings for path, findings in by_path.items() if findings}
    problems = [_problem(path, findings, origins, written, texts) for path, findings in [*by_path.items()][:ENOUGH]]
    return [
        dataclasses.replace(each, hint=typed(each.hint) if each.where == COMMAND_LINE else each.hint)
        for each in problems
    ]


def _existing(location: tuple[Any, ...], data: Any, missing_leaf: bool) -> list[Any]:
    """The part of a location that stands in the data: without pydantic's tags for the alternatives of a union."""
    kept: list[Any] = []
    for position, part in enumerate(location):
        known = range(len(data)) if isinstance(data, list) else data if isinstance(data, Mapping) else ()
        if part in known:
            data = data[part]
        elif not (missing_leaf and position == len(location) - 1):
            continue
        kept.append(part)
    return kept


def _problem(
    path: str,
    findings: list[tuple[Any, Any]],
    origins: Origins,
    written: Mapping[str, str],
    texts: Mapping[str, str],
) -> Problem:
    finding, location = findings[0]
    where = origin_of(path, origins)
    given, kind = finding["input"], finding["type"]
    # Values of variables may be secret, also inside a list.
    filled = [text for key, text in written.items() if key == path or key.startswith(f"{path}.")]
    shown = ", ".join(filled) or as_text(given, path, texts)
    if kind in ("extra_forbidden", "string_pattern_mismatch"):
        return _unknown_key(path, location, given, shown, where)
    if kind == "missing":
        return Problem(path, "is required", where, hint=f"set {path}, e.g. {path}=… on the command line")
    section = _section_at(location)
    if section and not isinstance(given, Mapping) and kind not in _TEXT_KINDS:
        allowed = ", ".join(section.model_fields)
        hint = _section_hint(path, section, None if filled else given, shown, texts)
        if is_accepted(path, True):  # `rewards.numeric: true`
            allowed, hint = f"{allowed} below it, or true for their defaults, or false", f"write {path}: true"
        return Problem(path, "must be a section", where, shown, allowed, hint)
    allowed = " or ".join(dict.fromkeys(_allowed(one) for one, _ in findings))
    kinds = {one["type"] for one, _ in findings}
    choices = literals(*location) if "literal_error" in kinds else []
    # Of a list it is the one that is none of them.
    wrong = next((each for each in given if each not in choices), given) if isinstance(given, list) else given
    close = did_you_mean(str(wrong), choices)
    form = "{}='\"{}\"'" if where == COMMAND_LINE else "{}: '{}'"
    hint = f"did you mean `{close}`?" if close else _change(path, location, kinds, given, filled, texts)
    if close and close == given and "list_type" in kinds:
        hint = f"write [{given}]"
    if where == COMMAND_LINE and isinstance(given, str) and not filled and (plain := unquoted(given, kinds)):
        hint = f"write {path}: {plain}"
    if "string_type" in kinds and isinstance(given, bool | int | float) and not kinds & _BOUNDS:
        hint = f"quote it: {form.format(path, shown)}"
    hint = (not filled and habit(path, given)) or hint
    return Problem(path, "is not valid", where, f"{shown}{_type_name(given)}", allowed, hint)


def _section_hint(path: str, section: type[Section], given: Any, shown: str, texts: Mapping[str, str]) -> str:
    if given is None:
        return f"write keys below `{path}:`, or remove this line"
    if isinstance(given, list) and given and all(isinstance(each, Mapping) for each in given):
        return f"write its keys without dashes: {path}: {_merged(given, path, texts)}"
    if isinstance(given, list) or not section.main_key:
        return f"write {path}: {{{next(iter(section.model_fields))}: …}}"
    return f"write {path}: {{{section.main_key}: {shown}}}"


def _merged(parts: Iterable[Mapping[str, Any]], path: str, texts: Mapping[str, str]) -> str:
    """The mappings of a list as one, in a line."""
    return f"{{{', '.join(as_text(part, f'{path}.{index}', texts)[1:-1] for index, part in enumerate(parts))}}}"


def _unknown_key(path: str, location: list[Any], value: Any, given: str, where: str) -> Problem:
    section = _section_at(location[:-1])
    if section is None:
        return Problem(path, UNKNOWN_KEY, where, given, "names of arguments: letters, digits and _", "rename it")
    # The key may have a dot in it.
    key, prefix = str(location[-1]), ".".join(map(str, location[:-1]))
    places = {name: [f"{prefix}.{name}" if prefix else name] for name in section.model_fields}
    close = did_you_mean(key, places)
    if not prefix or not close or key in leaf_paths():
        # `path`, `name` and such say nothing of another section.
        places = {**({} if prefix and key in _MAIN_KEYS else leaf_paths()), **places}
        close = key if key in places else did_you_mean(key, places)
    hint = f"did you mean `{'` or `'.join(places[close])}`?" if close else ""
    if close == key and len(places[key]) == 1:
        said = moved(place := places[key][0], value, given)
        hint = hint if said == f"write {place}: {given}" else said
    if prefix and key in Recipe.model_fields:
        hint = f"`{key}` stands at the top of a recipe, not below {prefix}"
    elif prefix and key in _MAIN_KEYS and not close and section.main_key:
        hint = f"write {prefix}.{section.main_key}: {f'[{given}]' if section.main_key == 'sources' else given}"
    if not prefix and isinstance(value, Mapping) and (meant := _misspelt_section(key, value)):
        hint = f"did you mean `{meant}`?"
    elif key not in places or not prefix:
        hint = translation(key, value, given) or hint
    hint = hint or f"remove it; `toolkit schema --markdown` lists the keys{f' of {prefix}' if prefix else ''}"
    if key == prefix:
        hint = f"these keys stand below `{key}:` already; remove that line"
    return Problem(path, UNKNOWN_KEY, where, given, ", ".join(section.model_fields), hint)


def _misspelt_section(key: str, value: Mapping[str, Any]) -> str:
    """The section whose name an unknown key is a slip of, or another tool's word for, among those that have all the
    keys below it; empty if there is none."""
    fits = [name for name, section in sections().items() if {each.lower() for each in value} <= {*section.model_fields}]
    elsewhere = PLACES.get(key, "").partition(".")[0]
    return did_you_mean(key, fits) or (elsewhere if elsewhere in fits else "") if value else ""


def _kind_at(location: Iterable[Any]) -> Any:
    """The declared type at a location; None where the schema knows none."""
    kind: Any = Recipe
    for part in location:
        if isinstance(part, int):
            plain = (one.__origin__ if hasattr(one, "__metadata__") else one for one in (kind, *get_args(kind)))
            lists = [one for one in plain if getattr(one, "__origin__", None) is list]
            kind = get_args(lists[0])[0] if lists else None
        elif isinstance(kind, type) and issubclass(kind, Section) and part in kind.model_fields:
            kind = kind.model_fields[part].annotation
            # Of one that may be left out, the section.
            if type(None) in get_args(kind):
                kind = next((one for one in get_args(kind) if isinstance(one, type) and issubclass(one, Section)), kind)
        else:
            return None
    return kind


def _section_at(location: Iterable[Any]) -> type[Section] | None:
    kind = _kind_at(location)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _allowed(finding: Any) -> str:
    context = finding.get("ctx", {})
    kinds = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "string_type": "text",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping",
        "empty_text": "text that is not empty",
        "control_character": "text without control characters",
        "shell_variable": "a path without variables of the shell, which nothing fills in",
        "too_short": "at least one entry",
    }
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    for bound in signs.keys() & context.keys():
        return f"{signs[bound]} {context[bound]:.10g}"
    if finding["type"] in kinds:
        return kinds[finding["type"]]
    if finding["type"] == "literal_error":
        return str(context["expected"]).replace("'", "").replace(" or ", ", ")
    return str(finding["msg"])


def _type_name(value: Any) -> str:
    names = {bool: "true/false", int: "whole number", float: "number", str: "text", list: "list", dict: "mapping"}
    return f" ({names[type(value)]})" if type(value) in names else ""


def _change(
    path: str, location: Sequence[Any], kinds: set[str], given: Any, filled: list[str], texts: Mapping[str, str]
) -> str:
    """What to write instead of a value of a wrong kind."""
    if kinds & _TEXT_KINDS:
        return _text_change(path, kinds, ", ".join(filled) or str(given))
    if given is None and filled:
        return f"set what {filled[0]} stands for, or write the value itself"
    if filled and kinds & _NUMBERS:
        return "a variable is text; write ${oc.decode:${oc.env:NAME}} to read it as a number or true/false"
    if filled and kinds == {"list_type"}:
        return f"write [{filled[0]}]"
    if isinstance(given, str) and unquoted(given, kinds):
        return "write a plain number or true/false, without quotes"
    if isinstance(given, float) and given.is_integer() and kinds & {"int_type", "int_from_float"}:
        return f"write {given:.0f}"
    if isinstance(given, list) and given and all(isinstance(each, Mapping) for each in given) and not filled:
        return f"write the keys of a section without dashes: {_merged(given, path, texts)}"
    one: Any = given[0] if isinstance(given, list) and len(given) == 1 and not filled else None
    if one in literals(*location) or any(type(one) in _PLAIN.get(kind, ()) for kind in kinds):
        return f"write {path}: {as_text(one, f'{path}.0', texts)}"
    if isinstance(given, str | int | float) and kinds == {"list_type"}:
        # A text with a comma is one entry.
        return f"write {inline([given]) if isinstance(given, str) else f'[{as_text(given, path, texts)}]'}"
    entry = _section_at([*location, 0])
    if kinds == {"list_type"} and entry and isinstance(given, Mapping) and given.keys() <= {*entry.model_fields}:
        return f"write [{as_text(given, path, texts)}]"
    default = _default_at(location)
    return f"write what is allowed, or remove it for the default {default}" if default else "write what is allowed"


def _text_change(path: str, kinds: set[str], given: str) -> str:
    if "shell_variable" in kinds:
        return f"write {path}: " + SHELL_VARIABLE.sub(r"${oc.env:\1}", given)
    return "write a value, or remove it" if "empty_text" in kinds else "remove the character, or type the text anew"


def _default_at(location: Sequence[Any]) -> str:
    section = _section_at(location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    return "" if field is None or field.is_required() else as_text(field.default)
