"""What is planned of pipelines, against the orders of torch's own schedules."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes import recipe_of
from toolkit.distributed.layout import batch_layout
from toolkit.models.parallel.stage import SCHEDULES
from toolkit.planner.hardware import find
from toolkit.planner.pipeline import bubble, hops, of_process, part, place_of, processes, units
from toolkit.planner.speed.stages import stage_layers
from toolkit.planner.speed.step import Step
from toolkit.planner.speed.work import load_of
from toolkit.planner.trace.types import Amount, Pass, Tensors, Trace
from toolkit.planner.workload import Workload
from toolkit.recipe.parallel import Parallel

LAYERS, WIDTH, VOCABULARY = 12, 1024, 64_000


def workload_of(schedule: str, processes: int, tied: bool = False) -> Workload:
    """Twelve layers of 12 million parameters, with embeddings and head as large as five of them."""
    recipe = recipe_of(
        f"strategy.name=ddp precision=bf16 parallel.pipeline={processes} parallel.schedule={schedule} "
        f"batch.global_batch_size={4 * processes} batch.micro_batch_size=1"
    )
    tensors = [Tensors("layer", (12 * WIDTH, WIDTH), LAYERS, True, "base"), Tensors("other", (WIDTH,), 1, True, "base")]
    tensors.append(Tensors("embeddings", (VOCABULARY, WIDTH), 1, True, "base"))
    tensors += [] if tied else [Tensors("head", (VOCABULARY, WIDTH), 1, True, "base")]

    def passing(times: float) -> Pass:
        return Pass(
            matmul=Amount((0.0, 2 * times * WIDTH * VOCABULARY), (0.0, 2 * times * 12 * WIDTH**2)),
            attention=Amount((), (0.0, 0.0, 4 * times * WIDTH)),
            moved=Amount((0.0, 8.0 * times * WIDTH), (0.0, 60.0 * times * WIDTH)),
            launches=Amount((1.0,), (1.0 * times,)),
        )

    passes = {"forward": passing(1), "backward": passing(2), "recompute": passing(0), "evaluation": passing(1)}
    trace = Trace(LAYERS, tuple(tensors), (), passes, Amount((0.0, 4.0 * WIDTH)), 0, None)
    return Workload(recipe, batch_layout(recipe, processes), find(f"h100x{processes}"), trace)


COMPUTES = ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")


def order_of(name: str, size: int, micro_batches: int) -> dict[int, list[Any]]:
    """Each process's work in order, as torch's schedule has it: kind, stage and micro-batch."""

    def stage(index: int, count: int, rank: int) -> Any:
        return SimpleNamespace(
            stage_index=index, num_stages=count, group_size=size, group_rank=rank, is_first=index == 0,
            is_last=index == count - 1, submod=torch.nn.Identity(), has_backward=True,
        )  # fmt: skip

    if name == "1f1b":
        # Its own list of orders is for drawing; it runs warm-up, then a backward pass and a forward pass in turn.
        work = {}
        for rank in range(size):
            ahead = min(micro_batches, size - rank)
            work[rank] = [("FORWARD", rank, number) for number in range(ahead)]
            for number in range(micro_batches):
                work[rank].append(("FULL_BACKWARD", rank, number))
                if ahead + number < micro_batches:
                    work[rank].append(("FORWARD", rank, ahead + number))
        return work
    if name == "gpipe":
        given: Any = stage(0, size, 0)
    else:
        given = [stage(0, 2 * size, 0), stage(2 * size - 1 if name == "zero_bubble" else size, 2 * size, 0)]
    made = SCHEDULES[name](given, micro_batches, loss_fn=lambda output, target: output)
    return {
        rank: [(each.computation_type.name, each.stage_index, each.microbatch_index) for each in actions
               if each is not None and each.computation_type.name in COMPUTES]
        for rank, actions in made.pipeline_order.items()
    }  # fmt: skip


def run(name: str, size: int, micro_batches: int, seconds: dict[str, float]) -> tuple[float, list[int]]:
    """Seconds that the busiest process waits, and of each process the most stages' worth of micro-batches it holds."""
    work, parallel = order_of(name, size, micro_batches), Parallel(pipeline=size, schedule=name)
    last = parallel.stages - 1
    done: dict[tuple[str, int, int], float] = {}
    at, clock, live, most = ([0] * size for _ in range(4))
    busy = [0.0] * size
    clock = [0.0] * size
    while any(at[rank] < len(work[rank]) for rank in work):
        moved = False
        for rank, actions in work.items():
            while at[rank] < len(actions):
                kind, stage, number = actions[at[rank]]
                needs = {"FORWARD": [("FORWARD", stage - 1, number)] if stage else []}
                later = [("INPUT", stage + 1, number)] if stage < last else []
                needs |= {key: [("FORWARD", stage, number), *later] for key in ("FULL_BACKWARD", "BACKWARD_INPUT")}
                needs["BACKWARD_WEIGHT"] = [("INPUT", stage, number)]
                if not all(each in done for each in needs[kind]):
                    break
                start = max([clock[rank], *(done[each] for each in needs[kind])])
                clock[rank] = start + seconds[kind]
                busy[rank] += seconds[kind]
                done["INPUT" if kind in ("FULL_BACKWARD", "BACKWARD_INPUT") else kind, stage, number] = clock[rank]
                live[rank] += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
                most[rank] = max(most[rank], live[rank])
                at[rank] += 1
                moved = True
        assert moved, "no process can go on"
    return max(clock) - max(busy), most


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_and_what_is_held_are_those_of_torchs_orders(name: str) -> None:
    for size, rounds in itertools.product((2, 4, 8), (1, 2, 4)):
        micro_batches, parallel = size * rounds, Parallel(pipeline=size, schedule=name)
        each = parallel.stages // size
        for forward, inputs, weights in ((1.0, 1.0, 1.0), (1.0, 1.0, 0.1), (1.0, 2.0, 1.0), (1.0, 2.0, 0.5)):
            seconds = {
                "FORWARD": forward / each, "BACKWARD_INPUT": inputs / each, "BACKWARD_WEIGHT": weights / each,
                "FULL_BACKWARD": (inputs + weights) / each,
            }  # fmt: skip
            waited, held = run(name, size, micro_batches, seconds)
            assert bubble(parallel, micro_batches, forward, inputs, weights) == pytest.approx(waited, rel=0.01)
            assert [units(parallel, place, micro_batches) for place in range(size)] == held


def test_shares_of_bubbles_are_those_of_the_papers() -> None:
    """(p - 1) / (m + p - 1) of a step for GPipe and 1F1B, and half of the waiting with two stages on each process."""
    for name, stages in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)):
        waits = bubble(Parallel(pipeline=4, schedule=name), 16, 1.0, 1.0, 1.0)
        assert waits / 3 == pytest.approx(3 / stages)
        if stages == 1:
            assert waits / (16 * 3 + waits) == pytest.approx(3 / 19)


@pytest.mark.parametrize("tied", [False, True])
def test_processes_have_the_whole_model_between_them(tied: bool) -> None:
    whole = workload_of("1f1b", 3, tied)
    parts = processes(dataclasses.replace(whole, stages=(5, 4, 3)))
    assert [each.trace.layers for each in parts] == [5, 4, 3]
    again = VOCABULARY * WIDTH if tied else 0
    assert sum(each.trace.elements() for each in parts) == whole.trace.elements() + again
    forward = [each.trace.passes["forward"].matmul.of(each.trace.layers, 512, 0) for each in parts]
    assert sum(forward) == pytest.approx(whole.trace.passes["forward"].matmul.of(LAYERS, 512, 0))
    assert part(whole, LAYERS, first=True, last=True).elements() == whole.trace.elements()


def test_stages_are_cut_by_time_with_the_head_counted() -> None:
    """No other cut of two stages is faster by the roofline; the head, as large as five layers, takes some off one."""
    whole = workload_of("1f1b", 2)
    load = load_of(whole.recipe, "torch_varlen", 1, 4096.0, 4096.0**2)

    def slowest(stages: tuple[int, ...]) -> float:
        of = processes(dataclasses.replace(whole, stages=stages))
        return max(sum(Step(each, load, ()).passing.values()) for each in of)

    layers = stage_layers(whole, load)
    assert sum(layers) == LAYERS and layers[0] > layers[1]
    assert slowest(layers) <= 1.02 * min(slowest((number, LAYERS - number)) for number in range(1, LAYERS))


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_sent_is_counted_where_stages_lie_on_different_processes(name: str) -> None:
    whole = workload_of(name, 2)
    parallel = whole.recipe.parallel
    stages = (LAYERS - parallel.stages + 1, *[1] * (parallel.stages - 1))
    whole = dataclasses.replace(whole, stages=stages)
    sent = [hops(of_process(whole, place), 100.0, 10) for place in range(2)]
    edges = [
        stage for stage in range(parallel.stages - 1) if place_of(stage, parallel) != place_of(stage + 1, parallel)
    ]
    assert sum(on for on, _ in sent) == sum(back for _, back in sent) == 100.0 * len(edges)
    routed = dataclasses.replace(whole, routed=4)
    more = sum(sum(hops(of_process(routed, place), 100.0, 10)) for place in range(2)) - 200.0 * len(edges)
    assert more == 2 * 2 * 10 * 4 * sum(sum(stages[: stage + 1]) for stage in edges)
