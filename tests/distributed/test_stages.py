"""How layers are cut into stages, and which of torch's schedules takes how many micro-batches."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from recipes import recipe_of
from toolkit.common import UserError
from toolkit.distributed.layout import batch_layout
from toolkit.distributed.stages import cut, divides, runs_as


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (0.3, 0.0), (0.0, 2.4), (1.5, 3.0)])
def test_no_cut_has_a_faster_slowest_stage(stages: int, first: float, last: float) -> None:
    def slowest(layers: tuple[int, ...]) -> float:
        times = list(map(float, layers))
        times[0] += first
        times[-1] += last
        return max(times)

    for layers in range(stages, 10):
        every = itertools.product(range(1, layers + 1), repeat=stages)
        best = min(slowest(each) for each in every if sum(each) == layers)
        made = cut(layers, stages, first, last)
        assert len(made) == stages and sum(made) == layers and min(made) >= 1
        assert slowest(made) == best, (layers, made)


def test_a_large_head_leaves_the_last_stage_fewer_layers() -> None:
    assert cut(16, 2, last=4.0) == (10, 6)
    assert cut(80, 4) == (20, 20, 20, 20)


def stage(index: int, count: int, processes: int) -> Any:
    return SimpleNamespace(
        stage_index=index, num_stages=count, group_size=processes, group_rank=0, is_first=index == 0,
        is_last=index == count - 1, submod=torch.nn.Identity(), has_backward=True,
    )  # fmt: skip


def test_torch_refuses_the_numbers_of_micro_batches_that_are_refused_here() -> None:
    for processes, micro_batches in itertools.product((2, 3, 4), range(1, 14)):
        two = [stage(0, 2 * processes, processes), stage(processes, 2 * processes, processes)]
        try:
            ScheduleInterleaved1F1B(two, micro_batches, loss_fn=lambda output, target: output)
            taken = True
        except ValueError:
            taken = False
        assert divides("interleaved_1f1b", processes, micro_batches) == taken, (processes, micro_batches)
        two[1].stage_index = 2 * processes - 1
        ScheduleZBVZeroBubble(two, micro_batches, loss_fn=lambda output, target: output)
        if runs_as("1f1b", processes, micro_batches) == "1f1b":
            Schedule1F1B(stage(0, processes, processes), micro_batches, loss_fn=lambda output, target: output)
        else:
            with pytest.raises(ValueError, match="Number of microbatches"):
                Schedule1F1B(stage(0, processes, processes), micro_batches, loss_fn=lambda output, target: output)


def test_what_makes_no_equal_rounds_is_refused_with_the_nearest_that_does() -> None:
    recipe = recipe_of(
        "strategy.name=ddp parallel.pipeline=2 parallel.schedule=interleaved_1f1b batch.global_batch_size=10 "
        "batch.micro_batch_size=2"
    )
    with pytest.raises(UserError, match="equal rounds of at least 2") as refused:
        batch_layout(recipe, 2)
    assert "batch.micro_batch_size=1 or 5" in refused.value.change
    for size in (1, 5):
        batch_layout(recipe.with_values({"batch.micro_batch_size": size}), 2)
    batch_layout(recipe.with_values({"parallel.schedule": "1f1b"}), 2)


def test_processes_of_one_stage_are_neighbours_and_get_rows_of_their_own() -> None:
    layout = batch_layout(recipe_of("strategy.name=ddp parallel.pipeline=2 batch.global_batch_size=8"), 4)
    assert [layout.replica(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert (layout.data_parallel_size, layout.micro_batches * layout.micro_batch_size) == (2, 8)
    with pytest.raises(UserError, match=r"parallel\.pipeline=2 does not divide 3 processes"):
        batch_layout(recipe_of("strategy.name=ddp parallel.pipeline=2 batch.global_batch_size=8"), 3)
