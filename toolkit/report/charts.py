"""Line charts over training steps: axes, ticks, thinned and smoothed lines, as figures that a template draws as SVG.

The lines live in a nested SVG that stretches with the page, while text and markers are placed in percent, so that they
keep their size on a phone and on paper. A plotting library would draw an image of one width, or bring a script a
hundred times as large as the page.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

MAX_POINTS = 1000
_INTERVALS = 5
"""Most intervals between the ticks of an axis, before its ends are rounded."""
MAX_MARKS = 50
FEW_POINTS = 16
LOG_RATIO = 50.0
COLOURS = 8
"""Number of colours for lines of equal standing; the ninth looks like the first."""

Style = Literal["line", "faint", "points"]
"""A line, raw values faintly behind a smoothed line, or a thin line with markers."""


@dataclass(frozen=True)
class Series:
    """One line of a chart: a value at each of rising positions. Values that are not finite are marked, not drawn.

    Args:
        number: Which of several lines of equal standing it is, for a colour of its own; 0 has `chart` choose.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "line"
    number: int = 0

    @property
    def look(self) -> str:
        """The line's classes in `style.css`."""
        return f"{self.style} nth{(self.number - 1) % COLOURS + 1}" if self.number else self.style


@dataclass(frozen=True)
class Axis:
    """Maps values to 0..1 and knows its tick marks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def position(self, value: float) -> float:
        """Share of the axis below `value`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def chart(
    title: str,
    series: Sequence[Series],
    *,
    height: int = 180,
    from_zero: bool = False,
    may_log: bool = False,
    form: Callable[[float], str] = lambda value: f"{value:.5g}",
) -> dict[str, Any]:
    """A figure with title, legend, axes and lines over training steps, as `chart.html.j2` draws it.

    Args:
        title: What is shown, with its unit.
        series: Lines over a common axis of steps; empty ones are left out.
        height: Height of the plot in pixels.
        from_zero: Whether the value axis starts at zero.
        may_log: Whether a logarithmic axis is used when a few values tower over the rest.
        form: Text of a tick and of a value under the pointer.
    """
    series = _told_apart([line for line in series if len(line.x)])
    if not series:
        return {"title": title, "lines": []}
    xs = [x for line in series for x in (line.x[0], line.x[-1])]
    x_axis = _step_axis(min(xs), max(xs))
    y_axis = _value_axis(sorted(value for line in series for value in line.y if _drawable(value)), from_zero, may_log)
    broken = {x for line in series for x, y in zip(line.x, line.y, strict=True) if not _drawable(y)}
    legend: list[tuple[str, str]] = [(line.look, line.label) for line in series] if len(series) > 1 else []
    if broken:
        legend.append(("broken", f"{steps_text(broken)} without a finite value"))
    if y_axis.log:
        legend.append(("", "logarithmic"))
    ticks = zip(y_axis.ticks, _tick_texts(y_axis.ticks, form), strict=True)
    return {
        "title": title,
        "height": height,
        "rows": [((1 - y_axis.position(tick)) * height, text) for tick, text in ticks],
        "columns": [(x_axis.position(tick) * 100, f"{tick:,.0f}") for tick in x_axis.ticks],
        "lines": [_line(line, x_axis, y_axis, height) for line in series],
        "broken": _marks([x_axis.position(x) for x in sorted(broken)]),
        "legend": legend,
        "pointer": _pointer_data(series, x_axis, form),
        "spoken": _spoken(title, series, form),
    }


def _told_apart(series: Sequence[Series]) -> list[Series]:
    """With a colour of its own for each where several lines would look alike."""
    alike = {style for style, count in Counter(line.style for line in series).items() if count > 1}
    if not alike or any(line.number for line in series):
        return [*series]
    return [replace(line, number=at) if line.style in alike else line for at, line in enumerate(series, start=1)]


def _line(line: Series, x_axis: Axis, y_axis: Axis, height: int) -> dict[str, Any]:
    """A series as it is drawn: an SVG path, and markers."""
    points = [
        (x_axis.position(x) * 100, (1 - y_axis.position(y)) * height if _drawable(y) else math.nan)
        for x, y in downsample(line.x, line.y)
    ]
    dots = points[:: max(len(points) // MAX_MARKS, 1)] if line.style == "points" or len(points) <= FEW_POINTS else []
    return {"style": line.look, "path": _path(points), "dots": [point for point in dots if _drawable(point[1])]}


def _marks(positions: Sequence[float]) -> list[float]:
    """Where values are missing, in percent of the width: of marks that would overlap, the first."""
    first = {int(each * MAX_MARKS): each for each in reversed(positions)}
    return [each * 100 for each in sorted(first.values())]


def downsample(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points that keep the ends and, in every stretch, the smallest and the largest value."""
    if len(x) <= MAX_POINTS:
        return list(zip(x, y, strict=True))
    buckets = (MAX_POINTS - 2) // 2
    inner = len(x) - 2
    kept = [0]
    for bucket in range(buckets):
        stretch = range(1 + bucket * inner // buckets, 1 + (bucket + 1) * inner // buckets)
        drawn = [index for index in stretch if _drawable(y[index])] or [stretch[0]]
        kept += sorted({min(drawn, key=y.__getitem__), max(drawn, key=y.__getitem__)})
    kept.append(len(x) - 1)
    return [(x[index], y[index]) for index in kept]


def smooth(y: Sequence[float]) -> list[float]:
    """Moving average of the middle values in a twentieth of the points: one spike leaves no plateau.

    What is not finite is left out; where nothing else is in reach, the result is NaN.
    """
    half = len(y) // 40
    window: list[float] = []
    smoothed = []
    start = stop = 0
    for index in range(len(y)):
        # Towards both ends the window shrinks to stay centred, but not so far that the ends jump with single steps.
        reach = max(min(half, index, len(y) - 1 - index), half // 4)
        low, high = max(index - reach, 0), min(index + reach + 1, len(y))
        for value in y[stop:high]:
            if _drawable(value):
                bisect.insort(window, value)
        for value in y[start:low]:
            if _drawable(value):
                window.pop(bisect.bisect_left(window, value))
        start, stop = low, max(stop, high)
        edge = max(len(window) // 4, len(window) // 2 - 25)
        middle = window[edge : len(window) - edge]
        smoothed.append(sum(middle) / len(middle) if middle else math.nan)
    return smoothed


def nice_ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that enclose `low` to `high`."""
    raw = (high - low) / _INTERVALS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounding to the step's own digits keeps 0.30000000000000004 off the page.
    digits = max(0, -math.floor(math.log10(step)))
    return tuple(round(index * step, digits + 1) for index in range(first, last + 1))


def _drawable(value: float) -> bool:
    """Whether a value is finite, and small enough that differences of two values are finite as well."""
    return abs(value) < 1e300


def _value_axis(values: Sequence[float], from_zero: bool, may_log: bool) -> Axis:
    """Axis for sorted finite values."""
    if not values:
        return Axis(0.0, 1.0, ())
    low, high = values[0], values[-1]
    if may_log and low > 0 and high > LOG_RATIO * values[len(values) // 2]:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = max(1, math.ceil(len(decades) / 6))
        ticks = tuple(10.0**decade for decade in decades[::every])
        return Axis(10.0 ** decades[0], 10.0 ** decades[-1], ticks, log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
        high = high if high > low else 1.0
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    ticks = nice_ticks(low, high)
    return Axis(ticks[0], ticks[-1], ticks)


def _step_axis(low: float, high: float) -> Axis:
    """Axis for steps: whole-number ticks inside the range of the data."""
    if low == high:
        return Axis(low - 0.5, high + 0.5, (low,))
    ticks = nice_ticks(low, high)
    return Axis(low, high, tuple(tick for tick in ticks if low <= tick <= high and tick == int(tick)))


def _tick_texts(ticks: Sequence[float], form: Callable[[float], str]) -> list[str]:
    """Texts of an axis's ticks, with the same number of decimals on all but zero."""
    texts = [form(tick) for tick in ticks]
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    if all(re.fullmatch(r"-?\d+(\.\d+)?", text) for text in texts):
        return ["0" if tick == 0 else f"{tick:.{decimals}f}" for tick in ticks]
    return texts


def _path(points: Sequence[tuple[float, float]]) -> str:
    """SVG path, broken where a value is missing; a lone point becomes a dot through its round cap."""
    path = ""
    for drawable, run in itertools.groupby(points, lambda point: _drawable(point[1])):
        texts = [f"{x:.3f} {y:.2f}" for x, y in run]
        if drawable:
            path += f"M{'L'.join(texts)}{'h0' if len(texts) == 1 else ''}"
    return path


def _pointer_data(series: Sequence[Series], x_axis: Axis, form: Callable[[float], str]) -> str:
    """What the read-out under the pointer needs: per line its label, steps and ready-made texts."""
    lines = []
    for line in series:
        points = downsample(line.x, line.y)
        texts = [form(y) if _drawable(y) else str(y) for _, y in points]
        lines.append({"label": line.label, "x": [x for x, _ in points], "text": texts})
    return json.dumps({"low": x_axis.low, "high": x_axis.high, "lines": lines}, separators=(",", ":"))


def _spoken(title: str, series: Sequence[Series], form: Callable[[float], str]) -> str:
    parts = []
    for line in series:
        known = [value for value in line.y if _drawable(value)]
        if known and line.style != "faint":
            parts.append(f"{line.label} from {form(known[0])} to {form(known[-1])}")
    return f"{title}: {', '.join(parts) or 'no finite value'}"


def steps_text(steps: Set[float]) -> str:
    """The first of some steps, and how many more there are: `steps 3, 5, 8 and 2 more`."""
    ordered = sorted(steps)
    more = f" and {len(ordered) - 3:,} more" if len(ordered) > 3 else ""
    return f"step{'s' if len(ordered) > 1 else ''} {', '.join(f'{step:,.0f}' for step in ordered[:3])}{more}"
