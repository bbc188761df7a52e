"""The rows of all sources as one memory-mapped table, before they are tokens, and what is seen in each source.

Rows are kept as JSON strings of their normal form: an Arrow struct would give tool arguments keys they never had.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from datasets import Dataset
from tqdm import tqdm

from toolkit.common import UserError
from toolkit.data.auditing.audit import SourceFigures
from toolkit.data.formats.columns import EMPTY, names_in, verdict
from toolkit.data.formats.conversion import RowFormat
from toolkit.data.formats.messages import further_fields
from toolkit.data.formats.prompts import PromptFormat
from toolkit.data.formats.ratings import beside_answers, is_worse
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task, has_empty_turn, is_empty, is_missing_value
from toolkit.data.reading.readers import RawRow
from toolkit.data.reading.sources import Reader
from toolkit.data.rows import (
    Chat,
    Row,
    sides,
    to_json,
)

FIRST_ROWS = 100
"""By so many rows the format of a source is recognised."""
PLACEHOLDER = re.compile(r"<(\|?)(image|video|audio)(_pad)?\1>")
"""What stands for a picture, sound or film in a text of LLaMA-Factory, LLaVA, Llama and Qwen; no element of HTML."""
ROWS_SCHEMA = pa.schema(
    [("row", pa.large_string()), ("where", pa.string()), ("source", pa.int32()), ("content", pa.int64())]
)


def open_rows(reader: Reader, task: Task) -> tuple[RowFormat | PromptFormat, Iterator[RawRow]]:
    """The format of a source, and its rows from the first one on.

    Raises:
        UserError: See `recognise` and `Reader.rows`.
    """
    rows = reader.rows()
    head = list(itertools.islice(rows, FIRST_ROWS))
    found = recognise([row for _, row in head], reader.source, task)
    return found, found.rows(itertools.chain(head, rows))


def has_placeholder(text: str) -> bool:
    """Whether a placeholder stands in a text with no end tag behind it, which an element of HTML has."""
    last = {match[2]: match.start() for match in PLACEHOLDER.finditer(text)}
    return any(start > text.rfind(f"</{name}>") for name, start in last.items())


def collect(readers: list[Reader], task: Task, path: Path) -> tuple[Dataset, list[SourceFigures]]:
    """Writes the rows of all sources that have something to train on into one Arrow file.

    Returns:
        The table (columns: row, where, source, content), and for every source its format, rows, rows without
        content, unused columns and which of them judge rows or answers, fields of messages that are left to the chat
        template, rows with placeholders of pictures, turns that say nothing or missing values, and which of
        `data.ignore` there are.
    """
    sources = []
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, ROWS_SCHEMA) as writer,
        tqdm(desc="Reading data", unit=" rows", delay=5, disable=None, leave=False) as progress,
    ):
        for number, reader in enumerate(readers):
            row_format, rows = open_rows(reader, task)
            classes: list[str] = []
            if task.labelled and isinstance(row_format, RowFormat):
                classes = reader.class_names(row_format.label_column)
                row_format = dataclasses.replace(row_format, classes=tuple(classes))
            figures = SourceFigures(
                path=reader.source.path, split=reader.source.split, format=row_format.name, classes=classes
            )
            absent = set(reader.source.ignore or ())
            fields: dict[str, None] = {}
            unused: dict[str, Counter[bool | None]] = {}
            worse: Counter[str] = Counter()
            used = row_format.used_columns()
            while batch := list(itertools.islice(rows, 1000)):
                for name, value in (item for _, raw in batch for item in raw.items() if item[0] not in used):
                    said = unused.setdefault(name, Counter())
                    if value not in EMPTY:
                        said[verdict(value)] += 1
                scores = beside_answers([*unused]) if task.pairs else ()
                worse.update(one for one, other in scores for _, raw in batch if is_worse(raw, one, other))
                for _, raw in batch if absent else ():
                    present = set(names_in(raw))
                    absent = {name for name in absent if not {name, name.rpartition(".")[2]} & present}
                converted = [(row_format.convert(raw, where), where) for where, raw in batch]
                kept = [(row, where) for row, where in converted if not is_empty(row, task)]
                records = [_record(row, where, number) for row, where in kept]
                figures.empty_turns += sum(has_empty_turn(row, task) for row, _ in kept)
                figures.missing_values += sum(is_missing_value(row, task) for row, _ in kept)
                figures.placeholders += sum(has_placeholder(record["row"]) for record in records)
                writer.write_batch(pa.RecordBatch.from_pylist(records, schema=ROWS_SCHEMA))
                figures.rows += len(batch)
                figures.empty_rows += len(batch) - len(records)
                if len(records) < len(batch) and not figures.first_empty:
                    figures.first_empty = next(where for row, where in converted if is_empty(row, task))
                for row, _ in converted:
                    for side in sides(row):
                        fields.update(dict.fromkeys(further_fields(side.messages) if isinstance(side, Chat) else ()))
                progress.update(len(batch))
            reader.check_unchanged()
            figures.unused_columns = list(unused)
            judging = (name for name in unused if set(unused[name]) == {True, False} and name not in row_format.ignored)
            figures.verdicts = {name: unused[name][False] for name in judging}
            figures.worse = dict(worse)
            figures.unused_fields = list(fields)
            figures.ignored = {name: name not in absent for name in reader.source.ignore or ()}
            sources.append(figures)
    return Dataset.from_file(str(path)), sources


def _record(row: Row, where: str, source: int) -> dict[str, Any]:
    text = to_json(row)
    content = int.from_bytes(xxhash.xxh3_64_digest(in_utf8(text, where)), "big", signed=True)
    return {"row": text, "where": where, "source": source, "content": content}


def in_utf8(text: str, where: str) -> bytes:
    """The bytes of a text.

    Raises:
        UserError: It holds what is no character.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is no character",
            "correct the broken escape (often a cut emoji) or remove the row",
        ) from None
