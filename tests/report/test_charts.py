"""Charts: any values are drawn, and thinning, smoothing and ticks keep what matters."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from pages import Page

from toolkit.report.charts import MAX_POINTS, Series, chart, downsample, nice_ticks, smooth
from toolkit.report.page import render


def drawn(title: str, series: list[Series], **options: Any) -> str:
    return render("chart.html.j2", chart=chart(title, series, **options))


def test_downsampling_keeps_ends_and_extremes() -> None:
    y = [math.sin(index / 500) for index in range(100_000)]
    y[31_337], y[77_777], y[50_000] = 99.0, -99.0, math.nan
    points = downsample(range(100_000), y)
    assert len(points) <= MAX_POINTS
    assert points[0][0] == 0 and points[-1][0] == 99_999
    assert (31_337, 99.0) in points and (77_777, -99.0) in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert downsample([1, 2], [3, 4]) == [(1, 3), (2, 4)]


def test_missing_values_are_marked_where_they_are_and_close_ones_once() -> None:
    y = [1.0] * 1001
    for x in (300, 310, 319, 750, 1000):
        y[x] = math.nan
    assert chart("Loss", [Series("training", range(1001), y)])["broken"] == pytest.approx([30, 75, 100])


def test_lines_of_one_style_have_colours_of_their_own() -> None:
    lines = [Series(name, [1, 2], [1, 2]) for name in ("chosen", "rejected", "margin")]
    assert [look for look, _ in chart("Rewards", lines)["legend"]] == ["line nth1", "line nth2", "line nth3"]
    told = [Series("training", [1, 2], [1, 2]), Series("held-out", [1, 2], [1, 2], "points")]
    assert [look for look, _ in chart("Loss", told)["legend"]] == ["line", "points"]


def test_smoothing_follows_the_curve_and_ignores_spikes() -> None:
    line = [5.0 - 0.01 * index for index in range(400)]
    assert smooth(line)[200] == pytest.approx(line[200])
    spiked = [*line]
    spiked[200], spiked[100] = 1e6, math.nan
    assert max(abs(a - b) for a, b in zip(smooth(spiked), line, strict=True)) < 0.1
    assert smooth([]) == []
    assert smooth([1.0]) == [1.0]
    assert all(math.isnan(value) for value in smooth([math.nan] * 50))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (2.1, 4.3, (2, 2.5, 3, 3.5, 4, 4.5)),
        (0, 2e-5, (0, 5e-6, 1e-5, 1.5e-5, 2e-5)),
        (1, 100_000, (0, 20_000, 40_000, 60_000, 80_000, 100_000)),
        (-3, 7, (-4, -2, 0, 2, 4, 6, 8)),
    ],
)
def test_ticks_are_round_numbers_around_the_data(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0],
        [5.0, 5.0],
        [-1.0, -2.0],
        [1e-30, 2e-30],
        [1e-300, 1e299],
        [math.inf, math.nan],
        [1.0, 1.0 + 1e-12],
        [3.4e38, 1.0],
    ],
)
@pytest.mark.parametrize("options", [{}, {"from_zero": True}, {"may_log": True}])
def test_any_values_make_a_chart(values: list[float], options: dict[str, bool]) -> None:
    html = drawn("Anything", [Series("line", [1.0, 2.0], values)], **options)
    Page(html)
    for y in re.findall(r'(?:cy|y1)="(-?[\d.]+|nan|inf)"', html):
        assert -1 <= float(y) <= 185


def test_few_large_values_get_a_logarithmic_axis() -> None:
    x = [float(step) for step in range(1, 101)]
    y = [1.0 + step % 3 for step in range(99)] + [8000.0]
    html = drawn("Gradient norm", [Series("norm", x, y)], may_log=True)
    assert "logarithmic" in html
    assert "10000</text>" in html
