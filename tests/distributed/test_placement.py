"""Which processes divide what, and over how many machines."""

from __future__ import annotations

import pytest

from toolkit.distributed.layout import World
from toolkit.distributed.placement import placement
from toolkit.recipe import load

OVER = "over 2 machines, whose network every layer waits for"


@pytest.mark.parametrize(
    ("sizes", "world", "said"),
    [
        ({}, World(0, 0, 16, 8), []),
        ({"tensor": 8}, World(0, 0, 16, 8), [("8 neighbouring processes divide each layer, on one machine", False)]),
        (
            {"tensor": 16},
            World(0, 0, 16, 8),
            [
                (
                    f"16 neighbouring processes divide each layer, {OVER}",
                    True,
                )
            ],
        ),
        (
            {"sequence": 4, "tensor": 4},
            World(0, 0, 16, 8),
            [
                ("4 neighbouring processes divide each layer, on one machine", False),
                (
                    f"4 neighbouring processes share each row, 4 ranks apart, {OVER}",
                    True,
                ),
            ],
        ),
        ({"expert": 8}, World(0, 0, 8, 8), [("8 neighbouring processes divide the experts, on one machine", False)]),
        (
            {"context": 6},
            World(0, 0, 12, 4),
            [(f"6 neighbouring processes share each row, {OVER}", True)],
        ),
        # Three a machine: the group in the middle is on both.
        ({"tensor": 2}, World(0, 0, 6, 3), [(f"2 neighbouring processes divide each layer, {OVER}", True)]),
        (
            {"context": 5},
            World(0, 0, 15, 3),
            [(f"5 neighbouring processes share each row, {OVER.replace('2', '3')}", True)],
        ),
        (
            {"pipeline": 4},
            World(0, 0, 16, 8),
            [("layers lie on ranks 0-3, 4-7, 8-11, 12-15, one after the other, from machine to machine", False)],
        ),
        (
            {"pipeline": 2},
            World(0, 0, 2, 2),
            [("layers lie on ranks 0, 1, one after the other, on one machine", False)],
        ),
    ],
)
def test_who_divides_what_is_said(sizes: dict[str, int], world: World, said: list[tuple[str, bool]]) -> None:
    recipe = load("llama_3_1_8b_lora").recipe.with_values({f"parallel.{way}": size for way, size in sizes.items()})
    assert [(text.partition(": ")[2], crosses) for text, crosses in placement(recipe, world)] == said
