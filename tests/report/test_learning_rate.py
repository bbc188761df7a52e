"""The best learning rate of a sweep: found where the loss is least, as sure as it says, and no surer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from toolkit.common import UserError
from toolkit.report.learning_rate import Estimate, Point, best_rate, for_width

RATES = [1.25e-4 * 2**at for at in range(7)]


def swept(best: float, noise: float, seed: int, groups: int = 2) -> list[Point]:
    """Runs whose losses are a parabola, with an offset for each group and noise."""
    draw = np.random.default_rng(seed)
    return [
        Point(rate, 1.5 + 0.05 * math.log(rate / best) ** 2 + 0.1 * group + draw.normal(0, noise), str(group))
        for rate in RATES
        for group in range(groups)
    ]


def test_without_noise_the_least_is_found_between_the_rates() -> None:
    low, middle, high = best_rate(swept(1.3e-3, 0.0, 0)).ends
    assert low == pytest.approx(1.3e-3, rel=1e-2) and middle == pytest.approx(1.3e-3, rel=1e-3)
    assert high == pytest.approx(1.3e-3, rel=1e-2)


def test_a_run_that_is_missing_moves_the_least_nowhere() -> None:
    # Without the better group's run at the best rate, means are least at an end.
    tried = [each for each in swept(1e-3, 0.0, 0) if each.rate in RATES[2:5]]
    points = [each for each in tried if not (each.rate == 1e-3 and each.group == "0")]
    assert best_rate(points).ends[1] == pytest.approx(1e-3, rel=1e-2)


def test_nine_of_ten_intervals_hold_the_true_rate() -> None:
    ends = [best_rate(swept(1.3e-3, 0.01, seed)).ends for seed in range(200)]
    held = sum(low <= 1.3e-3 <= high for low, _, high in ends) / len(ends)
    assert 0.82 <= held <= 0.97
    assert np.median([high / low for low, _, high in ends]) < 1.5


def test_more_noise_is_less_sure_and_never_surer_than_what_was_tried() -> None:
    clear, noisy = (best_rate(swept(1.3e-3, noise, 4)).ends for noise in (0.003, 0.05))
    assert clear[2] / clear[0] < noisy[2] / noisy[0]
    assert RATES[0] <= noisy[0] and noisy[2] <= RATES[-1]


def test_three_runs_alone_leave_what_lies_between_the_neighbours() -> None:
    points = [Point(rate, loss, "") for rate, loss in ((1e-4, 2.0), (2e-4, 1.0), (4e-4, 2.0))]
    low, middle, high = best_rate(points).ends
    assert 1e-4 < low < 1.1e-4 < 2e-4 == pytest.approx(middle, rel=0.02) and 3.6e-4 < high < 4e-4


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0, 2.0, 3.0], ["the lowest learning rate", "sweep lower"]),
        ([3.0, 2.0, 1.0], ["the highest learning rate", "sweep higher"]),
        ([1.0, 2.0], ["2 learning rates"]),
    ],
)
def test_a_least_that_was_not_seen_is_refused(losses: list[float], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        best_rate([Point(1e-4 * 2**at, loss, "") for at, loss in enumerate(losses)])
    assert all(word in str(caught.value) for word in words)


def test_runs_that_differ_in_all_else_too_say_nothing_of_the_rate() -> None:
    """As those of a search over several keys: the other keys may have made their losses."""
    draw = np.random.default_rng(0)
    alone = [Point(rate, loss, f"other {loss}") for rate, loss in zip(RATES, draw.normal(2, 0.5, 7), strict=True)]
    with pytest.raises(UserError, match="1 learning rates were tried with all else the same"):
        best_rate(alone)
    # Beside a sweep they change nothing.
    assert best_rate([*alone, *swept(1.3e-3, 0.0, 0)]).ends[1] == pytest.approx(1.3e-3, rel=1e-3)


def test_of_a_search_with_two_kinds_of_runs_each_kind_is_compared_with_itself() -> None:
    draw = np.random.default_rng(0)
    rates = np.exp(draw.uniform(math.log(2e-4), math.log(8e-3), 12))
    points = [
        Point(rate, 1.5 + 0.05 * math.log(rate / 1.3e-3) ** 2 + 0.3 * (at % 2), str(at % 2))
        for at, rate in enumerate(rates.tolist())
    ]
    assert best_rate(points).ends[1] == pytest.approx(1.3e-3, rel=1e-2)


def test_two_widths_measure_how_the_rate_falls_and_one_does_not() -> None:
    small, double = best_rate(swept(2e-3, 1e-3, 1)), best_rate(swept(2e-3 / math.sqrt(2), 1e-3, 2))
    measured = [(576, small), (1152, double)]
    low, middle, high = for_width(measured, 2304).ends
    assert middle == pytest.approx(1e-3, rel=0.1)
    # From 1152 on the exponent of one half may be another one by 1.64 deviations.
    assert high / low == pytest.approx(2 ** (2 * 1.645 * 0.5), rel=0.1)
    between = for_width(measured, 1152).ends
    assert between == pytest.approx(double.ends, rel=0.02)
    low, middle, high = for_width([(576, small)], 2304).ends
    # Between inverse proportion, a fourth, and not at all, and beyond either by what laws leave open.
    assert 2e-3 / 4**2 < low < 2e-3 / 4 and middle == pytest.approx(1e-3, rel=0.1) and 2e-3 < high < 2e-3 * 4
    same = for_width([(576, small)], 576).ends
    assert same == pytest.approx(small.ends)


def test_rates_of_three_real_widths() -> None:
    """Llamas of 4 layers trained from scratch for 80 steps on documentation, two seeds each; nats per token."""
    seen = {
        (64, 8e-3): [(6.3547, 6.3581), (6.3233, 6.2898), (6.2922, 6.2452), (6.3036, 6.3211), (6.4677, 6.3620)],
        (192, 4e-3): [(6.1821, 6.1474), (6.0576, 5.9912), (6.0291, 6.0106), (6.3299, 6.2273)],
        (384, 2e-3): [(6.0479, 6.0403), (5.9718, 5.9849), (6.1226, 6.1812), (6.3452, 6.4313)],
    }
    found = {
        width: best_rate(
            [Point(least * 2**at, loss, str(seed)) for at, pair in enumerate(losses) for seed, loss in enumerate(pair)]
        )
        for (width, least), losses in seen.items()
    }
    low, _, high = for_width([(64, found[64]), (192, found[192])], 384).ends
    assert low < found[384].ends[1] < high


def test_an_estimate_reads_as_a_range() -> None:
    assert Estimate(np.log(np.full(10, 2e-3))).text() == "0.002 (90%: 0.002 to 0.002)"
