"""What is wrong with a recipe, said so that it can be mended: where, what was given, what is allowed, what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from toolkit.errors import UserError
from toolkit.recipe.schema import Recipe, Section, leaf_paths

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Problem:
    """One thing to mend.

    Args:
        path: Dotted key, e.g. `method.r`, or empty when the recipe as a whole is meant.
        what: What is wrong.
        where: `file:line`, or `command line`.
        given: The offending value, as text.
        allowed: What would be accepted.
        hint: The likely mend.
    """

    path: str
    what: str
    where: str = ""
    given: str = ""
    allowed: str = ""
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{self.path or 'recipe'}: {self.what}" + (f"  ({self.where})" if self.where else "")]
        lines += [
            f"    {label:<8} {text}"
            for label, text in (("given", self.given), ("allowed", self.allowed), ("change", self.hint))
            if text
        ]
        return "\n".join(lines)


class RecipeError(UserError):
    """A recipe that cannot be used, with every problem found in it.

    Args:
        name: The recipe's name.
        problems: All of them, in the order of the recipe.
        partial: The recipe without the offending keys, when that much can be built; further checks may use it.
        origins: Dotted key to `file:line`, for those checks.
    """

    exit_code = 2

    def __init__(
        self,
        name: str,
        problems: Iterable[Problem],
        partial: Recipe | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.problems = list(problems)
        self.partial = partial
        self.origins = dict(origins or {})
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__(f"recipe {name}: {count}\n\n" + "\n".join(map(str, self.problems)))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The closest known word, or an empty string."""
    known = list(known)
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else ""


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Where the value at a dotted path, or the nearest part around it, was written; empty for defaults."""
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return ""


def from_validation_error(error: ValidationError, data: Any, origins: Mapping[str, str]) -> list[Problem]:
    """Pydantic's findings as problems, one per key (a union reports one finding per alternative)."""
    by_path: dict[str, list[tuple[Any, Any]]] = {}
    for finding in error.errors():
        location = _existing(finding["loc"], data, missing_leaf=finding["type"] == "missing")
        by_path.setdefault(".".join(map(str, location)), []).append((finding, location))
    return [_problem(path, findings, origins) for path, findings in by_path.items()]


def _existing(location: tuple[Any, ...], data: Any, missing_leaf: bool) -> list[Any]:
    """The part of a location that stands in the data: without pydantic's tags for the alternatives of a union."""
    kept: list[Any] = []
    for position, part in enumerate(location):
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not (missing_leaf and position == len(location) - 1):
            break
        kept.append(part)
    return kept


def _problem(path: str, findings: list[tuple[Any, Any]], origins: Mapping[str, str]) -> Problem:
    finding, location = findings[0]
    where = origin_of(path, origins)
    given = finding["input"]
    if finding["type"] == "extra_forbidden":
        return _unknown_key(path, location, given, where)
    if finding["type"] == "missing":
        return Problem(path, "is required", where, hint=f"set {path}, e.g. {path}=… on the command line")
    section = _section_at(location)
    if section and not isinstance(given, Mapping):
        wanted = f"{path}: {{{section.main_key or 'key'}: {given}}}"
        return Problem(path, "must be a section", where, repr(given), ", ".join(section.model_fields), f"write {wanted}")
    allowed = " or ".join(dict.fromkeys(_allowed(one) for one, _ in findings))
    options = [option for one, _ in findings if one["type"] == "literal_error" for option in _options(location)]
    close = did_you_mean(str(given), [str(option) for option in options])
    hint = f"did you mean `{close}`?" if close else _type_hint(finding, given)
    return Problem(path, "is not valid", where, f"{given!r} ({_type_name(given)})", allowed, hint)


def _unknown_key(path: str, location: list[Any], given: Any, where: str) -> Problem:
    section = _section_at(location[:-1]) or Recipe
    key = str(location[-1])
    prefix = path.rpartition(".")[0]
    hint = ""
    if close := did_you_mean(key, section.model_fields):
        hint = f"did you mean `{prefix + '.' if prefix else ''}{close}`?"
    elif elsewhere := leaf_paths().get(key) or leaf_paths().get(did_you_mean(key, leaf_paths())):
        hint = f"did you mean `{'` or `'.join(elsewhere)}`?"
    return Problem(path, "unknown key", where, repr(given), ", ".join(section.model_fields), hint)


def _section_at(location: Iterable[Any]) -> type[Section] | None:
    kind: Any = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        field = kind.model_fields.get(part) if isinstance(kind, type) and issubclass(kind, Section) else None
        if field is None:
            return None
        kind = field.annotation
        inner = [arg for arg in get_args(kind) if isinstance(arg, type) and issubclass(arg, Section)]
        kind = inner[0] if inner else kind
    if list(location) and not isinstance(list(location)[-1], int) and get_args(kind):
        return None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _options(location: list[Any]) -> tuple[Any, ...]:
    section = _section_at(location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    values: list[Any] = []
    todo = [field.annotation] if field else []
    while todo:
        for arg in get_args(todo.pop()):
            (todo if get_args(arg) else values).append(arg)
    return tuple(value for value in values if isinstance(value, str))


def _allowed(finding: Any) -> str:
    context = finding.get("ctx", {})
    kinds = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping",
        "too_short": "at least one entry",
    }
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    kind = finding["type"]
    if kind in kinds:
        return kinds[kind]
    if kind in bounds:
        return f"{signs[bounds[kind]]} {context[bounds[kind]]}"
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "").replace(" or ", ", ")
    return str(finding["msg"])


def _type_name(value: Any) -> str:
    names = {bool: "true/false", int: "whole number", float: "number", str: "text", list: "list", dict: "mapping"}
    return names.get(type(value), "nothing" if value is None else type(value).__name__)


def _type_hint(finding: Any, given: Any) -> str:
    if isinstance(given, str) and finding["type"] in ("int_type", "float_type", "bool_type"):
        return "write the value without quotes, as a plain number or true/false"
    return ""
