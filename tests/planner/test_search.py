"""Which setting is best of those that were planned, and which are worth a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from arithmetic import Arithmetic, recipe

from toolkit.common import UserError
from toolkit.planner.hardware import find
from toolkit.planner.search import (
    EVERY,
    MODE,
    TILES,
    Candidate,
    _micro_batches,
    _micro_batches_worth,
    _recomputations,
    _strategies,
    as_arguments,
    cheapest,
    consider,
    explore,
    fastest,
    fitting,
    layers_recomputed,
    least,
)

LITTLE = [("none", 1), ("elementwise", 1)]


def candidate(
    name: str,
    seconds: float,
    fits: str = "yes",
    total: int = 10,
    devices: int = 1,
    rank: tuple[int, int] = (0, 0),
    tokens_from: str = "upper bound",
    needed: float = 1.5,
) -> Candidate:
    """One that needs so many of 2 GiB, and up to 1.5 times as much."""
    amount = int(needed * 2**30)
    plan: Any = SimpleNamespace(
        fit=SimpleNamespace(answer=fits, needed=amount, available=2**31, margin=2**31 - amount, where="device memory"),
        work=SimpleNamespace(
            step_seconds=SimpleNamespace(value=seconds), tokens_per_step=6400.0, tokens_from=tokens_from
        ),
        memory=[
            SimpleNamespace(total=SimpleNamespace(value=total, high=1.5 * total)),
            SimpleNamespace(total=SimpleNamespace(value=1, high=1)),
        ],
        devices=devices,
    )
    return Candidate({"name": name}, recipe(), plan, rank)


def test_figures_of_a_setting() -> None:
    made = candidate("a", 2.0, total=7, devices=8)
    assert made.figures == (2.0, 7, 2.0 * 8 / 6400.0)
    assert made.need == "1.5 of 2.0 GiB of device memory"
    assert as_arguments({"strategy.name": "zero2", "batch.micro_batch_size": 4, "data.packing": True}) == (
        "strategy.name=zero2 batch.micro_batch_size=4 data.packing=true"
    )


def test_the_fastest_that_fits_and_the_simplest_of_equals() -> None:
    slow, fast = candidate("slow", 2.0), candidate("fast", 1.0, rank=(1, 0))
    tight, large = candidate("tight", 0.5, "tight"), candidate("large", 0.1, "no")
    assert fastest([slow, fast, tight, large]) is fast
    assert fitting([slow, fast, tight, large]) == [slow, fast]
    assert fastest([tight, large]) is tight and fitting([tight, large]) == [tight]
    assert fastest([large]) is None and fastest([]) is None and cheapest([large]) is None
    # Within a percent or two nobody sees a difference; then the simpler, and then the smaller counts.
    simple = candidate("simple", 1.001)
    assert fastest([fast, simple]) is simple
    assert fastest([simple, small := candidate("small", 1.001, total=5)]) is small
    assert fastest([candidate("second", 1.001), first := candidate("first", 1.0)]) is first
    assert fastest([only := candidate("only", 1.0), candidate("later", 1.5)]) is only


def test_where_none_fits_for_sure_a_little_time_is_given_for_room() -> None:
    """Of 2 GiB one takes nearly all; what could be needed beside it is there by half, or but for a tenth, of others."""
    full = candidate("full", 1.0, "tight", needed=1.99)
    half, most = candidate("half", 1.2, "tight", needed=1.6), candidate("most", 1.6, "tight", needed=1.38)
    assert (full.tries, half.tries, most.tries) == pytest.approx((1.98, 4 / 3, 1.05), abs=0.01)
    assert fastest([full, half, most]) is half and cheapest([full, half, most]) is half
    assert fastest([full, slow := candidate("slow", 2.5, "tight", needed=1.38)]) is full and slow.tries < full.tries
    assert candidate("large", 1.0, "no", needed=3.0).tries == 2 and candidate("small", 1.0).tries == 1
    # What surely fits is taken however long it takes.
    assert fastest([half, sure := candidate("sure", 9.0)]) is sure


def test_the_cheapest_and_the_least() -> None:
    one, eight = candidate("one", 4.0, devices=1), candidate("eight", 1.0, devices=8)
    assert cheapest([one, eight]) is one and fastest([one, eight]) is eight
    assert cheapest([one, candidate("same", 4.0, devices=1, rank=(1, 0))]) is one
    assert cheapest([one, candidate("no", 0.1, "no")]) is one
    assert least([one, small := candidate("small", 9.0, "no", total=5)]) is small
    assert least([candidate("slower", 9.0), one]) is one
    assert least([candidate("involved", 4.0, rank=(1, 1)), one]) is one


@pytest.mark.parametrize(
    ("stated", "hardware", "expected"),
    [
        (
            {},
            "h100",
            [*LITTLE, ("full", 4), ("full", 2), ("selective", 1), ("full", 1), ("offload", 1)],
        ),
        ({}, "cpu", [*LITTLE, ("full", 4), ("full", 2), ("selective", 1), ("full", 1)]),
        (
            {"mode": "full", "every_n_layers": 3},
            *(
                "h100",
                [*LITTLE, ("full", 4), ("full", 3), ("full", 2), ("selective", 1), ("full", 1), ("offload", 3)],
            ),
        ),
        ({"mode": "auto", "every_n_layers": 3}, "h100", [("full", 3), ("offload", 3)]),
        (
            {"mode": "auto"},
            "h100",
            [*LITTLE, ("full", 4), ("full", 2), ("selective", 1), ("full", 1), ("offload", 1)],
        ),
    ],
)
def test_from_no_recomputing_to_all(stated: dict[str, Any], hardware: str, expected: list[tuple[str, int]]) -> None:
    made, on = recipe(activation_checkpointing=stated), find(hardware)
    assert [(each[MODE], each[EVERY]) for each in _recomputations(made, on)] == expected


@pytest.mark.parametrize(
    ("tokens", "stated", "tiled"), [(16384, 1, []), (32768, 1, ["full", "offload"]), (32768, 4, [])]
)
def test_mlps_in_tiles_are_tried_for_long_rows(tokens: int, stated: int, tiled: list[str]) -> None:
    made = recipe(batch={"seq_len": tokens}, activation_checkpointing={"mlp_tiles": stated})
    found = [each for each in _recomputations(made, find("h100")) if TILES in each]
    assert [each[MODE] for each in found] == tiled and all(each[TILES] == 8 and each[EVERY] == 1 for each in found)


PLAIN = ["ddp", "zero1", "zero2", "fsdp", "zero3", "fsdp each"]
OFFLOADING = ["fsdp each", "zero2", "fsdp", "zero3", "zero3"]


@pytest.mark.parametrize(
    ("hardware", "plain", "offloading"),
    [
        ("h100", ["ddp"], OFFLOADING[1:]),
        ("h100x8", PLAIN, OFFLOADING),
        ("h100x8x2", [*PLAIN, "fsdp hybrid"], OFFLOADING),
        ("cpux2", ["ddp"], []),
    ],
)
def test_strategies_of_a_machine_the_simple_ones_first(hardware: str, plain: list[str], offloading: list[str]) -> None:
    def names(made: Any, offload: bool) -> list[str]:
        marks = {"strategy.sync_each_batch": " each", "strategy.sharding": " hybrid"}
        return [
            each["strategy.name"] + "".join(mark for key, mark in marks.items() if each.get(key) not in (None, False))
            for each in _strategies(made, find(hardware), offload)
            if each
        ]

    auto = recipe(strategy={"name": "auto"})
    assert (names(auto, False), names(auto, True)) == (plain, offloading)
    # One that is asked for comes first, as it is.
    asked = recipe(strategy={"name": plain[-1].split()[0]})
    assert _strategies(asked, find(hardware), False)[0] == {}
    assert names(asked, True) == offloading


def test_drives_are_offered_where_the_recipe_names_one() -> None:
    made = recipe(strategy={"name": "zero3", "offload_optimizer": "cpu", "nvme_path": "/x"})
    nvme = [each for each in _strategies(made, find("h100"), True) if each.get("strategy.offload_optimizer") == "nvme"]
    assert [each["strategy.offload_param"] for each in nvme] == ["none", "cpu", "nvme"]
    assert all(each.get("strategy.nvme_path", "/x") == "/x" for each in nvme)


def test_the_largest_micro_batch_that_fits_is_found_by_halves() -> None:
    made, on = recipe(batch={"global_batch_size": 64, "seq_len": 1024}), find("h100")
    sizes = _micro_batches(made, 1)
    assert [each["batch.micro_batch_size"] for each in sizes] == [1, 2, 4, 8, 16]
    odd = recipe(batch={"global_batch_size": 64, "seq_len": 1024, "micro_batch_size": 32})
    assert [each["batch.micro_batch_size"] for each in _micro_batches(odd, 1)] == [1, 2, 4, 8, 16, 32]
    for largest in (0, 1, 4, 16):
        asked = []

        def estimate(changed: Any, hardware: Any, largest: int = largest, asked: list[int] = asked) -> Any:
            asked.append(changed.batch.micro_batch_size)
            return candidate("x", 1.0, "yes" if asked[-1] <= largest else "no").plan

        tried = _micro_batches_worth(made, on, estimate, sizes)
        assert [each.recipe.batch.micro_batch_size for each in tried] == asked and asked[0] == 16
        assert max((size for size in asked if size <= largest), default=0) == largest and len(asked) <= 4
    assert _micro_batches_worth(made, on, lambda changed, hardware: None, sizes) == []


def test_rows_that_are_short_and_padded_have_the_micro_batch_that_is_fastest() -> None:
    """64 rows of 100 tokens on average, where rows of 1,024 are allowed."""
    made, on = recipe(batch={"global_batch_size": 64, "seq_len": 1024}), find("h100")
    for limit, best, asked in ((64, 16, [16, 32, 64, 32, 16, 8]), (8, 8, [16, 2, 4, 8, 4]), (0, None, [16, 2, 1])):
        sizes: list[int] = []

        def estimate(changed: Any, hardware: Any, limit: int = limit, sizes: list[int] = sizes) -> Any:
            sizes.append(changed.batch.micro_batch_size)
            seconds = {64: 3.0, 32: 2.0, 16: 1.0}.get(sizes[-1], 1.5 + 1 / sizes[-1])
            answer = "yes" if sizes[-1] <= limit else "no"
            return candidate("x", seconds, answer, tokens_from="counted").plan

        tried = _micro_batches_worth(made, on, estimate, _micro_batches(made, 1))
        assert sizes == asked
        quick = fastest(tried)
        assert (quick and quick.recipe.batch.micro_batch_size) == best


def test_settings_are_ranked_from_the_simplest_to_the_most_involved() -> None:
    made = recipe(strategy={"name": "auto"}, activation_checkpointing={"mode": "auto"})
    tried = explore(made, find("h100x8"), Arithmetic(8), made.undecided)
    order = [(name, False) for name in ("ddp", "zero1", "zero2", "fsdp", "zero3")] + [("fsdp", True)]
    plain = [each for each in tried if each.recipe.strategy.offload_optimizer == "none"]
    plain = [each for each in plain if each.recipe.strategy.offload_param == "none"]
    assert len({each.rank for each in plain}) > 3
    for each in plain:
        place, level = each.rank
        assert order[place] == (each.recipe.strategy.name, each.recipe.strategy.sync_each_batch)
        assert (level == 0) == (each.recipe.activation_checkpointing.mode == "none")


@pytest.mark.parametrize(("compiled", "fits", "tried"), [(20.0, "no", True), (0.0, "no", False), (20.0, "yes", False)])
def test_graphs_recompute_only_where_layers_are_compiled_and_keeping_all_does_not_fit(
    compiled: float, fits: str, tried: bool
) -> None:
    asked: list[str] = []

    def estimate(changed: Any, hardware: Any, may_trace: bool = False) -> Any:
        mode = changed.activation_checkpointing.mode
        asked.append(mode)
        plan = candidate(mode, 1.0, fits if mode == "none" else "yes").plan
        seconds = SimpleNamespace(value=1.0 if mode in ("none", "elementwise") else 2.0)
        plan.work = SimpleNamespace(
            step_seconds=seconds, compute_seconds=seconds, compile_seconds=compiled,
            tokens_per_step=1.0, tokens_from="upper bound",
        )  # fmt: skip
        return plan

    found = explore(recipe(), find("h100"), estimate, (MODE,))
    best = fastest(found)
    assert ("elementwise" in asked) == tried and best is not None
    mode = "none" if fits == "yes" else "elementwise" if tried else "full"
    assert best.recipe.activation_checkpointing.mode == mode
    # A step that recomputes layers cannot be as short.
    assert ("full" in asked) == (fits == "no" and not tried)


def test_a_model_whose_mlps_take_no_tiles_is_planned_without() -> None:
    made = recipe(batch={"seq_len": 32768}, activation_checkpointing={"mode": "auto"})
    asked: list[int] = []

    def estimate(changed: Any, hardware: Any, may_trace: bool = False) -> Any:
        asked.append(changed.activation_checkpointing.mlp_tiles)
        if asked[-1] > 1:
            raise UserError("its layers have no MLP that takes hidden states alone", "remove mlp_tiles")
        return Arithmetic(8)(changed, hardware)

    found = explore(made, find("h100"), estimate, (MODE,))
    assert max(asked) > 1 and found and all(TILES not in each.changes for each in found)
    # Who asks for tiles is told.
    stated = recipe(batch={"seq_len": 32768}, activation_checkpointing={"mode": "full", "mlp_tiles": 8})
    with pytest.raises(UserError, match="no MLP"):
        explore(stated, find("h100"), estimate, (MODE,))


def test_a_stated_micro_batch_is_tried_where_it_divides_the_batch() -> None:
    made = recipe(batch={"global_batch_size": 4, "micro_batch_size": 4})
    assert [each["batch.micro_batch_size"] for each in _micro_batches(made, 1)] == [1, 2, 4]
    assert [each["batch.micro_batch_size"] for each in _micro_batches(made, 2)] == [1, 2]
    found = explore(made, find("h100x2"), Arithmetic(2), ("batch.micro_batch_size",))
    assert {each.recipe.batch.micro_batch_size for each in found} == {2}


def test_what_would_have_been_taken_anyway_is_no_change() -> None:
    made, on = recipe(), find("h100")
    taken = consider(made, on, Arithmetic(1), {"batch.micro_batch_size": 4, "strategy.name": "ddp"})
    other = consider(made, on, Arithmetic(1), {"batch.micro_batch_size": 2, "strategy.name": "zero2"})
    assert taken and other
    assert "batch.micro_batch_size" not in taken.changes
    assert other.changes["batch.micro_batch_size"] == 2 and other.changes["strategy.name"] == "zero2"
    assert consider(made, on, Arithmetic(1, without=("full",)), {MODE: "full"}) is None


def test_what_is_recomputed_is_said_as_one_says_it() -> None:
    said = {1: "every layer", 2: "every 2nd layer", 12: "every 12th layer", 21: "every 21st layer"}
    assert {every: layers_recomputed(every) for every in said} == said
