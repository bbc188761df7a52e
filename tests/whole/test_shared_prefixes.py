"""Trainings in which beginnings of conversations are computed once learn what they learn where each has its own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from harness import losses, write_recipe
from ranks import ON_CPU, Ranks
from small import LORA, RECIPE
from tiny import chat_rows, tiny_model

from toolkit.cli.main import main as cli
from toolkit.planner.build import estimate
from toolkit.planner.hardware import find
from toolkit.recipe.rules import load_checked
from toolkit.train.main import main

SYSTEM = "You know all about the methods of strings in Python, and answer in one short sentence. " * 3
SIZES = ["batch.seq_len=512", "batch.global_batch_size=8", "batch.micro_batch_size=4", "model.attention=torch_varlen"]
PAIRS = ["data.sources=[pairs.jsonl]", "batch.micro_batch_size=2", "batch.global_batch_size=4"]
ASKED = ["recipe=small", "optimizer.name=sgd", "learning_rate=0.5", "max_steps=4", *SIZES]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared_prefixes")
    for name, kind in (("llama", "meta-llama/Llama-3.2-1B"), ("qwen", "Qwen/Qwen3-8B")):
        tiny_model(kind, folder / name)
    system = {"role": "system", "content": SYSTEM}
    rows = [{"messages": [*([system] if at % 3 else []), *row["messages"]]} for at, row in enumerate(chat_rows(60))]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pairs = [
        {"prompt": row["messages"][:-1], "chosen": row["messages"][-1:], "rejected": other["messages"][-1:]}
        for row, other in itertools.pairwise(rows)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
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
    ],
    ids=["full", "lora", "packed", "recomputed", "compiled", "evaluated", "dpo", "orpo"],
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
    assert len(found["true"]) == 4 and found["true"] == pytest.approx(found["false"], rel=2e-5)


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp"])
def test_engines_learn_what_one_process_does(engine: str, place: Path, ranks: Ranks) -> None:
    asked = [*ASKED, "batch.micro_batch_size=2"]
    one = ranks.run(place, *asked, "batch.share_prefixes=false", f"output.name=one-{engine}", entry=ON_CPU)
    two = ranks.run(place, *asked, f"strategy.name={engine}", f"output.name={engine}", processes=2, entry=ON_CPU)
    assert one.returncode == two.returncode == 0, one.stderr[-2000:] + two.stderr[-2000:]
    runs = place / "runs"
    assert losses(runs / engine) == pytest.approx(losses(runs / f"one-{engine}"), rel=2e-5)


@pytest.mark.parametrize("further", [[], [*PAIRS, "objective=dpo"]], ids=["sft", "dpo"])
def test_a_plan_counts_what_is_computed_once(further: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert cli(["data", "recipe=small", *SIZES, *further]) == 0
    plans = []
    for shares in ("true", "false"):
        loaded = load_checked("small", [*SIZES, *further, "precision=bf16", f"batch.share_prefixes={shares}"])
        plans.append(estimate(loaded.recipe, loaded.name, find("h100"), advice=False))
    shared, apart = plans
    assert shared.work.tokens_per_step == apart.work.tokens_per_step
    for figure in ("model_flops_per_step", "hardware_flops_per_step"):
        assert 0.3 < getattr(shared.work, figure) / getattr(apart.work, figure) < 0.9
    assert shared.memory[0].total.value < apart.memory[0].total.value
    assert any("begin conversations alike and are computed once" in note for note in shared.notes)
    assert not any("computed once" in note for note in apart.notes)
