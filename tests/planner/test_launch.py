"""What a launch takes of the plan: its hardware, and what is decided of a recipe."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from toolkit.distributed.layout import World
from toolkit.planner import launch, question
from toolkit.planner.hardware import find
from toolkit.planner.launch import decide_for_launch, launched_on
from toolkit.recipe.rules import load_checked


@pytest.mark.parametrize(
    ("world", "name"), [(World(), "cpu"), (World(1, 1, 2, 2), "cpux2"), (World(2, 0, 4, 2), "cpux2x2")]
)
def test_processes_of_a_launch_on_a_cpu_share_its_cores(world: World, name: str) -> None:
    found, alone = launched_on(world, environment={"ACCELERATE_USE_CPU": "true"}), find("cpu")
    assert (found.name, found.devices_per_node, found.nodes) == (name, world.local_world_size, world.num_nodes)
    part = find(f"cpux{world.local_world_size}") if world.local_world_size > 1 else alone
    assert found.device == part.device and (found.device == alone.device) == (world.local_world_size == 1)


def test_a_launch_divides_rows_that_no_device_holds_and_keeps_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = question.Question.plan
    monkeypatch.setattr(question.Question, "plan", lambda *args, may_trace=False: plan(*args))  # Traces take seconds.
    on = find("l40sx8")
    on = dataclasses.replace(on, device=on.device.model_copy(update={"memory": 8 * 2**30}))
    monkeypatch.setattr(launch, "launched_on", lambda world, folder: on)
    words = ["strategy=auto", "activation_checkpointing=auto", "micro_batch_size=auto"]
    loaded = load_checked("llama_3_1_8b_lora", [*words, "batch.seq_len=16384", "batch.global_batch_size=24"])
    decided = decide_for_launch(loaded, World(0, 0, 8, 8))
    assert decided.recipe.knows_engine and decided.recipe.parallel.sequence == 2
    assert yaml.safe_load(decided.to_yaml())["parallel"]["sequence"] == 2
    assert "dividing nothing" in decided.chosen["parallel.sequence"]
    assert "would not fit" in decided.chosen["parallel.sequence"]
