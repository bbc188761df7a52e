"""How many workers `data.num_workers: auto` comes to, and that plans tell and count them."""

from __future__ import annotations

import dataclasses

import pytest

from recipes import recipe_of
from toolkit.distributed.layout import batch_layout
from toolkit.planner.build import estimate
from toolkit.planner.hardware import find
from toolkit.planner.loader import loader_workers
from toolkit.planner.plan import Range, Work


def workers(*, step: float, hardware: str = "h100", cores: int | None = None, streaming: bool = False) -> int:
    """For steps of so many seconds with 32 full rows of 2,048 tokens, in four micro-batches."""
    recipe = recipe_of("batch.global_batch_size=32 batch.micro_batch_size=8 batch.seq_len=2048 schedule.max_steps=9")
    recipe = recipe.with_values({"data.streaming": streaming})
    machine = find(hardware)
    if cores:
        node = machine.node.model_copy(update={"cores": cores})
        machine = dataclasses.replace(machine, node=node)
    work = Work.model_construct(tokens_per_step=32 * 2048.0, step_seconds=Range(value=step, low=step, high=step))
    return loader_workers(recipe, batch_layout(recipe, 1), machine, work)[0]


def test_prepared_rows_need_no_worker_on_any_device_there_is() -> None:
    # 50,000 tokens per second are those of a 1B model on an H200, 500 those of the demo on two cores.
    assert workers(step=1.3) == workers(step=130, hardware="cpu") == 0


def test_a_stream_is_worth_one_where_steps_are_quick() -> None:
    assert workers(step=1.3, streaming=True) == 1
    assert workers(step=130, streaming=True, hardware="cpu", cores=2) == 0


def test_quick_steps_are_worth_workers_and_a_stream_one_at_most() -> None:
    assert [workers(step=step) for step in (0.05, 0.002)] == [1, 2]
    assert [workers(step=step, streaming=True) for step in (0.05, 0.002)] == [1, 1]


def test_a_process_with_one_core_makes_its_batches_itself() -> None:
    assert workers(step=0.002, cores=1) == 0 < workers(step=0.002, cores=2)


@pytest.mark.parametrize(("asked", "number"), [("auto", 0), ("2", 2)])
def test_a_plan_tells_and_counts_them(formulas: None, asked: str, number: int) -> None:
    recipe = recipe_of(f"model.path=meta-llama/Llama-3.2-1B batch.micro_batch_size=1 data.num_workers={asked}")
    plan = estimate(recipe, "mine", find("h100"))
    without = estimate(recipe.with_values({"data.num_workers": 0}), "mine", find("h100"))
    assert plan.num_workers == number
    assert plan.host.peak - without.host.peak == number * 50 * 2**20
    told = plan.chosen.get("data.num_workers", "")
    assert told.startswith("0: making its batches takes 0.") if asked == "auto" else not told
