"""What all pages share: the templates, and how figures and nested data are put before them.

Python computes what is shown, the templates in `templates/` say how. They escape everything they are given, and put
style and script into the page itself, so that it is one file that needs nothing from outside and can be mailed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from toolkit.common import bytes_text

_TEMPLATES = Environment(
    loader=PackageLoader("toolkit.report"),
    autoescape=select_autoescape(["html.j2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **values: Any) -> str:
    """Fills a template of `templates/`; in those named `.html.j2` every value is escaped."""
    return _TEMPLATES.get_template(template).render(values)


@dataclass(frozen=True)
class Tile:
    """A headline figure, with lines of small print.

    Attributes:
        change: What has changed, at the start of the first line; `good` says whether for the better.
        main: Whether it is as wide as two.
    """

    title: str
    value: str
    notes: tuple[str, ...] = ()
    change: str = ""
    good: bool = False
    main: bool = False


@dataclass
class Card:
    """One level of nested data: names with values, and a histogram as label, count and share of the largest count."""

    heading: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    histogram: list[tuple[str, str, float]] = field(default_factory=list)


def cards(values: Mapping[str, Any], heading: str = "") -> list[Card]:
    """Nested data as cards: flat values in one card, each deeper mapping in a card of its own."""
    card, deeper = Card(heading), []
    for key, value in values.items():
        name = f"{heading} · {title(key)}" if heading else title(key)
        if key == "histogram":
            card.histogram = _histogram(value)
        elif isinstance(value, Mapping) and not (heading and _is_flat(value)):
            deeper += cards(value, name)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            deeper += [each for index, item in enumerate(value, 1) for each in cards(item, f"{name} {index}")]
        else:
            card.rows.append((title(key), plain(value, key)))
    return [card, *deeper] if card.rows or card.histogram else deeper


def title(key: str) -> str:
    """A key as words: `ram_bytes` to `ram`, `world_size` to `world size`."""
    return key.removesuffix("_bytes").replace("_", " ")


def plain(value: Any, key: str = "") -> str:
    """A value as text; the key tells bytes and shares from other numbers."""
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return str(value)
        if key.endswith("_bytes"):
            return bytes_text(value)
        if isinstance(value, int):
            return f"{value:,}"
        if key.startswith(("share", "efficiency")):
            return f"{value:.1%}"
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{title(name)} {plain(item, name)}" for name, item in value.items())
    return str(value)


def _is_flat(values: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, Mapping | list) and value for value in values.values())


def _histogram(buckets: Iterable[Mapping[str, int]]) -> list[tuple[str, str, float]]:
    most = max((bucket["rows"] for bucket in buckets), default=0) or 1
    return [
        (f"{bucket['from']:,}\u2013{bucket['to']:,}", f"{bucket['rows']:,}", bucket["rows"] / most)
        for bucket in buckets
    ]
