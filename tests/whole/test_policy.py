"""Learning from rewards on every engine: the same answers, losses, norms and weights as of one process; and the demo,
which learns a format with a real model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from demos import SECONDS, before_and_after
from figures import record
from harness import write_jsonl, write_recipe
from matrix import METHODS, RECIPE, Difference, Launcher, Result, cells
from ranks import Ranks
from tiny import chat_rows, models_and_rows

LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
MODELS = {"llama": "meta-llama/Llama-3.2-1B"}
SETTINGS = {
    "full": [*METHODS["full"], "optimizer.eps=1.0e-4"],
    "lora": [*METHODS["lora"], "optimizer.eps=1.0e-4"],
}
COMMON = [
    *("model.path=llama", "rollout.num_generations=4", "rollout.max_completion_tokens=6", "data.over_long=drop"),
    *("schedule.max_steps=4", "evaluation.num_prompts=0", "data.eval_max_samples=2"),
    *("rewards.file=own.py", "rewards.trust_python=true", "rewards.length.max_tokens=3", "rewards.length.soft=6"),
]
STOPS = [2, *range(4, 60)]
"""Tokens of a vocabulary of 128 that end an answer, so that answers are of all lengths, also among processes."""
# Random models keep to no format; but hardly two answers have the same share of vowels.
OWN = """
def reward(completions, prompts, **columns):
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]
"""
OBJECTIVES = {
    "grpo": ["objective=grpo"],
    "reference": ["objective=grpo", "policy.beta=0.1", "policy.num_iterations=2", "policy.scale_rewards=batch"],
    "rloo": ["objective=rloo", "policy.beta=0.05"],
}
CORE = [
    ("grpo", "full", "ddp", 2),
    ("grpo", "full", "zero3", 2),
    ("reference", "lora", "zero2", 2),
    ("reference", "lora", "fsdp", 1),
    ("grpo", "lora", "fsdp", 2),
    ("rloo", "lora", "ddp", 1),
]
FULL = [
    (objective, method, engine, size)
    for objective in OBJECTIVES
    for method in (("full", "lora") if objective == "grpo" else ("lora",))
    for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp")
    for size in (1, 2)
]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with a tiny model and prompts, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("policy")
    models_and_rows(folder, MODELS, kv_heads=2)
    rows = [{"prompt": row["messages"][0]["content"], "answer": str(n)} for n, row in enumerate(chat_rows(40))]
    write_jsonl(folder / "chat.jsonl", rows)
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    config = folder / "llama" / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": STOPS}), encoding="utf-8")
    write_recipe(folder, "matrix", RECIPE)
    return Launcher(folder, ranks)


@pytest.mark.parametrize(
    ("objective", "method", "engine", "size"),
    cells(CORE, FULL),
)
def test_an_engine_equals_one_process(
    objective: str,
    method: str,
    engine: str,
    size: int,
    launcher: Launcher,
    record_property: Callable[[str, object], None],
) -> None:
    common = [*COMMON, *OBJECTIVES[objective], *SETTINGS[method]]
    alike = f"{objective}-{method}"
    reference = launcher.result(alike, "single", *common, "batch.micro_batch_size=2")
    name = f"{alike}-{engine}-{size}"
    run = launcher.result(name, engine, *common, f"batch.micro_batch_size={size}")
    difference = Difference.between(*map(_with_losses_above_zero, (run, reference)))
    title = "Answers that are rewarded: largest difference from one process"
    record(record_property, title, run=name, **difference.figures())
    assert not difference.over(LIMITS)
    assert min(reference.grad_norms) > 1e-4, "nothing was learnt"
    for one, other in zip(run.held_out, reference.held_out, strict=True):
        assert one["eval_reward"] == pytest.approx(other["eval_reward"], abs=1e-9)
        assert one["eval_answers"] == other["eval_answers"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes that differ are forked on CPUs")
def test_processes_that_differ_on_how_prompts_may_be_read_all_read_them_alike(launcher: Launcher) -> None:
    """Rounding decides it, of which processors are no two alike; and processes with parts of a model read together."""
    common = [*COMMON, *OBJECTIVES["grpo"], *SETTINGS["full"], "schedule.max_steps=2", "batch.micro_batch_size=2"]
    apart = launcher.result("apart", "zero3", *common, entry="written_apart")
    assert not Difference.between(apart, launcher.result("alike", "single", *common)).over(LIMITS)


def _with_losses_above_zero(result: Result) -> Result:
    """Losses of answers that are compared with each other are about 0, of which no difference is a share."""
    return dataclasses.replace(result, losses=[1 + loss for loss in result.losses])


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.slow
def test_the_demo_learns_a_format_from_rewards(tmp_path: Path, ranks: Ranks) -> None:
    """With a real model: on held-out prompts more answers keep to the format, beyond what chance explains."""
    less = ["schedule.max_steps=5", "evaluation.num_prompts=0", "evaluation.every_steps=5"]
    first, last = before_and_after("grpo", tmp_path, ranks, *less)
    low = last["eval_reward_format"] - last["eval_reward_format_plus_minus"]
    assert low > first["eval_reward_format"] + first["eval_reward_format_plus_minus"]
