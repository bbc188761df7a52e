"""Parallel coordinates: where each run's line crosses the axes, and what is said of them."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from toolkit.report.coordinates import MOST, Dimension, coordinates

LOSS = Dimension("loss", [2.0, 3.0, 4.0])


def crossings(figure: dict[str, Any], run: int) -> list[tuple[float, float]]:
    """(percent of the width, pixels from the top) of a run's line."""
    found = re.findall(r"[ML]([\d.]+) ([\d.]+)", figure["lines"][run]["path"])
    return [(float(x), float(y)) for x, y in found]


def drawn(*settings: Dimension, results: tuple[Dimension, ...] = (LOSS,)) -> dict[str, Any]:
    return coordinates("", ["a", "b", "c"], settings, results, height=100)


def test_numbers_stand_between_the_lowest_and_the_highest() -> None:
    figure = drawn(Dimension("r", [8, 12, 16]))
    assert [crossings(figure, run) for run in range(3)] == [
        [(0, 100), (100, 100)], [(0, 50), (100, 50)], [(0, 0), (100, 0)],
    ]  # fmt: skip
    (_, name, ticks), _ = figure["axes"]
    assert name == "r" and ticks == [(100, "8"), (0, "16"), (50, "12")]


def test_rates_that_are_multiples_stand_at_equal_distances() -> None:
    figure = drawn(Dimension("learning_rate", [1e-5, 1e-4, 1e-3]))
    assert [crossings(figure, run)[0][1] for run in range(3)] == pytest.approx([100, 50, 0])


@pytest.mark.parametrize("values", [["cosine", "linear", "cosine"], [True, False, True]])
def test_words_stand_apart_and_the_same_ones_together(values: list[Any]) -> None:
    figure = drawn(Dimension("name", values))
    first, second, third = (crossings(figure, run)[0][1] for run in range(3))
    assert first == third != second
    assert {text for _, text in figure["axes"][0][2]} == {str(value) for value in values}


def test_numbers_among_words_stand_by_their_size() -> None:
    figure = drawn(Dimension("micro_batch_size", [16, "auto", 4, 128]))
    assert [text for _, text in sorted(figure["axes"][0][2], reverse=True)] == ["4", "16", "128", "auto"]


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_line_is_broken_where_a_run_has_no_value(missing: Any) -> None:
    figure = drawn(Dimension("a", [1, 2, 3]), Dimension("b", [1, missing, 3]), Dimension("c", [1, 2, 3]))
    assert len(crossings(figure, 1)) == 3 and figure["lines"][1]["path"].count("M") == 2
    assert figure["lines"][0]["path"].count("M") == 1
    assert "b " not in figure["lines"][1]["spoken"]


def test_texts_of_many_values_do_not_lie_over_each_other() -> None:
    names = [str(at) for at in range(40)]
    figure = coordinates("", names, [Dimension("seed", list(range(40)))], [Dimension("loss", [2.0] * 39 + [2.001])])
    for _, _, ticks in figure["axes"]:
        heights = sorted(y for y, _ in ticks)
        assert all(after - before >= 13 for before, after in itertools.pairwise(heights))


def test_results_are_always_shown_and_settings_that_do_not_fit_are_named() -> None:
    figure = drawn(*(Dimension(f"s{at}", [1, 2, 3]) for at in range(12)))
    assert [name for _, name, _ in figure["axes"]] == [*(f"s{at}" for at in range(MOST - 1)), "loss"]
    assert figure["left_out"] == [f"s{at}" for at in range(MOST - 1, 12)]


@pytest.mark.parametrize("higher", [False, True])
def test_of_many_runs_the_best_third_is_told_from_the_others(higher: bool) -> None:
    values: list[Any] = [*range(11), math.nan]
    names = [str(value) for value in values]
    figure = coordinates("", names, [Dimension("r", values)], [Dimension("score", values, higher_is_better=higher)])
    (best, told), _ = figure["legend"]
    assert told == "best third by score"
    found = {line["spoken"].partition(":")[0] for line in figure["lines"] if line["style"] == best}
    assert found == ({"10", "9", "8", "7"} if higher else {"0", "1", "2", "3"})
    assert [line["style"] for line in figure["lines"][-4:]] == 4 * [best], "drawn over the others"
