"""Reads one local file into plain rows; every error names the file, the line and what to change."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

import pyarrow as pa
import pyarrow.parquet as pq

from toolkit.errors import UserError

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
ACCEPTED = f"{' '.join(KINDS)}, also with {' '.join(COMPRESSIONS)} behind (except .parquet)"


@overload
def kind(path: Path) -> str: ...
@overload
def kind(path: Path, strict: Literal[False]) -> str | None: ...
def kind(path: Path, strict: bool = True) -> str | None:
    """What a file is by its name: jsonl, json, csv, tsv, parquet or text.

    Raises:
        UserError: The extension is unknown (None instead if not `strict`).
    """
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    found = KINDS.get(name.suffix.lower())
    if found is None and strict:
        raise UserError(f"`{path}` has an unknown extension `{path.suffix}`", f"accepted are {ACCEPTED}")
    return found


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of one file with their places.

    Raises:
        UserError: The file is empty, is not UTF-8, cannot be parsed, or holds something else than rows.
    """
    if not path.stat().st_size:
        raise UserError(f"`{path}` is empty", "fill the file or take it out of `data.sources`")
    readers = {"jsonl": _jsonl, "json": _json, "csv": _csv, "tsv": _csv, "parquet": _parquet, "text": _text}
    try:
        yield from readers[kind(path)](path)
    except (pa.ArrowException, EOFError) as error:
        raise UserError(f"`{path}` cannot be read: {error}", "the file is damaged or not what its name says") from error
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error}", "check the file and its permissions") from error


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Drops null fields inside the columns of a row: Arrow gives every object of a column the keys of all others."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if inner is not None}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return {name: clean(value) for name, value in row.items()}


def _open(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed and without a byte order mark."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    # PyArrow opens all three; the standard library of 3.11 has no zstd.
    file = pa.input_stream(str(path), compression=compression) if compression else path.open("rb")
    stream = io.BufferedReader(file)
    if stream.peek(3)[:3] == b"\xef\xbb\xbf":
        stream.read(3)
    return stream


def _decode(data: bytes, path: Path, line: int, offset: int) -> str:
    """Decodes bytes that start at `line` and byte `offset` of the (decompressed) file."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        encoding = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        raise UserError(
            f"`{path}` is not UTF-8: line {line}, byte {offset + error.start} is 0x{data[error.start]:02x}",
            f"save it as UTF-8, for example `iconv -f {encoding} -t UTF-8` if that is what it is",
        ) from None


def _read_text(path: Path) -> str:
    with _open(path) as file:
        return _decode(file.read(), path, line=1, offset=0)


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    offset = 0
    with _open(path) as file:
        for number, data in enumerate(file, 1):
            line = _decode(data, path, number, offset)
            offset += len(data)
            if line.strip():
                where = f"{path}:{number}"
                yield where, _object(_loads(line, path, first_line=number), where)


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = _read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object per line in a file that should be called .jsonl
            yield from _jsonl(path)
            return
        raise _invalid_json(path, error, first_line=1) from None
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list):
        raise UserError(f"`{path}` holds a single {_type(value)}", "a .json file is an array of objects")
    for number, row in enumerate(value, 1):
        where = f"{path} row {number}"
        yield where, _object(row, where)


def _csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if kind(path) == "tsv" else ","
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        if not all(name.strip() for name in header) or len(set(header)) < len(header) or not header:
            raise UserError(
                f"`{path}` has no header: its first line is {header}", "name every column once in the first line"
            )
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise UserError(
                    f"{path}:{reader.line_num} has {len(fields)} fields, the header has {len(header)}",
                    f"quote fields that hold a {'tab' if delimiter == chr(9) else 'comma'} or a line break",
                )
            yield f"{path}:{reader.line_num}", dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: {error}", "check the quotes in this line") from None


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    for batch in pq.ParquetFile(path).iter_batches(1000):
        for row in batch.to_pylist():
            number += 1
            yield f"{path} row {number}", without_nulls(row)


def _text(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield str(path), {"text": _read_text(path)}


def _loads(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _invalid_json(path, error, first_line) from None


def _invalid_json(path: Path, error: json.JSONDecodeError, first_line: int) -> UserError:
    line = error.doc.split("\n")[error.lineno - 1]
    near = line[max(0, error.colno - 21) : error.colno + 20]
    return UserError(
        f"{path}:{first_line + error.lineno - 1} column {error.colno} is not valid JSON: {error.msg}, near `{near}`",
        "correct this line; a .jsonl file has one object per line",
    )


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} is no object but: {_type(value)}", 'a row looks like {"prompt": …, "completion": …}')
    return value


def _type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
