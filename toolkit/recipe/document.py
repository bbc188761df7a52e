"""The schema for people and for editors: `docs/recipes.md` and `recipes/schema.json`, both made from the docstrings."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from toolkit.recipe.problems import as_text
from toolkit.recipe.schema import Recipe, Section, Source, sections

_KINDS = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "NoneType": "null"}
_BOUNDS = ((Gt, "gt", "above"), (Ge, "ge", "at least"), (Lt, "lt", "below"), (Le, "le", "at most"))


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors. Keys that groups may supply are not required."""
    schema = Recipe.model_json_schema()
    schema.pop("required", None)
    for definition in schema["$defs"].values():
        if definition.get("title") != "Source":
            definition.pop("required", None)
    schema["properties"]["defaults"] = {
        "type": "array",
        "description": "What this recipe extends: another recipe's name, or `group: option`; `_self_` comes last.",
        "items": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    }
    source = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Source"}]}
    for key in ("sources", "eval_sources"):
        schema["$defs"]["Data"]["properties"][key]["items"] = source
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Recipe"
    return schema


def markdown() -> str:
    """Every section and key with type, default and meaning, as Markdown."""
    lines = ["## Keys of the recipe itself", "", *_table(Recipe, skip=tuple(sections()))]
    for name, section in sections().items():
        lines += ["", f"## {name}", "", _plain(section.__doc__ or "")]
        if section.main_key:
            lines += ["", f"`{name}=VALUE` on the command line sets `{name}.{section.main_key}`."]
        lines += ["", *_table(section)]
        if name == "data":
            lines += ["", "### A source", "", _plain(Source.__doc__ or ""), "", *_table(Source)]
    return "\n".join(lines) + "\n"


def _table(section: type[Section], skip: tuple[str, ...] = ()) -> list[str]:
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in section.model_fields.items():
        if key not in skip:
            default = "required" if field.default is PydanticUndefined else f"`{as_text(field.default)}`"
            cells = (f"`{key}`", _values(field), default, _plain(field.description or ""))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _values(field: FieldInfo) -> str:
    bounds = [
        f"{word} {getattr(one, attribute):g}"
        for one in field.metadata
        for kind, attribute, word in _BOUNDS
        if isinstance(one, kind)
    ]
    bounds += ["not empty" for one in field.metadata if isinstance(one, MinLen)]
    return ", ".join([" or ".join(dict.fromkeys(_kinds(field.annotation))), *bounds])


def _kinds(annotation: Any) -> Iterator[str]:
    """The words for a type: `whole number above 0`, `list of text`, the allowed values themselves."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        yield ", ".join(f"`{value}`" for value in args)
    elif origin is typing.Annotated:
        field = FieldInfo.from_annotation(annotation)
        yield _values(field)
    elif origin is list:
        yield f"list of {' or '.join(_kinds(args[0]))}"
    elif origin is dict:
        yield "mapping"
    elif args:
        for arg in args:
            yield from _kinds(arg)
    else:
        yield "source" if annotation is Source else _KINDS[annotation.__name__]


def _plain(text: str) -> str:
    return " ".join(text.split())
