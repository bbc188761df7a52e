"""Beginnings that documents of a batch have in common, found so that they are computed once.

Documents often begin alike: with a system message, with tools, with examples. What a causal model computes of a token
depends on nothing behind it, so that such a beginning is the same in all of them, and one copy of it serves: the rest
of each document attends to it and to itself. Losses and gradients are the same sums in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.rows import IGNORE

LEAST = 8
"""Tokens of the shortest beginning that is worth a segment of its own."""

Array = NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """Tokens and labels of one document, (length,) each."""

    ids: Array
    labels: Array

    @property
    def free(self) -> int:
        """So many of its first tokens no loss is asked of: they come before the one that predicts the first label."""
        trained = np.flatnonzero(self.labels != IGNORE)
        return max(0, (int(trained[0]) if len(trained) else len(self.ids)) - 1)


@dataclass(frozen=True)
class Segment:
    """A part of a document, computed once for all that have it.

    Args:
        document: Number of a document that has it.
        start: Its first token there.
        end: The one behind its last.
        before: The segments that these tokens follow, from the document's first token on.
        last: Whether the document ends with it.
    """

    document: int
    start: int
    end: int
    before: tuple[Segment, ...] = ()
    last: bool = True

    def __len__(self) -> int:
        return self.end - self.start

    def of(self, values: Array) -> Array:
        """Its part of what a document has for each token."""
        return values[self.start : self.end]


def segments(documents: Sequence[Document]) -> list[Segment]:
    """What is to be computed of documents: the last segment of each in their order, behind those that it is the first
    to need."""
    last: dict[int, Segment] = {}

    def divide(numbers: list[int], start: int, before: tuple[Segment, ...]) -> None:
        """Of documents that are alike up to `start` and beyond, the last segments, behind those that they share."""
        if len(numbers) == 1:
            (number,) = numbers
            last[number] = Segment(number, start, len(documents[number].ids), before)
            return
        alike = _alike([documents[number] for number in numbers], start)
        if alike - start >= LEAST:
            before = (*before, Segment(numbers[0], start, alike, before, last=False))
            start = alike
        # They are parted by their next token, and those of which no further one is free go alone.
        following = {number: int(documents[number].ids[alike]) for number in numbers if documents[number].free > alike}
        for _, same in itertools.groupby(sorted(following, key=following.__getitem__), key=following.__getitem__):
            divide(list(same), start, before)
        for number in (each for each in numbers if each not in following):
            divide([number], start, before)

    divide(list(range(len(documents))), 0, ())
    whole = ([*last[number].before, last[number]] for number in range(len(documents)))
    return list(dict.fromkeys(itertools.chain.from_iterable(whole)))


def documents_in(rows: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Of rows with `input_ids`, `labels` and, where they are packed, `seq_lengths`."""
    found = []
    for row in rows:
        ids, labels = (np.asarray(row[name], dtype=np.int64) for name in ("input_ids", "labels"))
        ends = np.cumsum(row.get("seq_lengths", [len(ids)]))[:-1]
        found += [Document(*each) for each in zip(np.split(ids, ends), np.split(labels, ends), strict=True)]
    return found


def in_common(documents: Sequence[Document]) -> tuple[float, ...]:
    """Tokens that each further document of 2, 4, 8 … has in common with others, on average, up to as many as there are;
    empty where that is none."""
    found = []
    for size in (2**power for power in range(1, len(documents).bit_length())):
        groups = [documents[start : start + size] for start in range(0, len(documents) - size + 1, size)]
        tokens = [sum(len(each.ids) for each in group) - sum(map(len, segments(group))) for group in groups]
        found.append(sum(tokens) / len(groups) / (size - 1))
    return tuple(found) if any(found) else ()


def _alike(documents: Sequence[Document], start: int) -> int:
    """Up to where documents that are alike up to `start` stay so and are free."""
    first, *others = documents
    alike = max(start, min(each.free for each in documents))
    for other in others:
        differ = np.flatnonzero(first.ids[start:alike] != other.ids[start:alike])
        alike = start + int(differ[0]) if len(differ) else alike
    return alike


@dataclass(frozen=True)
class Row:
    """Documents as one row, in which what they share stands once.

    Args:
        ids: (tokens,)
        labels: (tokens,)
        positions: (tokens,) of each in its document.
        lengths: (segments,) tokens of each.
        keys: (segments,) tokens that each attends to: those of the segments before it, and its own.
        places: (sum of `keys`,) where in the row these are.
        ends: (documents,) of each the place behind its last token.
    """

    ids: Array
    labels: Array
    positions: Array
    lengths: Array
    keys: Array
    places: Array
    ends: Array

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Row:
        """Lays them out in their order."""
        parts = segments(documents)
        lengths = np.array([len(part) for part in parts])
        ends = dict(zip(parts, lengths.cumsum().tolist(), strict=True))
        places = [np.arange(ends[each] - len(each), ends[each]) for part in parts for each in (*part.before, part)]
        return cls(
            ids=np.concatenate([part.of(documents[part.document].ids) for part in parts]),
            # Of what is shared no loss is asked, so that its labels say nothing.
            labels=np.concatenate([part.of(documents[part.document].labels) for part in parts]),
            positions=np.concatenate([np.arange(part.start, part.end) for part in parts]),
            lengths=lengths,
            keys=np.array([part.end for part in parts]),
            places=np.concatenate(places),
            ends=np.array([ends[part] for part in parts if part.last]),
        )
