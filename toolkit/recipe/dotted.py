"""Nested values by dotted keys, and as text for a file or a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml


def interpolated(values: Any) -> Iterator[tuple[str, str]]:
    """Dotted path and text of every value that is still to be filled in."""
    texts = ((path, value) for path, value in parts(values) if isinstance(value, str))
    return ((path, text) for path, text in texts if "${" in text or text == "???")


def parts(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything in nested values, outer ones first."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        below = f"{path}.{key}" if path else str(key)
        yield below, value
        yield from parts(value, below)


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key, and of `optimizer.name` the section; whole keys where that is not clear."""
    short = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return [key if short.count(name) > 1 or name.isdigit() else name for key, name in zip(keys, short, strict=True)]


def value_at(data: Any, parts: Sequence[str]) -> Any:
    """The part of nested values at a dotted path; None if there is none."""
    for part in parts:
        if isinstance(data, list):
            data = data[int(part)] if part.isdigit() and int(part) < len(data) else None
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def remove(data: Any, path: str) -> bool:
    """Takes the value at a dotted path out of nested values; False if there is none."""
    *parents, last = path.split(".")
    data = value_at(data, parents)
    if isinstance(data, list) and last.isdigit() and int(last) < len(data):
        del data[int(last)]
        return True
    return isinstance(data, dict) and data.pop(last, data) is not data


def split_outside(text: str, separators: str) -> list[str]:
    """Splits at characters outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character in separators and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def inline(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def in_yaml(text: str, value: Any) -> str:
    """A value as it was written, or written anew where that is no YAML: `*_proj` and `@x` need quotes."""
    try:
        yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        return inline(value)
    return text


def typed(change: str) -> str:
    """A change such as `write batch.seq_len: 512` as it is typed in a shell: `write batch.seq_len=512`."""
    if "; write " in change:
        return "; ".join(map(typed, change.split("; ")))
    match = re.fullmatch(r"write (?P<key>[a-z_]\w*(\.[a-z_]\w*)*): (?P<text>.+)", change)
    if not match or " or " in change:
        return change
    value = yaml.safe_load(in_yaml(match["text"], match["text"]))
    return f"write {shlex.quote(match['key'] + '=' + (value if isinstance(value, str) else _typed(value)))}"


def _typed(value: Any) -> str:
    """A value, or a part of one, in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{', '.join(map(_typed, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_typed(each)}' for key, each in value.items())}}}"
    is_plain = not isinstance(value, str) or re.fullmatch(r"[\w./:+*@?%…-]+", value)
    return inline(value) if is_plain else f"'{value}'"
