"""What an engine holds on a device beside its share of the states; here without one, and for DDP.

An engine answers for each moment of a pass: which gradients are there, and which buffers of its own. `zero` and `fsdp`
do the same for DeepSpeed and FSDP2, read from the sources of the versions that are installed; trainings on two
processes hold them to it (tests/planner/test_engines.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from toolkit.planner.trace.types import Amount, Moment
from toolkit.planner.workload import WIDTH, Workload


class Held(NamedTuple):
    """Bytes on one device: of gradients, whole or divided, and of everything else."""

    gradients: float = 0.0
    engine: float = 0.0


class Engine:
    """One process, or DistributedDataParallel. The base of the others."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.trace, self.types, self.over = workload, workload.trace, workload.types, workload.over
        self.recipe, self.strategy, self.layout = workload.recipe, workload.strategy, workload.layout
        self.shape, self.accumulates, self.on_cpu = workload.shape, workload.accumulates, workload.on_cpu
        self.trained, self.owned = workload.trained, workload.owned
        self.local, self.reduce = WIDTH[self.types.local], WIDTH[self.types.reduce]

    def standing(self) -> Held:
        """What is there all the time."""
        if self.layout.world_size == 1:
            return Held()
        # torch/csrc/distributed/c10d/reducer.cpp: buckets for all gradients; accelerate leaves them no views of these.
        return Held(engine=(self.trained - self.workload.apart) * self.local)

    def happens(self, moment: Moment) -> bool:
        """Whether a pass comes by a moment: those with gradients from before are there only if these stay as made."""
        return self.accumulates or not moment.accumulating

    def passing(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        """What comes on top at a moment of a forward or backward pass, and what is left of the moment then."""
        earlier = self.trained * self.local if moment.accumulating else 0
        yield moment, Held(earlier + moment.gradients.at(self.shape))

    def stepping(self) -> Held:
        """What comes on top while gradients are clipped and the optimizer updates."""
        return Held(self.trained * self.local)

    def evaluating(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        """What comes on top at a moment of an evaluation."""
        yield moment, Held()

    def loading(self) -> float:
        """What comes on top while states are put in place."""
        return 0.0

    def layer(self, trained: bool | None = None) -> float:
        """Elements of a layer."""
        return self.trace.elements(trained=trained, place="layer") / max(1, self.trace.layers)

    def largest(self, trained: bool = True) -> int:
        """Elements of the largest parameter."""
        return max((each.numel for each in self.trace.tensors if each.trained or not trained), default=0)

    @property
    def kept_by_all(self) -> Amount:
        """Activations at the end of the forward pass, when every layer keeps its own: those per layer are what each
        keeps."""
        ends = [each.activations for each in self.trace.moments if each.place == "head" and each.phase != "evaluation"]
        return max(ends, key=lambda each: each.at(self.shape), default=Amount())

    def kept(self, moment: Moment, layers: float) -> Moment:
        """Between two layers: what that many layers keep for the backward pass, and no layer's temporary tensors."""
        fullest = self.kept_by_all
        activations = Amount(tuple(layers * value for value in fullest.per_layer), block=fullest.block)
        return dataclasses.replace(moment, activations=activations, casts=Amount(), logits=Amount())


def fewer(moment: Moment, layers: float) -> Moment:
    """The same moment of a model with fewer layers: that many are done since, and keep nothing any more."""

    def less(amount: Amount) -> Amount:
        pairs = itertools.zip_longest(amount.fixed, amount.per_layer, fillvalue=0.0)
        fixed = tuple(outside - layers * each for outside, each in pairs)
        return Amount(fixed, amount.per_layer, block=amount.block)

    return dataclasses.replace(moment, activations=less(moment.activations), casts=less(moment.casts))
