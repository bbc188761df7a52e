"""Prepared data is counted, and taken for counted only while nothing has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import chatml_tokenizer
from harness import write_jsonl

from toolkit.data.batching.answer_batches import AnswerCollator, PromptCollator
from toolkit.data.batching.batches import cut
from toolkit.data.batching.collate import Collator
from toolkit.data.batching.head_batches import HeadCollator
from toolkit.data.prepare import prepare
from toolkit.data.statistics import DataStatistics, record, statistics_of
from toolkit.distributed.layout import batch_layout
from toolkit.recipe import Recipe
from toolkit.train.batching import micro_batches

STOP = frozenset({2})
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def recipe(path: Path, seq_len: int = 64, **data: Any) -> Recipe:
    return Recipe.model_validate(
        {"model": {"path": "x"}, "data": {"sources": [str(path)], **data}, "batch": {"seq_len": seq_len}}
    )


def documents(path: Path, count: int) -> Path:
    return write_jsonl(path, ({"text": f"{n} " + "fox " * (1 + n % 7)} for n in range(count)))


@pytest.mark.parametrize("packing", [False, True])
def test_figures_are_those_of_the_rows(tmp_path: Path, packing: bool) -> None:
    wanted = recipe(documents(tmp_path / "a.jsonl", 40), packing=packing, eval_split=0.25)
    assert statistics_of(wanted, tmp_path / "cache") is None
    prepared = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache")
    statistics = statistics_of(wanted, tmp_path / "cache")
    assert statistics is not None and statistics == prepared.statistics
    assert prepared.eval is not None
    rows, held_out = list(prepared.train), list(prepared.eval)
    lengths = [len(row["input_ids"]) for row in rows]
    parts = [length for row in rows for length in row.get("seq_lengths", [len(row["input_ids"])])]
    assert (statistics.rows, statistics.tokens) == (len(rows), sum(lengths))
    assert statistics.trained_tokens == sum(label != -100 for row in rows for label in row["labels"])
    assert (statistics.documents, statistics.squared_tokens) == (30, sum(part**2 for part in parts))
    assert (statistics.quantiles[0], statistics.quantiles[-1]) == (min(lengths), max(lengths))
    assert (statistics.eval_rows, statistics.eval_tokens) == (10, sum(len(row["input_ids"]) for row in held_out))
    assert statistics.longest_eval == max(len(row["input_ids"]) for row in held_out)


def test_changed_data_and_settings_are_not_counted(tmp_path: Path) -> None:
    path, cache = documents(tmp_path / "a.jsonl", 40), tmp_path / "cache"
    alone = prepare(recipe(path), chatml_tokenizer(), STOP, cache).statistics
    assert alone and (alone.eval_rows, alone.eval_tokens, alone.longest_eval, alone.longest_target) == (0, 0, 0, None)
    assert statistics_of(recipe(path, num_proc=2), cache) is not None  # how it is made does not matter
    tokens = recipe(path).with_values({"model.new_tokens": ["fox"]})
    for other in (recipe(path, seq_len=65), recipe(path, packing=True), recipe(path, max_samples=30), tokens):
        assert statistics_of(other, cache) is None
    os.utime(path, ns=(1, 1))
    assert statistics_of(recipe(path), cache) is None
    prepare(recipe(path), chatml_tokenizer(), STOP, cache)  # the same content: loaded, and counted again
    assert statistics_of(recipe(path), cache) is not None


def test_a_file_that_joins_a_folder_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    documents(folder / "a.jsonl", 20)
    prepare(recipe(folder), chatml_tokenizer(), STOP, tmp_path / "cache")
    assert statistics_of(recipe(folder), tmp_path / "cache") is not None
    documents(folder / "b.jsonl", 20)
    assert statistics_of(recipe(folder), tmp_path / "cache") is None


def test_files_of_a_linked_folder_are_watched(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").mkdir()
    documents(tmp_path / "real" / "a.jsonl", 20)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "real")
    prepare(recipe(tmp_path / "data"), chatml_tokenizer(), STOP, tmp_path / "cache")
    assert statistics_of(recipe(tmp_path / "data"), tmp_path / "cache") is not None
    documents(tmp_path / "real" / "a.jsonl", 30)
    assert statistics_of(recipe(tmp_path / "data"), tmp_path / "cache") is None


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (16, 1), (16, 4), (64, 16)])
@pytest.mark.parametrize("kind", ["lognormal", "uniform", "few long"])
def test_micro_batches_of_an_epoch(size: int, count: int, kind: str, flat: bool) -> None:
    draw = np.random.default_rng(0)
    lengths = {
        "lognormal": np.clip(draw.lognormal(6, 0.8, 38_400), 5, 4096),
        "uniform": draw.uniform(10, 1000, 38_400),
        "few long": np.where(draw.random(38_400) < 0.01, 4096.0, 200.0),
    }[kind].astype(int)
    spread = tuple(np.quantile(lengths, np.linspace(0, 1, 1001)).tolist())
    dealt = DataStatistics(38_400, int(lengths.sum()), 1, 38_400, 1, spread).dealt(size, count, flat)
    rows = lengths if flat else -(-lengths // 8) * 8
    epochs = [cut(-np.sort(-draw.permutation(rows).reshape(-1, size), axis=1), count, flat) for _ in range(5)]
    assert dealt.tokens == pytest.approx(np.mean([each.tokens.mean() for each in epochs]), rel=0.03)
    assert dealt.longest == pytest.approx(np.mean([each.longest.mean() for each in epochs]), rel=0.03)
    grid = np.mean([(each.tokens * each.longest).mean() for each in epochs])
    assert dealt.grid == pytest.approx(grid, rel=0.1)
    fullest = np.mean([each.tokens.max() for each in epochs])
    assert 0.97 * fullest < dealt.fullest < 1.2 * fullest


def test_of_pairs_the_longer_side_counts(tmp_path: Path) -> None:
    rows = [{"source": "word " * (3 + n), "target": "word " * (30 - 2 * n)} for n in range(10)]
    path = tmp_path / "pairs.jsonl"
    write_jsonl(path, rows)
    held_out = write_jsonl(tmp_path / "held.jsonl", [{"source": "word", "target": "word " * n} for n in (3, 41)])
    wanted = recipe(path, seq_len=256, eval_sources=[str(held_out)]).model_copy(update={"objective": "seq2seq"})
    prepared = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache")
    longer = [max(len(row["input_ids"]), len(row["labels"])) for row in prepared.train]
    assert prepared.statistics and prepared.statistics.quantiles[-1] == max(longer)
    assert prepared.statistics.quantiles[0] == min(longer)
    assert prepared.eval is not None
    targets = max(len(row["labels"]) for row in prepared.eval)
    assert prepared.statistics.longest_target == prepared.statistics.longest_eval == targets > max(longer)


@pytest.mark.parametrize("flat", [True, False])
def test_texts_of_a_row_take_what_they_have_end_to_end_and_the_longest_each_if_padded(
    tmp_path: Path, flat: bool
) -> None:
    """Short questions and long passages, in micro-batches as a run cuts them."""
    rows = [{"anchor": f"word {n}", "positive": f"{n} " + "word " * (20 + n % 30)} for n in range(200)]
    path = write_jsonl(tmp_path / "related.jsonl", rows)
    wanted = recipe(path, seq_len=256, eval_split=0.2).with_values(
        {"objective": "embedding", "batch.global_batch_size": 16, "batch.micro_batch_size": 4}
    )
    prepared = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache")
    whole = Collator(chatml_tokenizer().pad_token_id, "flat" if flat else "padded")
    layout = batch_layout(wanted, 1)
    batches = micro_batches(wanted, prepared.train, HeadCollator(whole, "embedding"), layout, 40)
    widths = [batches.widths[each].max(axis=1) for each in batches]
    real = [int(each.sum() if flat else 2 * len(each) * each.max()) for each in widths]
    assert prepared.statistics and prepared.eval
    dealt = prepared.statistics.dealt(16, 4, flat, layout.answers)
    assert dealt.tokens == pytest.approx(np.mean(real), rel=0.03)
    assert 0.97 * max(real) < dealt.fullest < 1.1 * max(real)
    held_out = [list(row["seq_lengths"]) for row in prepared.eval]
    taken = max(np.mean(each) if flat else max(each) for each in held_out)
    assert prepared.statistics.longest_held_out(flat) == taken


def test_counting_imports_no_framework() -> None:
    code = "import sys, toolkit.data.statistics; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_figures_are_of_the_recipe_its_tokenizer_and_its_files(tmp_path: Path) -> None:
    """Whatever tokens follow from; the weights are not among it, however they are stored."""
    path, model, cache = documents(tmp_path / "a.jsonl", 3), tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", *(f"model{kind}" for kind in WEIGHTS)):
        (model / name).write_text("{}")
    template = tmp_path / "own.jinja"
    template.write_text("x")
    base = recipe(path).with_values({"model.path": str(model), "data.columns": {"text": "t", "system": "s"}})
    record(base, DataStatistics(3, 30, 27, 3, 300, (1.0, 2.0)), cache)
    assert statistics_of(base, cache) == DataStatistics(3, 30, 27, 3, 300, (1.0, 2.0))
    for change in (
        *({"model.path": "y"}, {"model.revision": "main"}, {"model.gguf_file": "a.gguf"}, {"model.tokenizer": "z"}),
        *({"model.chat_template": "chatml"}, {"objective": "language_modelling"}, {"seed": 5}, {"batch.seq_len": 65}),
        *({"data.packing": True}, {"data.eval_split": 0.5}, {"data.train_on": "all"}, {"data.streaming": True}),
        {"model.new_tokens": ["fox"]},
    ):
        assert statistics_of(base.with_values(change), cache) is None, change
    for change in (
        *({"data.num_proc": 3}, {"batch.micro_batch_size": 2}, {"optimizer.learning_rate": 1e-3}),
        {"data.columns": {"system": "s", "text": "t"}},
    ):
        assert statistics_of(base.with_values(change), cache) is not None, change
    for kind in WEIGHTS:
        os.utime(model / f"model{kind}", ns=(1, 1))
    assert statistics_of(base, cache) is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        times = (model / name).stat()
        os.utime(model / name, ns=(1, 1))
        assert statistics_of(base, cache) is None
        os.utime(model / name, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert statistics_of(base, cache) is not None
    for key, own in (("model.tokenizer", model), ("model.chat_template", template)):
        wanted = base.with_values({"model.path": "x", key: str(own)})
        record(wanted, DataStatistics(3, 30, 27, 3, 300, (1.0, 2.0)), cache)
        assert statistics_of(wanted, cache) is not None
        os.utime(model / "tokenizer.json" if own == model else own, ns=(3, 3))
        assert statistics_of(wanted, cache) is None


def test_files_of_folders_globs_and_held_out_data_are_watched(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    files = [
        documents(tmp_path / name, 3) for name in ("deep/er/a.jsonl", "glob-1.jsonl", "glob-2.jsonl", "held.jsonl")
    ]
    for number, path in enumerate(("deep", "glob-*.jsonl", "glob-*.jsonl", "glob-1.jsonl")):
        wanted = recipe(tmp_path / path, eval_sources=[str(tmp_path / "held.jsonl")])
        record(wanted, DataStatistics(3, 30, 27, 3, 300, (1.0, 2.0)), cache)
        assert statistics_of(wanted, cache) is not None
        changed = files[number]
        documents(changed, 4)
        assert statistics_of(wanted, cache) is None


def test_of_one_length_every_micro_batch_is_alike() -> None:
    """By hand: 100 tokens are filled up to 104 unless rows lie end to end."""
    figures = DataStatistics(50, 5000, 1, 50, 1, (100.0, 100.0))
    assert figures.mean_length == 100
    assert (figures.eval_rows, figures.eval_tokens, figures.longest_eval, figures.sample) == (0, 0, 0, "")
    for flat, width in ((False, 104), (True, 100)):
        dealt = figures.dealt(8, 2, flat)
        assert (dealt.tokens, dealt.longest, dealt.fullest) == (4 * width, width, 4 * width)
        assert dealt.grid == 4 * width * width


def test_the_longest_sequence_is_in_a_step_for_certain() -> None:
    spread = tuple([10.0] * 1000 + [4096.0])
    for rows in (1, 3, 5000):
        dealt = DataStatistics(rows, 10 * rows, 1, rows, 1, spread).dealt(1, 1, True)
        assert dealt.fullest == 4096 and dealt.tokens >= 10
    alone = DataStatistics(1, 4096, 1, 1, 1, spread).dealt(4, 4, True)
    assert alone.fullest == 4096


def test_what_pairs_of_answers_begin_with_alike_is_counted_once(tmp_path: Path) -> None:
    pairs = (
        {"prompt": "fox " * (20 + n % 9), "chosen": f"{n} " + "the " * (5 + n % 20), "rejected": f"x {n}"}
        for n in range(200)
    )
    wanted = recipe(write_jsonl(tmp_path / "a.jsonl", pairs), seq_len=256).with_values(
        {"objective": "dpo", "batch.global_batch_size": 8, "batch.micro_batch_size": 4}
    )
    prepared = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache")
    figures, layout = prepared.statistics, batch_layout(wanted, 1)
    assert figures is not None
    dealt = figures.dealt(8, layout.micro_batches, True, 2)
    collator = AnswerCollator(Collator(0, "flat", shares=True))
    batches = micro_batches(wanted, prepared.train, collator, layout, steps=20)
    train = prepared.train.add_column("row", list(range(len(prepared.train))))
    tokens = [collator([train[row] for row in rows])["input_ids"].shape[1] for rows in batches.between(0, 20)]
    assert dealt.tokens == pytest.approx(np.mean(tokens), rel=0.03)
    assert 0.97 < dealt.fullest / max(tokens) < 1.1
    assert np.mean(tokens) < 0.75 * figures.tokens / figures.rows * 4


@pytest.mark.parametrize("answers", [3, 8])
def test_prompts_are_counted_once_for_all_their_answers(tmp_path: Path, answers: int) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ({"prompt": f"{n} " + "fox " * (20 + n % 9)} for n in range(200)))
    wanted = recipe(file, seq_len=256).with_values(
        {"objective": "grpo", "rewards.length.max_tokens": 9, "rollout.max_completion_tokens": 20}
        | {"rollout.num_generations": answers, "batch.global_batch_size": 8, "batch.micro_batch_size": 2}
    )
    prepared = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache")
    figures, layout = prepared.statistics, batch_layout(wanted, 1)
    assert figures is not None
    collator = PromptCollator(Collator(0, "flat", shares=True), 20)
    batches, tokens = micro_batches(wanted, prepared.train, collator, layout, steps=20), []
    for rows in batches.between(0, 20):
        prompts = [list(prepared.train[row]["input_ids"]) for row in rows for _ in range(answers)]
        batch = collator.answered(prompts, [[number] * 20 for number in range(len(prompts))])
        tokens.append(batch["input_ids"].shape[1])
    dealt = figures.dealt(8, layout.micro_batches, True, answers)
    assert dealt.tokens == pytest.approx(np.mean(tokens), rel=0.03)
    assert figures.mean_length * 2 - figures.shared(2) == pytest.approx(np.mean(tokens), rel=0.03)
    assert np.mean(tokens) < 0.75 * figures.mean_length * 2


@pytest.mark.parametrize("packing", [False, True])
def test_what_documents_begin_with_alike_is_counted_once(tmp_path: Path, packing: bool) -> None:
    """Of micro-batches as training deals and lays them out."""
    said = [{"role": "system", "content": "fox " * 30}, {"role": "user", "content": "fox"}]
    talks = ([*said, {"role": "assistant", "content": f"{n} " + "the " * (5 + n % 20)}] for n in range(200))
    file = write_jsonl(tmp_path / "a.jsonl", ({"messages": talk} for talk in talks))
    wanted = recipe(file, seq_len=256, packing=packing).with_values(
        {"batch.global_batch_size": 8, "batch.micro_batch_size": 4, "data.eval_split": None}
    )
    prepared = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache")
    figures = prepared.statistics
    assert figures is not None and all(each > 30 for _, each in figures.in_common)
    layout = batch_layout(wanted, 1)
    dealt = figures.dealt(8, layout.micro_batches, True)
    collator = Collator(0, "flat", shares=True)
    batches = micro_batches(wanted, prepared.train, collator, layout, steps=20)
    tokens = [collator([prepared.train[row] for row in rows])["input_ids"].shape[1] for rows in batches.between(0, 20)]
    assert dealt.tokens == pytest.approx(np.mean(tokens), rel=0.03)
    # The fullest packed rows have more documents than usual ones, of which the plan knows no more.
    assert 0.97 < dealt.fullest / max(tokens) < (1.15 if packing else 1.05)
    apart = figures.tokens / figures.rows * 4
    assert apart - figures.shared(4) == pytest.approx(np.mean(tokens), rel=0.03) and np.mean(tokens) < 0.6 * apart
