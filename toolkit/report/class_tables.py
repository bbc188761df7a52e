"""How well each class is told, and what it is taken for, as the tables of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.report.load import number

_SHOWN = 30
"""Classes whose confusion fits on a page."""
_HEADS = ("precision", "recall", "F1")


@dataclass(frozen=True)
class ClassTable:
    """A table of figures.

    Args:
        title: What it shows, in a sentence.
        heads: Of its columns but the first.
        rows: Each with its name first.
    """

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


def class_tables(result: Mapping[str, Any] | None) -> list[ClassTable]:
    """Those of an evaluation: classes, entities, and the confusion matrix; none where it tells no classes apart."""
    result = result or {}
    tables = []
    for key, unit, title in (
        ("eval_classes", "rows", "Of the held-out labels of each class"),
        ("eval_entities", "entities", "Of the held-out entities of each type, with their borders"),
    ):
        if rows := _rows(result.get(key), unit):
            tables.append(ClassTable(title, (*_HEADS, unit if unit == "entities" else "labels"), rows))
    names, confusion = [*(_named(result.get("eval_classes")))], result.get("eval_confusion")
    if names and len(names) <= _SHOWN and isinstance(confusion, list) and len(confusion) == len(names):
        counted = [
            (name, *(f"{each:,}" for each in row if isinstance(each, int)))
            for name, row in zip(names, confusion, strict=True)
            if isinstance(row, list)
        ]
        if all(len(row) == len(names) + 1 for row in counted):
            tables.append(
                ClassTable("What labels of each class (rows) were taken for (columns)", tuple(names), counted)
            )
    return tables


def _named(table: Any) -> Mapping[str, Any]:
    return table if isinstance(table, dict) else {}


def _rows(table: Any, unit: str) -> list[tuple[str, ...]]:
    found = []
    for name, figures in _named(table).items():
        values = [number(_named(figures).get(key)) for key in ("precision", "recall", "f1", unit)]
        if all(value is not None for value in values):
            *scores, count = values
            found.append((name, *(f"{score:.3f}" for score in scores), f"{int(count or 0):,}"))
    return found
