"""Trainings in which beginnings of conversations are computed once learn what they learn where each has its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import small
from harness import losses, write_jsonl, write_recipe
from ranks import ON_CPU, Ranks
from small import LORA, RECIPE
from tiny import chat_rows, tiny_model

from toolkit.cli.main import main as cli
from toolkit.data.batching.shared_prefixes import Row
from toolkit.data.sample import sampled
from toolkit.models.attention import varlen
from toolkit.planner.build import estimate
from toolkit.planner.hardware import find
from toolkit.recipe.rules import load_checked
from toolkit.train.main import main

SYSTEM = "You know all about the methods of strings in Python, and answer in one short sentence. " * 3
ROWS = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] * 2
SIZES = ["batch.seq_len=512", "batch.global_batch_size=8", "batch.micro_batch_size=4", "model.attention=torch_varlen"]
PAIRS = ["data.sources=[pairs.jsonl]", "batch.micro_batch_size=2", "batch.global_batch_size=4"]
PROMPTS = [
    *("data.sources=[prompts.jsonl]", "batch.micro_batch_size=2", "batch.global_batch_size=4", "data.over_long=drop"),
    *("rollout.num_generations=4", "rollout.max_completion_tokens=6", "rewards.length.max_tokens=3"),
    *("rewards.file=own.py", "rewards.trust_python=true", "rewards.length.soft=6"),
]
TAUGHT = ["objective=distillation", "distillation.teacher.path=moe"]
VOWELS = """
def reward(completions, prompts, **columns):
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]
"""
ASKED = ["recipe=small", "optimizer.name=sgd", "learning_rate=0.5", "max_steps=4", *SIZES]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared_prefixes")
    kinds = {"llama": "meta-llama/Llama-3.2-1B", "qwen": "Qwen/Qwen3-8B", "moe": "Qwen/Qwen3-30B-A3B"}
    for name, kind in kinds.items():
        tiny_model(kind, folder / name)
    system = {"role": "system", "content": SYSTEM}
    rows = [{"messages": [*([system] if at % 3 else []), *row["messages"]]} for at, row in enumerate(chat_rows(60))]
    write_jsonl(folder / "chat.jsonl", rows)
    pairs = [
        {"prompt": row["messages"][:-1], "chosen": row["messages"][-1:], "rejected": other["messages"][-1:]}
        for row, other in itertools.pairwise(rows)
    ]
    write_jsonl(folder / "pairs.jsonl", pairs)
    judged = [row | {"label": bool(at % 2)} for at, row in enumerate(rows)]
    write_jsonl(folder / "judged.jsonl", judged)
    prompts = [{"prompt": row["messages"][:-1]} for row in rows]
    write_jsonl(folder / "prompts.jsonl", prompts)
    (folder / "own.py").write_text(VOWELS, encoding="utf-8")
    write_recipe(folder, "small", RECIPE)
    return folder


@pytest.mark.parametrize(
    "further",
    [
        [],
        [*LORA, "model.path=qwen"],
        ["data.packing=true", "batch.micro_batch_size=2", "batch.global_batch_size=4"],
        ["activation_checkpointing=full", "batch.micro_batch_size=8"],
        ["compile=layers"],
        ["data.eval_split=0.2", "evaluation.every_steps=2"],
        [*PAIRS, "objective=dpo", *LORA, "data.eval_split=0.2"],
        [*PAIRS, "objective=orpo"],
        ["data.sources=[judged.jsonl]", "objective=kto", "data.eval_split=0.2"],
        [*PROMPTS, "objective=grpo", "policy.beta=0.1", "policy.num_iterations=2", *LORA],
        [*TAUGHT, "distillation.on_policy=0.5", "rollout.max_completion_tokens=6", "data.eval_split=0.2"],
        ["data.streaming=true", "data.eval_split=null"],
        ["model.path=moe"],
    ],
    ids=[
        *("full", "lora", "packed", "recomputed", "compiled", "evaluated", "dpo", "orpo", "kto", "grpo"),
        *("distilled", "streamed", "mixture"),
    ],
)
def test_losses_are_those_of_conversations_with_beginnings_of_their_own(
    further: list[str], place: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    found = {}
    for shares in ("true", "false"):
        name = f"{request.node.callspec.id}-{shares}"
        asked = [*ASKED, *further, f"batch.share_prefixes={shares}", f"output.name={name}"]
        assert main(asked) == 0
        found[shares] = losses(Path("runs") / name)
    # Advantages of a group sum to nothing, and so does the loss of its answers before the first step.
    assert len(found["true"]) == 4 and found["true"] == pytest.approx(found["false"], rel=2e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("kernels", "further", "shared"),
    [(True, [], True), (False, [], False), (True, ["batch.micro_batch_size=1"], False)],
    ids=["shared", "other kernels", "nothing in common"],
)
def test_rows_are_laid_out_so_where_it_can_be_and_pays(
    kernels: bool, further: list[str], shared: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on a GPU whose attention takes no fewer queries than keys, nor if each row is by itself."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(varlen, "continues", lambda *_: kernels)
    laid_out, calls = Row.of, list[int]()

    def of(documents: Any) -> Row:
        calls.append(len(documents))
        return laid_out(documents)

    monkeypatch.setattr(Row, "of", of)
    small.set_up(*ASKED[1:], *further, "output.name=laid_out").trainer.data_collator(ROWS)
    assert bool(calls) == shared


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp"])
def test_engines_learn_what_one_process_does(engine: str, place: Path, ranks: Ranks) -> None:
    asked = [*ASKED, "batch.micro_batch_size=2"]
    one = ranks.run(place, *asked, "batch.share_prefixes=false", f"output.name=one-{engine}", entry=ON_CPU)
    two = ranks.run(place, *asked, f"strategy.name={engine}", f"output.name={engine}", processes=2, entry=ON_CPU)
    assert one.returncode == two.returncode == 0, one.stderr[-2000:] + two.stderr[-2000:]
    runs = place / "runs"
    assert losses(runs / engine) == pytest.approx(losses(runs / f"one-{engine}"), rel=2e-5)


@pytest.mark.parametrize("counted", [False, True], ids=["sampled", "counted"])
@pytest.mark.parametrize(
    "further", [[], [*PAIRS, "objective=dpo"], [*PROMPTS, "objective=grpo"]], ids=["sft", "dpo", "grpo"]
)
def test_a_plan_counts_what_is_computed_once(
    further: list[str], counted: bool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    if counted:
        assert cli(["data", "recipe=small", *SIZES, *further]) == 0
    plans = []
    for shares in ("true", "false"):
        loaded = load_checked("small", [*SIZES, *further, "precision=bf16", f"batch.share_prefixes={shares}"])
        known = None if counted else sampled(loaded.recipe)
        plans.append(estimate(loaded.recipe, loaded.name, find("h100"), advice=False, statistics=known))
    shared, apart = plans
    assert shared.work.tokens_per_step == apart.work.tokens_per_step
    for figure in ("model_flops_per_step", "hardware_flops_per_step"):
        assert 0.1 < getattr(shared.work, figure) / getattr(apart.work, figure) < 0.9
    assert shared.memory[0].total.value < apart.memory[0].total.value
    assert any("begin conversations alike and are computed once" in note for note in shared.notes)
    assert not any("computed once" in note for note in apart.notes)
