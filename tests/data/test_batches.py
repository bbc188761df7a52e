"""Rows are dealt into micro-batches by length: all of them, once, with the least padding and equal work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from toolkit.data.batching.batches import FixedOrder, MicroBatches, cut

CASES = [
    (size, count, seed, flat)
    for seed, (size, count) in enumerate([(1, 1), (2, 1), (4, 4), (5, 3), (8, 2), (8, 4), (16, 5), (64, 16), (96, 7)])
    for flat in (False, True)
]


def drawn(steps: int, size: int, seed: int) -> NDArray[np.int64]:
    """Lengths of steps' rows, longest first: even ones, some very long ones, and all alike."""
    random = np.random.default_rng(seed)
    even, alike = random.integers(1, 300, (steps, size)), np.full((1, size), 128)
    skewed = np.minimum(2048, np.exp(random.normal(4, 1.5, (steps, size)))).astype(int) + 1
    return -np.sort(-np.concatenate([even, skewed, alike]), axis=1)


def fewest(lengths: list[int], count: int, flat: bool) -> int:
    """The largest micro-batch of the best of all cuts of sorted rows."""
    places = itertools.combinations(range(1, len(lengths)), count - 1)
    parts = ([lengths[a:b] for a, b in itertools.pairwise((0, *cuts, len(lengths)))] for cuts in places)
    return min(max(sum(part) if flat else len(part) * part[0] for part in each) for each in parts)


@pytest.mark.parametrize(("size", "count", "seed", "flat"), CASES)
def test_every_row_is_in_one_micro_batch_and_none_is_empty(size: int, count: int, seed: int, flat: bool) -> None:
    lengths = drawn(20, size, seed)
    cuts = cut(lengths, count, flat)
    assert (cuts.rows >= 1).all() and (cuts.rows.sum(axis=1) == size).all()
    assert (cuts.starts[:, 0] == 0).all() and (cuts.starts[:, 1:] == (cuts.starts + cuts.rows)[:, :-1]).all()
    for step, row in enumerate(lengths.tolist()):
        parts = [row[a : a + n] for a, n in zip(cuts.starts[step], cuts.rows[step], strict=True)]
        assert cuts.longest[step].tolist() == [part[0] for part in parts]
        assert cuts.tokens[step].tolist() == [sum(part) if flat else len(part) * part[0] for part in parts]
    # As many rows in each, which was how they were divided before, would not be smaller.
    assert (cuts.tokens.max(axis=1) <= -(-size // count) * lengths[:, 0]).all()


@pytest.mark.parametrize("flat", [False, True])
def test_no_cuts_have_a_smaller_largest_micro_batch(flat: bool) -> None:
    for size, count in ((3, 2), (6, 3), (8, 4), (9, 2)):
        lengths = drawn(10, size, size)
        best = [fewest(row, count, flat) for row in lengths.tolist()]
        assert cut(lengths, count, flat).tokens.max(axis=1).tolist() == best


def run(
    lengths: NDArray[np.int64], accumulation: int, world_size: int, steps: int = 30, size: int = 24
) -> MicroBatches:
    return MicroBatches(
        FixedOrder(len(lengths), 3, True), lengths, -(-lengths // 8) * 8, steps, size, accumulation, world_size
    )


@pytest.mark.parametrize(("accumulation", "world_size"), [(1, 1), (6, 1), (2, 3), (3, 4), (1, 24)])
def test_steps_have_the_rows_that_are_drawn_for_them(accumulation: int, world_size: int) -> None:
    lengths = np.random.default_rng(0).integers(20, 200, (100, 1))
    dealt = run(lengths, accumulation, world_size)
    batches, every = list(dealt), accumulation * world_size
    assert len(batches) == len(dealt) == 30 * every and dealt.micro_batch_size == 24 // every
    padded = []
    for step in range(30):
        there = batches[step * every : step * every + every]
        rows = [row for batch in there for row in batch]
        assert sorted(rows) == sorted(dealt.order.between(step * 24, step * 24 + 24).tolist())
        padded.append(sum(len(batch) * max(dealt.widths[batch, 0]) for batch in there))
        assert dealt.padded(step, step + 1).tolist() == [padded[-1]]
        assert dealt.tokens(step, step + 1).tolist() == [lengths[rows].sum()]
    assert dealt.padded(3, 20).sum() == sum(padded[3:20])


def test_processes_have_equal_work() -> None:
    lengths = np.exp(np.random.default_rng(1).normal(4, 1, (1000, 1))).astype(int) + 8
    dealt = run(lengths, 4, 2, size=64)
    sizes = np.array([len(rows) * dealt.widths[rows, 0].max() for rows in dealt]).reshape(30, 4, 2)
    waited = sizes.max(axis=2).sum() / (sizes.sum() / 2)
    assert waited < 1.06 and sizes.sum(axis=1).max(axis=1).sum() / (sizes.sum() / 2) < 1.04
    assert (np.diff(sizes.max(axis=2), axis=1) <= 0).all()  # What does not fit is seen at once.


def test_pairs_are_padded_on_either_side() -> None:
    lengths = np.random.default_rng(2).integers(1, 100, (50, 2))
    dealt = run(lengths, 3, 1, steps=4, size=12)
    by_hand = sum(len(rows) * dealt.widths[rows].max(axis=0) for rows in dealt)
    assert dealt.padded(0, 4).tolist() == by_hand.tolist()
    assert (dealt.tokens(0, 4) < dealt.padded(0, 4)).all()


def test_a_run_that_is_continued_deals_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(4).integers(20, 200, (70, 1))
    whole, shorter = list(run(lengths, 2, 2)), list(run(lengths, 2, 2, steps=11))
    assert whole[: len(shorter)] == shorter
    monkeypatch.setattr("toolkit.data.batching.batches._ROWS_AT_ONCE", 24)
    assert list(run(lengths, 2, 2)) == whole


def test_every_row_is_drawn_once_an_epoch_and_no_batch_is_short() -> None:
    order = FixedOrder(num_rows=10, seed=3, shuffle=True).between(0, 24).tolist()
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert order == FixedOrder(10, 3, True).between(0, 24).tolist()
    assert FixedOrder(3, 0, False).between(0, 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert FixedOrder(3, 0, False).between(2, 5).tolist() == [2, 0, 1]


def test_processes_that_share_rows_get_the_same_ones() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, (24, 1))
    alone = MicroBatches(FixedOrder(24, 1, True), lengths, lengths, 3, 8, 2, 2)
    shared = MicroBatches(FixedOrder(24, 1, True), lengths, lengths, 3, 8, 2, 2, sharing=2)
    assert list(shared) == [rows for rows in alone for _ in range(2)] and len(shared) == 2 * len(alone)
    assert list(shared.between(1, 2)) == list(alone.between(1, 2))


def test_processes_of_a_pipeline_get_the_rows_of_those_before_them() -> None:
    """All processes with the first stage come before all with the second: ranks 0 and 1, then 2 and 3."""
    lengths = np.random.default_rng(0).integers(1, 100, (24, 1))
    alone = list(MicroBatches(FixedOrder(24, 1, True), lengths, lengths, 3, 8, 2, 2))
    piped = MicroBatches(FixedOrder(24, 1, True), lengths, lengths, 3, 8, 2, 2, stages=2)
    dealt = list(piped)
    assert len(dealt) == len(piped) == 2 * len(alone)
    # As accelerate deals them to four processes.
    ranks = [dealt[rank::4] for rank in range(4)]
    assert ranks[0] == ranks[2] == alone[::2] and ranks[1] == ranks[3] == alone[1::2]
