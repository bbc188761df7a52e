"""Rows as tokens in a memory-mapped table, and rows packed into sequences.

The tables are Arrow files, so that data may be larger than memory and the processes of a machine share it. Every row is
encoded once, however often it repeats. Packing is TRL's best-fit decreasing, which cuts no row and leaves some padding;
text that is concatenated and cut fills sequences completely, but trains on answers whose questions are elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow.compute as pc
import xxhash
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray

from toolkit.common import UserError, usable_cores
from toolkit.data.encoding.encode import Encoded, Encoder, Rendered
from toolkit.data.encoding.label_encoding import closing
from toolkit.data.formats.related import key_of
from toolkit.data.row_table import in_utf8
from toolkit.data.rows import (
    IGNORE,
    Judged,
    Labelled,
    Preference,
    Prompted,
    Related,
    Row,
    Tagged,
    from_json,
    sides,
    to_json,
)
from toolkit.own_process import end_with_parent

_Encoded = TypeVar("_Encoded")
LARGE = 10_000
"""From this many rows on, several processes tokenise, and a terminal shows their progress."""
PACKED_TOGETHER = 10_000
"""Rows packed at once: enough that the last, part-filled sequence of each group does not matter."""
_PACKED_TOKENS = 2**28
"""Their tokens at most, where rows are long: 1 GiB of each column, several times over. Arrow counts up to 2^31."""
_TOGETHER = 2**20
"""Bytes of rows that are tokenised at once, up to 1,000 rows; as tokens they are some twenty times as large."""
FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
TOKENS_FEATURES = Features(
    {**FEATURES, "kind": Value("string")}
    | dict.fromkeys(("row", "length", "trained", "chosen", "rejected", "cut"), Value("int64"))
    | dict.fromkeys(("stops", "merged", "prompt_lost", "equal", "apart", "desirable"), Value("bool"))
    | dict.fromkeys(("seq_lengths", "token_type_ids"), List(Value("int32")))
    | {"columns": Value("large_string"), "keys": List(Value("int64")), "score": Value("float64")}
)
_EMPTY_COLUMNS = {"chosen": 0, "rejected": 0, "equal": False, "apart": False, "seq_lengths": [], "token_type_ids": []}
_EMPTY_COLUMNS |= {"columns": "", "cut": 0, "keys": [], "score": 0.0}
"""What columns hold where a kind of rows has nothing for them."""


@dataclass(frozen=True)
class Chunker:
    """Encodes rows and cuts them to length. Picklable.

    Attributes:
        over_long: With `truncate` and `split`, longer rows become one or several chunks of at most `seq_len` tokens;
            otherwise they stay as they are, for the caller to refuse or drop.
        classes: Names of the classes of labelled rows, in the order of their numbers.
    """

    encoder: Encoder
    seq_len: int
    over_long: str
    classes: tuple[str, ...] = ()

    def __call__(self, rows: Sequence[tuple[Row, str]]) -> list[list[dict[str, Any]]]:
        """The columns of `TOKENS_FEATURES` (without `row`) for every chunk of each of some rows.

        All are rendered before the first is tokenised, which takes a sixth less than in turns: either work has the
        processor's caches for itself.

        Args:
            rows: Rows, and where they stand.

        Raises:
            UserError: A row cannot be encoded; the message names where it stands.
        """
        if rows and isinstance(rows[0][0], Prompted):
            return [[self._prompt(row, where)] for row, where in rows if isinstance(row, Prompted)]
        rendered = [
            (row, [_named(self.encoder.rendered, side, side, where) for side in sides(row)], where)
            for row, where in rows
        ]
        encoded = (
            (row, where, [_named(self.encoder, text, row, where) for text in texts]) for row, texts, where in rendered
        )
        return [self._encoded(row, where, *both) for row, where, both in encoded]

    def _encoded(self, row: Row, where: str, *both: Encoded) -> list[dict[str, Any]]:
        if isinstance(row, Preference):
            return [self._pair(type(row.chosen).__name__, *both)]
        if isinstance(row, Related):
            return [self._related(row, both, where)]
        return [self._labelled(row, *both)] if isinstance(row, Labelled | Tagged) else self._chunks(row, *both)

    def _labelled(self, row: Labelled | Tagged, encoded: Encoded) -> dict[str, Any]:
        """Labels as numbers of classes; those of no known class are not learnt."""
        named = row.tags if isinstance(row, Tagged) else [row.label]
        labels = [IGNORE if word == IGNORE else self._numbers.get(named[word], IGNORE) for word in encoded.labels]
        ids, types, length = encoded.input_ids, encoded.token_type_ids, len(encoded.input_ids)
        if length > self.seq_len and self.over_long == "truncate":
            ids, types = self._cut(ids), self._cut(types) if types else types
            labels = self._cut(labels) if isinstance(row, Tagged) else labels
        trained = sum(label != IGNORE for label in labels)
        whole = {"kind": type(row).__name__, "length": length, "merged": False, "stops": True}
        whole["prompt_lost"] = encoded.prompt_lost
        told = {"input_ids": ids, "labels": labels, "trained": trained, "desirable": False}
        return _EMPTY_COLUMNS | whole | told | {"token_type_ids": types}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Of the classes, of which there may be many thousands, by their names."""
        return {name: number for number, name in enumerate(self.classes)}

    def _cut(self, values: list[int]) -> list[int]:
        """What of a text's tokens, or of what stands beside them, is kept: the beginning, and what ends every text."""
        kept = closing(self.encoder.tokenizer)
        return [*values[: self.seq_len - kept], *values[len(values) - kept :]]

    def _related(self, row: Related, encoded: Sequence[Encoded], where: str) -> dict[str, Any]:
        """Texts behind each other, each cut to length by itself; an anchor that is its own positive is not trained."""
        whole = [each.input_ids for each in encoded]
        cuts = self.over_long == "truncate"

        def kept(given: list[int]) -> list[int]:
            return self._cut(given) if cuts and len(given) > self.seq_len else given

        ids = [*map(kept, whole)]
        anchor, *keys = map(key_of, ids)
        if row.query_prompt != row.document_prompt:
            # Known by what its text would be among the others, where the same words have another prompt.
            alike = sides(replace(row, query_prompt=row.document_prompt))[0]
            anchor = key_of(kept(_named(self.encoder, alike, row, where).input_ids))
        equal = row.score is None and anchor == keys[0]
        flat = [token for each in ids for token in each]
        return _EMPTY_COLUMNS | {
            "kind": type(row).__name__,
            "desirable": False,
            "input_ids": flat,
            "labels": [IGNORE] * len(flat),
            "seq_lengths": [*map(len, ids)],
            "length": max(map(len, whole)),
            "trained": 0 if equal or not all(ids) else len(ids),
            "stops": True,
            "merged": False,
            "prompt_lost": False,
            "equal": equal,
            "cut": sum(len(each) > self.seq_len for each in whole) if cuts else 0,
            "keys": [anchor, *keys],
            "score": row.score or 0.0,
        }

    def _chunks(self, row: Row, encoded: Encoded) -> list[dict[str, Any]]:
        kind, desirable = type(sides(row)[0]).__name__, isinstance(row, Judged) and row.desirable
        ids, labels = encoded.input_ids, encoded.labels
        length = max(len(ids), len(labels))
        whole = {"kind": kind, "length": length, "merged": encoded.boundary_merged, "desirable": desirable}
        whole["prompt_lost"] = encoded.prompt_lost
        starts, end = range(1), length
        if length > self.seq_len and self.over_long == "truncate":
            end = self.seq_len
        elif length > self.seq_len and self.over_long == "split" and kind == "Text":
            starts, end = range(0, length, self.seq_len), self.seq_len
        chunks = []
        for start in starts:
            chunk = {"input_ids": ids[start : start + end], "labels": labels[start : start + end]}
            if start:
                chunk["labels"][0] = IGNORE  # it is context, not a target
            targets = [label for label in chunk["labels"] if label != IGNORE]
            stops = not self.encoder.stop_token_ids.isdisjoint(targets)
            chunks.append(_EMPTY_COLUMNS | chunk | whole | {"trained": len(targets), "stops": stops})
        return chunks

    def _prompt(self, row: Prompted, where: str) -> dict[str, Any]:
        """What the model is asked, without an answer: no token has a label."""
        ids = _named(self.encoder.prompt_ids, row, row, where)
        labels = [IGNORE] * len(ids)
        lost = _named(self.encoder.prompt_lost, row.asked, row, where)
        whole = {"kind": type(row.asked).__name__, "length": len(ids), "merged": False, "prompt_lost": lost}
        whole |= {"desirable": False, "trained": len(ids), "stops": True}
        return (
            _EMPTY_COLUMNS | {"input_ids": ids, "labels": labels, "columns": json.dumps([where, row.columns])} | whole
        )

    def _pair(self, kind: str, chosen: Encoded, rejected: Encoded) -> dict[str, Any]:
        """Both answers behind each other, each with its prompt and cut to length by itself; none is trained of a pair
        that has lost one of them, or whose tokens are the same."""
        both = (chosen, rejected)
        end = self.seq_len if self.over_long == "truncate" else None
        ids, labels = [side.input_ids[:end] for side in both], [side.labels[:end] for side in both]
        targets = [[label for label in side if label != IGNORE] for side in labels]
        equal, merged = ids[0] == ids[1], any(side.boundary_merged for side in both)
        return _EMPTY_COLUMNS | {
            "kind": kind,
            "desirable": False,
            "input_ids": [*ids[0], *ids[1]],
            "labels": [*labels[0], *labels[1]],
            "seq_lengths": [*map(len, ids)],
            "length": max(len(side.input_ids) for side in both),
            "trained": sum(map(len, targets)) if all(targets) and not equal else 0,
            "chosen": len(targets[0]),
            "rejected": len(targets[1]),
            "stops": not any(self.encoder.stop_token_ids.isdisjoint(side) for side in targets),
            "merged": merged,
            "prompt_lost": any(side.prompt_lost for side in both),
            "equal": equal,
            # A token that holds the start of an answer is another one for each answer to the same prompt.
            "apart": not merged and _prompt(chosen) != _prompt(rejected),
        }


def _prompt(side: Encoded) -> list[int]:
    """The tokens before the first one that is trained."""
    first = next((n for n, label in enumerate(side.labels) if label != IGNORE), len(side.labels))
    return side.input_ids[:first]


def _named(encode: Callable[[Any], _Encoded], given: Any, row: Row, where: str) -> _Encoded:
    """What a step of the encoder makes of a row, or of the row as it was given it; an error names the row."""
    try:
        return encode(given)
    except UserError as error:
        raise UserError(f"{where}: {error.what}", error.change) from error
    except (TypeError, UnicodeEncodeError):
        # Of a stream nobody looked for what tokenizers refuse, nor of what a template writes.
        in_utf8(given.text if isinstance(given, Rendered) else to_json(row), where)
        raise


def tokenise(rows: Dataset, chunker: Chunker, num_proc: int | None, path: Path) -> Dataset:
    """Encodes every row once, into `path`.

    Args:
        rows: What `collect` wrote, or a selection of it.
        num_proc: Processes; None decides by the number of rows.

    Returns:
        A dataset with the columns of `TOKENS_FEATURES`, one row per chunk: `row` is the position in `rows`, `length`
        the tokens of the whole row, `trained` those of the chunk that carry loss.
    """
    if not len(rows):  # `map` would give the columns of the rows back
        return Dataset.from_dict({name: [] for name in TOKENS_FEATURES}, features=TOKENS_FEATURES)
    cores = usable_cores()
    num_proc = min(num_proc or (1 if len(rows) < LARGE else cores), len(rows))
    if len(rows) >= LARGE and sys.stderr.isatty():
        datasets.enable_progress_bars()
    with _stopped_at_once():
        tokens = rows.map(
            partial(_encode_batch, chunker),
            with_indices=True,
            batched=True,
            batch_size=max(1, min(1000, _TOGETHER * len(rows.data) // max(rows.data.nbytes, 1))),
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


@contextlib.contextmanager
def _stopped_at_once() -> Iterator[None]:
    """Has Ctrl-C and SIGTERM end what several processes do as they end everything, for which the pool would raise that
    its results have not come. Where this process is killed, they end too, and do not wait for it for ever."""
    global _forks
    _forks = True
    try:
        yield
    except Exception as error:
        before = error.__context__
        while before and not isinstance(before, KeyboardInterrupt):
            before = before.__context__
        if before:
            raise before from None
        raise
    finally:
        _forks = False


_forks = False
"""Whether what is forked now belongs to a pool."""
os.register_at_fork(after_in_child=lambda: end_with_parent() if _forks else None)


def _encode_batch(chunker: Chunker, batch: dict[str, list[Any]], positions: list[int]) -> dict[str, list[Any]]:
    each = chunker(list(zip(map(from_json, batch["row"]), batch["where"], strict=True)))
    chunks = [{"row": n, **chunk} for n, chunks in zip(positions, each, strict=True) for chunk in chunks]
    return {name: [chunk[name] for chunk in chunks] for name in TOKENS_FEATURES}


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
    batches = dataset.with_format("arrow").iter(1000)
    lengths = np.concatenate([pc.list_value_length(batch["input_ids"]).to_numpy() for batch in batches])
    found = f"rows of {lengths.min()} to {lengths.max()} tokens in sequences of {seq_len}"
    assert lengths.min() > 0 and lengths.max() <= seq_len, found
    together = _packed_together(lengths)
    options = {"batch_size": together, "keep_in_memory": not dataset.cache_files}
    packed = pack_dataset(dataset, seq_len, strategy="bfd", map_kwargs=options)
    return packed.select(np.random.default_rng(0).permutation(len(packed)))


def _packed_together(lengths: NDArray[np.int32]) -> int:
    """How many rows of (rows,) tokens are packed at once."""
    rows = PACKED_TOGETHER
    while rows > 1 and np.add.reduceat(lengths, range(0, len(lengths), rows), dtype=np.int64).max() > _PACKED_TOKENS:
        rows //= 2
    return rows
