"""A recipe for people and editors: one line, every value with its origin, JSON Schema, Markdown, or a diff.

The schema's classes are the only source: pydantic makes the JSON Schema, to which the short forms of sections are
added, and the tables of `docs/recipes.md` are written from the same fields. A copy is loaded and compared before it is
kept, so that it cannot say something else than what was asked for.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.common import UserError
from toolkit.files import write_new
from toolkit.recipe.base import Section
from toolkit.recipe.compose import Composed, compose_recipe
from toolkit.recipe.dotted import inline
from toolkit.recipe.errors import DEFAULT, as_text, origin_of
from toolkit.recipe.files import NAME, options, read, recipe_folders, search_order, shipped_recipes
from toolkit.recipe.layer import Layer, inherited, left_split
from toolkit.recipe.load import Loaded, load
from toolkit.recipe.overrides import parse
from toolkit.recipe.schema import Recipe, sections

_ANNOTATIONS = ("title", "description", "default")
_KINDS = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "mapping"}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
_SENTENCE_END = re.compile(r"(?<=[.])(?<!e[.]g[.])(?<! et al[.]) ")


def description(file: Path) -> str:
    """The `description` of a recipe file; empty when it has none or is not YAML."""
    try:
        return " ".join(str(read(file).values.get("description") or "").split())
    except OSError:
        return ""


def with_origins(loaded: Loaded, most: int | None = None) -> str:
    """The resolved recipe as YAML, each value followed by where it comes from. The result loads as YAML.

    Args:
        most: How many lines of what no schema limits, such as sources and keys of `extra`, are kept; None for all.
    """
    # A section's own line says nothing about a key that the section leaves out.
    outer = {*sections(), *_inner_sections(loaded.recipe)}
    origins = {key: place for key, place in loaded.origins.items() if key not in outer}
    if loaded.recipe.aligns:
        origins.setdefault("optimizer.learning_rate", f"default of {loaded.recipe.objective}")
    elif loaded.recipe.method.name != "full":
        origins.setdefault("optimizer.learning_rate", "default of adapters")
    lines = list(_lines(yaml.safe_load(loaded.to_yaml()), "", 0, origins))
    own = {*Recipe.model_fields} | {f"{name}.{key}" for name, kind in sections().items() for key in kind.model_fields}
    others = [line for line in lines if line[0] not in own]
    left_out = {id(line) for line in (others[most:] if most else ())}
    lines = [line for line in lines if id(line) not in left_out]
    width = min(60, max(len(text) for _, text, _ in lines))
    texts = [f"{text:<{width}}  # {origin}" if origin else text for _, text, origin in lines]
    return "\n".join([*texts, *([f"# … and {len(left_out):,} more lines: {loaded.file}"] if left_out else [])])


def _inner_sections(recipe: Recipe) -> Iterator[str]:
    """Dotted keys of a recipe whose values are sections within sections."""
    for name, kind in sections().items():
        section = getattr(recipe, name)
        yield from (f"{name}.{key}" for key in kind.model_fields if isinstance(getattr(section, key), Section))


def _lines(values: dict[str, Any], prefix: str, depth: int, origins: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Dotted key, text and origin of each line."""
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else key
        indent = "  " * depth
        if isinstance(value, dict) and value:
            yield path, f"{indent}{key}:", ""
            yield from _lines(value, path, depth + 1, origins)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield path, f"{indent}{key}:", ""
            for index, item in enumerate(value):
                place = origin_of(f"{path}.{index}", origins) or DEFAULT
                stated = {name: part for name, part in item.items() if part is not None}
                yield f"{path}.{index}", f"{indent}- {inline(stated)}", place
        else:
            yield path, f"{indent}{key}: {inline(value)}", origin_of(path, origins) or DEFAULT


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors. Keys that groups may supply are not required."""
    schema = Recipe.model_json_schema()
    schema.pop("required", None)
    for definition in schema["$defs"].values():
        if definition.get("title") != "Source":
            definition.pop("required", None)
    extends = "The recipe that this one extends, by name; a list for several, the later ones winning."
    names = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}
    schema["properties"]["defaults"] = {"description": extends, "anyOf": [{"type": "string"}, names]}
    source = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Source"}]}
    for key in ("sources", "eval_sources"):
        schema["$defs"]["Data"]["properties"][key]["items"] = source
    for name, section in sections().items():
        schema["properties"][name] = _with_words(name, section, schema)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Recipe"
    return schema


def _with_words(name: str, section: type[Section], schema: dict[str, Any]) -> dict[str, Any]:
    """A section as keys, or as a word: one of its options, or a value of its main key."""
    keys: dict[str, Any] = schema["$defs"][section.__name__]["properties"]
    main = {key: value for key, value in keys.get(section.main_key or "", {}).items() if key not in _ANNOTATIONS}
    shipped = options(name, [shipped_recipes()])
    what = f"A ready-made option, by the name of its file in recipes/{name}/; the other keys of this section change it."
    keys["option"] = {"description": what, "type": "string", "examples": shipped}
    names = [*shipped, *(name for name in main.get("enum", []) if name not in shipped)]
    forms = [{"$ref": f"#/$defs/{section.__name__}"}, {"type": "string", "examples": names}]
    forms += [main] if main and main.get("type") != "string" else []
    return {"description": _plain(section.__doc__ or ""), "anyOf": forms}


def markdown() -> str:
    """Every section and key with type, default and meaning, as Markdown."""
    schema = Recipe.model_json_schema()
    own = {key: field for key, field in schema["properties"].items() if key not in sections()}
    lines = ["## Keys of the recipe itself", "", *_table(own)]
    for name, section in sections().items():
        definition = schema["$defs"][section.__name__]
        lines += ["", f"## {name}", "", _plain(definition["description"])]
        if shipped := options(name, [shipped_recipes()]):
            lines += ["", f"Shipped options: {', '.join(f'`{option}`' for option in shipped)}."]
        if section.main_key:
            word = "A word that is no option" if shipped else "A word"
            lines += ["", f"{word}, `{name}: WORD`, sets `{name}.{section.main_key}`."]
        lines += ["", *_table(definition["properties"])]
        for key, nested in _nested(definition, schema):
            lines += ["", f"### {name}.{key}", "", _plain(nested["description"]), "", *_table(nested["properties"])]
        if name == "data":
            source = schema["$defs"]["Source"]
            lines += ["", "### A source", "", _plain(source["description"]), "", *_table(source["properties"])]
    return "\n".join(lines) + "\n"


def _nested(definition: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys of a section that have keys of their own, and the definitions of these."""
    for key, field in definition["properties"].items():
        for form in field.get("anyOf", ()):
            if "$ref" in form:
                yield key, schema["$defs"][form["$ref"].rpartition("/")[2]]


def keys_text() -> str:
    """Every key with its values, its default and the first sentence of what it means, for `--help`."""
    schema = Recipe.model_json_schema()
    lines = ["keys of a recipe, as KEY: VALUES (DEFAULT)"]

    def add(fields: Mapping[str, dict[str, Any]], prefix: str) -> None:
        for key, field in fields.items():
            default = as_text(field["default"]) if "default" in field else "required"
            first = _SENTENCE_END.split(_plain(field["description"]))[0]
            for text, indent in ((f"{prefix}{key}: {_values(field)} ({default})", 2), (first, 6)):
                lines.append(textwrap.indent(textwrap.fill(text.replace("`", ""), 78 - indent), " " * indent))

    add({key: field for key, field in schema["properties"].items() if key not in sections()}, "")
    for name, section in sections().items():
        definition = schema["$defs"][section.__name__]
        add(definition["properties"], f"{name}.")
        for key, nested in _nested(definition, schema):
            add(nested["properties"], f"{name}.{key}.")
    lines += ["", "keys of a source, in data.sources and data.eval_sources"]
    add(schema["$defs"]["Source"]["properties"], "")
    return "\n".join(lines) + "\n"


def _table(fields: Mapping[str, dict[str, Any]]) -> list[str]:
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in fields.items():
        default = f"`{as_text(field['default'])}`" if "default" in field else "required"
        cells = (f"`{key}`", _values(field), default, _plain(field["description"]))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _values(schema: Mapping[str, Any]) -> str:
    """What fits a JSON Schema, in plain words: `whole number, above 0`, `list of text`, the allowed values."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_values, schema["anyOf"])))
    if "$ref" in schema:
        return "source" if schema["$ref"].endswith("/Source") else "keys of its own"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = f"list of {_values(schema['items'])}" if "items" in schema else _KINDS.get(schema["type"], schema["type"])
    bounds = [f"{word} {schema[key]:.16g}" for key, word in _BOUNDS.items() if key in schema]
    bounds += ["not empty"] if "minItems" in schema else []
    return ", ".join([kind, *bounds])


def _plain(text: str) -> str:
    return " ".join(text.split())


def write_diff(parent: str, overrides: Sequence[str], name: str, folder: str | Path | None = None) -> Path:
    """Writes `NAME.yaml`, which extends `parent` and loads to exactly `parent` with the overrides.

    Args:
        parent: Name or path of the recipe to extend.
        overrides: As for `load`.
        name: Name of the new recipe, without `.yaml`.
        folder: The user's recipes folder; by default `recipes/` of the working folder. It is made if need be.

    Raises:
        RecipeError: The parent or the overrides are wrong.
        UserError: The name cannot be used, or the difference cannot be written as a file.
    """
    own = Path(folder or "recipes")
    folder = folder if own.is_dir() else None
    wanted, recipe = compose_recipe(parent, overrides, folder), load(parent, overrides, folder).recipe
    file = own / f"{name}.yaml"
    _check_place(name, file, wanted, recipe_folders(folder))
    chosen = parse(overrides, search_order(wanted.file, recipe_folders(folder))).groups
    base = compose_recipe(parent, [f"{group}={option}" for group, option in chosen.items()], folder)
    values = _changed(wanted.values, base.values, recipe)
    # An interpolation in the description must not be filled in, least of all when cut in two.
    change = " ".join(overrides).replace("${", "{") or "no change yet"
    values.setdefault("description", f"{wanted.name} with {change}"[:100])
    if "data" not in chosen and _is_other_data(wanted.values["data"], base.values["data"]):
        values["data"] = values["data"]["sources"]  # A word leaves the parent's format and columns behind.
    content: dict[str, Any] = {"description": values.pop("description"), "defaults": wanted.file.stem}
    for group, option in chosen.items():
        content[group] = {"option": option, **values.pop(group)} if group in values else option
    content |= values
    try:
        write_new(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))
    except FileExistsError:
        raise _exists(file) from None
    same = False
    try:
        again = load(name, folder=own).recipe
        same = again.model_dump(exclude={"description"}) == recipe.model_dump(exclude={"description"})
    finally:
        if not same:
            file.unlink()
    if not same:
        raise UserError(
            "a file that extends a recipe cannot take keys out of one of its mappings",
            f"copy {wanted.file} by hand and edit it; nothing was written",
        )
    return file


def _is_other_data(wanted: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether the data differ as `data=OTHER` makes them."""
    others = inherited(base) | {"sources": wanted["sources"]}
    Layer(left=left_split(base)).hold_out(others)
    return wanted["sources"] != base["sources"] and others == wanted


def _exists(file: Path) -> UserError:
    return UserError(f"{file} exists already", "choose another name; nothing was written")


def _check_place(name: str, file: Path, parent: Composed, folders: Sequence[Path]) -> None:
    parts = name.split("/")
    if not NAME.fullmatch(name) or parts[-1].startswith("_") or any(part in sections() for part in parts[:-1]):
        allowed = "letters, digits, _ - . and /, no leading _, and no folder named like a section"
        raise UserError(f"{name!r} cannot name a recipe", f"use {allowed}")
    if os.path.lexists(file):
        raise _exists(file)
    if parts[-1] == parent.file.stem:
        raise UserError(f"a recipe named {parts[-1]} cannot extend {parent.name}", "choose another name")
    beside = parent.file.parent
    if beside not in folders and file.parent.resolve() != beside:
        place = parent.name.rpartition("/")[0]
        raise UserError(f"{parent.name} can only be extended in its own folder", f"name the copy {place}/{parts[-1]}")


def _changed(wanted: dict[str, Any], base: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Keys whose values differ, by section; a key that was taken out gets its default back."""
    changed: dict[str, Any] = {}
    for key in Recipe.model_fields:
        new, old = wanted.get(key), base.get(key)
        if key not in sections() or isinstance(new, str) or isinstance(old, str):
            if new != old:
                changed[key] = new if key in wanted else getattr(recipe, key)
            continue
        new, old = new or {}, old or {}
        defaults = getattr(recipe, key).model_dump(exclude_unset=False)
        leaves = {leaf: new.get(leaf, defaults[leaf]) for leaf in defaults if new.get(leaf, old) != old.get(leaf, old)}
        if leaves:
            changed[key] = leaves
    return changed
