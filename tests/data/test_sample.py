"""Figures from a sample are near those of the prepared data."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import STOP, chat_row, chatml_tokenizer, recipe, write_jsonl

from toolkit.data import sample
from toolkit.data.prepare import prepare
from toolkit.data.sample import sampled
from toolkit.recipe import Recipe

LENGTHS = np.random.default_rng(0).lognormal(3, 0.7, 2000).astype(int) + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    chatml_tokenizer().save_pretrained(folder)
    return folder


def words(number: int) -> str:
    return f"{number} " + "The quick brown fox " * (int(LENGTHS[number]) // 4 + 1)


def texts(path: Path, count: int = 2000) -> Path:
    return write_jsonl(path, ({"text": words(number)} for number in range(count)))


def asked(model: Path, *paths: Any, **settings: Any) -> Recipe:
    return recipe(*paths, **settings).with_values({"model.path": str(model)})


CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "packed": {"packing": True},
    "cut": {"over_long": "split", "seq_len": 32},
    "dropped": {"over_long": "drop", "seq_len": 48, "eval_split": 0.2},
    "limited": {"max_samples": 500},
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_texts(kind: str, large: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = asked(model, texts(tmp_path / "a.jsonl"), objective="language_modelling", **CASES[kind])
    near(wanted, tmp_path, monkeypatch, large)


def test_chats_with_held_out_rows(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_jsonl(tmp_path / "a.jsonl", (chat_row("What is it?", words(number)) for number in range(2000)))
    near(asked(model, rows, eval_split=0.1), tmp_path, monkeypatch, True)


def test_weighted_sources_and_a_held_out_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [texts(tmp_path / "a.jsonl", 400), texts(tmp_path / "b.jsonl", 1200)]
    sources = [{"path": str(path), "weight": 1.0} for path in paths]
    held_out = [str(texts(tmp_path / "held.jsonl", 90))]
    wanted = asked(model, *sources, eval_sources=held_out, objective="language_modelling", seq_len=512)
    near(wanted, tmp_path, monkeypatch, False)


def test_pairs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ({"source": words(number), "target": words(-number)} for number in range(1000))
    near(asked(model, write_jsonl(tmp_path / "a.jsonl", rows), objective="seq2seq"), tmp_path, monkeypatch, False)


def near(wanted: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    counted = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").statistics
    if large:
        monkeypatch.setattr(sample, "_READ_WHOLE", 1000)
    figures = sampled(wanted)
    assert counted and figures and "four characters" not in figures.sample
    for name in ("rows", "tokens", "trained_tokens", "documents", "eval_rows", "eval_tokens"):
        assert getattr(figures, name) == pytest.approx(getattr(counted, name), rel=0.12), name
    assert figures.squared_tokens == pytest.approx(counted.squared_tokens, rel=0.3)
    for quantile in (500, 900):
        assert figures.quantiles[quantile] == pytest.approx(counted.quantiles[quantile], rel=0.35)
    assert figures.longest_eval <= 1.02 * max(counted.longest_eval, counted.quantiles[-1])
    assert (figures.longest_target or 0) <= 1.02 * (counted.longest_target or 0)


def test_without_a_tokenizer_characters_are_counted(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl")
    exact, rough = (sampled(asked(where, path, objective="language_modelling")) for where in (model, tmp_path))
    assert exact and rough and "four characters a token" in rough.sample
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = sampled(asked(tmp_path, path, objective="language_modelling"))
    assert broken and "cannot be read" in broken.sample and broken.tokens == rough.tokens
    assert rough.rows == exact.rows and 0.5 < rough.tokens / exact.tokens < 2


def test_parquet_is_sampled_and_what_cannot_be_is_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_READ_WHOLE", 1000)
    plain = texts(tmp_path / "a.jsonl")
    table = pa.table({"text": [words(number) for number in range(2000)]})
    pq.write_table(table, tmp_path / "b.parquet")
    figures = sampled(asked(model, tmp_path / "b.parquet"))
    assert figures and figures.rows == 2000
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n{"text\n' * 100)
    (tmp_path / "e.jsonl").write_text('["x"]\n' * 300)
    others = [tmp_path / name for name in ("c.jsonl.gz", "d.jsonl", "e.jsonl", "none.jsonl")]
    for other in (*others, "builtin:stdlib-docstrings"):
        assert sampled(asked(model, other)) is None
    assert sampled(asked(model, plain, streaming=True)) is None


def test_sampling_imports_no_framework() -> None:
    code = (
        "import sys, tokenizers, toolkit.data.sample; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
