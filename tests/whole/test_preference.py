"""Pairs of answers, and judged ones, on every engine: the same losses, norms and weights as of one process, whatever
divides the work; and the demos, which learn with a real model."""

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
from tiny import models_and_rows, pair_rows

LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
MODELS = {
    "llama": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}
# See `test_tensor_parallel.SETTINGS`.
SETTINGS = {
    "full": [*METHODS["full"], "optimizer.eps=1.0e-4"],
    "lora": [*METHODS["lora"], "optimizer.eps=1.0e-4"],
    "qlora": [*METHODS["qlora"], "optimizer.eps=1.0e-4"],
}
# The gradient of DPO alone is the difference of two that are much alike, of which rounding is a larger share.
OBJECTIVES = {
    "dpo": ["objective=dpo", "preference.sft_weight=1.0"],
    "orpo": ["objective=orpo"],
    "ipo": ["objective=dpo", "preference.loss=ipo"],
    "kto": ["objective=kto", "preference.undesirable_weight=0.8", "data.sources=[judged.jsonl]"],
}
COLUMNS = {"kto": "{instruction: prompt, output: completion}"}
CORE = [
    ("llama", "dpo", "lora", "zero2", 4),
    ("llama", "dpo", "full", "zero3", 1),
    ("llama", "orpo", "full", "fsdp", 2),
    ("llama", "dpo", "qlora", "ddp", 1),
    ("qwen3", "dpo", "lora", "tensor", 2),
    ("qwen3_moe", "dpo", "full", "expert", 2),
    ("llama", "kto", "full", "ddp", 1),
    ("llama", "kto", "lora", "fsdp", 1),
]
FULL = [
    *(("llama", "dpo", "full", "ddp", 2), ("llama", "kto", "full", "zero3", 2)),
    *(("qwen3", "dpo", "full", "tensor", 2), ("llama", "kto", "full", "tensor", 2)),
    *itertools.product(("llama",), OBJECTIVES, ("full", "lora"), ("ddp", "zero1", "zero2", "zero3", "fsdp"), (1, 4)),
]
WAYS = {"tensor": ["parallel.tensor=2"], "expert": ["parallel.expert=2"]}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with tiny models and pairs, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("pairs")
    models_and_rows(folder, MODELS, kv_heads=2)
    rows = pair_rows(41, "prompt", "chosen")
    # Rejected is the next row's answer, so that lengths differ.
    pairs = [row | {"rejected": other["chosen"]} for row, other in itertools.pairwise(rows)]
    write_jsonl(folder / "chat.jsonl", [row for row in pairs if row["chosen"] != row["rejected"]])
    judged = [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 4 else "rejected"], "label": number % 4 > 0}
        for number, row in enumerate(pairs)
    ]
    write_jsonl(folder / "judged.jsonl", judged)
    write_recipe(folder, "matrix", RECIPE)
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
    common.append(f"data.columns={COLUMNS.get(objective, '{instruction: prompt}')}")
    alike = f"{model}-{objective}-{method}"
    entry = {"entry": "in_parts"} if engine == "tensor" else {}
    reference = launcher.result(alike, "single", *common, "batch.micro_batch_size=2", **entry)
    divided, engine = WAYS.get(engine, []), "ddp" if engine in WAYS else engine
    name = f"{alike}-{'-'.join(divided) or engine}-{size}".replace("=", "")
    run = launcher.result(name, engine, *common, *divided, f"batch.micro_batch_size={size}")
    difference = Difference.between(run, reference)
    record(record_property, "Pairs of answers: largest difference from one process", run=name, **difference.figures())
    assert not difference.over(LIMITS)
    # By no more than what must not be negative, most of a loss would go untested.
    assert objective != "kto" or run.held_out[-1]["eval_kl"] > 0.1
    assert run.answers == reference.answers
    for one, other in zip(run.held_out, reference.held_out, strict=True):
        assert one["eval_accuracy"] == other["eval_accuracy"]
        assert one.get("eval_kl", 0.0) == pytest.approx(other.get("eval_kl", 0.0), rel=1e-4, abs=1e-5)
        assert one.get("eval_pairs") == other.get("eval_pairs") and one.get("eval_answers") == other.get("eval_answers")


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    "objective", [pytest.param("dpo", marks=pytest.mark.slow), pytest.param("kto", marks=pytest.mark.matrix)]
)
def test_the_demo_learns_to_prefer_the_right_answer(objective: str, tmp_path: Path, ranks: Ranks) -> None:
    """With a real model on real texts: held-out answers are told apart better than by chance."""
    less = ["schedule.max_steps=8", "data.eval_max_samples=24", "evaluation.num_prompts=0", "evaluation.every_steps=8"]
    first, last = before_and_after(objective, tmp_path, ranks, *less)
    assert first["eval_accuracy"] == 0.5
    assert last["eval_accuracy"] >= 0.65 and last["eval_loss"] < first["eval_loss"] and last["eval_reward_margin"] > 0
