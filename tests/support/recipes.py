"""A user's recipe files for tests, and the values they load to."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from toolkit.recipe import Loaded, Recipe

BASE = "defaults: [{model: smollm2_135m_builtin}, {data: stdlib_docstrings}, _self_]\n"
"""The least that a recipe needs, in one line."""


def write(name: str, text: str, root: str = "recipes") -> Path:
    """Writes a YAML file below the working folder."""
    file = Path(root) / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def values(loaded: Loaded, *paths: str) -> list[Any]:
    """The values of a loaded recipe at some dotted keys."""
    result = []
    for path in paths:
        value: Any = loaded.recipe
        for part in path.split("."):
            value = getattr(value, part)
        result.append(value)
    return result


def recipe(**sections: Any) -> Recipe:
    """A recipe with these sections beside the least that it needs; nothing is composed."""
    return Recipe.model_validate({"model": {"path": "m"}, "data": {"sources": ["d.jsonl"]}, **sections})


def recipe_of(*settings: str) -> Recipe:
    """A recipe with texts of `section.key=value`, parted by spaces; values are YAML, and nothing is composed."""
    content: dict[str, Any] = {"model": {"path": "a/b"}, "data": {"sources": [{"path": "rows.jsonl"}]}}
    for setting in shlex.split(" ".join(settings)):
        path, _, text = setting.partition("=")
        section, _, key = path.partition(".")
        place = content.setdefault(section, {}) if key else content
        place[key or section] = yaml.safe_load(text)
    return Recipe.model_validate(content)


def each(key: str, values: str) -> list[str]:
    """`key=value` for each of some values, parted by spaces."""
    return [f"{key}={value}" for value in values.split()]
