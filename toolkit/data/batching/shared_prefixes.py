"""Beginnings that documents of a batch have in common, found so that they are computed once.

Documents often begin alike: with a system message, with tools, with examples. What a causal model computes of a token
depends on nothing behind it, so that such a beginning is the same in all of them, and one copy of it serves: the rest
of each document attends to it and to itself. Losses and gradients are the same sums in another order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.data.rows import IGNORE
from toolkit.recipe import Recipe

LEAST = 8
"""Tokens of the shortest beginning that is worth a segment of its own."""

COMPARED = 256
"""Documents that are compared with each other for what they have in common."""

Array = NDArray[np.int64]


class Document(NamedTuple):
    """Tokens and labels of one document, (length,) each."""

    ids: Array
    labels: Array

    @property
    def free(self) -> int:
        """So many of its first tokens no loss is asked of: they come before the one that predicts the first label."""
        trained = self.labels != IGNORE
        first = int(trained.argmax()) if len(trained) else 0
        return max(0, (first if first or trained[:1].any() else len(trained)) - 1)


def documents_in(rows: Iterable[Mapping[str, Any]]) -> list[Document]:
    """The documents of rows with `input_ids`, `labels` and, if packed, `seq_lengths`."""
    found = []
    for row in rows:
        ids, labels = (np.asarray(row[name], dtype=np.int64) for name in ("input_ids", "labels"))
        lengths = row.get("seq_lengths", ())
        if len(lengths) < 2:
            found.append(Document(ids, labels))
            continue
        ends = np.cumsum(lengths)[:-1]
        found += [Document(*each) for each in zip(np.split(ids, ends), np.split(labels, ends), strict=True)]
    return found


def drawn(recipe: Recipe, rows: Any) -> list[Document]:
    """Some documents of a prepared data set as they are beside each other, of rows drawn at random."""
    numbers = np.random.default_rng(0).permutation(len(rows))[:COMPARED]
    taken = rows.with_format("numpy").select(numbers)
    if recipe.reinforces:
        # Answers are yet to come; each has a first token, and no loss is asked of what is before it.
        asked = (np.append(row["input_ids"], 0) for row in taken)
        answered = (Document(ids, np.append(np.full(len(ids) - 1, IGNORE), 0)) for ids in asked)
        return [each for each in answered for _ in range(recipe.answers)]
    # Of an answer that is judged, that of another row is in a batch of its own.
    return documents_in(taken)[:: 2 if recipe.judges else 1]


class Segment(NamedTuple):
    """A part of a document, computed once for all that have it.

    Args:
        document: Number of a document that has it.
        start: Its first token there.
        end: The one behind its last.
        before: Numbers of the shared segments that these tokens follow, from the document's first token on.
    """

    document: int
    start: int
    end: int
    before: tuple[int, ...] = ()


def segments(documents: Sequence[Document]) -> tuple[list[Segment], list[Segment]]:
    """Those that documents share, and the last one of each, in their order."""
    free, shared = [each.free for each in documents], list[Segment]()
    last = [Segment(number, 0, len(each.ids)) for number, each in enumerate(documents)]

    def divide(numbers: Iterable[int], start: int, before: tuple[int, ...]) -> None:
        """Looks for further beginnings of documents that are alike up to `start`, and have these segments there."""
        alike: dict[bytes, list[int]] = {}
        for number in numbers:
            if free[number] >= start + LEAST:
                alike.setdefault(documents[number].ids[start : start + LEAST].tobytes(), []).append(number)
        for group in (each for each in alike.values() if len(each) > 1):
            most = min(free[number] for number in group)
            ids = np.stack([documents[number].ids[start:most] for number in group])
            differ = (ids != ids[0]).any(axis=0)
            end = start + int(differ.argmax()) if differ.any() else most
            chain = (*before, len(shared))
            shared.append(Segment(group[0], start, end, before))
            for number in group:
                last[number] = Segment(number, end, len(documents[number].ids), chain)
            divide(group, end, chain)

    divide(range(len(documents)), 0, ())
    return shared, last


def in_common(documents: Iterable[Document], least: int = 1) -> tuple[tuple[int, float], ...]:
    """Of so many documents beside each other, tokens that each further one has in common with others, on average; empty
    where that is none.

    Args:
        documents: Some, of which the first `COMPARED` are compared.
        least: The fewest that are ever beside each other; the numbers are this one, twice as many, and so on.
    """
    documents, found = list(itertools.islice(documents, max(COMPARED, least))), []
    sizes = (least * 2**power for power in range((len(documents) // least).bit_length()))
    for size in (each for each in sizes if each > 1):
        groups = [documents[start : start + size] for start in range(0, len(documents) - size + 1, size)]
        saved = 0
        for group in groups:
            computed = (each.end - each.start for parts in segments(group) for each in parts)
            saved += sum(len(each.ids) for each in group) - sum(computed)
        found.append((size, saved / len(groups) / (size - 1)))
    return tuple(found) if any(saved for _, saved in found) else ()


@dataclass(frozen=True)
class Row:
    """Documents as one row, in which what they share stands once, before the first that needs it.

    Args:
        ids: (tokens,)
        labels: (tokens,)
        positions: (tokens,) of each in its document.
        lengths: (segments,) tokens of each.
        keys: (segments,) tokens that each attends to: those of the segments before it, and its own.
        places: (sum of `keys`,) where in the row these are.
        ends: (documents,) of each the place behind its last token.
        counts: (tokens,) documents that have each.
    """

    ids: Array
    labels: Array
    positions: Array
    lengths: Array
    keys: Array
    places: Array
    ends: Array
    counts: Array

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Row:
        """Lays them out in their order."""
        shared, last = segments(documents)
        parts, places, ends, times = list[Segment](), list[Array](), list[int](), list[int]()
        having = Counter(number for part in last for number in part.before)
        stands: dict[int, Array] = {}
        """Where shared segments are, by their numbers."""
        end = 0

        def put(part: Segment) -> Array:
            nonlocal end
            parts.append(part)
            own = np.arange(end, end := end + part.end - part.start)
            places.extend([*(stands[number] for number in part.before), own])
            return own

        for part in last:
            for number in part.before:
                if number not in stands:
                    stands[number] = put(shared[number])
                    times.append(having[number])
            put(part)
            times.append(1)
            ends.append(end)
        starts, stops = (np.array([getattr(each, name) for each in parts]) for name in ("start", "end"))
        return cls(
            ids=np.concatenate([documents[each.document].ids[each.start : each.end] for each in parts]),
            # Of what is shared no loss is asked, so that its labels say nothing.
            labels=np.concatenate([documents[each.document].labels[each.start : each.end] for each in parts]),
            positions=np.concatenate([np.arange(each.start, each.end) for each in parts]),
            lengths=stops - starts,
            keys=stops,
            places=np.concatenate(places),
            ends=np.array(ends),
            counts=np.repeat(times, stops - starts),
        )
