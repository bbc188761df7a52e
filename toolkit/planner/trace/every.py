"""The trace of a model of which every n-th layer is recomputed, from that with none and that with all of them.

Traces are linear in the layers, so the two are weighed by how many layers are of which kind: exact for work, and within
some percent for memory. A trace of its own would take seconds for each n; only halves, which are used most, have one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from toolkit.planner.trace.types import Amount, Moment, Pass, Shape, Trace


def every_nth(none: Trace, recomputed: Trace, n: int) -> Trace:
    """The trace between two others.

    Args:
        none: Without activation checkpointing.
        recomputed: With it in every layer.
        n: Of so many layers the first is recomputed.
    """
    layers, count = none.layers, math.ceil(none.layers / n)
    # While the last of them is at work, those after it hold nothing: in the backward pass their gradients are made.
    others = layers - 1 - (count - 1) * n
    shape = Shape(layers, 4, 4096)
    kinds: dict[tuple[str, str, bool], tuple[list[Moment], list[Moment]]] = {}
    for index, trace in enumerate((none, recomputed)):
        for each in trace.moments:
            kinds.setdefault((each.phase, each.place, each.accumulating), ([], []))[index].append(each)
    made = max((each.gradients for each in none.moments if not each.accumulating), key=lambda each: each.at(shape))
    moments: list[Moment] = []
    for (phase, place, accumulating), (kept, again) in kinds.items():
        if not kept or not again:
            moments += kept or again
            continue
        full, lean = (max(part, key=lambda each: each.activations.at(shape)) for part in (kept, again))
        after = others if place == "last_layer" and phase != "evaluation" else 0
        moments += [_weighed(each, (each, layers - count), (lean, count), layers) for each in kept]
        for each in again:
            moment = _weighed(each, (full, layers - count - after), (each, count), layers)
            of_layers = Amount(per_layer=made.per_layer) if phase == "backward" and not accumulating else Amount()
            gradients = _sum(moment.gradients, of_layers, 1.0, after / layers)
            moments.append(dataclasses.replace(moment, gradients=gradients))
    share = count / layers
    passes = {
        name: Pass(
            *(
                _sum(getattr(none.passes[name], each.name), getattr(again, each.name), 1 - share, share)
                for each in dataclasses.fields(Pass)
            )
        )
        for name, again in recomputed.passes.items()
    }
    return dataclasses.replace(recomputed, moments=tuple(moments), passes=passes)


def _weighed(moment: Moment, first: tuple[Moment, int], second: tuple[Moment, int], layers: int) -> Moment:
    """A moment at which as many layers hold what they do at each of two others."""
    amounts = {}
    for part in ("activations", "casts", "logits", "gradients"):
        one, other = (getattr(each, part) for each, _ in (first, second))
        amount = _sum(one, other, first[1] / layers, second[1] / layers)
        amounts[part] = dataclasses.replace(getattr(moment, part), per_layer=amount.per_layer)
    return dataclasses.replace(moment, **amounts)


def _sum(one: Amount, other: Amount, first: float, second: float) -> Amount:
    """So much of one and so much of another."""

    def added(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(first * a + second * b for a, b in itertools.zip_longest(one, other, fillvalue=0.0))

    chunk = first * one.chunk + second * other.chunk
    fixed, per_layer = added(one.fixed, other.fixed), added(one.per_layer, other.per_layer)
    return Amount(fixed, per_layer, chunk, one.tokens, max(one.block, other.block))
