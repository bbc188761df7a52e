"""Rows are repeated, held out and left out as the recipe says; checked against what can be counted by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from toolkit.common import UserError
from toolkit.data.mixture import mix


def mixed(sizes: list[int], weights: list[float | None], **settings: object) -> list[list[int]]:
    """The rows of each source that are trained on."""
    source = np.repeat(np.arange(len(sizes)), sizes)
    train = mix(source, np.arange(len(source)), weights, seed=3, **settings).train  # type: ignore[arg-type]
    return [train[source[train] == number].tolist() for number in range(len(sizes))]


@pytest.mark.parametrize("sizes", [[30, 10], [10, 30], [7, 100, 3], [1, 1, 1], [5, 0, 5]])
@pytest.mark.parametrize("shares", [("0.1", "0.9", "1"), ("3", "1", "1"), ("0.3", "0.3", "0.4"), ("2", "0.5", "1")])
def test_shares_are_those_of_the_weights_and_no_row_is_lost(sizes: list[int], shares: tuple[str, ...]) -> None:
    weights = [Fraction(share) for share in shares[: len(sizes)]]
    parts = mixed(sizes, [float(weight) for weight in weights])
    # The source that has most rows for its weight decides; it is used once.
    unit = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    wanted = [-(-unit * weight // 1) if size else 0 for size, weight in zip(sizes, weights, strict=True)]
    assert [len(part) for part in parts] == wanted
    for part, size in zip(parts, sizes, strict=True):
        times = Counter(part)
        assert len(times) == size and (not size or max(times.values()) - min(times.values()) <= 1)


def test_rows_with_nothing_to_train_have_no_part_in_shares_and_limits() -> None:
    unusable = np.array([n % 3 > 0 for n in range(30)] + [False] * 10)
    usable = [n for n in range(40) if not unusable[n]]

    def train(limit: int | None) -> list[int]:
        source = np.repeat([0, 1], [30, 10])
        return mix(source, np.arange(40), [1.0, 2.0], max_samples=limit, seed=3, unusable=unusable).train.tolist()

    times = Counter(train(None))
    assert {times[n] for n in range(30)} == {1} and {times[n] for n in range(30, 40)} == {2}
    limited = train(12)
    assert len(limited) == 32 and len([n for n in limited if n in usable]) == 12


def test_a_source_without_weight_counts_as_one_beside_others() -> None:
    assert [len(part) for part in mixed([10, 10], [None, 2.0])] == [10, 20]
    assert [len(part) for part in mixed([10, 10], [None, 1.0])] == [10, 10]
    assert [len(part) for part in mixed([10, 20], [None, None])] == [10, 20]


def test_without_shuffling_rows_stay_in_order_pass_after_pass() -> None:
    (first, second) = mixed([4, 10], [1.0, 1.0], shuffle=False)
    assert second == list(range(4, 14)) and first[:8] == [0, 1, 2, 3] * 2
    assert len(first) == 10 and first[8:] == sorted(first[8:])
    source = np.repeat([0, 1], [4, 10])
    assert (np.diff(source[mix(source, np.arange(14), [1.0, 1.0], shuffle=False, seed=0).train]) >= 0).all()
    shuffled = mix(source, np.arange(14), [None, None], seed=0).train.tolist()
    assert sorted(shuffled) == list(range(14)) and shuffled != sorted(shuffled)
    assert shuffled != mix(source, np.arange(14), [None, None], seed=1).train.tolist()


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_a_fraction_of_the_contents_is_held_out_with_all_its_rows(fraction: float, deduplicate: bool) -> None:
    content = np.array([n % 20 for n in range(50)])
    mixture = mix(np.zeros(50, int), content, [None], eval_fraction=fraction, deduplicate=deduplicate, seed=1)
    held, kept = set(content[mixture.eval]), set(content[mixture.train])
    assert len(held) == round(20 * fraction) and not held & kept and held | kept == set(range(20))
    rows = sorted([*mixture.train.tolist(), *mixture.eval.tolist()])
    assert rows == (list(range(20)) if deduplicate else list(range(50)))
    assert mixture.duplicates == 30
    assert mixture.eval.tolist() != sorted(mixture.eval.tolist())  # a limit would take the first otherwise


def test_a_fraction_that_holds_out_nothing_or_all_is_refused() -> None:
    for fraction, rows, count in ((0.01, 10, 0), (0.99, 10, 10), (0.5, 1, 0)):
        with pytest.raises(UserError, match=f"`data.eval_split: {fraction}` of {rows} distinct rows holds out {count}"):
            mix(np.zeros(2 * rows, int), np.arange(2 * rows) % rows, [None], eval_fraction=fraction, seed=0)
    nothing = mix(np.zeros(0, int), np.zeros(0, int), [None], eval_fraction=0.5, seed=0)
    assert not len(nothing.train) and not len(nothing.eval)


@pytest.mark.parametrize("limit", [1, 5, 19, 20, 21])
def test_a_limit_takes_a_random_choice_in_order(limit: int) -> None:
    def taken(shuffle: bool, seed: int) -> list[int]:
        return mix(
            np.zeros(20, int), np.arange(20), [None], max_samples=limit, shuffle=shuffle, seed=seed
        ).train.tolist()

    assert len(taken(True, 0)) == len(set(taken(True, 0))) == min(limit, 20)
    assert taken(False, 0) == sorted(taken(False, 0))
    if limit < 19:
        assert taken(False, 0) != list(range(limit)) and taken(False, 0) != taken(False, 1)


def test_the_first_row_of_a_content_is_kept() -> None:
    content = np.array([5, 3, 5, 3, 9, 5])
    source = np.array([0, 0, 1, 1, 1, 1])
    mixture = mix(source, content, [None, None], deduplicate=True, shuffle=False, seed=0)
    assert mixture.train.tolist() == [0, 1, 4] and mixture.duplicates == 3
    assert mix(source, content, [None, None], shuffle=False, seed=0).train.tolist() == list(range(6))
    # Weights are of what is left.
    weighted = mix(source, content, [1.0, 1.0], deduplicate=True, shuffle=False, seed=0).train.tolist()
    assert weighted == [0, 1, 4, 4]
    assert len(list(itertools.groupby(weighted))) == 3


def test_runs_with_other_seeds_hold_out_the_same_rows_if_their_eval_seed_is_the_same() -> None:
    def drawn(seed: int, eval_seed: int | None = None) -> tuple[list[int], list[int]]:
        mixture = mix(np.zeros(40, int), np.arange(40), [None], eval_fraction=0.25, seed=seed, eval_seed=eval_seed)
        return mixture.eval.tolist(), mixture.train.tolist()

    assert drawn(1)[0] != drawn(2)[0]
    assert drawn(1, 7)[0] == drawn(2, 7)[0] and drawn(1, 7)[1] != drawn(2, 7)[1]
    assert drawn(1, 1) == drawn(1) and drawn(2, 1)[0] == drawn(1)[0]
