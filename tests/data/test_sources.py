"""Every kind of file is read as it is, and every damaged one is named with the place and the cure."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_from_disk
from harness import write_jsonl

from toolkit.common import UserError
from toolkit.data.reading import sources
from toolkit.data.reading.sources import open_source
from toolkit.data.reading.splits import split_of
from toolkit.recipe.data import Source


def read(path: Path | str, **settings: Any) -> list[dict[str, Any]]:
    return [row for _, row in open_source(Source(path=str(path), **settings)).rows()]


def refused(path: Path | str, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **settings)
    assert caught.value.change
    return str(caught.value)


ROWS = [{"prompt": "naïve 😀", "completion": "日本"}, {"prompt": "b", "completion": "c"}]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS).encode()),
        ("spread.jsonl", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
        ("bom-array.jsonl", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("bom.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("bom.csv", "\ufeffprompt,completion\nnaïve 😀,日本\nb,c\n".encode()),
        ("bom.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + "\n".join(map(json.dumps, ROWS)).encode(), mtime=0)),
        ("a.jsonl", "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()),
        ("bom.jsonl", b"\xef\xbb\xbf" + "\n".join(json.dumps(row) for row in ROWS).encode()),
        ("a.json", json.dumps(ROWS, indent=2).encode()),
        ("a.json", json.dumps({"version": 1, "data": ROWS}).encode()),
        ("lines.json", "\n".join(json.dumps(row) for row in ROWS).encode()),
        ("a.csv", 'prompt,completion\r\n"naïve 😀",日本\r\nb,c\r\n'.encode()),
        ("bom.tsv", "\ufeffprompt\tcompletion\nnaïve 😀\t日本\nb\tc\n".encode()),
        ("a.jsonl.gz", gzip.compress("\n".join(json.dumps(row) for row in ROWS).encode(), mtime=0)),
        ("a.csv.bz2", bz2.compress("prompt,completion\nnaïve 😀,日本\nb,c\n".encode())),
    ],
)
def test_formats_give_the_same_rows(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("excel.csv", "prompt;completion\r\nnaïve 😀;日本\r\nb;c\r\n".encode()),
        ("pandas.csv", ",prompt,completion\n0,naïve 😀,日本\n1,b,c\n".encode()),
        ("spaced.csv", 'prompt, completion\nnaïve 😀, "日本"\nb, c\n'.encode()),
        ("array.jsonl", json.dumps(ROWS).encode()),
    ],
)
def test_what_other_programs_write_is_read(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    rows = [{key: value for key, value in row.items() if key != "index"} for row in read(tmp_path / name)]
    assert rows == ROWS


def test_saved_datasets(tmp_path: Path) -> None:
    whole = Dataset.from_list(ROWS * 3)
    DatasetDict({"train": whole.select([3, 4]), "test": whole.select([1])}).save_to_disk(str(tmp_path / "both"))
    whole.save_to_disk(str(tmp_path / "one"))
    assert read(tmp_path / "both") == ROWS[1:] + ROWS[:1]
    assert read(tmp_path / "both", split="test") == ROWS[1:]
    assert read(tmp_path / "one") == ROWS * 3
    # `datasets` keeps what was once made of them in the same folder.
    loaded = load_from_disk(str(tmp_path / "one"))
    loaded.map(lambda row: {"completion": row["completion"].upper()})
    loaded.map(lambda row: {"completion": row["completion"].lower()}, num_proc=2)
    loaded.filter(lambda row: row["prompt"] == "b")
    assert len(list((tmp_path / "one").glob("*.arrow"))) == 5
    assert read(tmp_path / "one") == ROWS * 3


def test_zstd(tmp_path: Path) -> None:
    with pa.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as file:
        file.write("\n".join(json.dumps(row) for row in ROWS).encode())
    assert read(tmp_path / "a.jsonl.zst") == ROWS


def test_csv_fields_may_hold_commas_quotes_and_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,x\n"a, ""b""\nc",1\n')
    assert read(tmp_path / "a.csv") == [{"text": 'a, "b"\nc', "x": "1"}]


def test_nested_objects_keep_their_own_keys(tmp_path: Path) -> None:
    rows = [{"messages": [{"arguments": {"city": "Rome"}}]}, {"messages": [{"arguments": {"n": 3, "list": [1, "a"]}}]}]
    assert read(write_jsonl(tmp_path / "a.jsonl", rows)) == rows
    pq.write_table(
        pa.Table.from_pylist([{"m": [{"a": 1}], "x": None}, {"m": [{"b": 2}], "x": "y"}]), tmp_path / "a.parquet"
    )
    assert read(tmp_path / "a.parquet") == [{"m": [{"a": 1}], "x": None}, {"m": [{"b": 2}], "x": "y"}]


def test_nested_lists_of_parquet(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": json.dumps({"n": 1})}
    rows = [
        {
            "messages": [{"role": "user", "content": "a", "tool_calls": None}],
            "input_ids": [1, 2],
            "grid": [[1], [2, 3]],
        },
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "input_ids": [], "grid": []},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet")
    assert first == rows[0] | {"messages": [{"role": "user", "content": "a"}]}
    assert second == rows[1] | {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def test_an_object_that_is_spread_over_lines_names_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{\n "a": 1\n}\n{\n "a" 2\n}\n')
    assert "a.jsonl:5 column 6 is not valid JSON" in refused(tmp_path / "a.jsonl")


def test_text_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert read(tmp_path / "a.txt") == [{"text": "one"}]


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read(tmp_path / "a.txt") == [{"text": "one\n\ntwo\n"}]


def test_max_samples_takes_the_first_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"n": n} for n in range(9)])
    assert read(path, max_samples=2) == [{"n": 0}, {"n": 1}]


def test_folder_has_the_splits_of_its_file_names(tmp_path: Path) -> None:
    for name in ("train-1.jsonl", "train-2.jsonl", "dev.jsonl", "more/test.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    (tmp_path / "README.md").write_text("# Card")
    assert [row["text"] for row in read(tmp_path)] == ["train-1.jsonl", "train-2.jsonl"]
    assert [row["text"] for row in read(tmp_path, split="validation")] == ["dev.jsonl"]
    assert [row["text"] for row in read(tmp_path, split="test")] == ["more/test.jsonl"]
    assert [row["text"] for row in read(f"{tmp_path}/*.jsonl")] == ["train-1.jsonl", "train-2.jsonl"]
    assert [row["text"] for row in read(f"{tmp_path}/d*.jsonl")] == ["dev.jsonl"]


@pytest.mark.parametrize("pattern", ["training/*.jsonl", "training/?*.jsonl", "*/*.jsonl", "*ing/[atv]*.jsonl", ""])
def test_the_name_of_a_file_says_its_split_before_that_of_its_folder(pattern: str, tmp_path: Path) -> None:
    for name in ("train", "a", "val"):
        write_jsonl(tmp_path / "training" / f"{name}.jsonl", [{"text": name}])
    assert [row["text"] for row in read(tmp_path / pattern)] == ["a", "train"]
    assert [row["text"] for row in read(tmp_path / pattern, split="validation")] == ["val"]


@pytest.mark.parametrize("pattern", ["", "data", "data/*.jsonl"])
def test_one_of_several_splits_of_a_kind_is_taken_by_its_whole_name(pattern: str, tmp_path: Path) -> None:
    kinds = ("train_sft", "train_gen", "test_sft", "test_prefs")
    for name in kinds:
        write_jsonl(tmp_path / "data" / f"{name}-00000-of-00001.jsonl", [{"text": name}])
    for name in kinds:
        assert read(tmp_path / pattern, split=name) == [{"text": name}]
    for name in ("train_prefs", "train_s"):
        assert f"has no split `{name}`; it has `test`: test_prefs" in refused(tmp_path / pattern, split=name)
    alone = tmp_path / "data" / "train_sft-00000-of-00001.jsonl"
    assert read(alone, split="train_sft") == read(alone) == [{"text": "train_sft"}]
    assert "is one file and has no split `train_gen`" in refused(alone, split="train_gen")


@pytest.mark.parametrize(
    ("split", "name", "others"),
    [
        ("train_sft", "train_sft_00000.jsonl", ["train_gen_00000.jsonl"]),
        ("validation_matched", "mnli_validation_matched.jsonl", ["mnli_validation_mismatched.jsonl"]),
        ("validation_matched", "dev_matched.tsv", ["dev_mismatched.tsv", "train.tsv"]),
        ("train_1", "train_1_of.jsonl", ["train_10.jsonl", "train_2.jsonl"]),
        ("train_sft", "train_sft/rows.jsonl", ["train_sft/val.jsonl"]),
        ("Test_Set", "data/test_set/a.jsonl", ["data/test_other/a.jsonl"]),
        ("test_set", "test.jsonl", ["train.jsonl"]),
        ("test_set", "test-00000-of-00001.jsonl", ["train-00000-of-00001.jsonl"]),
        ("test_set", "gsm8k_test.jsonl", ["gsm8k_train.jsonl"]),
        ("test_set", "test/rows.jsonl", ["train/rows.jsonl"]),
        ("train_sft", "rows.jsonl", ["test.jsonl"]),
        ("train_sft", "rows.jsonl", []),
    ],
)
def test_a_split_with_further_words_is_found_beside_others_and_else_all_of_its_kind(
    split: str, name: str, others: list[str], tmp_path: Path
) -> None:
    for file in (name, *others):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"text\n{file}\n" if file.endswith("tsv") else json.dumps({"text": file}))
    assert read(tmp_path, split=split) == [{"text": name}]


@pytest.mark.parametrize(
    ("split", "name"), [("train_3", "train_1"), ("gen_train", "sft_train"), ("mnli_val_matched", "mnli_val_mismatched")]
)
def test_a_split_with_further_words_is_not_another_one_of_its_kind(split: str, name: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / f"{name}.jsonl", [{"text": "a"}])
    assert f"has no split `{split}`" in refused(tmp_path, split=split)


@pytest.mark.parametrize(
    "pattern", ["run[12]/rows/*.jsonl", "run?/rows/a.jsonl", "run[12]/*/a.jsonl", "*/rows/?.jsonl"]
)
def test_patterns_of_folders(pattern: str, tmp_path: Path) -> None:
    for run in "12":
        write_jsonl(tmp_path / f"run{run}" / "rows" / "a.jsonl", [{"text": run}])
    assert [row["text"] for row in read(f"{tmp_path}/{pattern}")] == ["1", "2"]


def test_split_names() -> None:
    assert split_of("train-00000-of-00001.parquet") == "train"
    assert split_of("my_valid.jsonl") == "validation"
    assert split_of("contest.jsonl") is None


def test_folder_without_split_names_is_train(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "part1.jsonl", [{"n": 1}])
    write_jsonl(tmp_path / "part2.jsonl", [{"n": 2}])
    assert read(tmp_path) == [{"n": 1}, {"n": 2}]
    message = refused(tmp_path, split="validation")
    assert "no split `validation`" in message and "`train`: part1.jsonl" in message and "data.eval_split" in message


def test_documentation_and_metadata_in_a_folder_are_no_data(tmp_path: Path) -> None:
    for name in ("README.md", "LICENSE.txt", "book.txt"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == [{"text": "book.txt"}]
    write_jsonl(tmp_path / "data.jsonl", [{"text": "row"}])
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    assert read(tmp_path) == [{"text": "row"}]


def test_settings_of_hub_data_are_refused_for_local_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"n": 1}])
    assert "only hub data sets have a `name`" in refused(path, name="en")
    assert "only hub data sets have a `revision`" in refused("builtin:stdlib-docstrings", revision="main")
    assert "is a slice" in refused(tmp_path, split="train[:10%]")
    assert "is an address" in refused("memory://a.jsonl", name="en")
    assert "is no file or folder" in refused("/dev/null")
    assert "cannot be read" in refused("long name " * 100)


def test_invalid_json_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "\u2028"}\n\n{"a": 1,}\n')
    assert "a.jsonl:3 column 9 is not valid JSON" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text('[\n{"a": 1},\n{"a" 2}\n]')
    assert "a.json:3 column 6" in refused(tmp_path / "a.json")


def test_not_utf8_names_line_and_byte(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "caf\xe9"}\n')
    message = refused(tmp_path / "a.jsonl")
    assert "line 2, byte 19 is 0xe9" in message and "UTF-8" in message
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,2\n\xff,3\n")
    assert "line 3, byte 8 is 0xff" in refused(tmp_path / "a.csv")
    (tmp_path / "b.jsonl").write_bytes('{"a": 1}'.encode("utf-16"))
    assert "iconv -f UTF-16" in refused(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b"", "is empty\n  fill the file, or take it out of `data.sources` or `data.eval_sources`"),
        ("a.jsonl", b"\n \n", "no rows"),
        ("a.json", b"[]", "no rows"),
        ("a.csv", b"a,b\n", "no rows"),
        ("a.csv", b"hello,\nx,y\n", "no header"),
        ("a.csv", b"a,b\n1,2,3\n", "a.csv:2 has 3 fields, the header has 2"),
        ("a.csv", b'a,b\n1,"2\n3,4\n', "a.csv:2: unexpected end of data"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl:2 is not an object but: array"),
        ("a.json", b'"text"', "holds a single string"),
        ("a.xlsx", b"PK", "unknown extension `.xlsx`"),
        ("a.parquet", b"PAR1 not really", "cannot be read"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}' * 1000, mtime=0)[:30], "cannot be read"),
        ("a.json", gzip.compress(b"[]", mtime=0), "gzip data, not what its name says"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        ("a.csv", b"PK\x03\x04excel", "zip archive"),
        ("a.json", b'{"a": [1, 2], "b": [3, 4]}', "one object with the keys 'a', 'b' instead of rows"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "a.jsonl:1 cannot be read as JSON"),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}\n", "a.jsonl:1 cannot be read as JSON"),
        ("a.arrow", b"not arrow", "cannot be read"),
        ("a.json", b"[" * 100_000, "a.json:1 cannot be read as JSON"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    message = refused(tmp_path / name)
    assert words in message and name.split(".")[0] in message


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a.zip", "unpack `a.zip` first"),
        ("a.jsonl.xz", "unpack `a.jsonl.xz` first"),
        ("a.tar.gz", "unpack `a.tar.gz` first"),
        ("a.xlsx", "save the table of `a.xlsx` as CSV"),
        ("a.bin", "accepted are .jsonl"),
    ],
)
def test_data_that_is_packed_is_to_be_unpacked_alone_or_in_a_folder(tmp_path: Path, name: str, change: str) -> None:
    (tmp_path / name).write_bytes(b"PK")
    assert change in refused(tmp_path / name)
    assert change in (message := refused(tmp_path)) and "no data files" in message


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{}])
    assert "did you mean" in (message := refused(tmp_path / "trian.jsonl")) and "train.jsonl" in message
    assert "there is no folder" in refused(tmp_path / "nowhere" / "a.jsonl")
    assert "no data files" in refused(f"{tmp_path}/*.csv")


def test_relative_mistyped_file_is_not_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "data" / "train.jsonl", [{}])
    assert "did you mean `data/train.jsonl`" in refused("data/train.jsonnl")
    assert "does not exist" in refused("train.jsonl")
    # In a folder that has no `data`, such as one beside it, too.
    for named in ("elsewhere/train.jsonl", "elsewhere/train.csv.gz"):
        assert "there is no folder `elsewhere`" in refused(named)
    assert isinstance(open_source(Source(path="elsewhere/train.jsonl", revision="main")), sources._Hub)


def test_unreachable_hub_data_set_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused("nobody/no-such-data")
    assert "nobody/no-such-data" in message and "hub" in message
    with pytest.raises(UserError):
        open_source(Source(path="nobody/no-such-data")).fingerprint()


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"n": 1}])
    before = open_source(Source(path=str(path))).fingerprint()
    path.touch()
    assert open_source(Source(path=str(path))).fingerprint() == before
    write_jsonl(path, [{"n": 2}])
    assert open_source(Source(path=str(path))).fingerprint() != before


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_reader_on_a_folder_in_hub_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    write_jsonl(tmp_path / "d" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "d" / "test.jsonl", ROWS[:1])
    reader = sources._Hub(Source(path=str(tmp_path / "d"), split="test"), streaming)
    assert [row for _, row in reader.rows()] == ROWS[:1]
    before = reader.fingerprint()
    assert before == reader.fingerprint()
    with pytest.raises(UserError, match="dev"):
        list(sources._Hub(Source(path=str(tmp_path / "d"), split="dev"), streaming).rows())


def test_the_subset_that_is_named_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    subsets = "".join(f"- {{config_name: {name}, data_files: {name}.jsonl}}\n" for name in ("one", "two"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n", encoding="utf-8")
    for name, rows in (("one", ROWS[:1]), ("two", ROWS)):
        write_jsonl(tmp_path / "d" / f"{name}.jsonl", rows)
    one, two = (sources._Hub(Source(path=str(tmp_path / "d"), name=name), True) for name in ("one", "two"))
    assert [[row for _, row in each.rows()] for each in (one, two)] == [ROWS[:1], ROWS]
    assert one.fingerprint() != two.fingerprint()


NAMES = {
    "train": "train training",
    "validation": "validation valid val dev eval evaluation",
    "test": "test testing",
}


@pytest.mark.parametrize(("split", "names"), NAMES.items())
def test_a_split_is_known_under_every_name(split: str, names: str, tmp_path: Path) -> None:
    for name in names.split():
        for spelt in (name, name.upper(), f"my-{name}-1.jsonl", f"{name}/a.jsonl", f"a/{name}_b.csv"):
            assert split_of(spelt) == split, spelt
        assert split_of(f"x{name}") is None or f"x{name}" in names
        folder = tmp_path / name
        write_jsonl(folder / f"{name}.jsonl", [{"text": name}])
        write_jsonl(folder / "other.jsonl", [{"text": "other"}])
        for asked in names.split():
            rows = [row["text"] for row in read(folder, split=asked)]
            assert sorted(rows) == sorted([name, "other"] if split == "train" else [name])
        if split != "train":
            assert [row["text"] for row in read(folder)] == ["other"]
        alone = write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
        assert all(read(alone, split=asked) == [{"text": name}] for asked in names.split())


def test_splits_that_are_not_there_are_listed(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        write_jsonl(tmp_path / f"{name}_dev.jsonl", [{"text": name}])
        write_jsonl(tmp_path / f"{name}_test.jsonl", [{"text": name}])
    message = refused(tmp_path)
    assert (
        "has no split `train`; it has `validation`: a_dev.jsonl, b_dev.jsonl, c_dev.jsonl; `test`: a_test.jsonl"
        in message
    )
    assert "to one of validation, test, or hold a fraction out" in message
    for slice_ in ("train[:10]", "train+test"):
        assert f"`split: {slice_}` is a slice" in refused(tmp_path, split=slice_)
    assert "is one file and has no split `validation`" in refused(tmp_path / "a_test.jsonl", split="validation")
    own = write_jsonl(tmp_path / "own" / "german.jsonl", [{"text": "a"}])
    assert "has no split `german`" in refused(own.parent, split="german")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "README.md",
            "readme.txt",
            "LICENSE",
            "license.txt",
            "LICENCE.md",
            "CHANGELOG.md",
            "CITATION.txt",
            "CONTRIBUTING.md",
        ),
        *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
    ],
)
def test_files_about_the_data_are_no_data(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("[]")
    assert "no data files" in refused(tmp_path)
    (tmp_path / "estate.json").write_text('[{"text": "a"}]')
    assert read(tmp_path) == [{"text": "a"}]


def test_hidden_files_are_no_data(tmp_path: Path) -> None:
    for name in ("a.jsonl", ".hidden.jsonl", ".cache/b.jsonl", "more/c.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    assert [row["text"] for row in read(tmp_path)] == ["a.jsonl", "more/c.jsonl"]


def test_links_in_a_folder_are_followed_each_folder_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "elsewhere/a.jsonl", [{"text": "a"}])
    write_jsonl(tmp_path / "data/b.jsonl", [{"text": "b"}])
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/linked again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/up").symlink_to(tmp_path / "data")
    assert [row["text"] for row in read(tmp_path / "data")] == ["b", "a"]


def test_links_to_nothing_are_not_passed_over(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.txt.old").symlink_to("gone")  # No name of data.
    assert len(read(tmp_path)) == 1
    (tmp_path / "b.jsonl").symlink_to("blobs/0123")
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "b.jsonl"):
        assert f"`{tmp_path / 'b.jsonl'}` is a link to blobs/0123, which is not there" in refused(path)


def test_a_folder_that_cannot_be_looked_into_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.jsonl", "closed/b.jsonl"):
        write_jsonl(tmp_path / name, [{"text": "a"}])
    scandir = os.scandir

    def as_another_user(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", as_another_user)
    assert "cannot be read: Permission denied" in refused(tmp_path)


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        (["train-00000-of-00002.jsonl"], 1),
        (["train-00001-of-00002.jsonl"], 0),
        (["train-00000-of-00002-0123456789abcdef.jsonl"], 1),
        (["c4-train.00000-of-01024.jsonl.gz", "c4-train.00002-of-01024.jsonl.gz"], 1),
        (["part-1-of-3.jsonl", "part-3-of-3.jsonl"], 2),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], None),
        (["train-00000-of-00002-0123456789abcdef.jsonl", "train-00001-of-00002-fedcba9876543210.jsonl"], None),
        (["part-1-of-2.jsonl", "part-2-of-2.jsonl"], None),
        (["train-00000-of-00001.jsonl", "test-00000-of-00002.jsonl"], None),  # Another split.
        (["a/train-00000-of-00001.jsonl", "b/train-00000-of-00001.jsonl"], None),
    ],
)
def test_folders_hold_all_files_of_a_numbered_set(names: list[str], lacking: int | None, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = b'{"text": "a"}\n'
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    if lacking is not None:
        assert f"the first that it lacks has the number {lacking}" in refused(tmp_path)
        assert len(read(tmp_path / "*.jsonl*")) == len(names)
    else:
        assert read(tmp_path)


def test_a_saved_dataset_that_is_not_whole_or_saved_twice_is_refused(tmp_path: Path) -> None:
    Dataset.from_list(ROWS * 3).save_to_disk(str(tmp_path), num_shards=2)
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path))  # `datasets` leaves the files of before.
    assert "of sets of 1 and of 2 files" in refused(tmp_path)
    (tmp_path / "data-00000-of-00001.arrow").unlink()
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    assert "holds 1 of 2 files" in refused(tmp_path)


@pytest.mark.parametrize(
    ("path", "is_hub"),
    [
        *(("owner/name", True), ("name", True), ("owner/name.with-dots_1", True), ("name.v2", True)),
        *(("data/rows.jsonl", False), ("rows.jsonl", False), ("rows.csv.gz", False), ("./owner/name", False)),
        *(("/owner/name", False), ("a/b/c", False), ("owner/na me", False), ("-x/name", False), ("../name", False)),
        *(("owner/rows.jsonl", True), ("data/name", False)),
    ],
)
def test_what_is_not_there_may_be_on_the_hub(path: str, is_hub: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    if is_hub:
        assert isinstance(open_source(Source(path=path, name="en", revision="main")), sources._Hub)
    else:
        assert "does not exist" in refused(path)


def test_local_data_is_told_apart_by_content_or_as_a_stream_by_time(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"n": 1}])

    def fingerprints() -> list[str]:
        return [open_source(Source(path=str(path)), streaming).fingerprint() for streaming in (False, True)]

    whole, stream = fingerprints()
    os.utime(path, ns=(5, 5))
    touched = fingerprints()
    assert touched[0] == whole and touched[1] != stream and fingerprints() == touched
    write_jsonl(path, [{"n": 2}])
    os.utime(path, ns=(5, 5))
    edited = fingerprints()
    assert edited[0] != whole and edited[1] == touched[1]  # of the same size and time
    write_jsonl(path, [{"n": 22}])
    os.utime(path, ns=(5, 5))
    assert fingerprints()[1] != touched[1]
    path.rename(tmp_path / "b.jsonl")
    assert open_source(Source(path=str(tmp_path / "b.jsonl"))).fingerprint() != whole
    reader = open_source(Source(path=str(tmp_path / "b.jsonl")))
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(UserError, match=r"b\.jsonl` cannot be read"):
        reader.fingerprint()


def test_a_missing_file_is_told_from_what_lies_beside_it(tmp_path: Path) -> None:
    assert "holds nothing" in refused(tmp_path / "zzz.jsonl")
    for n in range(10):
        write_jsonl(tmp_path / f"{n}{n}{n}.csv", [{}])
    message = refused(tmp_path / "zzz.jsonl")
    assert "holds 000.csv, 111.csv" in message and "777.csv" in message and "888.csv" not in message


def test_built_in_data_has_one_name_and_one_split() -> None:
    assert "and `builtin:stdlib-docstring-pairs` and `builtin:stdlib-docstrings-judged`" in refused("builtin:wikipedia")
    assert "has only the split `train`, not `test`" in refused("builtin:stdlib-docstrings", split="test")
    (where, row), *_ = open_source(Source(path="builtin:stdlib-docstrings", max_samples=2)).rows()
    assert where == "builtin:stdlib-docstrings row 1" and list(row) == ["messages"]
    *_, (_, row) = open_source(Source(path="builtin:stdlib-docstring-pairs", max_samples=2)).rows()
    assert list(row) == ["prompt", "chosen", "rejected"] and row["chosen"] != row["rejected"]
    *_, (_, row) = open_source(Source(path="builtin:stdlib-docstrings-judged", max_samples=2)).rows()
    assert list(row) == ["prompt", "completion", "label"] and row["label"] is False


def test_names_of_files_need_not_be_text(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    os.rename(tmp_path / "a.jsonl", os.fsencode(tmp_path) + b"/\xff.jsonl")
    assert read(tmp_path) == ROWS and open_source(Source(path=str(tmp_path))).fingerprint()


@pytest.mark.parametrize("streaming", [False, True])
def test_names_of_classes_of_a_hub_data_set_are_read_from_its_files(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Parquet that no card describes, as `push_to_hub` of older versions left it."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    rows = Dataset.from_dict({"text": ["a"], "label": [1]}, features=features)
    (tmp_path / "set").mkdir()
    rows.to_parquet(tmp_path / "set" / "train.parquet")
    hub = sources._Hub(Source(path=str(tmp_path / "set")), streaming)
    assert hub.class_names("label") == ["no", "yes"] and hub.class_names("text") == []
    assert [row for _, row in hub.rows()] == [{"text": "a", "label": 1}]
