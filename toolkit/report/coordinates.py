"""Parallel coordinates: an axis for each setting that differs and each result, and across them a line for each run.

With a handful of runs a table says it all; with dozens this shows which settings the good ones have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.report.charts import COLOURS, Series, nice_ticks

MOST = 9
"""Axes whose texts fit side by side."""
_FEW = 6
"""Different values up to which each is written beside its axis."""
_BEST, _OTHERS = "line nth2", "line faint nth8"
_LOG_RATIO = 8.0
"""From there on numbers above zero stand at their logarithms: learning rates and ranks are tried in multiples."""


@dataclass(frozen=True)
class Dimension:
    """What an axis shows.

    Args:
        name: Below the axis.
        values: Of each run: numbers, or anything else as text; None where a run has none.
        form: Text of a number.
        higher_is_better: Of a result.
    """

    name: str
    values: Sequence[float | str | None]
    form: Callable[[float], str] = lambda value: f"{value:.4g}"
    higher_is_better: bool = False


def coordinates(
    title: str, names: Sequence[str], settings: Sequence[Dimension], results: Sequence[Dimension], height: int = 240
) -> dict[str, Any]:
    """A figure as `coordinates.html.j2` draws it: settings from left to right, as many as fit, and then results.

    Args:
        names: Of the runs.
        results: At least one; by the first of them many runs are told apart.
        height: Of an axis, in pixels.
    """
    fit = max(0, MOST - len(results))
    shown = [*settings[:fit], *results]
    places = [100 * at / max(1, len(shown) - 1) for at in range(len(shown))]
    axes = [_axis(each, height) for each in shown]
    looks = _looks(len(names), results[0])
    lines = []
    for run, name in enumerate(names):
        points = [(x, heights[run]) for x, (_, heights) in zip(places, axes, strict=True)]
        told = [f"{each.name} {_text(each, each.values[run])}" for each in shown if not _missing(each.values[run])]
        lines.append({"style": looks[run], "path": _path(points), "spoken": f"{name}: {', '.join(told)}"})
    if len(names) > COLOURS:
        legend = [(_BEST, f"best third by {results[0].name}"), (_OTHERS, "others")]
        # The best over the others.
        lines.sort(key=lambda line: line["style"] == _BEST)
    else:
        legend = list(zip(looks, names, strict=True))
    return {
        "title": title,
        "height": height,
        "axes": [(x, each.name, ticks) for x, each, (ticks, _) in zip(places, shown, axes, strict=True)],
        "lines": lines,
        "legend": legend,
        "left_out": [each.name for each in settings[fit:]],
    }


def _looks(count: int, result: Dimension) -> list[str]:
    """A colour for each line; of more lines than colours one for the best third by a result, and one for the others."""
    if count <= COLOURS:
        return [Series("", (), (), number=run + 1).look for run in range(count)]
    sign = -1 if result.higher_is_better else 1
    values = [math.inf if _missing(each) else sign * float(each) for each in result.values]  # type: ignore[arg-type]
    limit = sorted(values)[count // 3 - 1]
    return [_BEST if value <= limit < math.inf else _OTHERS for value in values]


def _axis(dimension: Dimension, height: int) -> tuple[list[tuple[float, str]], list[float]]:
    """Ticks with their pixels from the top, and the pixels of each run; NaN where it has no value."""
    known = [value for value in dimension.values if not _missing(value)]
    numbers = [value for value in known if isinstance(value, int | float)]
    if len(numbers) < len(known) or any(isinstance(value, bool) for value in numbers):
        # Numbers among words, as of a micro-batch that some leave to `auto`, by their size.
        texts = list(dict.fromkeys(_text(dimension, value) for value in sorted(known, key=_order)))
        of_text = {text: height * (1 - (at + 0.5) / len(texts)) for at, text in enumerate(texts)}
        heights = [math.nan if _missing(each) else of_text[_text(dimension, each)] for each in dimension.values]
        return [(y, text) for text, y in of_text.items()], heights
    different = sorted(set(numbers))
    low, high = (different[0], different[-1]) if different else (0.0, 0.0)
    log = low > 0 and high / low >= _LOG_RATIO

    def place(value: float) -> float:
        if low == high:
            return height / 2
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return height * (1 - share)

    ticks = different if len(different) <= _FEW else [low, *nice_ticks(low, high), high]
    ticks = [each for each in ticks if low <= each <= high]
    heights = [math.nan if _missing(each) else place(float(each)) for each in dimension.values]  # type: ignore[arg-type]
    return _apart([(place(each), dimension.form(each)) for each in ticks]), heights


def _apart(ticks: list[tuple[float, str]], least: float = 13.0) -> list[tuple[float, str]]:
    """Without those whose texts would lie over others, the ends first."""
    kept: list[tuple[float, str]] = []
    for each in (*ticks[:1], *ticks[-1:], *ticks[1:-1]):
        if all(abs(each[0] - other[0]) >= least for other in kept):
            kept.append(each)
    return kept


def _order(value: float | str | None) -> tuple[float, str]:
    """Numbers by their size, and then words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (float(value), "") if is_number else (math.inf, str(value))  # type: ignore[arg-type]


def _missing(value: float | str | None) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _text(dimension: Dimension, value: float | str | None) -> str:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return dimension.form(float(value)) if plain else str(value)  # type: ignore[arg-type]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """SVG path through the axes on which a run has a value, broken at the others."""
    path, pen = "", "M"
    for x, y in points:
        if math.isfinite(y):
            path += f"{pen}{x:.3f} {y:.2f}"
            pen = "L"
        else:
            pen = "M"
    return path
