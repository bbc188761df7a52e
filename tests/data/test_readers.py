"""Files are read by their names, and what is wrong in them is said with its place."""

from __future__ import annotations

import bz2
import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toolkit.common import UserError
from toolkit.data.reading import readers
from toolkit.data.reading.readers import ACCEPTED, kind, read

ROWS = [{"text": "a", "n": "1"}, {"text": "b\u2028c", "n": "2"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CONTENT = {
    **dict.fromkeys((".jsonl", ".ndjson"), LINES),
    ".json": json.dumps(ROWS),
    ".csv": "text,n\na,1\nb\u2028c,2\n",
    ".tsv": "text\tn\na\t1\nb\u2028c\t2\n",
}


def compressed(data: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        return bytes(pa.Codec("zstd").compress(data, asbytes=True))
    return {".gz": gzip.compress, ".bz2": bz2.compress, "": bytes}[suffix](data)


@pytest.mark.parametrize("behind", ["", ".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".md"])
def test_every_kind_of_text_is_read_under_its_suffix(suffix: str, behind: str, tmp_path: Path) -> None:
    assert suffix in ACCEPTED and behind in ACCEPTED
    text = CONTENT.get(suffix, "One\n\ntwo")
    for name in (f"a{suffix}{behind}", f"A.B{suffix}{behind}".upper()):
        path = tmp_path / name
        path.write_bytes(compressed(text.encode(), behind))
        assert kind(path) is not None
        assert [row for _, row in read(path)] == (ROWS if suffix in CONTENT else [{"text": "One\n\ntwo"}])


@pytest.mark.parametrize("in_a_list", [False, True])
def test_a_map_with_a_key_twice_is_refused_by_its_row_and_type(in_a_list: bool, tmp_path: Path) -> None:
    """As an object it would lose its first turn, and the rest would be trained."""
    once, twice = [("user", "Hi"), ("assistant", "Hello")], [("user", "a"), ("assistant", "b"), ("user", "c")]
    kind: pa.DataType = pa.map_(pa.string(), pa.string())
    rows = [[once], [twice]] if in_a_list else [once, twice]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(kind) if in_a_list else kind)}), path)
    with pytest.raises(UserError, match="has a key twice") as caught:
        list(read(path))
    assert "rows.parquet row 2: `messages` is of Arrow's type" in caught.value.what
    assert "map<string, string" in caught.value.what and "list of objects" in str(caught.value)


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    messages = pa.array([[list(message.items()) for message in talk]], kind)
    nested = pa.array([{"inner": [("a", None), ("b", "c")]}], pa.struct({"inner": pa.map_(pa.string(), pa.string())}))
    pq.write_table(pa.table({"messages": messages, "more": nested}), tmp_path / "a.parquet")
    (row,) = [row for _, row in read(tmp_path / "a.parquet")]
    assert row == {"messages": talk, "more": {"inner": {"b": "c"}}}


def test_arrow_and_parquet_are_read_uncompressed(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS * 1500)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "b.arrow"):
        places, rows = zip(*read(tmp_path / name), strict=True)
        assert list(rows) == ROWS * 1500
        assert places[0] == f"{tmp_path / name} row 1" and places[-1] == f"{tmp_path / name} row 3000"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_with_words(name: str, tmp_path: Path) -> None:
    """In a process of its own, which a file that is mapped into memory would end."""
    table, path = pa.table({"text": [str(n) * 500 for n in range(10_000)]}), tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    reading = (
        "import os, sys; from pathlib import Path; from toolkit.data.reading.readers import read\n"
        "rows = read(Path(sys.argv[1])); next(rows); os.truncate(sys.argv[1], 100_000); print(len(list(rows)))"
    )
    done = subprocess.run([sys.executable, "-c", reading, str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and f"UserError: `{path}` cannot be read" in done.stderr, (done.stdout, done.stderr)


def test_an_arrow_stream_that_was_not_written_to_its_end_is_refused(tmp_path: Path) -> None:
    path, batch = tmp_path / "a.arrow", pa.RecordBatch.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
        whole = file.tell()
        writer.write_batch(batch)
    assert len(list(read(path))) == 4
    content = path.read_bytes()
    for end in (whole, len(content) - 8):  # Between two batches PyArrow takes it for the end.
        path.write_bytes(content[:end])
        with pytest.raises(UserError, match="ends before the mark of its end"):
            list(read(path))


@pytest.mark.parametrize("name", ["a.xlsx", "a", "a.gz", "a.jsonl.zip", "jsonl", "a.json.old", "a.yaml"])
def test_other_names_are_of_no_kind(name: str) -> None:
    assert kind(Path(name)) is None


def refused(path: Path, data: bytes | str) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(UserError) as caught:
        list(read(path))
    assert caught.value.change
    return str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "data", "what", "change"),
    [
        (".gz", gzip.compress(b"a", mtime=0), "gzip data", "end in `.gz`"),
        (".zst", compressed(b"a", ".zst"), "zstd data", "end in `.zst`"),
        (".parquet", b"PAR1....", "Parquet data", "end in `.parquet`"),
        (".zip", b"PK\x03\x04...", "a zip archive (Excel files are, too)", "save the table as CSV"),
        (".lfs", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer", "run `git lfs pull`"),
    ],
)
def test_what_a_file_is_and_does_not_say(suffix: str, data: bytes, what: str, change: str, tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv", "a.txt", "a.arrow"):
        message = refused(tmp_path / name, data)
        assert f"{name}` is {what}, not what its name says" in message and change in message
    if suffix == ".gz":
        (tmp_path / "a.txt.GZ").write_bytes(data)
        assert [row for _, row in read(tmp_path / "a.txt.GZ")] == [{"text": "a"}]


@pytest.mark.parametrize(
    ("value", "what"),
    [([1], "array"), ("a", "string"), (True, "boolean"), (None, "null"), (5, "number"), (0.5, "number")],
)
def test_a_row_is_an_object(value: Any, what: str, tmp_path: Path) -> None:
    message = refused(tmp_path / "a.jsonl", f'{{"a": 1}}\n\n{json.dumps(value)}\n')
    assert f"a.jsonl:3 is not an object but: {what}" in message
    assert ('{"messages": […]}' if what == "array" else '{"prompt": …, "completion": …}') in message
    assert f"a.json row 2 is not an object but: {what}" in refused(tmp_path / "a.json", json.dumps([{"a": 1}, value]))
    if what != "array":
        assert f"holds a single {what}" in refused(tmp_path / "b.json", json.dumps(value))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_places_of_rows(name: str, mark: str, tmp_path: Path) -> None:
    path = tmp_path / name
    texts = {
        "lines": ('{"a": 1}\n\n{"a": 2}\n', [":1", ":3"]),
        "spread": ('{\n  "a": 1\n}\n\n{\n  "a": 2\n}\n{\n"a": 3}', [":1", ":5", ":8"]),
        "array": ('[{"a": 1},\n {"a": 2}]', [" row 1", " row 2"]),
    }
    for text, places in texts.values():
        path.write_text(mark + text, encoding="utf-8")
        rows = list(read(path))
        assert [place for place, _ in rows] == [f"{path}{place}" for place in places]
        assert [row["a"] for _, row in rows] == list(range(1, len(places) + 1))
    (tmp_path / "a.csv").write_text('text,n\n"one\ntwo",1\n\nthree,2\n')
    assert [place for place, _ in read(tmp_path / "a.csv")] == [f"{tmp_path}/a.csv:{n}" for n in (2, 5)]


def test_one_object_in_a_file_is_a_row_if_it_can_be_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for value in ({"text": "a", "n": 1}, {"messages": [], "n": 1}, {"conversations": []}):
        path.write_text(json.dumps(value))
        assert list(read(path)) == [(f"{path} row 1", value)]
    message = refused(path, json.dumps({f"column {n}": {"0": n} for n in range(12)}))
    assert "'column 0', " in message and "'column 7' instead of rows" in message and 'orient="records"' in message
    path.write_text(json.dumps({"data": "text"}))
    assert [row for _, row in read(path)] == [{"data": "text"}]
    path.write_text(" \n")
    assert list(read(path)) == []


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_separators_of_spreadsheets(sign: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    lines = [["text", " n "], ["a;b,c\td|e", "1"], ['say "so"', "2"]]
    quoted = "\n".join(sign.join('"' + field.replace('"', '""') + '"' for field in line) for line in lines)
    for text in (quoted, quoted.replace(f'"{sign}"', f'"{sign} "')):
        path.write_text(text)
        assert [row for _, row in read(path)] == [{"text": "a;b,c\td|e", "n": "1"}, {"text": 'say "so"', "n": "2"}]
    shown = "tab" if sign == "\t" else repr(sign)
    message = refused(path, f"a{sign}b\n1{sign}2\n1{sign}2{sign}3\n")
    assert "a.csv:3 has 3 fields, the header has 2" in message and f"fields that hold a {shown} or a line" in message
    assert "a.csv:2 has 1 fields" in refused(path, f"a{sign}b\n1\n")


def test_headers_name_every_column_once(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for header in ("a,a", "a,,b", "a,"):
        assert "has no header: its first line is [" in refused(path, f"{header}\n1,2,3\n")
    path.write_text(",a\n7,b\n")
    assert [row for _, row in read(path)] == [{"index": "7", "a": "b"}]
    path.write_text("text\none\ntwo\n")
    assert [row for _, row in read(path)] == [{"text": "one"}, {"text": "two"}]
    path.write_text(f"text,n\n{'x' * 200_000},1\n")
    assert len(next(read(path))[1]["text"]) == 200_000


def test_a_tab_separated_file_holds_commas(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a,b\tc\n1,2\t3\n")
    assert [row for _, row in read(tmp_path / "a.tsv")] == [{"a,b": "1,2", "c": "3"}]


def test_a_line_that_is_cut_short_is_named_itself_and_not_the_next(tmp_path: Path) -> None:
    message = refused(tmp_path / "a.jsonl", '{"a": 1}\n{"a": {"b": 2}\n{"a": 3}\n')
    assert "a.jsonl:2 column 15 is not valid JSON" in message and 'near `{"a": {"b": 2}`' in message
    assert "a.jsonl:2 column 15 " in refused(tmp_path / "a.jsonl", '{"a": 1}\r\n{"a": {"b": 2}\r\n{"a": 3}\r\n')


def test_what_is_no_json_is_shown_where_it_stands(tmp_path: Path) -> None:
    long = '{"a": "' + "x" * 50 + '", "b": nope, "c": "' + "y" * 50 + '"}'
    message = refused(tmp_path / "a.jsonl", f'{{"a": 1}}\n{long}\n')
    column = long.index("nope") + 1
    assert f"a.jsonl:2 column {column} is not valid JSON" in message
    shown = message.partition("near `")[2].partition("`")[0]
    assert shown == long[column - 21 : column + 20] and "nope" in shown
    assert "a .jsonl file has one object per line" in message
    # Not one row in each line of a file with that name: the first thing wrong is said.
    message = refused(tmp_path / "a.json", '{"a": 1}\n{b: 2}\n')
    assert "a.json:2 column 2" in message and ".jsonl" not in message
    assert "a.json:1 column 2" in refused(tmp_path / "a.json", "{b: 2}\n")


def test_a_key_that_says_two_things_is_refused(tmp_path: Path) -> None:
    """Python's reader of JSON keeps the last of them."""
    twice = '{"prompt": "a", "completion": "b", "completion": "c"}'
    what = "cannot be read as JSON: `completion` stands twice in one object, as 'b' and 'c'"
    assert f"a.jsonl:2 {what}" in refused(tmp_path / "a.jsonl", f'{{"prompt": "a", "completion": "b"}}\n{twice}\n')
    assert what in refused(tmp_path / "a.json", f'[{{"rows": [{twice}]}}]')
    spread = twice.replace("{", "{\n").replace(",", ",\n")
    assert f"b.jsonl:4 {what}" in refused(tmp_path / "b.jsonl", f'{{\n"prompt": "a"\n}}\n{spread}\n')
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 1, "text": "a", "id": 1}\n')
    assert [row for _, row in read(path)] == [{"id": 1, "text": "a"}]


def test_values_of_parquet_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    offsets = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab\xff")])
    dates = pa.array([0, 10**18], pa.timestamp("us"))
    for column, what in ((texts, "'utf-8' codec can't decode byte 0xff"), (dates, "date value out of range")):
        whole = pa.chunked_array([pa.nulls(1500, column.type), column])
        pq.write_table(pa.table({"text": ["a"] * 1502, "more": whole}), path)
        with pytest.raises(UserError) as failed:
            list(read(path))
        assert f"a.parquet row 1502: `more` cannot be read: {what}" in str(failed.value)
        assert "write the file without this column" in failed.value.change
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(UserError, match="has two columns `text`"):
        list(read(path))


@pytest.mark.parametrize(("mark", "encoding"), [("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("latin1", "LATIN1")])
def test_other_encodings_are_named(mark: str, encoding: str, tmp_path: Path) -> None:
    text = '{"text": "a"}\n{"text": "caf\xe9"}\n'
    data = text.encode(mark)
    if encoding == "UTF-16":
        data = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}[mark] + data
    for name in ("a.jsonl", "a.json", "a.txt"):
        message = refused(tmp_path / name, data)
        assert f"`iconv -f {encoding} -t UTF-8`" in message
        if encoding == "LATIN1":
            at = data.index(b"\xe9")
            assert f"is not UTF-8: line 2, byte {at} is 0xe9" in message


@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_other_encodings_are_named_without_a_mark(name: str, encoding: str, tmp_path: Path) -> None:
    message = refused(tmp_path / name, 'text\n"a"\n'.encode(encoding))
    assert "is not UTF-8" in message and f"`iconv -f {encoding} -t UTF-8`" in message


@pytest.mark.parametrize("behind", [".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".md"])
def test_what_was_packed_to_fill_a_memory_is_not_unpacked(
    suffix: str, behind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_LONGEST", 2**20)
    path = tmp_path / f"a{suffix}{behind}"
    # The row itself is one that can be read.
    path.write_bytes(compressed(b'{"text": "' + b" " * 2**26 + b'"}\n', behind))
    assert path.stat().st_size * 100 < 2**26
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"has more than 1,048,576 bytes|unpacks to more than 100 times its size"):
            list(read(path))
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_files_that_unpack_to_much_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LONGEST", 2**12)
    text = "".join(f"{number:x}" for number in range(20_000))
    for suffix in (".txt", ".txt.gz"):
        path = tmp_path / f"long{suffix}"
        path.write_bytes(compressed(text.encode(), path.suffix if path.suffix != ".txt" else ""))
        assert [row for _, row in read(path)] == [{"text": text}]


def test_a_file_for_which_memory_lacks_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*arguments: Any, **named: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(readers, "_decode", lacks)
    for suffix in (".jsonl", ".json", ".csv", ".txt"):
        path = tmp_path / f"a{suffix}"
        path.write_text(CONTENT.get(suffix, "One"), encoding="utf-8")
        with pytest.raises(UserError, match="takes more memory than there is"):
            list(read(path))
