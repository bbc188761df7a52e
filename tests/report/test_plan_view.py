"""Figures of a plan as text: they add up, and say what they stand for."""

from __future__ import annotations

import pytest
from example_plan import FITS, TIGHT, TOO_LARGE, example_plan

from toolkit.report import plan_view


def test_what_is_on_the_device_adds_up() -> None:
    for plan in (FITS, TOO_LARGE):
        assert sum(plan.memory[0].parts_at_peak().values()) == pytest.approx(plan.memory[0].total.value)


def test_labels_tell_recipes_and_hardware_apart() -> None:
    other = example_plan(recipe="qwen3_8b_lora", hardware="h100x8", overrides=[])
    assert plan_view.labels([FITS, other]) == [
        "llama_3_1_8b_lora hardware=h200x8 seq_len=4096",
        "qwen3_8b_lora hardware=h100x8",
    ]
    assert plan_view.labels([FITS, TIGHT]) == ["llama_3_1_8b_lora", "batch.micro_batch_size=8"]


def test_what_is_not_free_does_not_look_free() -> None:
    assert [plan_view.money_text(cost) for cost in (0.0, 0.004, 0.005, 12_345.6)] == ["0.00", "<0.01", "0.01", "12,346"]


def test_a_pipeline_shows_its_stages_and_its_bubble() -> None:
    work = FITS.work.model_copy(update={"bubble_seconds": 0.125})
    plan = FITS.model_copy(update={"work": work, "pipeline": 2, "stages": [17, 15], "schedule": "1f1b"})
    rows = dict(plan_view.setting_rows(plan))
    assert "4 groups of 2 devices that follow each other x 1 micro-batch of 2" in rows["batch"]
    assert rows["pipeline"] == "17 + 15 layers by 1f1b; its bubble is 12.5% of a step"
    assert "bubble 12%" in plan_view.shares_text(plan)
    assert "pipeline" not in dict(plan_view.setting_rows(FITS)) and "bubble" not in plan_view.shares_text(FITS)
