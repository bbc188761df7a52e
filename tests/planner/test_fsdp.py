"""What FSDP2 holds at every moment of a pass, counted in units: which are gathered, and which gradients are on their
way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import find
from toolkit.planner.memory.fsdp import Fsdp
from toolkit.planner.trace.types import Amount, Moment, Tensors, Trace
from toolkit.planner.workload import Workload
from toolkit.recipe import Recipe

# Elements of a layer, the embeddings and the head: so far apart that a sum tells how many of each are in it.
L, E, H = 1e3, 1e6, 1e9
LAYERS, KEEPS, BESIDE = 4, 7.0, 5.0  # Bytes that each layer keeps for the backward pass, and that others do.
PLACES = ("embeddings", "first_layer", "last_layer", "head")


def trace(tied: bool = False) -> Trace:
    """Four layers, whose gradients are made in bf16 from the head to the embeddings."""
    head = 0.0 if tied else H
    made = {"head": head, "last_layer": head + L, "first_layer": head + 4 * L, "embeddings": head + 4 * L + E}
    keeps = Amount((BESIDE,), (KEEPS,))
    moments = [
        Moment(phase, place, accumulating, keeps, Amount(), Amount(), Amount((2 * made[place],)))  # type: ignore[arg-type]
        for accumulating in (False, True)
        for phase in ("forward", "backward", "evaluation")
        for place in PLACES
    ]
    tensors = [Tensors("embeddings", (8000, 125), 1, True, "base"), Tensors("layer", (8, 125), LAYERS, True, "base")]
    tensors += [] if tied else [Tensors("head", (8_000_000, 125), 1, True, "base")]
    return Trace(LAYERS, tuple(tensors), tuple(moments), {}, Amount(), 0, None)


def engine(hardware: str = "h100x2", passes: int = 1, tied: bool = False, **strategy: Any) -> Fsdp:
    on = find(hardware)
    batch = {"seq_len": 64, "micro_batch_size": 1, "global_batch_size": passes * on.devices}
    sections = {"model": {"path": "m"}, "data": {"sources": ["d"]}, "precision": "bf16", "batch": batch}
    made = Recipe.model_validate({**sections, "strategy": {"name": "fsdp", **strategy}})
    return Fsdp(Workload(made, batch_layout(made, on.devices), on, trace(tied)))


def held(fsdp: Fsdp, phase: str, place: str, accumulating: bool = False) -> list[tuple[float, float, float]]:
    """Layers that still keep something, gradients, and all else, both in elements of 16 bits."""
    (moment,) = (
        each
        for each in fsdp.trace.moments
        if (each.phase, each.place, each.accumulating) == (phase, place, accumulating)
    )
    states = fsdp.evaluating(moment) if phase == "evaluation" else fsdp.passing(moment)
    return [(left.activations.at(fsdp.shape) / KEEPS, found.gradients / 2, found.engine / 2) for left, found in states]


ALL = LAYERS + BESIDE / KEEPS


@pytest.mark.parametrize("phase", ["forward", "evaluation"])
@pytest.mark.parametrize(
    ("made", "expected"),
    [
        # Each unit as it comes out of the all-gather and as it is copied out of that; before the last layer starts, the
        # one before it has not been let go of.
        (engine(), {"embeddings": [2 * E], "first_layer": [2 * L], "last_layer": [2 * L, 3 * L], "head": [2 * H]}),
        # Nobody else has a part.
        (engine("h100"), {"embeddings": [E], "first_layer": [L], "last_layer": [L], "head": [H]}),
        # Layers stay until the backward pass.
        (
            engine(sharding="shard_grad_op"),
            {
                "embeddings": [2 * E],
                "first_layer": [2 * L],
                "last_layer": [3 * L + 2 * L, 3 * L + 3 * L],
                "head": [4 * L + 2 * H],
            },
        ),
        # Embeddings that are the head too are gathered all the time, and after the last layer comes no unit.
        (
            engine(tied=True),
            {"embeddings": [2 * E], "first_layer": [E + 2 * L], "last_layer": [E + 2 * L, E + 3 * L], "head": [E + L]},
        ),
    ],
    ids=["two", "alone", "keeps", "tied"],
)
def test_units_that_are_gathered_in_a_forward_pass(made: Fsdp, expected: dict[str, list[float]], phase: str) -> None:
    for place in PLACES:
        found = held(made, phase, place)
        assert [each for *_, each in found] == expected[place], place
        # The layer that has not begun keeps nothing yet.
        assert [layers for layers, *_ in found] == pytest.approx([ALL, ALL - 1][: len(found)])
        assert not any(gradients for _, gradients, _ in found)


# Gradients in bf16 are copied to be reduced in fp32, two elements each; a rank's half of the sum in fp32 is one.
# (layers that keep something, gradients, gathered units and what is being reduced)
LAST = [
    (ALL, H + L, 2 * L + 2 * H),  # This layer and the one before it, while the head's gradients are being reduced.
    (4, H, 2 * L + 2 * H),  # Copied out of the all-gather's output.
    (3, H + L, L + 2 * L),  # Done; the layer's gradients are copied, and
    (3, H + L, L + 2 * L),  # divided.
]
FIRST = [
    (ALL, H + 3 * L + L, L + E + 2 * L),
    (1, H + 3 * L, 2 * L + 2 * L),
    (0, H + 3 * L + L, E + 2 * L),
    (0, H + 4 * L, E + 2 * L),
]
FRONT = [(ALL, H + 4 * L + E, E + 2 * L), (0, H + 4 * L + E, 2 * E)]


def test_gradients_on_their_way_and_units_gathered_ahead_in_a_backward_pass() -> None:
    made = engine()
    assert held(made, "backward", "head") == [(ALL, H, H + L)]
    assert held(made, "backward", "last_layer") == LAST
    assert held(made, "backward", "first_layer") == FIRST
    assert held(made, "backward", "embeddings") == FRONT
    assert made.stepping() == ((H + 4 * L + E) * 2, 0)
    assert made.standing() == (0, 0)


def test_layers_that_stay_are_not_gathered_again() -> None:
    made = engine(sharding="shard_grad_op")
    assert held(made, "backward", "head") == [(ALL, H, H + 4 * L + L)]
    assert held(made, "backward", "last_layer") == [
        (ALL, H + L, 3 * L + L + 2 * H),
        (3, H + L, 3 * L + 2 * L),
        (3, H + L, 3 * L + 2 * L),
    ]
    assert held(made, "backward", "first_layer") == [
        (ALL, H + 3 * L + L, L + 2 * L),
        (0, H + 3 * L + L, 2 * L),
        (0, H + 4 * L, 2 * L),
    ]


def test_alone_nothing_is_gathered_ahead_and_gradients_are_not_divided() -> None:
    made = engine("h100")
    assert held(made, "backward", "head") == [(ALL, H, H)]
    assert held(made, "backward", "last_layer") == [
        (ALL, 2 * H + L, L + 2 * H),
        (3, 2 * H + L, 2 * L),
        (3, 2 * H + 2 * L, 2 * L),
    ]


def test_gloo_reduces_a_copy_and_lets_go_of_it_late() -> None:
    """With a chance of 0.8 when the next unit is gathered, and half of that when it is reduced."""
    made = engine("cpux2")
    late, later = 0.8 * 2 * L, 0.4 * 2 * L
    for place, plain in (("last_layer", LAST), ("first_layer", FIRST)):
        moment, gathered, copied, divided = held(made, "backward", place)
        assert (moment, copied) == (plain[0], plain[2])
        gathering = late if place == "first_layer" else 0  # The last layer's is the first to be reduced.
        assert gathered == (*plain[1][:2], pytest.approx(plain[1][2] + gathering))
        assert divided == (*plain[3][:2], pytest.approx(plain[3][2] + 2 * L + later))
    assert held(made, "backward", "embeddings") == [
        (*FRONT[0][:2], FRONT[0][2] + 2 * L),
        (*FRONT[1][:2], FRONT[1][2] + 2 * E),
    ]


def test_earlier_micro_batches_are_summed_whole_until_the_last_one_is_divided() -> None:
    """In fp32, two elements each; what is done of the last one is divided, and makes room."""
    made, whole = engine(passes=2), 2 * (H + 4 * L + E)
    for place in PLACES:
        assert [gradients for _, gradients, _ in held(made, "forward", place, True)] == [whole] * (
            1 + (place == "last_layer")
        )
    assert held(made, "backward", "head", True) == [(ALL, whole + H, H + L)]
    last = held(made, "backward", "last_layer", True)
    assert [gradients for _, gradients, _ in last] == [
        whole - 2 * H + H + L,
        whole - 2 * H + H,
        whole - 2 * H + H,
        whole - 2 * (H + L) + H + L,
    ]
    assert [beside for *_, beside in last] == [beside for *_, beside in LAST]
    first = held(made, "backward", "first_layer", True)
    done = H + 3 * L
    assert [gradients for _, gradients, _ in first] == [
        whole - done + L,
        whole - done,
        whole - done,
        whole - done - L,
    ]
    # The embeddings' own are being added, in fp32 too.
    made_whole, reduced = held(made, "backward", "embeddings", True)
    assert made_whole[1] == whole - (H + 4 * L) + E and reduced[1] == H + 4 * L + 2 * E


def test_sums_that_are_divided_with_every_micro_batch_take_a_part() -> None:
    made, part = engine(passes=2, sync_each_batch=True), H + 4 * L + E
    for place in PLACES:
        assert {gradients for _, gradients, _ in held(made, "forward", place, True)} == {part}
    assert held(made, "backward", "head", True) == [(ALL, part + H, H + L)]
    assert [gradients for _, gradients, _ in held(made, "backward", "first_layer", True)] == [
        part + L,
        part,
        part + L,
        part + L,
    ]


def test_frozen_weights_are_gathered_and_have_no_gradients() -> None:
    made = engine()
    frozen = Tensors("layer", (8, 250), LAYERS, False, "base")
    wider = dataclasses.replace(made.trace, tensors=(*made.trace.tensors, frozen))
    both = Fsdp(dataclasses.replace(made.workload, trace=wider))
    assert held(both, "forward", "first_layer") == [(ALL, 0, 2 * 3 * L)]
    assert held(both, "backward", "last_layer")[2] == (3, H + L, 3 * L + 2 * L)
    assert both.loading() == 4 * H, "the largest in fp32, on its way from the first process"
    assert engine("h100").loading() == 0
