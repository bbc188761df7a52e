"""A user's recipe files for tests, and the values they load to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.recipe import Loaded

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
