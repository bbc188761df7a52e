"""Rows tokenised while training reads them, for data that is too large to prepare.

Training starts after the first few rows and no tokens are written, but every epoch tokenises again, rows are shuffled
only within a window, and the audit sees only the beginning. A thread tokenises while the model computes.

Rows are dealt in turn to as many lanes as a step has sequences, and a step takes the next sequence of every lane. How
many sequences a row becomes, or how its lane packs it, moves nothing in other lanes. So a process reads all rows, which
is cheap, but tokenises only those of its own lanes, and no step depends on the number of processes. Where a lane falls
behind, its rows wait in memory. Files dealt to processes would be read once, but each step would hold other rows.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from toolkit.common import UserError, in_background
from toolkit.data.formats.conversion import RowFormat
from toolkit.data.formats.prompts import PromptFormat
from toolkit.data.formats.task import Task, is_empty
from toolkit.data.reading.sources import Reader
from toolkit.data.row_table import open_rows
from toolkit.data.tokenization import FEATURES, Chunker, pack
from toolkit.recipe import Recipe

AUDITED_ROWS = 1000
"""The audit of a stream sees this many rows of every source."""
SHUFFLE_BUFFER = 10_000
"""Rows that the next one is drawn from. They are read, not tokenised, and grow to this number as rows are drawn."""
_FIRST_ROWS = 32
"""Rows in the buffer when the first is drawn."""
_GROWTH = 8
"""Rows read for each one that is drawn, until the buffer is full."""
_AHEAD = 1000
"""Sequences that are made before they are trained on: those of one step at first, each time twice as many."""
_AHEAD_TOKENS = 2**22
"""Tokens after which no further step is made ahead. As lists they take some 70 bytes each, and twice as many wait."""
_FIRST_PACKED, _PACKED = 2, 32
"""Full sequences' worth of rows that a lane packs together: few at first, so that training can start."""


@dataclass(frozen=True)
class Stream:
    """The training rows of a recipe without an end, each with input_ids and labels, with packing also seq_lengths.

    Without weights sources follow each other; with weights rows are drawn from them at random in these shares until
    every source has been used once. Then it begins again in another order, so that every batch is whole, and a run
    that is continued finds its place by counting rows. Shuffling is within a window of 10,000 rows.
    """

    readers: list[Reader]
    recipe: Recipe
    chunker: Chunker
    task: Task

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.divided(1))

    def divided(self, processes: int) -> IterableDataset:
        """The stream in one shard per process; accelerate's data loader reads the shard of its own process."""
        packed = {"seq_lengths": List(Value("int32"))} if self.recipe.data.packing else {}
        size = self.recipe.batch.sequences_per_step
        share = size // processes
        return IterableDataset.from_generator(
            _sequences,
            features=Features({**FEATURES, **packed}),
            gen_kwargs={"stream": self, "lanes": [range(n, n + share) for n in range(0, size, share)]},
        )

    def steps(self, lanes: range, stop: threading.Event) -> Iterator[list[dict[str, Any]]]:
        """What these lanes hold of each step, several steps at a time, without an end but for `stop`.

        Raises:
            UserError: If a row cannot be read or is too long.
        """
        dealt = _Dealt(self._dealt(stop), self.recipe.batch.sequences_per_step, lanes)
        sequences = [self._lane(dealt.to(lane)) for lane in lanes]
        for doubled in itertools.count():
            window: list[dict[str, Any]] = []
            tokens = 0
            for _ in range(min(2**doubled, -(-_AHEAD // len(lanes)))):
                step = [sequence for lane in sequences if (sequence := next(lane, None))]
                if stop.is_set():
                    return
                window += step
                tokens += sum(len(sequence["input_ids"]) for sequence in step)
                if tokens >= _AHEAD_TOKENS:
                    break
            yield window

    def _lane(self, rows: Iterator[_Row]) -> Iterator[dict[str, Any]]:
        """The sequences of a lane."""
        documents = itertools.chain.from_iterable(map(self._tokens, rows))
        if not self.recipe.data.packing:
            yield from documents
        seq_len, together = self.recipe.batch.seq_len, _FIRST_PACKED
        while True:
            taken, room = [], together * seq_len
            for document in documents:
                taken.append(document)
                room -= len(document["input_ids"])
                if room <= 0:
                    break
            else:
                return
            yield from pack(Dataset.from_list(taken, features=FEATURES), seq_len)
            together = min(2 * together, _PACKED)

    def _dealt(self, stop: threading.Event) -> Iterator[_Row | None]:
        """Epoch after epoch, each of which begins one lane further than the last, so that every row comes to every lane
        in time: one that gets no row, or only rows with nothing to train on, would wait for ever."""
        for epoch in itertools.count():
            number = 0
            for row in self._rows(np.random.default_rng([self.recipe.seed, epoch])):
                if stop.is_set():
                    return
                number += 1
                yield row
            yield from itertools.repeat(None, (1 - number) % self.recipe.batch.sequences_per_step)

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
        return (_Row(row_format, where, content) for where, content in rows)

    def _tokens(self, raw: _Row) -> Iterator[dict[str, Any]]:
        row, chunker = raw.format.convert(raw.content, raw.where), self.chunker
        if is_empty(row, self.task):
            return
        for chunk in chunker([(row, raw.where)])[0]:
            over_long = chunker.over_long if chunk["length"] > chunker.seq_len else None
            if over_long == "error" or (over_long == "split" and chunk["kind"] != "Text"):
                raise UserError(
                    f"{raw.where} has {chunk['length']:,} tokens, more than `batch.seq_len: {chunker.seq_len}`",
                    "raise `batch.seq_len`, or set `data.over_long` to drop or truncate",
                )
            if chunk["trained"] and over_long != "drop":
                yield {name: chunk[name] for name in FEATURES}


def _sequences(stream: Stream, lanes: list[range]) -> Iterator[dict[str, Any]]:
    (own,) = lanes
    stop = threading.Event()
    steps = stream.steps(own, stop)
    following = in_background(lambda: next(steps))
    try:
        while True:
            window = following.result()
            following = in_background(lambda: next(steps))
            yield from window
    finally:
        stop.set()


@dataclass(frozen=True)
class _Row:
    """A row as it is read: where it stands, and how it is converted."""

    format: RowFormat | PromptFormat
    where: str
    content: dict[str, Any]


class _Dealt:
    """Rows dealt in turn to a number of lanes, of which some are asked for theirs."""

    def __init__(self, rows: Iterator[_Row | None], number: int, lanes: range) -> None:
        self._rows = zip(itertools.cycle(range(number)), rows)
        self._waiting = {lane: deque[_Row]() for lane in lanes}

    def to(self, lane: int) -> Iterator[_Row]:
        """The rows of a lane. Those of the others that are read meanwhile wait for them."""
        waiting = self._waiting[lane]
        while True:
            while waiting:
                yield waiting.popleft()
            for receiver, row in self._rows:
                if row and receiver in self._waiting:
                    self._waiting[receiver].append(row)
                    if receiver == lane:
                        break
            else:
                return


def _shuffled(rows: Iterator[_Row], rng: np.random.Generator) -> Iterator[_Row]:
    """Rows drawn at random from a buffer that fills as they are drawn."""
    buffer: list[_Row] = []
    room = _FIRST_ROWS
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
