"""Reads one local file into plain rows, each with its place (`train.jsonl:17`).

`datasets.load_dataset` reads most of these formats, too, but infers one Arrow schema for all rows: objects get the keys
of all others, a row that differs fails without its line, and a CSV cell `4` becomes a number. So JSON, CSV and text are
parsed by the standard library, which is slower than Arrow (and no matter beside tokenising), and every error names the
file, the line and what to change. Only JSON arrays, CSV and text are read whole; JSON lines and Parquet stream.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from toolkit.common import UserError, brief

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
TYPED = ("parquet", "arrow")
"""Kinds of files that say the types of their columns."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
ACCEPTED = f"{' '.join(KINDS)}, also with {' '.join(COMPRESSIONS)} behind (except .parquet and .arrow)"
_SIGNATURES = {
    b"version https://git-lfs": ("", "a Git LFS pointer", "run `git lfs pull` in the repository it came from"),
    b"\x1f\x8b": (".gz", "gzip data", "rename it to end in `.gz`"),
    b"\x28\xb5\x2f\xfd": (".zst", "zstd data", "rename it to end in `.zst`"),
    b"PAR1": (".parquet", "Parquet data", "rename it to end in `.parquet`"),
    b"PK\x03\x04": ("", "a zip archive (Excel files are, too)", "unpack it, or save the table as CSV"),
}
"""First bytes of a file to the extension it must have, what it is, and what to do otherwise."""
_PACKED = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar", ".xz", ".lz4"), "unpack `{}` first"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the table of `{}` as CSV"),
}
"""Extensions of what holds data in a form that is not read, and what to do."""

_LONGEST, _TIMES = 2**28, 100
"""Bytes of a line, and how many times as large as it is a file may unpack to, if to more than those."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an Arrow stream."""
_BY_PAGES: dict[str, Any] = {"pre_buffer": False, "buffer_size": 2**20}
"""Has Parquet read what it decodes next; otherwise it holds whole columns of a group of rows, and groups ahead."""
_NOT_SPACE = re.compile(r"\S")

RawRow = tuple[str, dict[str, Any]]
"""Where a row stands (`train.jsonl:17`), and its columns."""


def kind(path: Path) -> str | None:
    """What a file is by its name: jsonl, json, csv, tsv, parquet, arrow or text; None if its extension is unknown."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return KINDS.get(name.suffix.lower())


def read(path: Path) -> Iterator[RawRow]:
    """Rows of one file, whose `kind` is known, with their places.

    Raises:
        UserError: The file is empty, is not UTF-8, cannot be parsed, or holds something else than rows.
    """
    readers = {"jsonl": _jsonl, "json": _json, "csv": _csv, "tsv": _csv, "parquet": _columns, "arrow": _columns}
    readers["text"] = _text
    try:
        _check_signature(path)
        yield from readers[kind(path) or "text"](path)
    except (pa.ArrowException, EOFError, OSError) as error:
        raise UserError(
            f"`{path}` cannot be read: {error}",
            "the file is damaged (download it again), not what its name says, or not readable for you",
        ) from error
    except MemoryError:
        raise UserError(
            f"`{path}` takes more memory than there is", "write it as JSON lines or Parquet, which are read by rows"
        ) from None


def change_of(names: Iterable[str]) -> str:
    """What to do about files of which none has an extension that is known."""
    for name in names:
        suffixes = [each.lower() for each in Path(name).suffixes[-2:]]
        if packed := next((_PACKED[each] for each in reversed(suffixes) if each in _PACKED), None):
            return f"{packed.format(name)}; accepted are {ACCEPTED}"
    return f"accepted are {ACCEPTED}"


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Drops null fields inside the columns of a row: Arrow gives every object of a column the keys of all others."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if inner is not None}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return {name: clean(value) for name, value in row.items()}


def _check_signature(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(32)
    if not head:
        raise UserError(f"`{path}` is empty", "fill the file, or take it out of `data.sources` or `data.eval_sources`")
    for signature, (suffix, what, change) in _SIGNATURES.items():
        if head.startswith(signature) and path.suffix.lower() != suffix:
            raise UserError(f"`{path}` is {what}, not what its name says", change)


def _open(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed and without a byte order mark."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    # PyArrow opens all three; the standard library of 3.11 has no zstd.
    file = pa.input_stream(str(path), compression=compression) if compression else path.open("rb")
    stream = io.BufferedReader(file)
    head = stream.peek(3)[:3]
    if head == b"\xef\xbb\xbf":
        stream.read(3)
    if head[:2].count(b"\0") == 1:
        encoding = "UTF-16BE" if head.startswith(b"\0") else "UTF-16LE"
        raise UserError(
            f"`{path}` is not UTF-8: its first character has a byte 0x00",
            f"save it as UTF-8, for example `iconv -f {encoding} -t UTF-8` if that is what it is",
        )
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
        return _decode(_unpacked(file, path), path, line=1, offset=0)


def _unpacked(file: io.BufferedReader, path: Path) -> bytes:
    """All that is in a file. Of one that was packed to fill a memory no more is read than that is seen."""
    if path.suffix.lower() not in COMPRESSIONS:
        return file.read()
    whole, most = io.BytesIO(), max(_LONGEST, _TIMES * path.stat().st_size)
    while whole.tell() <= most and (part := file.read(2**24)):
        whole.write(part)
    if whole.tell() > most:
        raise UserError(
            f"`{path}` unpacks to more than {_TIMES} times its size", "unpack it yourself, if it is meant to be so"
        )
    return whole.getvalue()


def _head(path: Path) -> bytes:
    with _open(path) as file:
        return file.peek(64).lstrip()


def _jsonl(path: Path) -> Iterator[RawRow]:
    yield from _json(path) if _head(path).startswith(b"[") else _objects(path)


def _objects(path: Path) -> Iterator[RawRow]:
    """Objects that follow each other."""
    head = _head(path)
    is_spread = head.startswith(b"{") and not head.partition(b"\n")[0].strip(b"{ \r")
    yield from _spread(path) if is_spread else _lines(path)


def _lines(path: Path) -> Iterator[RawRow]:
    offset = 0
    with _open(path) as file:
        for number, data in enumerate(iter(functools.partial(file.readline, _LONGEST + 1), b""), 1):
            if len(data) > _LONGEST:
                raise UserError(f"{path}:{number} has more than {_LONGEST:,} bytes", "divide or remove this row")
            line = _decode(data, path, number, offset)
            offset += len(data)
            if line.strip():
                where = f"{path}:{number}"
                yield where, _object(_loads(line.rstrip(), path, first_line=number), where)


def _spread(path: Path) -> Iterator[RawRow]:
    """Objects that follow each other, each over several lines."""
    text, end, line, decoder = _read_text(path), 0, 1, json.JSONDecoder(object_pairs_hook=_said_once)
    while begin := _NOT_SPACE.search(text, end):
        line += text.count("\n", end, begin.start())
        try:
            value, after = decoder.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            value, after = _loads(text[begin.start() :], path, first_line=line), len(text)
        yield f"{path}:{line}", _object(value, f"{path}:{line}")
        line, end = line + text.count("\n", begin.start(), after), after


def _json(path: Path) -> Iterator[RawRow]:
    text = _read_text(path)
    try:
        value = _loads(text, path, first_line=1) if text.strip() else []
    except UserError as error:
        if getattr(error.__cause__, "msg", "") != "Extra data":
            raise
        yield from _objects(path)  # in a file that should be called .jsonl
        return
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [_single(value, path)]
    if not isinstance(value, list):
        raise UserError(f"`{path}` holds a single {_type(value)}", "a .json file is an array of objects")
    for number, row in enumerate(value, 1):
        where = f"{path} row {number}"
        yield where, _object(row, where)


def _single(value: dict[str, Any], path: Path) -> dict[str, Any]:
    """The object, if it can be the one row of a file: then a column is text or a conversation."""
    if any(isinstance(column, str) for column in value.values()) or value.keys() & {"messages", "conversations"}:
        return value
    raise UserError(
        f"`{path}` holds one object with the keys {', '.join(map(repr, list(value)[:8]))} instead of rows",
        "write an array of objects, or one object per line; "
        'from pandas with `df.to_json("data.jsonl", orient="records", lines=True)`',
    )


def _csv(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(sys.maxsize)
    text = _read_text(path)
    first_line = text[:10_000].partition("\n")[0]
    # Spreadsheets of half the world write semicolons.
    delimiter = "\t" if kind(path) == "tsv" else next((sign for sign in ",;\t|" if sign in first_line), ",")
    spaced = f"{delimiter} " in first_line
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=spaced, strict=True)
    line = 1  # where the row begins
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(header) > 1 and not header[0]:
            header[0] = "index"  # the nameless first column that pandas writes
        if not all(header) or len(set(header)) < len(header) or not header:
            raise UserError(
                f"`{path}` has no header: its first line is {header}", "name every column once in the first line"
            )
        line = reader.line_num + 1
        for fields in reader:
            if fields and len(fields) != len(header):
                raise UserError(
                    f"{path}:{line} has {len(fields)} fields, the header has {len(header)}",
                    f"quote fields that hold a {'tab' if delimiter == chr(9) else repr(delimiter)} or a line break",
                )
            if fields:
                yield f"{path}:{line}", dict(zip(header, fields, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{line}: {error}", "check the quotes of the row that begins in this line") from None


def _columns(path: Path) -> Iterator[RawRow]:
    """Rows of a Parquet file, or of an Arrow file as `Dataset.save_to_disk` writes it."""
    # Not mapped into memory: of a file that is cut short meanwhile, or a disk that fails, the process would die.
    with pa.OSFile(str(path)) as file:
        before = 0
        for batch in _parquet(file) if kind(path) == "parquet" else _batches(file):
            for number, row in enumerate(_as_rows(batch, path, before), before + 1):
                yield f"{path} row {number}", without_nulls(row)
            before += batch.num_rows


def _parquet(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    opened = pq.ParquetFile(file, **_BY_PAGES)
    lacking = opened.metadata.num_rows
    for batch in opened.iter_batches(1000):
        lacking -= batch.num_rows
        yield batch
    if lacking:  # A column whose pages end at the end of the file is shorter to PyArrow.
        raise pa.ArrowInvalid(f"it ends {lacking:,} rows early")


def _batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Those of an Arrow file, in parts of at most 1,000 rows."""
    reader = _arrow(file)
    is_stream = isinstance(reader, pa.RecordBatchStreamReader)
    for batch in reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)):
        yield from (batch.slice(first, 1000) for first in range(0, batch.num_rows, 1000))
    if is_stream:  # PyArrow takes the end of the file for that of the stream, also of one that was cut there.
        file.seek(max(file.tell() - len(_END_OF_STREAM), 0))
        if file.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
            raise pa.ArrowInvalid("it ends before the mark of its end")


def _arrow(file: pa.NativeFile) -> pa.RecordBatchStreamReader | pa.RecordBatchFileReader:
    """A reader of either kind of Arrow file: one ends with a table of its batches."""
    try:
        return pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        return pa.ipc.open_file(file)


def _as_rows(batch: pa.RecordBatch, path: Path, before: int) -> list[dict[str, Any]]:
    """The rows of a batch, before which others stand in the file."""
    names = batch.schema.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"`{path}` has two columns `{twice}`", "rename or remove one of them")
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError):  # text that is not UTF-8, a date after the year 9999, a key twice
        for number, name in itertools.product(range(batch.num_rows), names):
            place = f"{path} row {before + number + 1}: `{name}`"
            try:
                batch.column(name)[number].as_py(maps_as_pydicts="strict")
            except KeyError:
                raise UserError(
                    f"{place} is of Arrow's type {batch.schema.field(name).type}, and a map in it has a key twice: an "
                    "object would lose one of its values",
                    'write the column as a list of objects, such as [{"role": "user", "content": …}, …]',
                ) from None
            except (ValueError, OverflowError) as error:
                raise UserError(
                    f"{place} cannot be read: {error}", "correct the row, or write the file without this column"
                ) from None
        raise


def class_names(path: Path, column: str) -> list[str]:
    """What the numbers of a column stand for, by the features that `datasets` wrote into a file; empty otherwise."""
    if kind(path) not in TYPED:
        return []
    with pa.OSFile(str(path)) as file:
        schema = pq.ParquetFile(file).schema_arrow if kind(path) == "parquet" else _arrow(file).schema
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        feature = feature.get("feature", feature)  # Of a list.
        return [str(name) for name in feature["names"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def _text(path: Path) -> Iterator[RawRow]:
    yield str(path), {"text": _read_text(path)}


def _loads(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_said_once)
    except json.JSONDecodeError as error:
        near = error.doc.split("\n")[error.lineno - 1][max(0, error.colno - 21) : error.colno + 20]
        line = first_line + error.lineno - 1
        raise UserError(
            f"{path}:{line} column {error.colno} is not valid JSON: {error.msg}, near `{near}`",
            "correct this line" + "; a .jsonl file has one object per line" * (kind(path) == "jsonl"),
        ) from error
    except (RecursionError, ValueError) as error:  # nested a thousand deep, a number too long, a key said twice
        raise UserError(f"{path}:{first_line} cannot be read as JSON: {error}", "correct or remove this row") from None


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key that says two things, JSON's readers keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if value != found[name]:
                both = " and ".join(brief(repr(each), 1, 80) for each in (value, found[name]))
                raise ValueError(f"`{name}` stands twice in one object, as {both}")
    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        example = '{"messages": […]}' if isinstance(value, list) else '{"prompt": …, "completion": …}'
        raise UserError(f"{where} is not an object but: {_type(value)}", f"a row looks like {example}")
    return value


def _type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
