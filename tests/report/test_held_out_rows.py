"""Intervals of losses over rows: what they are made of, how often they hold the truth, and what is not compared."""

from __future__ import annotations

import math

import numpy as np
import pytest

from toolkit.report import held_out_rows
from toolkit.report.held_out_rows import Estimate, HeldOutRows, RowLosses, joined, of_mean, per_count


def test_an_interval_is_that_of_a_ratio_over_rows() -> None:
    x, n = np.array([12.0, 3.0, 7.5, 20.0, 0.0]), np.array([4.0, 2.0, 3.0, 8.0, 0.0])
    value, half = per_count(x, n)
    ratio = x.sum() / n.sum()
    variance = 4 / 3 * ((x - ratio * n) ** 2)[:4].sum() / n.sum() ** 2
    assert value == pytest.approx(ratio, rel=1e-12)
    # Student's quantile of three degrees of freedom, from a table.
    assert half == pytest.approx(3.18245 * math.sqrt(variance), rel=2e-3)


def test_a_mean_is_a_ratio_to_the_rows() -> None:
    assert of_mean([1.0, 0.5, 0.0]) == per_count([1.0, 0.5, 0.0], [1, 1, 1])
    # Student's quantile of two degrees of freedom, from a table.
    assert of_mean([1.0, 0.5, 0.0]).half == pytest.approx(4.30265 * 0.5 / math.sqrt(3), rel=1e-5)


def test_quantiles_are_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 5, 11, 100, 100_000):
        assert held_out_rows._student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1.3e-3)


def test_one_row_has_no_interval_and_none_no_figure() -> None:
    value, half = per_count([3.0, 0.0], [2.0, 0.0])
    assert value == 1.5 and math.isnan(half)
    assert not Estimate(value, half).is_certain
    assert all(map(math.isnan, per_count([], [])))
    assert math.isnan(per_count([math.nan, 1.0], [1.0, 1.0]).half)


@pytest.mark.parametrize("rows", [8, 40, 400])
def test_intervals_hold_the_truth_about_as_often_as_they_say(rows: int) -> None:
    """Of losses of two models that share how hard a row is, whose tokens are alike, and of their difference, which is
    known far better."""
    draw = np.random.default_rng(rows)
    held, paired, narrower = 0, 0, 0
    for _ in range(1000):
        n = draw.integers(5, 60, rows)
        hard = draw.normal(2.0, 0.5, rows)
        one = n * hard + draw.normal(0, 0.3, rows) * np.sqrt(n)
        other = n * (hard + 0.01) + draw.normal(0, 0.3, rows) * np.sqrt(n)
        loss = per_count(one, n)
        change = per_count(other - one, n)
        held += abs(loss.value - 2.0) <= loss.half
        paired += abs(change.value - 0.01) <= change.half
        narrower += change.half < loss.half
    assert 0.92 < held / 1000 < 0.98 and 0.92 < paired / 1000 < 0.98
    assert narrower == 1000 or rows < 40


def test_neighbours_are_joined_so_that_few_entries_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out_rows, "MOST", 3)
    columns = np.stack([np.arange(8.0), np.ones(8)])
    assert joined(columns) == [[3.0, 12.0, 13.0], [3.0, 3.0, 2.0]]
    assert joined(columns[:, :3]) == columns[:, :3].tolist()


def test_only_the_same_losses_of_the_same_rows_are_compared() -> None:
    own = RowLosses("rows", [2.0, 3.0], [4.0, 9.0])
    assert own.since(RowLosses("rows", [2.0, 3.0], [5.0, 9.5])) == per_count([-1.0, -0.5], [2.0, 3.0])
    assert own.since(RowLosses("others", [2.0, 3.0], [5.0, 9.5])) is None
    assert own.since(RowLosses("rows", [2.0, 4.0], [5.0, 9.5])) is None and own.since(None) is None


def test_rows_are_those_of_an_evaluation_or_not_used() -> None:
    kept = HeldOutRows(measured="rows", counts=[2.0, 3.0], sums={0: [4.0, 9.0], 4: [4.0, math.nan]})
    assert HeldOutRows.model_validate_json(kept.model_dump_json()).sums[0] == [4.0, 9.0]
    assert kept.of({"step": 0, "eval_loss": 2.6}) == RowLosses("rows", [2.0, 3.0], [4.0, 9.0])
    assert kept.of({"step": 0, "eval_loss": 2.7}) is None, "another evaluation of this step"
    assert kept.of({"step": 4, "eval_loss": math.nan}) is None and kept.of({"step": 8, "eval_loss": 2.6}) is None
    assert kept.of(None) is None


def test_a_difference_has_as_many_digits_as_its_interval_says_something_of() -> None:
    assert Estimate(-1.23456, 0.04567).texts() == ("-1.2346", "± 0.0457")
    assert Estimate(0.000012345, 0.0000346).texts() == ("+0.000012", "± 0.000035")
    # Zero has no minus.
    assert Estimate(0.0, 0.0).negative().texts() == ("+0.0000", "± 0.0000")
    assert Estimate(-0.00001, 0.01).texts() == ("+0.0000", "± 0.0100")
    assert Estimate(0.5, math.nan).texts() == ("+0.5000", "± ?")
    assert Estimate(-1.5, 0.25).negative().text() == "+1.5000 ± 0.2500 (95% interval, the same rows)"
