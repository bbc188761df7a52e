"""The audit and prepared rows as text: every figure in its place, whatever the width of the terminal."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_fixtures import STOP, chat_row, chatml_tokenizer, recipe
from harness import write_jsonl

from toolkit.common import printable
from toolkit.data.auditing.audit import Problem
from toolkit.data.prepare import Prepared, prepare
from toolkit.data.preview import render, show
from toolkit.data.rows import IGNORE


def prepared(place: Path, rows: list[Any], name: str = "rows.jsonl", **settings: Any) -> Prepared:
    path = write_jsonl(place / name, rows)
    return prepare(recipe(path, **settings), chatml_tokenizer(), STOP, place / "cache")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_audit_keeps_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    rows = [chat_row("hi " * n, f"yo {n}") for n in range(1, 31)]
    lines = render(prepared(Path(), rows, "short.jsonl", eval_split=0.2).audit).splitlines()
    assert max(map(len, lines)) <= min(columns, 100)
    head, first = lines[:2]
    assert "read used repeats" in head
    assert head.split() == ["data", "format", "read", "used", "repeats", "share"]
    assert first.split() == ["short.jsonl", "messages", "30", "24", "1.00", "100.0%"]
    bars = {line.split()[0]: line.count("█") for line in lines if "█" in line}
    assert max(bars.values()) == min(columns, 100) - 34
    assert any(line.startswith("min ") or "max " in line for line in lines)
    long = render(prepared(Path(), rows, f"{'x' * 90}end.jsonl").audit).splitlines()
    assert max(map(len, long)) <= min(columns, 100)
    assert long[1].startswith("…x") and long[1].split()[0].endswith("xend.jsonl")
    assert len(long[1].split()[0]) == max(min(columns, 100) - 55, 12)


def test_rows_show_what_is_trained(tmp_path: Path) -> None:
    rows = prepared(tmp_path, [chat_row("hi", "yo"), chat_row("a\x1b[31m", "b")], shuffle=False)
    plain = show(rows, chatml_tokenizer(), 2, color=False)
    first, second = plain.split("\n\n")
    head, *text = first.splitlines()
    assert head.startswith("── row 1: ") and head.endswith(" trained") and "documents" not in head
    assert "«yo<|im_end|>»" in "\n".join(text) and "«hi" not in first
    assert "\\x1b[31m" in second and "\x1b" not in plain and "── row 2" in second
    assert show(rows, chatml_tokenizer(), 1, color=False).rstrip() == first.rstrip()
    colored = show(rows, chatml_tokenizer(), 1, color=True)
    assert "\x1b[32myo<|im_end|>\x1b[0m" in colored and "«" not in colored


@pytest.mark.parametrize("text", ["aé漢🙂 b\n", "two words", "🙂", "  "])
def test_parts_of_a_row_are_decoded_once_and_together_make_the_row(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, draw = chatml_tokenizer(), random.Random(0)
    ids = tokenizer(text * 500)["input_ids"]
    labels = [draw.choice([number, IGNORE]) for number in ids]
    decode, decoded = tokenizer.decode, list[int]()

    def counted(part: list[int], **settings: Any) -> str:
        decoded.append(len(part))
        return decode(part, **settings)

    monkeypatch.setattr(tokenizer, "decode", counted)
    row: Any = SimpleNamespace(
        train=[{"input_ids": ids, "labels": labels}], audit=SimpleNamespace(objective="sft"), classes=()
    )
    _, _, shown = show(row, tokenizer, 1, color=False).partition("\n")
    assert shown.translate({ord("«"): "", ord("»"): ""}) == text * 500
    assert sum(decoded) <= 8 * len(ids)


def test_packed_documents_are_parted(tmp_path: Path) -> None:
    packed = prepared(tmp_path, [chat_row(f"hi {n}", f"yo {n}") for n in range(4)], packing=True, seq_len=256)
    text = show(packed, chatml_tokenizer(), 1, color=False)
    assert "in 4 documents" in text.splitlines()[0]
    assert [line.split(":")[0] for line in text.splitlines() if line.startswith("┄┄")] == [
        f"┄┄ document {number}" for number in (2, 3, 4)
    ]


def test_an_audit_is_no_longer_than_a_screen_whatever_the_data(tmp_path: Path) -> None:
    long, many = "\x1b[2J" + "x" * 5000, [f"column {number} \u202e" for number in range(5000)]
    audit = prepared(tmp_path, [chat_row("hi", "yo")] * 3).audit
    source = audit.sources[0].model_copy(update={"path": long, "unused_columns": [long, *many], "unused_fields": many})
    problems = [Problem("warning", long, long)] * 100 + [Problem("fatal", "the fatal one", "do this")]
    hostile = audit.model_copy(update={"sources": [source] * 500, "problems": problems})
    text = render(hostile, "/run/audit.json")
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100 and printable(text) == text
    assert "fatal: the fatal one" in text and "more lines" in text and lines[-1] == "all of it: /run/audit.json"
    assert "is trained in every row" in text  # What is short is left whole.
    assert "all of it" not in render(audit, "/run/audit.json") and "more lines" not in render(audit)
