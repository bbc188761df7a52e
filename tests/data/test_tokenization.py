"""Packing keeps every document whole; splitting keeps every token."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pyarrow as pa
import pytest
import trl.data_utils
from data_fixtures import chatml_tokenizer, plain_tokenizer
from datasets import Dataset
from harness import write_jsonl

from toolkit.common import UserError, in_background
from toolkit.data import tokenization
from toolkit.data.encoding.encode import Encoder
from toolkit.data.formats.task import Task, is_empty
from toolkit.data.reading.sources import open_source
from toolkit.data.row_table import collect
from toolkit.data.rows import (
    IGNORE,
    Chat,
    Completion,
    Labelled,
    Pair,
    Prompted,
    Row,
    Segments,
    Text,
    Tokens,
    from_json,
    to_json,
)
from toolkit.data.tokenization import Chunker, pack, tokenise
from toolkit.recipe.data import Source


def documents_dataset(lengths: list[int]) -> Dataset:
    """Documents of distinct tokens; the first label of each is -100."""
    rows, token = [], 0
    for length in lengths:
        ids = list(range(token, token + length))
        rows.append({"input_ids": ids, "labels": [IGNORE, *ids[1:]], "row": len(rows)})
        token += length
    return Dataset.from_list(rows)


def unpacked(packed: Dataset) -> list[tuple[list[int], list[int]]]:
    documents = []
    for row in packed:
        start = 0
        for length in row["seq_lengths"]:
            documents.append((row["input_ids"][start : start + length], row["labels"][start : start + length]))
            start += length
        assert start == len(row["input_ids"]) == len(row["labels"])
    return documents


def chunks_of(chunker: Chunker, row: Row, where: str = "d:1") -> list[dict[str, Any]]:
    (chunks,) = chunker([(row, where)])
    return chunks


def test_every_document_is_packed_once_and_whole() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, 64) for _ in range(500)]
    dataset = documents_dataset(lengths)
    packed = pack(dataset, 64)
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]
    assert max(map(len, packed["input_ids"])) <= 64
    assert sorted(unpacked(packed)) == sorted(zip(dataset["input_ids"], dataset["labels"], strict=True))
    assert sum(lengths) / (len(packed) * 64) > 0.95


def test_packing_is_deterministic_and_follows_selected_rows() -> None:
    dataset = documents_dataset([3, 5, 2, 8, 1, 8, 4]).select([6, 1, 3])
    packed = pack(dataset, 10)
    assert packed.to_list() == pack(dataset, 10).to_list()
    assert sorted(packed["seq_lengths"]) == [[5, 4], [8]]


def test_sequences_are_not_sorted_by_length() -> None:
    lengths = [len_ for row in pack(documents_dataset([64] * 50 + [3] * 2000), 64)["seq_lengths"] for len_ in row[:1]]
    assert lengths != sorted(lengths, reverse=True) and {64, 3} == set(lengths[:20])


def test_rows_that_do_not_fit_are_never_cut() -> None:
    with pytest.raises(AssertionError):
        pack(documents_dataset([3, 11]), 10)


def test_packs_a_dataset_on_disk(tmp_path: Path) -> None:
    documents_dataset([3, 5, 2]).save_to_disk(tmp_path / "rows")
    assert sorted(pack(Dataset.load_from_disk(tmp_path / "rows"), 5)["seq_lengths"]) == [[3, 2], [5]]


def test_a_long_text_is_split_without_losing_tokens() -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset())
    text = Text("A text of some length.")
    ids = encoder(text).input_ids
    chunks = chunks_of(Chunker(encoder, 10, "split"), text)
    assert [token for chunk in chunks for token in chunk["input_ids"]] == ids
    assert len(chunks) > 1 and all(len(chunk["input_ids"]) == 10 for chunk in chunks[:-1])
    assert all(chunk["labels"] == [IGNORE, *chunk["input_ids"][1:]] for chunk in chunks)
    assert [chunk["stops"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


TASKS = {
    "auto": Task("sft", "auto", True),
    "roles": Task("sft", ["user", "tool"], True),
    "all": Task("sft", "all", True),
    "language_modelling": Task("language_modelling", "auto", True),
    "seq2seq": Task("seq2seq", "auto", True),
}
ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SILENT = {"role": "assistant", "content": ""}
CALLING = SILENT | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
# Rows, and the tasks for which there is nothing in them to train on.
NOTHING: list[tuple[Row, str]] = [
    (Text("a"), ""),
    (Text(" \n"), "auto roles all language_modelling seq2seq"),
    (Completion("a", "b"), ""),
    (Completion("", "b"), ""),
    (Completion("a", " "), "auto roles all language_modelling seq2seq"),
    (Pair("a", "b"), ""),
    (Pair(" ", "b"), "auto roles all language_modelling seq2seq"),
    (Pair("a", ""), "auto roles all language_modelling seq2seq"),
    (Segments([("a", False), ("b", True)]), ""),
    (Segments([("a", False), ("", True)]), "auto roles all language_modelling seq2seq"),
    (Segments([]), "auto roles all language_modelling seq2seq"),
    (Tokens([1, 2], [IGNORE, 2]), ""),
    (Tokens([1, 2], [IGNORE, IGNORE]), "auto roles all language_modelling seq2seq"),
    (Chat([]), "auto roles all language_modelling seq2seq"),
    (Chat([ASKED]), "auto seq2seq"),
    (Chat([ANSWERED]), "roles"),
    (Chat([ASKED, SILENT]), "auto seq2seq"),
    (Chat([ASKED, CALLING]), ""),
    (Chat([CALLING]), "roles"),
    (Chat([ASKED, ANSWERED | {"train": False}]), "auto seq2seq"),
    (Chat([ASKED | {"train": True}, SILENT]), ""),
    (Chat([ASKED | {"train": False}, ANSWERED]), "roles"),
]


@pytest.mark.parametrize(("row", "tasks"), NOTHING, ids=str)
def test_rows_with_nothing_to_train_on_are_known_by_their_task(row: Row, tasks: str) -> None:
    assert " ".join(name for name, task in TASKS.items() if is_empty(row, task)) == tasks


def test_chunks_say_what_they_are_of() -> None:
    tokenizer = chatml_tokenizer()
    encoder = Encoder(tokenizer, "auto", frozenset({2}))
    for row, kind in (
        (Text("fox"), "Text"),
        (Completion("fox", " dog"), "Completion"),
        (Chat([ASKED, ANSWERED]), "Chat"),
        (Pair("fox jumps over", "dog"), "Pair"),
        (Segments([("fox", False), ("dog", True)]), "Segments"),
        (Tokens([5, 6, 2], [IGNORE, 6, 2]), "Tokens"),
    ):
        (chunk,) = chunks_of(Chunker(encoder, 512, "error"), row)
        encoded = encoder(row)
        assert chunk["kind"] == kind and chunk["input_ids"] == encoded.input_ids and chunk["labels"] == encoded.labels
        assert chunk["length"] == max(len(encoded.input_ids), len(encoded.labels))
        assert chunk["trained"] == sum(label != IGNORE for label in encoded.labels)
        assert chunk["stops"] == (kind != "Segments") and not chunk["merged"] and not chunk["prompt_lost"]
    (merged,) = chunks_of(Chunker(encoder, 512, "error"), Completion("The quick br", "own fox"))
    assert merged["merged"]
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    (lost,) = chunks_of(Chunker(encoder, 512, "error"), Chat([{"role": "system", "content": "S"}, ASKED, ANSWERED]))
    assert lost["prompt_lost"]


def test_what_a_template_leaves_out_of_prompts_and_of_labelled_conversations_is_noticed() -> None:
    tokenizer = chatml_tokenizer()
    encoder = Encoder(tokenizer, "auto", frozenset({2}))
    system, call = {"role": "system", "content": "Secret"}, {"function": {"name": "clock", "arguments": {}}}
    talk = Chat([system, ASKED])
    rows = (Prompted(talk, {"answer": ""}), Labelled(talk, None, "a"))
    for row in rows:
        assert not chunks_of(Chunker(encoder, 512, "error", classes=("a",)), row)[0]["prompt_lost"]
    called = Chat([ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}])
    assert chunks_of(Chunker(encoder, 512, "error"), Prompted(called, {"answer": ""}))
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match="d:1: The chat template leaves out the tool calls of message 1"):
        chunks_of(Chunker(encoder, 512, "error"), Prompted(called, {"answer": ""}))
    for row in rows:
        assert chunks_of(Chunker(encoder, 512, "error", classes=("a",)), row)[0]["prompt_lost"]


@pytest.mark.parametrize("over_long", ["error", "drop", "truncate", "split"])
def test_only_texts_are_split_and_cut_rows_end_where_they_must(over_long: str) -> None:
    encoder = Encoder(chatml_tokenizer(), "auto", frozenset({2}))
    for row in (
        Text("fox jumps over the dog " * 3),
        Completion("fox ", "dog " * 20),
        Tokens([7] * 30, [IGNORE, *[7] * 29]),
    ):
        ids, labels = encoder(row).input_ids, encoder(row).labels
        chunks = chunks_of(Chunker(encoder, 12, over_long), row)
        cuts = [(0, len(ids))]
        if over_long == "truncate":
            cuts = [(0, 12)]
        elif over_long == "split" and isinstance(row, Text):
            cuts = [(n, min(n + 12, len(ids))) for n in range(0, len(ids), 12)]
        assert [chunk["input_ids"] for chunk in chunks] == [ids[a:b] for a, b in cuts]
        assert [chunk["labels"] for chunk in chunks] == [[IGNORE, *labels[a + 1 : b]] for a, b in cuts]
        assert {chunk["length"] for chunk in chunks} == {len(ids)}
        assert len(chunks_of(Chunker(encoder, len(ids), over_long), row)[0]["input_ids"]) == len(ids)


def test_what_is_wrong_with_a_row_names_its_place() -> None:
    with pytest.raises(UserError, match="d:7: The row has the token 9999") as caught:
        chunks_of(
            Chunker(Encoder(plain_tokenizer(), "auto", frozenset()), 10, "error"), Tokens([9999], [IGNORE]), "d:7"
        )
    assert "model.tokenizer" in caught.value.change


def test_rows_of_all_forms_and_sources_are_collected(tmp_path: Path) -> None:
    """More than are read at once; those without content are counted and left out."""
    first = write_jsonl(
        tmp_path / "a.jsonl", ({"text": " " if n % 10 == 0 else f"a {n}", f"x{n % 3}": n} for n in range(2500))
    )
    talk = [{"role": "user", "content": "q", "name": "Ann"}, {"role": "assistant", "content": "a", "id": 3}]
    second = write_jsonl(
        tmp_path / "b.jsonl", [{"messages": talk}, {"messages": talk[:1], "note": "x"}, {"messages": talk}]
    )
    readers = [open_source(Source(path=str(path))) for path in (first, second)]
    rows, (texts, chats) = collect(readers, TASKS["auto"], tmp_path / "rows.arrow")
    assert rows.column_names == ["row", "where", "source", "content"] and len(rows) == 2250 + 2
    assert (texts.rows, texts.empty_rows, texts.format, texts.path) == (2500, 250, "text", str(first))
    assert (chats.rows, chats.empty_rows, chats.format, chats.split) == (3, 1, "messages", "train")
    assert texts.unused_columns == ["x0", "x1", "x2"] and chats.unused_columns == ["note"]
    assert chats.unused_fields == ["name", "id"] and texts.unused_fields == []
    assert rows["source"] == [0] * 2250 + [1] * 2
    kept = [n for n in range(2500) if n % 10]
    assert rows["where"][:2250] == [f"{first}:{n + 1}" for n in kept]
    assert [from_json(text) for text in rows["row"][:2250]] == [Text(f"a {n}") for n in kept]
    content = rows["content"]
    assert content[-1] == content[-2] and len(set(content)) == 2251


def test_packing_many_rows_at_once_loses_none() -> None:
    rows = Dataset.from_dict(
        {"input_ids": [[n, n] for n in range(10_005)], "labels": [[IGNORE, n] for n in range(10_005)]}
    )
    packed = pack(rows, 8)
    assert sorted(token for row in packed["input_ids"] for token in row) == sorted(list(range(10_005)) * 2)
    assert 2502 <= len(packed) <= 2503
    with pytest.raises(AssertionError):
        pack(Dataset.from_dict({"input_ids": [[1], []], "labels": [[IGNORE], []]}), 8)


@pytest.mark.parametrize(("lengths", "groups"), [([8] * 30, 4), ([1] * 60, 1), ([1] * 40 + [8] * 20, 8)])
def test_of_long_rows_fewer_are_packed_at_once(
    lengths: list[int], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow counts the tokens of a column in 32 bits, which 10,000 rows of a long context are too many for."""
    monkeypatch.setattr(tokenization, "PACKED_TOGETHER", 64)
    monkeypatch.setattr(tokenization, "_PACKED_TOKENS", 64)
    packing, tokens = trl.data_utils._pack_bfd, list[int]()

    def noted(examples: pa.Table, *args: Any, **kwargs: Any) -> pa.Table:
        tokens.append(sum(map(len, examples["input_ids"])))
        return packing(examples, *args, **kwargs)

    monkeypatch.setattr(trl.data_utils, "_pack_bfd", noted)
    dataset = documents_dataset(lengths)
    packed = pack(dataset, 8)
    assert len(tokens) == groups and max(tokens) <= 64 and sum(tokens) == sum(lengths)
    assert sorted(unpacked(packed)) == sorted(zip(dataset["input_ids"], dataset["labels"], strict=True))


@pytest.mark.parametrize(
    ("count", "asked", "processes"),
    [(9_999, None, None), (10_000, None, 3), (5, 2, 2), (2, 8, 2), (1, 8, None), (10_000, 1, None), (10_000, 7, 7)],
)
def test_many_rows_are_tokenised_by_as_many_processes_as_may_run(
    count: int, asked: int | None, processes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 4}, raising=False)
    rows = mock.MagicMock(column_names=["row"], data=pa.table({"row": ["text"]}))
    rows.__len__.return_value = count
    tokenise(rows, Chunker(Encoder(plain_tokenizer(), "auto", frozenset()), 10, "error"), asked, Path("tokens.arrow"))
    assert rows.map.call_args.kwargs["num_proc"] == processes


def tokenise_slowly(folder: Path) -> None:
    """On two processes, for minutes; each leaves a file with its number."""

    class Slow(Chunker):
        def __call__(self, rows: Any) -> Any:
            (folder / f"{os.getpid()}.worker").touch()
            time.sleep(120)

    (folder / f"{os.getpid()}.parent").touch()
    rows = Dataset.from_dict({"row": [to_json(Text("some"))] * 4, "where": ["here"] * 4})
    tokenise(rows, Slow(Encoder(plain_tokenizer(), "auto", frozenset()), 10, "error"), 2, folder / "tokens.arrow")


def started(folder: Path) -> list[psutil.Process]:
    """What tokenises in a folder, once two processes do, and all that they have started."""
    end = time.monotonic() + 60
    while len(list(folder.glob("*.worker"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    (parent,) = (psutil.Process(int(file.stem)) for file in folder.glob("*.parent"))
    return parent.children(recursive=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others are not told of a parent's death")
def test_processes_that_tokenise_end_with_one_that_is_killed(tmp_path: Path) -> None:
    parent = multiprocessing.get_context("fork").Process(target=tokenise_slowly, args=(tmp_path,))
    parent.start()
    children = started(tmp_path)
    parent.kill()
    parent.join()
    assert len(children) >= 2 and not psutil.wait_procs(children, timeout=10)[1]


def test_ctrl_c_is_not_hidden_by_results_that_have_not_come(tmp_path: Path) -> None:
    def press() -> None:
        started(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    # What was started in the background of a shell ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pressed = in_background(press)
        with pytest.raises(KeyboardInterrupt):
            tokenise_slowly(tmp_path)
        pressed.result()
    finally:
        signal.signal(signal.SIGINT, before)
