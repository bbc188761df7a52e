"""Rows tokenised while training reads them, for data that is too large to prepare.

Training starts after the first few rows and no tokens are written, but every epoch tokenises again, rows are shuffled
only within a window, and the audit sees only the beginning. A thread tokenises while the model computes. Every process
does so for the whole stream and keeps its part: how many sequences a row becomes is known only when it is tokenised, so
whoever left rows out could not tell which sequences are its own, and losses would depend on the number of processes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from toolkit.common import UserError, in_background
from toolkit.data.formats import RowFormat, Task
from toolkit.data.sources import Reader
from toolkit.data.tokenization import FEATURES, Chunker, is_empty, open_rows, pack
from toolkit.recipe import Recipe

AUDITED_ROWS = 1000
"""The audit of a stream sees this many rows of every source."""
SHUFFLE_BUFFER = 10_000
"""Rows that the next one is drawn from. They are read, not tokenised, and grow to this number as rows are drawn."""
_FIRST_WINDOW, _LAST_WINDOW = 32, 1000
"""Sequences that are made, and packed, together: few at first, so that training can start; each time twice as many."""
_GROWTH = 8
"""Rows read for each one that is drawn, until the buffer is full."""


def stream(readers: list[Reader], recipe: Recipe, chunker: Chunker, task: Task) -> IterableDataset:
    """The training rows of a recipe as a stream without an end.

    Without weights sources follow each other; with weights rows are drawn from them at random in these shares until
    every source has been used once. Then it begins again in another order, so that every batch is whole, and a run
    that is continued finds its place by counting rows. Shuffling is within a window of 10,000 rows.

    Returns:
        Columns input_ids and labels, with packing also seq_lengths.
    """
    packed = {"seq_lengths": List(Value("int32"))} if recipe.data.packing else {}
    return IterableDataset.from_generator(
        _sequences,
        features=Features({**FEATURES, **packed}),
        gen_kwargs={"stream": _Stream(readers, recipe, chunker, task)},
    )


def _sequences(stream: _Stream) -> Iterator[dict[str, Any]]:
    stop = threading.Event()
    windows = stream.windows(stop)
    following = in_background(lambda: next(windows))
    try:
        while True:
            window = following.result()
            following = in_background(lambda: next(windows))
            yield from window
    finally:
        stop.set()


@dataclass(frozen=True)
class _Row:
    """A row as it is read: of which source, where it stands, and how it is converted."""

    source: int
    format: RowFormat
    where: str
    content: dict[str, Any]


@dataclass(frozen=True)
class _Stream:
    readers: list[Reader]
    recipe: Recipe
    chunker: Chunker
    task: Task

    def windows(self, stop: threading.Event) -> Iterator[list[dict[str, Any]]]:
        """Some sequences at a time, without an end but for `stop`.

        Raises:
            UserError: If a row is too long, or a source has nothing to train on.
        """
        size = _FIRST_WINDOW
        for epoch in itertools.count():
            rng = np.random.default_rng([self.recipe.seed, epoch])
            rows, used = self._rows(rng), set[int]()
            sequences: list[dict[str, Any]] = []
            for row in rows:
                if stop.is_set():
                    return
                for sequence in self._tokens(row):
                    sequences.append(sequence)
                    used.add(row.source)
                if len(sequences) >= size:
                    yield self._finished(sequences, rng)
                    sequences, size = [], min(2 * size, _LAST_WINDOW)
            yield self._finished(sequences, rng)
            for number, reader in enumerate(self.readers):
                if number not in used:
                    raise UserError(
                        f"data source `{reader.source.path}` has no row with a trained token",
                        "take it out of `data.sources`, or check `data.columns`, `data.train_on` and `batch.seq_len`",
                    )

    def _finished(self, sequences: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
        """What of some sequences is trained on: they are in another order, since those of one row are neighbours."""
        if self.recipe.data.shuffle:
            sequences = [sequences[each] for each in rng.permutation(len(sequences))]
        if not sequences or not self.recipe.data.packing:
            return sequences
        return list(pack(Dataset.from_list(sequences, features=FEATURES), self.recipe.batch.seq_len))

    def _rows(self, rng: np.random.Generator) -> Iterator[_Row]:
        """The rows of an epoch in their order."""
        weights = [reader.source.weight for reader in self.readers]
        if len(weights) > 1 and any(weight is not None for weight in weights):
            rows = self._drawn([1.0 if weight is None else weight for weight in weights], rng)
        else:
            rows = itertools.chain.from_iterable(map(self._read, range(len(weights))))
        return _shuffled(rows, rng) if self.recipe.data.shuffle else rows

    def _drawn(self, weights: list[float], rng: np.random.Generator) -> Iterator[_Row]:
        sources = [self._read(number) for number in range(len(weights))]
        exhausted: set[int] = set()
        shares = np.array(weights) / sum(weights)
        while True:
            number = int(rng.choice(len(weights), p=shares))
            row = next(sources[number], None)
            if row is None:
                exhausted.add(number)
                if len(exhausted) == len(weights):
                    return
                sources[number] = self._read(number)
                row = next(sources[number])
            yield row

    def _read(self, number: int) -> Iterator[_Row]:
        row_format, rows = open_rows(self.readers[number], self.task)
        return (_Row(number, row_format, where, content) for where, content in rows)

    def _tokens(self, raw: _Row) -> Iterator[dict[str, Any]]:
        row, chunker = raw.format.convert(raw.content, raw.where), self.chunker
        if is_empty(row, self.task):
            return
        for chunk in chunker(row, raw.where):
            over_long = chunker.over_long if chunk["length"] > chunker.seq_len else None
            if over_long == "error" or (over_long == "split" and chunk["kind"] != "Text"):
                raise UserError(
                    f"{raw.where} has {chunk['length']:,} tokens, more than `batch.seq_len: {chunker.seq_len}`",
                    "raise `batch.seq_len`, or set `data.over_long` to drop or truncate",
                )
            if chunk["trained"] and over_long != "drop":
                yield {name: chunk[name] for name in FEATURES}


def _shuffled(rows: Iterator[_Row], rng: np.random.Generator) -> Iterator[_Row]:
    """Rows drawn at random from a buffer that fills as they are drawn."""
    buffer: list[_Row] = []
    room = _FIRST_WINDOW
    for row in rows:
        buffer.append(row)
        if len(buffer) >= room:
            yield _take(buffer, rng)
            room = min(room + _GROWTH, SHUFFLE_BUFFER)
    while buffer:
        yield _take(buffer, rng)


def _take(buffer: list[_Row], rng: np.random.Generator) -> _Row:
    chosen = int(rng.integers(len(buffer)))
    buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
    return buffer.pop()
