"""What DeepSpeed's ZeRO holds at every moment of a pass: buckets, gradients on their way, gathered weights."""

from __future__ import annotations

import random
from typing import Any

import pytest

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import find
from toolkit.planner.memory.device import engine
from toolkit.planner.memory.engine import Engine
from toolkit.planner.memory.zero import Bf16Zero1, Zero2, Zero3
from toolkit.planner.trace.types import Amount, Moment, Tensors, Trace
from toolkit.planner.workload import WIDTH, Workload
from toolkit.recipe import Recipe

# Elements of a layer, the embeddings and the head: so far apart that a sum tells how many of each are in it.
L, E, H = 1e3, 1e6, 1e9
ALL = 4 * L + E  # Of a model whose embeddings are the head too,
T = H + ALL  # and of one with a head of its own.
KEEPS = 7.0
BUCKET = 2500
"""Elements: two layers fit, and neither the embeddings nor the head."""


def tensors(*shapes: tuple[str, tuple[int, ...], int]) -> tuple[Tensors, ...]:
    return tuple(Tensors(place, shape, count, True, "base") for place, shape, count in shapes)  # type: ignore[arg-type]


WIDE = tensors(("embeddings", (8000, 125), 1), ("layer", (8, 125), 4), ("head", (8_000_000, 125), 1))
TIED = WIDE[:2]


def made_by(
    kind: type[Engine],
    hardware: str = "h100x2",
    *,
    passes: int = 1,
    of: tuple[Tensors, ...] = WIDE,
    layers: int = 4,
    precision: str = "bf16",
    mode: str = "none",
    **strategy: Any,
) -> Any:
    """The engine of a recipe with such a model, whose gradients are made from the head to the embeddings."""
    on = find(hardware)
    batch = {"seq_len": 64, "micro_batch_size": 1, "global_batch_size": passes * on.devices}
    strategy = {"reduce_bucket_size": BUCKET, **strategy}
    sections = {"model": {"path": "m"}, "data": {"sources": ["d"]}, "activation_checkpointing": {"mode": mode}}
    recipe = Recipe.model_validate({**sections, "precision": precision, "batch": batch, "strategy": strategy})
    head = sum(each.numel for each in of if each.place == "head")
    made = {"head": head, "last_layer": head + L, "first_layer": head + 4 * L, "embeddings": head + 4 * L + E}
    moments = [
        Moment(phase, place, False, Amount((), (KEEPS,)), Amount(), Amount(), Amount((2 * made[place],)))  # type: ignore[arg-type]
        for phase in ("forward", "backward", "evaluation")
        for place in made
    ]
    trace = Trace(layers, of, tuple(moments), {}, Amount(), 0, None)
    engine_of = engine(Workload(recipe, batch_layout(recipe, on.devices), on, trace))
    assert type(engine_of) is kind
    return engine_of


def held(of: Engine, phase: str, place: str) -> list[tuple[float, float, float]]:
    """Layers that still keep something, gradients, and all else, both in elements of 16 bits."""
    (moment,) = (each for each in of.trace.moments if (each.phase, each.place) == (phase, place))
    found = of.evaluating(moment) if phase == "evaluation" else of.passing(moment)
    return [(left.activations.at(of.shape) / KEEPS, each.gradients / 2, each.engine / 2) for left, each in found]


def test_a_bucket_is_reduced_when_the_next_parameter_does_not_fit() -> None:
    """As if each gradient were put into it, one layer after the other; one that is larger goes by itself."""
    chance = random.Random(0)
    for _ in range(200):
        sizes, bucket = [chance.randint(1, 40) for _ in range(chance.randint(1, 3))], chance.randint(5, 60)
        head, embeddings, layers = chance.randint(1, 90), chance.randint(1, 90), chance.randint(1, 6)
        of = tensors(
            ("embeddings", (embeddings,), 1), *(("layer", (size,), layers) for size in sizes), ("head", (head,), 1)
        )
        zero = made_by(Zero2, of=of, layers=layers, name="zero2", reduce_bucket_size=bucket)
        for at_the_end, outside in ((False, [head]), (True, [embeddings, head])):
            reduced, waiting = [], 0
            for size in [*outside, *sizes * layers]:
                if waiting + size > bucket:
                    reduced, waiting = [*reduced, waiting], 0
                reduced, waiting = ([*reduced, size], waiting) if size > bucket else (reduced, waiting + size)
            assert zero.filled(at_the_end) == max(*reduced, waiting, 0), (sizes, bucket, head, embeddings, layers)


@pytest.mark.parametrize(
    ("stage", "precision", "kind"),
    [
        ("zero1", "bf16", Bf16Zero1),
        ("zero1", "fp16", Zero2),
        ("zero1", "fp32", Zero2),
        ("zero1", "pure_bf16", Zero2),
        ("zero1", "pure_fp8", Zero2),
        ("zero2", "bf16", Zero2),
        ("zero3", "bf16", Zero3),
    ],
)
def test_the_optimizer_that_deepspeed_takes(stage: str, precision: str, kind: type[Engine]) -> None:
    made_by(kind, name=stage, precision=precision)


def test_zero2_divides_gradients_and_reduces_them_by_the_bucket() -> None:
    """Its part of the gradients is summed in fp32: two elements of 16 bits for each of half of all."""
    zero = made_by(Zero2, name="zero2")
    # What fits into no bucket is kept beside, in 16 bits.
    part, oversized, buckets = T, (E + H) / 2, 2 * BUCKET
    for place in ("embeddings", "last_layer", "head"):
        assert held(zero, "forward", place) == [(4, 0, 0)]
    assert held(zero, "backward", "head") == [(4, 0, 0)]
    # What is reduced lies there once in 16 bits and once in 32.
    assert held(zero, "backward", "last_layer") == [(4, 0, buckets), (4, part + oversized, buckets + 3 * H)]
    assert held(zero, "backward", "first_layer") == [(4, part, buckets), (4, part + oversized, buckets + 3 * H)]
    assert held(zero, "backward", "embeddings") == [(4, part, buckets), (0, part + oversized, buckets + 3 * H)]
    # While the norm is taken, one gradient in 64 bits: no more than its part.
    assert zero.stepping() == (2 * (part + oversized), 8 * T / 2)
    assert zero.standing() == (0, 0)
    waiting = made_by(Zero2, name="zero2", overlap_comm=False)
    assert held(waiting, "backward", "last_layer")[0] == (4, 0, BUCKET)


def test_layers_that_filled_the_bucket_keep_nothing_any_more() -> None:
    tied = made_by(Zero2, of=TIED, name="zero2")
    assert held(tied, "backward", "last_layer")[1] == (2, ALL + E / 2, 2 * BUCKET + 3 * 2 * L)
    four = made_by(Zero2, of=TIED, name="zero2", reduce_bucket_size=4000)
    assert held(four, "backward", "last_layer")[1] == (0, ALL + E / 2, 2 * 4000 + 3 * 4 * L)
    assert held(four, "backward", "first_layer")[1] == (4, ALL + E / 2, 2 * 4000 + 3 * 4 * L)


def test_zero2_in_fp32_keeps_parameters_whole_that_lie_across_an_edge() -> None:
    part = 2 * (T / 2 + L / 2)  # Of the largest of a layer a half, on average.
    zero = made_by(Zero2, name="zero2", precision="fp32")
    buckets = 2 * 2 * BUCKET
    assert held(zero, "backward", "first_layer") == [(4, part, buckets), (4, part, buckets + 2 * H)]
    assert zero.stepping() == (2 * part, 4 * T / 2), "gradients are flattened once more"
    twice = made_by(Zero2, name="zero2", precision="fp32", passes=2)
    assert held(twice, "forward", "head") == [(4, part, 0)]
    assert held(twice, "backward", "last_layer") == [(4, part, buckets), (4, 2 * part, buckets + 2 * H)]
    alone = made_by(Zero2, "h100", name="zero2", precision="fp32")
    assert held(alone, "backward", "first_layer")[0] == (4, 2 * T, buckets)


def test_zero1_keeps_all_gradients_until_the_last_micro_batch() -> None:
    twice = made_by(Zero2, name="zero1", precision="fp32", passes=2)
    buckets = 2 * 2 * BUCKET
    assert held(twice, "forward", "embeddings") == [(4, 2 * T, buckets)]
    assert held(twice, "backward", "first_layer") == [(4, 2 * T, buckets), (4, 2 * T, buckets + 2 * H)]
    # In fp16 they are summed in fp32, of which the buckets are too.
    half = made_by(Zero2, name="zero1", precision="fp16", passes=2)
    assert held(half, "backward", "first_layer")[0] == (4, 2 * T, buckets)
    once = made_by(Zero2, name="zero1", precision="fp16")
    assert held(once, "backward", "first_layer")[0] == (4, T, buckets)


def test_offloaded_gradients_go_to_the_host_one_by_one() -> None:
    pure = made_by(Zero2, name="zero2", precision="pure_bf16", offload_optimizer="cpu")
    assert pure.standing() == (0, 2 * H), "the largest waits there"
    assert held(pure, "backward", "first_layer") == [(4, 0, 2 * BUCKET), (4, 0, 2 * BUCKET + H)]
    assert pure.stepping() == (0, 0)
    mixed = made_by(Zero2, name="zero2", offload_optimizer="cpu")
    assert held(mixed, "backward", "first_layer")[1] == (4, T, 2 * BUCKET + 3 * H)
    assert mixed.stepping() == (2 * T, 0)


def test_parameters_are_flattened_before_there_are_masters() -> None:
    """All in 16 bits beside themselves; masters, which come later, are counted in any case."""
    for devices, over in (("h100", 0), ("h100x8", 2 * T - 4 * T / 8)):
        assert made_by(Zero2, devices, name="zero2").loading() == over
    assert made_by(Zero2, "h100x8", name="zero2", precision="pure_bf16").loading() == 2 * T - 2 * T / 8
    # Gradients of ZeRO-1 in bf16 are whole, and there from the beginning.
    assert made_by(Bf16Zero1, "h100x8", name="zero1").loading() == 0


def test_zero1_in_bf16_has_all_gradients_in_fp32_from_the_beginning() -> None:
    for passes in (1, 2):
        zero = made_by(Bf16Zero1, name="zero1", passes=passes)
        assert zero.standing() == (4 * T, 0)
        # Those in 16 bits of the micro-batch before go when the next backward pass begins.
        assert held(zero, "forward", "first_layer") == [(4, T if passes > 1 else 0, 0)]
        # They are flattened half a billion at a time.
        assert held(zero, "backward", "last_layer") == [(4, H + L, 0), (0, T, 2 * 5e8)]
    assert held(made_by(Bf16Zero1, of=TIED, name="zero1"), "backward", "head")[1] == (0, T - H, 2 * (T - H))


ZERO3 = {"name": "zero3", "param_persistence_threshold": 0, "max_reuse_distance": 0, "max_live_parameters": 1}


@pytest.mark.parametrize(
    ("strategy", "forward", "at_the_end", "backward"),
    [
        # Whole at the first layer, at the head and the last layer, and at the first layer on the way back.
        pytest.param({"prefetch_bucket_size": 0}, E, E, E, id="one weight at a time"),
        pytest.param({"prefetch_bucket_size": 500}, E, E, E, id="a bucket smaller than the largest is no vector"),
        pytest.param(
            {"prefetch_bucket_size": 500, "max_live_parameters": int(E + 2 * L)}, *[E + L + 500, E + 2 * L, E + L],
            id="those that come next",
        ),
        pytest.param(
            {"prefetch_bucket_size": int(E + L), "max_live_parameters": int(E + L)},
            *[2 * (E + L), 2 * (E + L), E + L],
            id="one vector, out of which each is copied",
        ),
        pytest.param(
            {"prefetch_bucket_size": int(2 * E), "max_live_parameters": int(2 * E)},
            *[2 * ALL, ALL, E + L],
            id="everything, fetched at the start",
        ),
        pytest.param(
            {"prefetch_bucket_size": 0, "max_reuse_distance": int(4 * L)}, *[E + L, E + 2 * L, E + L],
            id="what is used again within twice the distance",
        ),
    ],
)  # fmt: skip
def test_weights_that_zero3_has_whole(
    strategy: dict[str, int], forward: float, at_the_end: float, backward: float
) -> None:
    zero = made_by(Zero3, of=TIED, **ZERO3 | strategy)
    assert [each for *_, each in held(zero, "forward", "first_layer")] == [forward]
    for place in ("head", "last_layer"):
        assert held(zero, "forward", place)[0][2] == at_the_end
    assert held(zero, "backward", "head") == [(4, 0, at_the_end)]
    assert held(zero, "backward", "first_layer")[0] == (4, 0, backward)
    assert held(zero, "backward", "embeddings")[0] == (4, 0, min(backward, E))
    # Nothing is used again in an evaluation.
    again = strategy.get("max_reuse_distance", 0) > 0
    assert held(zero, "evaluation", "head") == [(4, 0, E if again else at_the_end)]


def test_recomputed_layers_are_used_three_times() -> None:
    zero = made_by(Zero3, of=TIED, mode="full", **ZERO3 | {"prefetch_bucket_size": 0, "max_reuse_distance": 3000})
    assert held(zero, "forward", "head")[0][2] == E + L


def test_zero3_reduces_in_copies_and_lets_go_of_layers_that_are_done() -> None:
    """Buckets of fp32; what did not fit is reduced from where it is, unless its dtype is another."""
    last = {"prefetch_bucket_size": 0, "max_live_parameters": 1}
    tied = made_by(Zero3, of=TIED, **ZERO3 | last)
    assert tied.standing() == (4 * ALL / 2, 4 * BUCKET)
    assert held(tied, "backward", "last_layer")[1] == (2, 0, E - 2 * L + 2 * 2 * L)
    assert held(tied, "backward", "first_layer")[1] == (4, 0, E + 2 * 2 * L)
    assert held(tied, "backward", "embeddings")[1] == (0, 0, E + 2 * E)
    fp32 = made_by(Zero3, of=TIED, precision="fp32", **ZERO3 | last)
    assert held(fp32, "backward", "first_layer")[1] == (4, 0, 2 * E + 2 * 2 * L)
    assert held(fp32, "backward", "embeddings")[1] == (0, 0, 2 * E)
    # gloo makes one more.
    on_cpu = made_by(Zero3, "cpux2", of=TIED, **ZERO3 | last)
    assert held(on_cpu, "backward", "first_layer")[1] == (4, 0, E + 2 * 2 * 2 * L)


def test_small_weights_stay_whole_and_are_gathered_again_after_the_step() -> None:
    all_small = made_by(Zero3, of=TIED, **ZERO3 | {"param_persistence_threshold": 1000})
    assert all_small.standing().engine == 4 * BUCKET + 2 * 4 * L
    assert all_small.stepping() == (0, 4 * ALL / 2 - 2 * 4 * L)
    assert held(all_small, "forward", "first_layer") == [(4, 0, E)]
    assert made_by(Zero3, of=TIED, **ZERO3, offload_optimizer="cpu").stepping() == (0, 0)
    huge = tensors(("layer", (4_000_000, 1000), 4))
    assert made_by(Zero3, of=huge, **ZERO3).stepping() == (0, 4e9), "a sub-group of a billion at a time"
    # Alone nothing is gathered, unless weights lie on the host.
    alone = made_by(Zero3, "h100", of=TIED, **ZERO3 | {"param_persistence_threshold": 1000})
    assert alone.standing().engine == 4 * BUCKET and held(alone, "forward", "head") == [(4, 0, 0)]
    away = made_by(Zero3, "h100", of=TIED, **ZERO3, offload_param="cpu", prefetch_bucket_size=0)
    assert held(away, "forward", "head") == [(4, 0, E)]
    assert away.loading() == WIDTH["bfloat16"] * E
