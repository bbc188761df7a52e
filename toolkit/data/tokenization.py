"""Rows of all sources as one memory-mapped table, and the same rows as tokens.

Rows are kept as JSON strings of their normal form: an Arrow struct would give tool arguments keys they never had.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets import Dataset, Features, List, Value
from tqdm import tqdm

from toolkit.common import UserError
from toolkit.data.audit import SourceFigures
from toolkit.data.encode import IGNORE, Encoder
from toolkit.data.formats import Shape, recognise
from toolkit.data.rows import Completion, Pair, Row, Text, from_json, to_json
from toolkit.data.sources import RawRow, Reader
from toolkit.recipe.schema import Source

FIRST_ROWS = 100
"""So many rows are looked at to recognise a shape."""
LARGE = 10_000
"""From so many rows on several processes tokenise, and a terminal sees their progress."""
ROWS_SCHEMA = pa.schema(
    [("row", pa.large_string()), ("where", pa.string()), ("source", pa.int32()), ("content", pa.int64())]
)
TOKENS_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "row": Value("int64"),
        "kind": Value("string"),
        "length": Value("int64"),
        "trained": Value("int64"),
        "stops": Value("bool"),
        "merged": Value("bool"),
    }
)


@dataclass(frozen=True)
class Use:
    """What the rows are for.

    Attributes:
        objective: The recipe's objective.
        train_on: `data.train_on`.
        has_chat_template: Whether the tokenizer can render chats.
    """

    objective: str
    train_on: str
    has_chat_template: bool


def shaped(reader: Reader, source: Source, use: Use) -> tuple[Shape, Iterator[RawRow]]:
    """The shape of a source, and its rows from the first one on.

    Raises:
        UserError: See `recognise` and `Reader.rows`.
    """
    rows = reader.rows()
    head = list(itertools.islice(rows, FIRST_ROWS))
    shape = recognise([row for _, row in head], source, use.objective, use.train_on, use.has_chat_template)
    return shape, itertools.chain(head, rows)


def collect(readers: list[tuple[Source, Reader]], use: Use, path: Path) -> tuple[Dataset, list[SourceFigures]]:
    """Writes the rows of all sources that have something to train on into one Arrow file.

    Returns:
        The table (columns: row, where, source, content), and for every source its format, rows, rows without
        content and unused columns.
    """
    sources = []
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, ROWS_SCHEMA) as writer,
        tqdm(desc="Reading data", unit=" rows", delay=5, disable=None, leave=False) as progress,
    ):
        for number, (source, reader) in enumerate(readers):
            shape, rows = shaped(reader, source, use)
            columns: dict[str, None] = {}
            count = empty = 0
            while chunk := list(itertools.islice(rows, 1000)):
                records = []
                for where, raw in chunk:
                    columns.update(dict.fromkeys(raw))
                    row = shape.convert(raw, where)
                    count += 1
                    if is_empty(row, use):
                        empty += 1
                    else:
                        records.append(_record(row, where, number))
                progress.update(len(chunk))
                writer.write_batch(pa.RecordBatch.from_pylist(records, schema=ROWS_SCHEMA))
            unused = [name for name in columns if name not in shape.used_columns()]
            sources.append(
                SourceFigures(
                    path=source.path,
                    split=source.split,
                    format=shape.format,
                    rows=count,
                    empty_rows=empty,
                    unused_columns=unused,
                )
            )
    return Dataset.from_file(str(path)), sources


def _record(row: Row, where: str, source: int) -> dict[str, Any]:
    text = to_json(row)
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is no character",
            "correct the broken escape (often a cut emoji) or remove the row",
        ) from None
    content = int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)
    return {"row": text, "where": where, "source": source, "content": content}


def is_empty(row: Row, use: Use) -> bool:
    """Whether a row has no content that could be trained on."""
    if isinstance(row, Text):
        return not row.text.strip()
    if isinstance(row, Completion):
        return not row.completion.strip()
    if isinstance(row, Pair):
        return not (row.source.strip() and row.target.strip())
    if use.objective == "language_modelling" or use.train_on == "all":
        return not row.messages
    return not any(
        message["role"] == "assistant" and (message["content"] or message.get("tool_calls"))
        for message in row.messages
        if message.get("train", True)
    )


@dataclass(frozen=True)
class Cutter:
    """Turns rows into tokens of the wanted length. Picklable.

    Attributes:
        encoder: Turns a row into tokens and labels.
        stop_token_ids: Tokens that end generation.
        seq_len: Longest row in tokens.
        over_long: With `truncate` and `split`, longer rows become one or several pieces of at most `seq_len` tokens;
            otherwise they stay as they are, for the caller to refuse or drop.
    """

    encoder: Encoder
    stop_token_ids: frozenset[int]
    seq_len: int
    over_long: str

    def __call__(self, row: Row, where: str) -> list[dict[str, Any]]:
        """The columns of `TOKENS_FEATURES` (without `row`) for every piece of one row.

        Raises:
            UserError: The row cannot be encoded; the message names `where`.
        """
        try:
            encoded = self.encoder(row)
        except UserError as error:
            raise UserError(f"{where}: {error.what}", error.change) from error
        ids, labels = encoded.input_ids, encoded.labels
        length = max(len(ids), len(labels))
        parts = [(ids, labels)]
        if length > self.seq_len and self.over_long == "truncate":
            parts = [(ids[: self.seq_len], labels[: self.seq_len])]
        elif length > self.seq_len and self.over_long == "split" and isinstance(row, Text):
            parts = split_row(ids, labels, self.seq_len)
        whole = {"kind": type(row).__name__, "length": length, "merged": encoded.boundary_merged}
        pieces = []
        for part_ids, part_labels in parts:
            targets = [label for label in part_labels if label != IGNORE]
            figures = {"trained": len(targets), "stops": not self.stop_token_ids.isdisjoint(targets)}
            pieces.append({"input_ids": part_ids, "labels": part_labels} | figures | whole)
        return pieces


def tokenise(rows: Dataset, cutter: Cutter, num_proc: int | None, path: Path) -> Dataset:
    """Encodes every row once, into `path`.

    Args:
        rows: What `collect` wrote, or a selection of it.
        cutter: Turns a row into tokens.
        num_proc: Processes; None decides by the number of rows.
        path: Arrow file to write.

    Returns:
        A dataset with the columns of `TOKENS_FEATURES`, one row per piece: `row` is the position in `rows`, `length`
        the tokens of the whole row, `trained` those of the piece that carry loss.
    """
    if not len(rows):  # `map` would give the columns of the rows back
        return Dataset.from_dict({name: [] for name in TOKENS_FEATURES}, features=TOKENS_FEATURES)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_proc = min(num_proc or (1 if len(rows) < LARGE else cores), len(rows))
    if len(rows) >= LARGE and sys.stderr.isatty():
        datasets.enable_progress_bars()
    tokens = rows.map(
        partial(_encode_batch, cutter),
        with_indices=True,
        batched=True,
        batch_size=100,
        remove_columns=rows.column_names,
        features=TOKENS_FEATURES,
        num_proc=num_proc if num_proc > 1 else None,
        cache_file_name=str(path),
        load_from_cache_file=False,
        # Hashing the tokenizer for a fingerprint of its own would take longer than it is worth.
        new_fingerprint=xxhash.xxh3_64_hexdigest(str(path).encode()),
        desc="Tokenising",
    )
    datasets.disable_progress_bars()
    return tokens


def _encode_batch(cutter: Cutter, batch: dict[str, list[Any]], positions: list[int]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in TOKENS_FEATURES}
    for text, where, position in zip(batch["row"], batch["where"], positions, strict=True):
        for piece in cutter(from_json(text), where):
            for name, value in (piece | {"row": position}).items():
                columns[name].append(value)
    return columns


_ROWS_AT_ONCE = 10_000
"""Rows packed together: enough that the last, part-filled sequence of each group does not matter."""


def pack(dataset: Dataset, seq_len: int) -> Dataset:
    """Packs whole rows into sequences of at most `seq_len` tokens (best-fit decreasing).

    The same rows give the same sequences. They come in a random order, because best-fit puts the longest rows first
    and training must not see rows sorted by length, shuffled or not.

    Args:
        dataset: rows with `input_ids` and `labels` of equal length; the first label of every row is -100.
        seq_len: tokens per packed sequence; no row may be longer or empty.

    Returns:
        Rows with `input_ids`, `labels` and `seq_lengths`, the tokens of each document in order.
    """
    from trl.data_utils import pack_dataset  # seconds to import, and only packing needs it

    dataset = dataset.select_columns(["input_ids", "labels"])
    for batch in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        lengths = pc.min_max(pc.list_value_length(batch["input_ids"])).as_py()
        assert lengths["min"] > 0 and lengths["max"] <= seq_len, f"rows of {lengths} tokens in sequences of {seq_len}"
    options = {"batch_size": _ROWS_AT_ONCE, "keep_in_memory": not dataset.cache_files}
    packed = pack_dataset(dataset, seq_len, strategy="bfd", map_kwargs=options)
    return packed.select(np.random.default_rng(0).permutation(len(packed)))


def split_row(input_ids: list[int], labels: list[int], seq_len: int) -> list[tuple[list[int], list[int]]]:
    """Cuts a long text into rows of at most `seq_len` tokens. The first token of each is context, not a target."""
    return [
        (input_ids[start : start + seq_len], [IGNORE, *labels[start + 1 : start + seq_len]])
        for start in range(0, len(input_ids), seq_len)
    ]
