"""What a process of a pipeline holds beside its states: micro-batches that are on their way through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from toolkit.distributed.stages import runs_as
from toolkit.planner.memory.engine import Engine, Held
from toolkit.planner.pipeline import place_of, tied_bytes, units
from toolkit.planner.trace.types import Amount, Moment, Tensors
from toolkit.planner.workload import WIDTH, Workload

_BUCKET = 25 * 2**20
"""Bytes of gradients that are averaged at a time (`train.trainers.pipelined`)."""


class Piped(Engine):
    """One process of a pipeline, whose stages the workload's trace is of.

    Attributes:
        waiting: Bytes of the micro-batches that wait for their backward pass, but for the one that is computed.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        parallel, place, micro_batches = workload.recipe.parallel, workload.place or 0, self._micro_batches
        stages = parallel.stages // parallel.pipeline
        held = units(parallel, place, micro_batches)
        runs = runs_as(parallel.schedule, parallel.stages, micro_batches)
        self._last = parallel.schedule == "zero_bubble" and place == 0
        self._last = self._last or (parallel.schedule != "zero_bubble" and place == parallel.pipeline - 1)
        boundary, layers = self.trace.boundary.at(self.shape), self.trace.layers / stages
        one = workload.usual * (self._kept(layers, last=self._last and stages == 1) + boundary)
        if runs == "gpipe" and self._last:
            # The gradient of what goes into an output head that is done at once.
            one += workload.usual * boundary
        # The moments are of all layers of the process at once.
        self.waiting = (held - stages) * one
        # All forward passes of GPipe come before the first gradient: with one of an earlier micro-batch one waits less.
        self._gone = one if runs == "gpipe" else 0.0
        if runs == "zero_bubble":
            # Gradients of what linear layers return wait with them for those of weights: of one when most wait, and of
            # all that do when the pipeline runs empty.
            returned = workload.usual * self._returned(layers)
            last = min(held, 2 * place + 1)
            self.waiting = max(held * one + returned, last * (one + returned)) - stages * one
        self.waiting += self._sent(runs, held, stages) * workload.usual * boundary
        if workload.recipe.method.name == "lora":
            # The first layer of a model reads what nothing is trained of, and keeps no copy of it for its norm.
            self.waiting += (held - held / stages * (place == 0)) * workload.usual * self._copy_in_norm()
        # One copy of each weight for all micro-batches (`models.step_casts`); where layers are recomputed, of adapters.
        passed = [each.casts.at(self.shape) for each in self.trace.moments if each.phase != "evaluation"]
        recomputes = self.recipe.activation_checkpointing.of_all_layers
        self._copies = None if recomputes else max(passed, default=0.0)
        # The place into which a gradient was received stays beside those that a backward pass makes of it.
        self._received = 0.0 if self._last and stages == 1 else workload.usual * boundary

    @property
    def _micro_batches(self) -> int:
        return self.layout.gradient_accumulation_steps

    def _sent(self, runs: str, held: int, stages: int) -> float:
        """Hidden states and gradients of them that have been sent and are still there: torch 2.13's `Schedule1F1B`
        keeps names for the last ones, schedules of several stages keep all of a step until it ends, and with them gloo
        keeps what they sent (NCCL does not); by the middle of the step, where a process may hold the most, half."""
        parallel, place = self.recipe.parallel, self.workload.place or 0
        if runs == "1f1b":
            return float(not self._last) + (place > 0)
        if runs == "gpipe" or not self.on_cpu:
            return 0.0
        own = [stage for stage in range(parallel.stages) if place_of(stage, parallel) == place]
        sends = sum(
            1
            for stage in own
            for other in (stage - 1, stage + 1)
            if 0 <= other < parallel.stages and place_of(other, parallel) != place
        )
        return sends * (self._micro_batches - held / stages) / 2

    def standing(self) -> Held:
        return Held()

    def happens(self, moment: Moment) -> bool:
        there = {"embeddings": (self.workload.place or 0) == 0, "head": self._last}
        return there.get(moment.place, True) and super().happens(moment)

    def passing(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        fixed = (*moment.activations.fixed, *[0.0] * (1 - len(moment.activations.fixed)))
        waiting = self.waiting - (self._gone if moment.accumulating else 0.0)
        waiting += self._received if moment.phase == "backward" else 0.0
        activations = dataclasses.replace(moment.activations, fixed=(fixed[0] + waiting, *fixed[1:]))
        casts = moment.casts if self._copies is None else Amount((self._copies,))
        yield from super().passing(dataclasses.replace(moment, activations=activations, casts=casts))

    def stepping(self) -> Held:
        size = self.trained * self.local
        averaged = min(_BUCKET, size) if self.layout.data_parallel_size > 1 else 0.0
        return Held(size, max(averaged, tied_bytes(self.workload)))

    def _returned(self, layers: float) -> float:
        """Bytes of the gradients of what the linear layers of so many layers return."""
        matrices = (each for each in self.trace.tensors if each.place == "layer" and len(each.shape) == 2)
        columns = sum(each.shape[0] * each.count for each in matrices if each.kind != "adapter")
        return layers * self.shape.tokens * columns / max(1, self.trace.layers) * WIDTH[self.types.compute]

    def _kept(self, layers: float, last: bool) -> float:
        """Bytes that so many layers keep of a micro-batch, and what is beside them: positions, masks and, at the last,
        what the final norm keeps."""
        fullest = self.kept_by_all
        inside = Amount(tuple(layers * value for value in fullest.per_layer), block=fullest.block).at(self.shape)
        beside = Amount(fullest.fixed, block=fullest.block).at(self.shape)
        if not last:
            # If the weight of the final norm is trained, what it is multiplied with.
            trained = any(each.trained for each in self._norms)
            beside -= self._copy_in_norm() + self.trace.boundary.at(self.shape) * trained
        return inside + beside

    @property
    def _norms(self) -> list[Tensors]:
        """Weights of the norms of layers, which are like those of the final one, and biases."""
        return [each for each in self.trace.tensors if each.place == "layer" and len(each.shape) == 1]

    def _copy_in_norm(self) -> float:
        """Bytes of hidden states in fp32, in which norms are computed, where they are not so anyway."""
        a_token = self.trace.boundary.of(self.trace.layers, 1, 0)
        same = any(a_token == WIDTH["float32"] * each.shape[0] for each in self._norms)
        return 0.0 if same or not self._norms else 2.0 * self.trace.boundary.at(self.shape)
