"""Rows tokenised while training reads them, for data that is too large to prepare.

Training starts at once and no tokens are written, but every epoch tokenises again, rows are shuffled only within a
window, and the audit sees only the beginning. Every process reads the whole stream and keeps its part, so that rows and
their order do not depend on the number of processes; files divided among processes would be read once, but then they
do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, interleave_datasets

from toolkit.common import UserError
from toolkit.data.formats import Task
from toolkit.data.sources import Reader
from toolkit.data.tokenization import FEATURES, Chunker, is_empty, open_rows, pack
from toolkit.recipe import Recipe

AUDITED_ROWS = 1000
"""The audit of a stream sees this many rows of every source."""
SHUFFLE_BUFFER = 10_000


def stream(readers: list[Reader], recipe: Recipe, chunker: Chunker, task: Task) -> IterableDataset:
    """The training rows of a recipe as a stream without an end.

    Without weights sources follow each other; with weights rows are drawn from them at random in these shares until
    every source has been used once. Then it begins again in another order, so that every batch is whole, and a run
    that is continued finds its place by counting rows. Shuffling is within a window of 10,000 rows.

    Returns:
        Columns input_ids and labels, with packing also seq_lengths.
    """
    parts = [
        IterableDataset.from_generator(
            _tokens, features=FEATURES, gen_kwargs={"reader": reader, "chunker": chunker, "task": task}
        )
        for reader in readers
    ]
    weights = [reader.source.weight for reader in readers]
    if len(parts) > 1 and any(weight is not None for weight in weights):
        filled = [1.0 if weight is None else weight for weight in weights]
        shares = [weight / sum(filled) for weight in filled]
        rows = interleave_datasets(parts, shares, seed=recipe.seed, stopping_strategy="all_exhausted")
    else:
        rows = concatenate_datasets(parts)
    if recipe.data.shuffle:
        rows = rows.shuffle(seed=recipe.seed, buffer_size=SHUFFLE_BUFFER)
    rows = IterableDataset.from_generator(_epochs, features=FEATURES, gen_kwargs={"rows": rows})
    if recipe.data.packing:
        rows = rows.map(
            _pack,
            batched=True,
            batch_size=1000,
            remove_columns=list(FEATURES),
            features=Features({**FEATURES, "seq_lengths": List(Value("int32"))}),
            fn_kwargs={"seq_len": recipe.batch.seq_len},
        )
    return rows


def _epochs(rows: IterableDataset) -> Iterator[dict[str, Any]]:
    for epoch in itertools.count():
        rows.set_epoch(epoch)  # the seed of its shuffling
        yield from rows


def _pack(batch: dict[str, list[Any]], seq_len: int) -> dict[str, list[Any]]:
    return pack(Dataset.from_dict(batch, features=FEATURES), seq_len).to_dict()


def _tokens(reader: Reader, chunker: Chunker, task: Task) -> Iterator[dict[str, Any]]:
    row_format, rows = open_rows(reader, task)
    usable = False
    for where, raw in rows:
        row = row_format.convert(raw, where)
        if is_empty(row, task):
            continue
        for chunk in chunker(row, where):
            over_long = chunker.over_long if chunk["length"] > chunker.seq_len else None
            if over_long == "error" or (over_long == "split" and chunk["kind"] != "Text"):
                raise UserError(
                    f"{where} has {chunk['length']:,} tokens, more than `batch.seq_len: {chunker.seq_len}`",
                    "raise `batch.seq_len`, or set `data.over_long` to drop or truncate",
                )
            if chunk["trained"] and over_long != "drop":
                usable = True
                yield {name: chunk[name] for name in FEATURES}
    if not usable:
        raise UserError(
            f"data source `{reader.source.path}` has no row with a trained token",
            "take it out of `data.sources`, or check `data.columns`, `data.train_on` and `batch.seq_len`",
        )
