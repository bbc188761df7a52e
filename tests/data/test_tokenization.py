"""Packing keeps every document whole; splitting keeps every token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from data_fixtures import plain_tokenizer
from datasets import Dataset

from toolkit.data.encode import Encoder
from toolkit.data.rows import IGNORE, Text
from toolkit.data.tokenization import Chunker, pack


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
    chunks = Chunker(encoder, 10, "split")(text, "d:1")
    assert [token for chunk in chunks for token in chunk["input_ids"]] == ids
    assert len(chunks) > 1 and all(len(chunk["input_ids"]) == 10 for chunk in chunks[:-1])
    assert all(chunk["labels"] == [IGNORE, *chunk["input_ids"][1:]] for chunk in chunks)
    assert [chunk["stops"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
