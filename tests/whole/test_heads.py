"""Reward models and classifiers on every engine: the same losses, norms, figures and weights as of one process; and the
demos, which learn with a real model."""

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
from tiny import labelled_rows, models_and_rows, pair_rows, tagged_rows, tiny_encoder

LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
SETTINGS = {method: [*METHODS[method], "optimizer.eps=1.0e-3"] for method in ("full", "lora", "qlora")}
# At a higher rate all pairs are soon told apart, and of a loss and gradients near zero rounding is a larger share.
_REWARD = ["preference.center_rewards=0.01", "optimizer.learning_rate=1.0e-4"]
OBJECTIVES = {
    "reward": ["objective=reward", "data.columns={instruction: prompt}", *_REWARD],
    "classification": ["objective=classification", "data.sources=[texts.jsonl]"],
    "token_classification": ["objective=token_classification", "data.sources=[words.jsonl]"],
}
CORE = [
    ("llama", "reward", "full", "ddp", 2),
    ("llama", "reward", "lora", "zero2", 4),
    ("llama", "reward", "full", "fsdp", 1),
    ("llama", "classification", "full", "zero3", 2),
    ("llama", "classification", "qlora", "ddp", 1),
    ("bert", "classification", "lora", "fsdp", 2),
    ("bert", "token_classification", "full", "zero3", 4),
    ("bert", "token_classification", "full", "fsdp", 2),
    ("bert", "token_classification", "lora", "ddp", 1),
]
FULL = [
    (model, objective, method, engine, size)
    for model, objective in itertools.product(("llama", "bert"), OBJECTIVES)
    # A decoder's head for words has dropout, and BERT no token that ends an answer.
    if (model, objective) not in (("llama", "token_classification"), ("bert", "reward"))
    for method in ("full", "lora")
    for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp")
    for size in (1, 4)
]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with tiny models and rows, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("heads")
    models_and_rows(folder, {"llama": "meta-llama/Llama-3.2-1B"}, kv_heads=2)
    tiny_encoder("bert", folder / "bert")
    answers = itertools.pairwise(pair_rows(41, "prompt", "chosen"))
    pairs = [row | {"rejected": f"never {other['chosen']}"} for row, other in answers]
    for name, rows in (("chat", pairs), ("texts", labelled_rows(60)), ("words", tagged_rows(60))):
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_recipe(folder, "matrix", RECIPE.replace("evaluation: {num_prompts: 2, max_new_tokens: 8, ", "evaluation: {"))
    return Launcher(folder, ranks)


@pytest.mark.parametrize(
    ("model", "objective", "method", "engine", "size"),
    cells(CORE, FULL),
)
def test_an_engine_equals_one_process(
    model: str,
    objective: str,
    method: str,
    engine: str,
    size: int,
    launcher: Launcher,
    record_property: Callable[[str, object], None],
) -> None:
    common = [f"model.path={model}", *OBJECTIVES[objective], *SETTINGS[method]]
    alike = f"{model}-{objective}-{method}"
    reference = launcher.result(alike, "single", *common, "batch.micro_batch_size=2")
    name = f"{alike}-{engine}-{size}"
    run = launcher.result(name, engine, *common, f"batch.micro_batch_size={size}")
    difference = Difference.between(run, reference)
    record(record_property, "Heads: largest difference from one process", run=name, **difference.figures())
    assert not difference.over(LIMITS)
    assert any("score" in each or "classifier" in each for each in run.weights)
    for one, other in zip(run.held_out, reference.held_out, strict=True):
        assert one["eval_accuracy"] == other["eval_accuracy"]
        assert one.get("eval_confusion") == other.get("eval_confusion")
        assert one.get("eval_entities") == other.get("eval_entities")


_SHORT = ["schedule.max_steps=8", "data.eval_max_samples=32", "evaluation.every_steps=8", "batch.global_batch_size=8"]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("objective", "less", "figure", "reached"),
    [
        pytest.param("reward", ["data.eval_max_samples=64"], "accuracy", 0.65, marks=pytest.mark.matrix),
        # At first all rows are taken for the commonest class, which seven in ten have.
        pytest.param("classification", ["data.eval_max_samples=64"], "macro_f1", 0.5, marks=pytest.mark.matrix),
        pytest.param("token_classification", _SHORT, "entity_f1", 0.5, marks=pytest.mark.slow),
    ],
    ids=["reward", "classification", "token_classification"],
)
def test_the_demo_learns_with_a_real_model(
    objective: str, less: list[str], figure: str, reached: float, tmp_path: Path, ranks: Ranks
) -> None:
    """On real texts: held-out rows are told better than by chance, or by who always says the same."""
    first, last = before_and_after(objective, tmp_path, ranks, *less)
    assert last["eval_loss"] < first["eval_loss"]
    assert last[f"eval_{figure}"] >= reached > first[f"eval_{figure}"]
