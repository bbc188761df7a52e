"""What a process of a pipeline holds beside its states: micro-batches that are on their way through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from toolkit.distributed.stages import runs_as
from toolkit.planner.memory.engine import Engine, Held
from toolkit.planner.pipeline import tied_bytes, units
from toolkit.planner.trace.types import Amount, Moment
from toolkit.planner.workload import WIDTH, Workload

_BUCKET = 25 * 2**20
"""Bytes of gradients that are averaged at a time (`train.pipelined`)."""


class Piped(Engine):
    """One process of a pipeline, whose stages the workload's trace is of.

    Attributes:
        waiting: Bytes of the micro-batches that wait for their backward pass, but for the one that is computed.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        parallel, place = workload.recipe.parallel, workload.place or 0
        stages = parallel.stages // parallel.pipeline
        held = units(parallel, place, self.layout.gradient_accumulation_steps)
        self._last = parallel.schedule == "zero_bubble" and place == 0
        self._last = self._last or (parallel.schedule != "zero_bubble" and place == parallel.pipeline - 1)
        boundary, layers = self.trace.boundary.at(self.shape), self.trace.layers / stages
        one = workload.usual * (self._kept(layers) + boundary)
        # The moments are of all layers of the process at once.
        self.waiting = (held - stages) * one
        # All forward passes of GPipe come before the first gradient: with one of an earlier micro-batch one waits less.
        all_first = runs_as(parallel.schedule, parallel.stages, self.layout.gradient_accumulation_steps) == "gpipe"
        self._gone = one if all_first else 0.0
        if parallel.schedule == "zero_bubble":
            # Gradients of what linear layers return wait with them for those of weights: of one when most wait, and of
            # all that do when the pipeline runs empty.
            returned = workload.usual * self._returned(layers)
            last = min(held, 2 * place + 1)
            self.waiting = max(held * one + returned, last * (one + returned)) - stages * one

    def standing(self) -> Held:
        return Held()

    def happens(self, moment: Moment) -> bool:
        there = {"embeddings": (self.workload.place or 0) == 0, "head": self._last}
        return there.get(moment.place, True) and super().happens(moment)

    def passing(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        fixed = (*moment.activations.fixed, *[0.0] * (1 - len(moment.activations.fixed)))
        waiting = self.waiting - (self._gone if moment.accumulating else 0.0)
        activations = dataclasses.replace(moment.activations, fixed=(fixed[0] + waiting, *fixed[1:]))
        yield from super().passing(dataclasses.replace(moment, activations=activations))

    def stepping(self) -> Held:
        size = self.trained * self.local
        averaged = min(_BUCKET, size) if self.layout.data_parallel_size > 1 else 0.0
        return Held(size, max(averaged, tied_bytes(self.workload)))

    def _returned(self, layers: float) -> float:
        """Bytes of the gradients of what the linear layers of so many layers return."""
        matrices = (each for each in self.trace.tensors if each.place == "layer" and len(each.shape) == 2)
        columns = sum(each.shape[0] * each.count for each in matrices if each.kind != "adapter")
        return layers * self.shape.tokens * columns / max(1, self.trace.layers) * WIDTH[self.types.compute]

    def _kept(self, layers: float) -> float:
        """Bytes that so many layers keep of a micro-batch."""
        ends = [each for each in self.trace.moments if each.place == "head" and each.phase != "evaluation"]
        fullest = max((each.activations for each in ends), key=lambda each: each.at(self.shape), default=Amount())
        return Amount(tuple(layers * value for value in fullest.per_layer), block=fullest.block).at(self.shape)
