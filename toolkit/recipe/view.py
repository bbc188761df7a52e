"""A recipe as a person reads it: one line, or every value with its origin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from toolkit.recipe.load import Loaded
from toolkit.recipe.problems import DEFAULT, origin_of


def description(file: Path) -> str:
    """The `description` of a recipe file; empty when it has none or is not YAML."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return ""
    return " ".join(str(content.get("description", "")).split()) if isinstance(content, dict) else ""


def with_origins(loaded: Loaded) -> str:
    """The resolved recipe as YAML, each value followed by where it comes from. The result loads as YAML."""
    lines = list(_lines(yaml.safe_load(loaded.to_yaml()), "", 0, loaded.origins))
    width = min(60, max(len(text) for text, _ in lines))
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines)


def _lines(values: dict[str, Any], prefix: str, depth: int, origins: dict[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else key
        indent = "  " * depth
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, path, depth + 1, origins)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield f"{indent}{key}:", ""
            for index, item in enumerate(value):
                place = origin_of(f"{path}.{index}", origins) or DEFAULT
                stated = {name: part for name, part in item.items() if part is not None}
                yield f"{indent}- {_inline(stated)}", place
        else:
            yield f"{indent}{key}: {_inline(value)}", _origin(path, origins)


def _origin(path: str, origins: dict[str, str]) -> str:
    """Where a value was written. A section's own line says nothing about a key that the section leaves out."""
    if path in origins:
        return origins[path]
    inside = [place for key, place in origins.items() if key.startswith(f"{path}.")]
    return inside[0] if inside else DEFAULT


def _inline(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...").strip()
