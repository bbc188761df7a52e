"""Figures from a sample are near those of the prepared data."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import STOP, chat_row, chatml_tokenizer, recipe
from harness import write_jsonl

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


def test_few_packed_rows_hold_no_more_than_they_can(model: Path, tmp_path: Path) -> None:
    wanted = asked(model, texts(tmp_path / "a.jsonl", 60), objective="language_modelling", packing=True, seq_len=1000)
    found = sampled(wanted)
    assert found and found.rows == prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").statistics.rows
    assert found.tokens / 970 < 2.5
    assert found.mean_length <= 1000


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
        for flat in (True, False):
            assert figures.lengths(flat)[quantile] == pytest.approx(counted.lengths(flat)[quantile], rel=0.35)
    assert bool(figures.end_to_end) == bool(counted.end_to_end)
    assert figures.longest_held_out(True) <= 1.02 * max(counted.longest_held_out(True), counted.lengths(True)[-1])
    assert figures.longest_eval <= 1.02 * max(counted.longest_eval, counted.quantiles[-1])
    assert (figures.longest_target or 0) <= 1.02 * (counted.longest_target or 0)


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto", "grpo"])
@pytest.mark.parametrize("tokenized", [True, False])
def test_what_documents_begin_with_alike(objective: str, tokenized: bool, model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(600):
        system = [{"role": "system", "content": "The quick brown fox jumps over it. " * 6}] * (number % 4 > 0)
        asked_of = {"prompt": [*system, {"role": "user", "content": words(number)}]}
        answer = [{"role": "assistant", "content": f"Number {number}"}]
        of = {"sft": {"completion": answer}, "kto": {"completion": answer, "label": number % 2 > 0}, "grpo": {}}
        rows.append(asked_of | of.get(objective, {"chosen": answer, "rejected": [{**answer[0], "content": "none"}]}))
    path, settings = write_jsonl(tmp_path / "a.jsonl", rows), {"objective": objective, "seq_len": 1024}
    answered = {"rewards.length.max_tokens": 9, "rollout.num_generations": 4} if objective == "grpo" else {}
    wanted = asked(model, path, **settings).with_values(answered)
    counted = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").statistics
    figures = sampled(asked(model if tokenized else tmp_path, path, **settings).with_values(answered))
    assert counted and figures and [size for size, _ in figures.in_common] == [size for size, _ in counted.in_common]
    found, expected = (each.shared(4) / each.mean_length for each in (figures, counted))
    # Of the tests' tokenizer, marks around messages have more tokens than is common.
    assert 0.7 < found / expected < 1.02 and expected > 0.5


@pytest.mark.parametrize(("objective", "names"), [("orpo", "prompt chosen rejected"), ("embedding", "anchor positive")])
def test_rows_of_several_texts(
    objective: str, names: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one beside a long one."""
    long = names.split()[-1]
    rows = [{name: f"{name} {n}" for name in names.split()} | {long: words(n)} for n in range(600)]
    wanted = asked(model, write_jsonl(tmp_path / "a.jsonl", rows), objective=objective, eval_split=0.2)
    near(wanted, tmp_path, monkeypatch, False)
    counted = sampled(wanted)
    assert counted and counted.lengths(True)[500] < 0.8 * counted.lengths(False)[500]


def test_without_a_tokenizer_characters_are_counted(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl")
    exact, rough = (sampled(asked(where, path, objective="language_modelling")) for where in (model, tmp_path))
    assert exact and rough and "four characters a token" in rough.sample
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = sampled(asked(tmp_path, path, objective="language_modelling"))
    assert broken and "cannot be read" in broken.sample and broken.tokens == rough.tokens
    assert rough.rows == exact.rows and 0.5 < rough.tokens / exact.tokens < 2
    by_hand = [len(words(number)) / 4 + 1 for number in range(0, 2000, 7)]  # every seventh, of which there are 286
    assert rough.tokens == pytest.approx(2000 * np.mean(by_hand), rel=0.01)


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


EXACT: dict[str, dict[str, Any]] = {
    "all": {},
    "limited": {"max_samples": 20},
    "not limited": {"max_samples": 500},
    "dropped": {"over_long": "drop", "seq_len": 24},
    "held out": {"eval_split": 0.25},
    "held out file": {"eval_sources": ["held.jsonl"]},
    "few held out": {"eval_sources": ["held.jsonl"], "eval_max_samples": 5},
    "held out with a wide limit": {"eval_sources": ["held.jsonl"], "eval_max_samples": 500},
    "held out beside a fraction": {"eval_split": 0.25, "eval_sources": ["held.jsonl"]},
    "few of a fraction": {"eval_split": 0.5, "eval_max_samples": 7},
    "held out and dropped": {"eval_sources": ["held.jsonl"], "over_long": "drop", "seq_len": 24},
}


@pytest.mark.parametrize("kind", EXACT)
def test_of_small_files_every_text_is_counted(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, but for which rows are held out or left out by chance."""
    monkeypatch.chdir(tmp_path)
    path, _ = texts(tmp_path / "a.jsonl", 60), texts(tmp_path / "held.jsonl", 30)
    wanted = asked(model, path, objective="language_modelling", **{"seq_len": 4096} | EXACT[kind])
    counted, figures = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").statistics, sampled(wanted)
    assert counted and figures and figures.sample == "a sample of 60 rows"
    assert (figures.rows, figures.documents, figures.eval_rows) == (counted.rows, counted.documents, counted.eval_rows)
    by_chance = "limited" in kind or "fraction" in kind or kind == "held out"
    near = 0.35 if by_chance and kind != "not limited" else 0
    for name in ("tokens", "trained_tokens", "squared_tokens"):
        assert getattr(figures, name) == pytest.approx(getattr(counted, name), rel=2 * near), name
    if kind in ("held out file", "held out and dropped", "held out with a wide limit"):
        assert (figures.eval_tokens, figures.longest_eval) == (counted.eval_tokens, counted.longest_eval)
    if not counted.eval_rows:
        assert (figures.eval_tokens, figures.longest_eval) == (0, 0)
    assert figures.longest_target is None
    if not near:
        assert figures.quantiles[-1] == counted.quantiles[-1] and figures.quantiles[0] == counted.quantiles[0]
        assert len(figures.quantiles) == 1001


def test_rows_are_split_into_even_parts_and_others_cut(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", 60)
    whole = sampled(asked(model, path, objective="language_modelling", seq_len=4096))
    parts = sampled(asked(model, path, objective="language_modelling", seq_len=16, over_long="split"))
    cut = sampled(asked(model, path, objective="language_modelling", seq_len=16, over_long="truncate"))
    assert whole and parts and cut
    lengths = [len(chatml_tokenizer()(words(n))["input_ids"]) + 1 for n in range(60)]
    assert whole.tokens == parts.tokens == sum(lengths)
    assert parts.rows == sum(-(-length // 16) for length in lengths) and parts.quantiles[-1] <= 16
    assert cut.tokens == sum(min(length, 16) for length in lengths) and cut.rows == 60
    assert parts.trained_tokens == whole.trained_tokens == sum(lengths) - 60


def test_weights_repeat_rows_in_the_figures(model: Path, tmp_path: Path) -> None:
    small, large = texts(tmp_path / "a.jsonl", 10), texts(tmp_path / "b.jsonl", 40)
    for weights, rows in (
        ((1.0, 1.0), 80),
        ((3.0, 1.0), 160),
        ((0.1, 1.0), 110 - 66),
        ((2.0, None), 120),
        ((None, None), 50),
    ):
        sources = [{"path": str(path), "weight": weight} for path, weight in zip((small, large), weights, strict=True)]
        figures = sampled(asked(model, *sources, objective="language_modelling", seq_len=4096))
        counted = prepare(
            asked(model, *sources, objective="language_modelling", seq_len=4096),
            chatml_tokenizer(),
            STOP,
            tmp_path / "cache",
        ).statistics
        assert figures and counted and figures.documents == counted.documents, (weights, rows)
        assert figures.tokens == pytest.approx(counted.tokens, rel=0.1)
        assert figures.sample == "a sample of 50 rows"


@pytest.mark.parametrize(("words", "rows"), [(12, 40), (200, 20)])
def test_weights_share_out_the_rows_that_are_not_dropped(words: int, rows: int, model: Path, tmp_path: Path) -> None:
    long = write_jsonl(tmp_path / "a.jsonl", [{"text": "word " * (200 if n % 3 else words)} for n in range(30)])
    short = write_jsonl(tmp_path / "b.jsonl", [{"text": "word " * 9}] * 20)
    sources = [{"path": str(path), "weight": 1.0} for path in (long, short)]
    wanted = asked(model, *sources, objective="language_modelling", seq_len=64, over_long="drop")
    figures, counted = sampled(wanted), prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").statistics
    assert figures and counted and figures.rows == counted.rows == rows and figures.tokens == counted.tokens


@pytest.mark.parametrize("sources", [[("a", None)], [("a", 1.0), ("b", 1.0)], [("a", 3.0), ("b", None)]])
@pytest.mark.parametrize("limit", [None, 40, 1000])
def test_a_fraction_is_held_out_before_rows_are_repeated_or_left_out(
    sources: list[tuple[str, float | None]], limit: int | None, model: Path, tmp_path: Path
) -> None:
    few = write_jsonl(tmp_path / "b.jsonl", ({"text": f"fox {n}"} for n in range(20)))
    paths = {"a": texts(tmp_path / "a.jsonl", 80), "b": few}
    given = [{"path": str(paths[name]), "weight": weight} for name, weight in sources]
    wanted = asked(model, *given, objective="language_modelling", eval_split=0.2, max_samples=limit, seq_len=4096)
    counted, figures = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").statistics, sampled(wanted)
    assert counted and figures and figures.eval_rows == counted.eval_rows == 0.2 * (80 + 20 * (len(sources) - 1))
    assert figures.rows == pytest.approx(counted.rows, rel=0.1)  # What is held out of each source is chance.


def test_pairs_of_other_forms_and_packed_rows(model: Path, tmp_path: Path) -> None:
    pairs = write_jsonl(tmp_path / "a.jsonl", ({"source": words(n), "target": words(n + 1)} for n in range(20)))
    figures = sampled(asked(model, pairs, objective="seq2seq", seq_len=4096))
    tokens = [len(chatml_tokenizer()(words(n))["input_ids"]) + 1 for n in range(21)]
    assert figures and figures.tokens == sum(tokens[:20]) and figures.trained_tokens == sum(tokens[1:])
    assert figures.longest_target == max(tokens[1:]) and figures.quantiles[-1] == max(tokens)
    packed = sampled(
        asked(model, texts(tmp_path / "b.jsonl", 60), objective="language_modelling", packing=True, seq_len=512)
    )
    assert packed and packed.documents == 60 and packed.rows == round(packed.tokens / (0.97 * 512))
    assert packed.quantiles[-1] == 512 and packed.quantiles[0] == pytest.approx(0.94 * 512)


@pytest.mark.parametrize(
    ("row", "settings", "trained"),
    [
        ({"prompt": "one two", "completion": "three"}, {}, "three"),
        ({"prompt": "one two", "completion": "three"}, {"train_on": "all"}, "one two|three"),
        ({"segments": [{"text": "one", "label": False}, {"text": " two", "label": True}]}, {}, " two"),
        (
            {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]},
            {},
            "two three",
        ),
        (
            {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]},
            {"train_on": ["user"]},
            "one",
        ),
        (
            {"messages": [{"role": "user", "content": "one", "train": True}, {"role": "assistant", "content": "two"}]},
            {},
            "one|two",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "two", "train": False},
                ]
                * 2
                + [{"role": "assistant", "content": "three"}]
            },
            {},
            "three",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]},
                ],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            {},
            json.dumps([{"type": "function", "function": {"name": "f", "arguments": {}}}]),
        ),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {}, 2),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {}, 1),
    ],
)
def test_what_carries_loss_is_counted(
    row: dict[str, Any], settings: dict[str, Any], trained: str | int, model: Path, tmp_path: Path
) -> None:
    figures = sampled(asked(model, write_jsonl(tmp_path / "a.jsonl", [row] * 3), **settings))
    if isinstance(trained, str):
        trained = sum(len(chatml_tokenizer()(text)["input_ids"]) for text in trained.split("|"))
    assert figures and figures.trained_tokens == 3 * trained and figures.tokens > figures.trained_tokens
    rough = sampled(asked(tmp_path, tmp_path / "a.jsonl", **settings))
    assert rough and (rough.sample == "a sample of 3 rows" or "four characters a token" in rough.sample)
    messages, tools = row.get("messages", ()), row.get("tools")
    if messages:
        texts_ = [*(each["content"] for each in messages if each["content"]), *([json.dumps(tools)] if tools else [])]
        calls = trained if tools else 0
        counted = sum(len(chatml_tokenizer()(text)["input_ids"]) for text in texts_) + calls
        assert figures.tokens == 3 * (counted + 5 * len(messages))


def test_files_that_could_only_be_read_whole_are_left_to_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_READ_WHOLE", 1000)
    lines = b"text,n\n" + b"fox,1\n" * 50
    (tmp_path / "a.csv").write_bytes(lines)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fox"}\n' * 50))
    for name, times in (("a.csv", 1), ("a.csv.gz", 4), ("b.jsonl.gz", 4)):
        limit = times * (tmp_path / name).stat().st_size
        for allowed in (limit, limit - 1):
            monkeypatch.setattr(sample, "_READ_WHOLE", allowed)
            assert (sampled(asked(model, tmp_path / name)) is not None) == (allowed == limit), name


def test_large_files_are_read_all_over(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines grow along the file: a sample of its beginning would be too short."""
    monkeypatch.setattr(sample, "_READ_WHOLE", 1000)
    growing = [
        write_jsonl(tmp_path / f"{n}.jsonl", ({"text": "fox " * (1 + i // 10)} for i in range(500))) for n in range(2)
    ]
    figures = sampled(asked(model, *growing, objective="language_modelling", seq_len=4096))
    assert figures and figures.rows == pytest.approx(1000, rel=0.6)
    assert figures.quantiles[0] < 8 and figures.quantiles[-1] > 45
    limited = sampled(asked(model, {"path": str(growing[0]), "max_samples": 10}, objective="language_modelling"))
    assert limited and limited.rows == 10
    table = pa.table({"text": ["fox"] * 900})
    (tmp_path / "p").mkdir()
    for name in ("c.parquet", "d.parquet"):
        pq.write_table(table, tmp_path / "p" / name)
    figures = sampled(asked(model, tmp_path / "p", objective="language_modelling"))
    assert figures and figures.rows == 1800 and figures.sample == "a sample of 300 rows"
