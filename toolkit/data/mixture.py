"""Which rows are trained on and how often: deduplication, the held-out fraction, weights and `max_samples`.

A row is two numbers, its source and a hash of its content, so that millions are mixed in memory without reading one,
and rows of equal content are never on both sides. Weights repeat rows until the shares are right, for every epoch
alike; to draw rows by weight in every step, as streams must, would leave some out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.common import UserError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """A choice of rows.

    Attributes:
        train: Row numbers to train on, in order; rows of small sources stand there several times.
        eval: Row numbers held out.
        duplicates: How many rows have the content of an earlier row.
    """

    train: Indices
    eval: Indices
    duplicates: int


def mix(
    source: Indices,
    content: Indices,
    weights: list[float | None],
    *,
    eval_fraction: float | None = None,
    max_samples: int | None = None,
    deduplicate: bool = False,
    shuffle: bool = True,
    seed: int,
    eval_seed: int | None = None,
    unusable: NDArray[np.bool_] | None = None,
    counts: list[int] | None = None,
) -> Mixture:
    """Chooses rows, the same ones for the same arguments.

    The held-out fraction is taken by content and before any repetition, so no content is on both sides. Sources
    follow each other in the order of the recipe unless `shuffle`.

    Args:
        source: Number of the source of every row, shape (rows,).
        content: Hash of the content of every row, shape (rows,).
        weights: `weight` of every source; if one is set, the others count as 1.
        eval_fraction: Share of the distinct rows to hold out.
        eval_seed: Which ones, the same for every `seed`; by default `seed` says it.
        unusable: Whether nothing is trained of a row, shape (rows,). Such rows have no part in shares and limits, and
            stand once.
        counts: Rows to take from every source, instead of those that the weights say.

    Raises:
        UserError: Nothing would be left to train on, or nothing to hold out.
    """
    rng = np.random.default_rng(seed)
    first = np.sort(np.unique(content, return_index=True)[1])  # the first row of every content
    rows = first if deduplicate else np.arange(len(content))
    held_out = np.zeros(0, dtype=np.int64)
    if eval_fraction is not None and len(first):
        count = round(eval_fraction * len(first))
        if not 0 < count < len(first):
            raise UserError(
                f"`data.eval_split: {eval_fraction}` of {len(first)} distinct rows holds out {count}",
                "choose another fraction, or name held-out rows with `data.eval_sources`",
            )
        chooser = rng if eval_seed in (None, seed) else np.random.default_rng(eval_seed)
        chosen = chooser.permutation(first)[:count]
        is_held_out = np.isin(content[rows], content[chosen])
        held_out, rows = chooser.permutation(rows[is_held_out]), rows[~is_held_out]

    without = np.zeros(len(content), bool) if unusable is None else unusable
    left_out, rows = rows[without[rows]], rows[~without[rows]]
    parts = [rows[source[rows] == number] for number in range(len(weights))]
    counts = counts or _counts([len(part) for part in parts], weights)
    train = np.concatenate([_repeat(part, count, rng) for part, count in zip(parts, counts, strict=True)])
    if max_samples is not None and max_samples < len(train):
        train = train[np.sort(rng.permutation(len(train))[:max_samples])]
    train = np.concatenate([train, left_out])
    return Mixture(rng.permutation(train) if shuffle else train, held_out, len(content) - len(first))


def weighs(weights: list[float | None]) -> bool:
    """Whether rows repeat so that sources have their shares."""
    return len(weights) > 1 and any(weight is not None for weight in weights)


def counts_for_usable(source: Indices, usable: NDArray[np.bool_], sources: int) -> list[int]:
    """Rows to take from every source for as large a sample, of which the usable ones are expected to stand in the
    shares that all rows of the sample have.

    Args:
        source: Number of the source of each row of the sample, shape (rows,).
        usable: Whether something is trained of it, shape (rows,).
        sources: How many there are.
    """
    sampled, kept = (np.bincount(source, weights, minlength=sources) for weights in (None, usable))
    # Of a source without any usable row more rows would be as useless.
    wanted = sampled.astype(float) * np.where(kept > 0, sampled / np.maximum(kept, 1), 1.0)
    return [math.ceil(count) for count in wanted * len(source) / wanted.sum()]


def _counts(sizes: list[int], weights: list[float | None]) -> list[int]:
    """Rows to take from every source: the smallest mixture in these shares that uses every row once."""
    if all(weight is None for weight in weights):
        return sizes
    pairs = [(size, 1.0 if weight is None else weight) for size, weight in zip(sizes, weights, strict=True)]
    # A row of the tightest source stands once; all others follow their weight, at least once.
    per_weight = max(size / weight for size, weight in pairs)
    # Rounding up only what is more than rounding noise: 0.1 * 30 is 3.0000000000000004.
    return [max(size, math.ceil(per_weight * weight - 1e-6)) if size else 0 for size, weight in pairs]


def _repeat(rows: Indices, count: int, rng: np.random.Generator) -> Indices:
    """`count` of `rows`: all of them as often as possible, and a random choice for the rest."""
    if not len(rows):
        return rows
    passes, rest = divmod(count, len(rows))
    return np.concatenate([np.tile(rows, passes), np.sort(rng.permutation(rows)[:rest])])
