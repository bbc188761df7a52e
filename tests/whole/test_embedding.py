"""Vectors on every engine: the same losses, norms, figures and weights as of one process; and the demo, which learns
with a real model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from demos import SECONDS, before_and_after
from figures import record
from harness import write_jsonl, write_recipe
from matrix import METHODS, RECIPE, Difference, Launcher, cells
from ranks import Ranks
from tiny import models_and_rows, pair_rows, tiny_encoder

LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
# Gradients of the last biases are sums that cancel over texts, of which rounding is a larger share: steps are small.
_SETTINGS = ["optimizer.eps=1.0e-3", "optimizer.learning_rate=1.0e-4"]
SETTINGS = {method: [*METHODS[method], *_SETTINGS] for method in ("full", "lora", "qlora")}
ROWS = {
    "pairs": ["data.sources=[pairs.jsonl]"],
    "scored": ["data.sources=[scored.jsonl]", "embedding.loss=cosent"],
}
CORE = [
    ("llama", "pairs", "full", "ddp", 2),
    ("bert", "pairs", "full", "ddp", 4),
    ("llama", "pairs", "lora", "zero2", 2),
    ("bert", "scored", "full", "zero3", 2),
    ("llama", "pairs", "full", "fsdp", 1),
    ("bert", "pairs", "lora", "fsdp", 4),
]
FULL = [
    ("llama", "pairs", "qlora", "ddp", 1),
    *(
        (model, rows, method, engine, size)
        for model, rows in itertools.product(("llama", "bert"), ROWS)
        for method in ("full", "lora")
        for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp")
        for size in (1, 4)
    ),
]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with tiny models and rows, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("embedding")
    models_and_rows(folder, {"llama": "meta-llama/Llama-3.2-1B"}, kv_heads=2)
    tiny_encoder("bert", folder / "bert")
    pairs = pair_rows(60, "anchor", "positive")
    scored = [
        {"sentence1": row["anchor"], "sentence2": pairs[(n + n % 3) % 60]["positive"], "score": 1 - (n % 3) / 2}
        for n, row in enumerate(pairs)
    ]
    for name, rows in (("pairs", pairs), ("scored", scored)):
        write_jsonl(folder / f"{name}.jsonl", rows)
    text = RECIPE.replace("evaluation: {num_prompts: 2, max_new_tokens: 8, ", "evaluation: {")
    write_recipe(folder, "matrix", text + "objective: embedding\n")
    return Launcher(folder, ranks)


@pytest.mark.parametrize(("model", "rows", "method", "engine", "size"), cells(CORE, FULL))
def test_an_engine_equals_one_process(
    model: str,
    rows: str,
    method: str,
    engine: str,
    size: int,
    launcher: Launcher,
    record_property: Callable[[str, object], None],
) -> None:
    common = [f"model.path={model}", *ROWS[rows], *SETTINGS[method]]
    alike = f"{model}-{rows}-{method}"
    reference = launcher.result(alike, "single", *common, "batch.micro_batch_size=2")
    name = f"{alike}-{engine}-{size}"
    run = launcher.result(name, engine, *common, f"batch.micro_batch_size={size}")
    difference = Difference.between(run, reference)
    record(record_property, "Embeddings: largest difference from one process", run=name, **difference.figures())
    assert not difference.over(LIMITS)
    for one, other in zip(run.held_out, reference.held_out, strict=True):
        for key in ("eval_recall_at_1", "eval_mrr_at_10", "eval_spearman"):
            assert one.get(key) == pytest.approx(other[key], abs=1e-6) if key in other else key not in one


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.matrix
def test_the_demo_learns_with_a_real_model(tmp_path: Path, ranks: Ranks) -> None:
    """On real texts: questions find their answers among those of all held-out rows."""
    less = ["schedule.max_steps=4", "data.eval_max_samples=64", "evaluation.every_steps=4"]
    less += ["batch.global_batch_size=16", "batch.seq_len=96"]
    first, last = before_and_after("embedding", tmp_path, ranks, *less)
    assert last["eval_loss"] < first["eval_loss"]
    assert last["eval_recall_at_10"] >= 0.7 > first["eval_recall_at_10"]
