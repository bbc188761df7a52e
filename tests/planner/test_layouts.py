"""All ways to divide a recipe over devices: which are planned, how they are ordered, and what is taken of them."""

from __future__ import annotations

import dataclasses

import pytest

from toolkit.cli.main import main as toolkit
from toolkit.common import UserError
from toolkit.planner import question
from toolkit.planner.build import estimate, estimate_layouts
from toolkit.planner.hardware import find
from toolkit.planner.layouts import divisions
from toolkit.recipe import load
from toolkit.recipe.rules import load_checked

AUTO = ["strategy=auto", "activation_checkpointing=auto", "micro_batch_size=auto"]


@pytest.fixture
def only_known_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways that would have to be traced first, in seconds each, are left out."""
    plan = question.Question.plan
    monkeypatch.setattr(question.Question, "plan", lambda *args, may_trace=False: plan(*args))


@pytest.mark.parametrize(
    ("name", "hardware", "there", "not_there"),
    [
        # 8 heads of keys and values, 32 heads, 32 layers, 8 devices to a node.
        (
            "llama_3_1_8b_lora",
            "h200x8x2",
            ["tensor=8", "sequence=8", "context=4", "pipeline=16", "sequence=2 tensor=4", "context=4 tensor=2"],
            ["tensor=16", "sequence=16", "expert=2", "tensor=2 pipeline=2"],
        ),
        ("qwen3_30b_a3b_full_expert", "h200x8", ["expert=8", "tensor=4"], ["tensor=8", "expert=2 tensor=2"]),
        # 9 heads, 3 of them with keys and values of their own.
        ("smollm2_135m_lora", "h100x6", ["tensor=3", "sequence=3", "context=2", "pipeline=6"], ["tensor=2"]),
        ("smollm2_135m_lora", "h100", [""], ["tensor=3"]),
    ],
)
def test_ways_that_devices_and_rules_allow(name: str, hardware: str, there: list[str], not_there: list[str]) -> None:
    recipe = load(name).recipe
    found = set()
    for each in divisions(recipe, find(hardware)):
        parallel = recipe.with_values(each).parallel
        sizes = (f"{key}={getattr(parallel, key)}" for key in parallel.changed() if key != "schedule")
        found.add(" ".join(sizes))
    assert found >= {"", *there}
    assert not found & {*not_there}


def test_what_is_printed_can_be_typed_and_gives_the_same_plan(only_known_traces: None) -> None:
    words = ["batch.micro_batch_size=1", "learning_rate=1e-5"]
    loaded, hardware = load("llama_3_1_8b_lora", words), find("h200x8")
    rows = estimate_layouts(loaded.recipe, loaded.name, hardware, overrides=words)
    assert [row.work.step_seconds.value for row in rows] == sorted(row.work.step_seconds.value for row in rows)
    assert {(row.sequence, row.pipeline) for row in rows} >= {(1, 1), (2, 1), (8, 1), (1, 2), (1, 8)}
    for row in rows:
        assert "learning_rate=1e-5" in row.overrides and "batch.micro_batch_size=1" not in row.overrides
        typed = load_checked("llama_3_1_8b_lora", row.overrides)
        again = estimate(typed.recipe, typed.name, hardware, advice=False)
        assert (again.memory, again.work, again.strategy) == (row.memory, row.work, row.strategy)


def test_what_does_not_fit_comes_last_and_of_schedules_the_fastest_stands(only_known_traces: None) -> None:
    loaded = load("llama_3_1_8b_lora", ["batch.seq_len=131072", "batch.global_batch_size=24"])
    rows = estimate_layouts(loaded.recipe, loaded.name, find("l40sx8"))
    answers = [row.fit.answer != "no" for row in rows]
    assert answers == sorted(answers, reverse=True) and len({*answers}) == 2
    pipelines = [row.pipeline for row in rows if row.pipeline > 1]
    assert pipelines and len(pipelines) == len({*pipelines})


def test_a_batch_that_goes_with_no_division_is_refused() -> None:
    loaded = load("blenderbot_400m_seq2seq", ["batch.global_batch_size=1"])
    with pytest.raises(UserError, match="a global batch of 1 sequence"):
        estimate_layouts(loaded.recipe, loaded.name, find("h200x2"))


def test_the_command_compares_them(only_known_traces: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert toolkit(["plan", "recipe=llama_3_1_8b_lora", "hardware=h200x8", "--layouts"]) == 0
    printed = capsys.readouterr().out
    assert "bound by" in printed and "parallel.sequence=8" in printed and "parallel.pipeline=2" in printed


def test_auto_divides_rows_where_nothing_fits_otherwise(only_known_traces: None) -> None:
    words = [*AUTO, "batch.seq_len=16384", "batch.global_batch_size=24"]
    loaded, on = load("llama_3_1_8b_lora", words), find("l40sx8")
    on = dataclasses.replace(on, device=on.device.model_copy(update={"memory": 8 * 2**30}))
    plan = estimate(loaded.recipe, loaded.name, on, advice=False)
    assert (plan.fit.answer, plan.sequence) == ("yes", 2)
    assert plan.chosen["parallel.sequence"].startswith("2: ")
    assert "dividing nothing, which would not fit" in plan.chosen["parallel.sequence"]
    # What is recomputed is compared among settings that are divided so.
    assert "which would not fit" in plan.chosen["activation_checkpointing.mode"]
    # Where a setting fits without it, nothing is divided, and what the recipe states stands.
    for further in (["batch.seq_len=4096"], ["parallel.sequence=4"]):
        other = load("llama_3_1_8b_lora", [*words, *further])
        taken = estimate(other.recipe, other.name, on, advice=False)
        assert taken.sequence == other.recipe.parallel.sequence
        assert "parallel.sequence" not in taken.chosen
    # What may be what does not fit is the user's to change.
    stated = load("llama_3_1_8b_lora", [*words, "micro_batch_size=1"])
    with pytest.raises(UserError, match=r"parallel\.sequence=2"):
        estimate(stated.recipe, stated.name, on, advice=False)
