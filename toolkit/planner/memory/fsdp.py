"""FSDP2: gathered units and gradients on their way. Read from torch 2.13, `torch/distributed/fsdp/_fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.distributed.engines import reshards_after_forward
from toolkit.planner.memory.engine import Engine, Held, fewer
from toolkit.planner.memory.states import gathered, shard
from toolkit.planner.trace.types import Moment
from toolkit.planner.workload import WIDTH, Workload

_LINGERING = 0.8
"""gloo's threads let go of their copy of what is reduced some time after that: the chance that it is still there when
the next unit is gathered, and half of that when the next one is reduced, as seen in trainings on a CPU."""


class Fsdp(Engine):
    """Units as accelerate 1.15 makes them (`fsdp2_prepare_model`): each layer, the embeddings, and the final norm with
    the head, which stay gathered until their backward pass is over; tied embeddings belong to these.

    Attributes:
        computed: Bytes of an element of a gathered weight, and of its gradient.
        unit: Bytes of a layer, gathered.
        staying: The same, if layers stay gathered until the backward pass.
        tied: Bytes outside the layers that are gathered all the time: embeddings that are the head's weight too.
        front: Bytes of embeddings that are a unit of their own.
        tail: Bytes of the final norm and the head, where the head has a weight of its own.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.computed = WIDTH[self.types.compute]
        self.divides, self.keeps = self.over.parameters > 1, not reshards_after_forward(self.recipe)
        self.unit = self._gathered("layer") / max(1, self.trace.layers)
        self.staying = self.unit if self.keeps else 0.0
        self.tail = self._gathered("head") if self.trace.own_head else 0.0
        embeddings = self._gathered("embeddings", "other")
        self.tied, self.front = (0.0, embeddings) if self.tail else (embeddings, 0.0)

    def _gathered(self, *places: str) -> float:
        return gathered(self.workload, (each for each in self.trace.tensors if each.place in places), self.computed)

    def standing(self) -> Held:
        return Held()

    def passing(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        # accelerate sums the gradients of all but the last micro-batch without dividing them, unless told otherwise.
        sums_whole = moment.accumulating and not self.strategy.sync_each_batch
        earlier = self.trained * self.reduce if sums_whole else 0.0
        if moment.phase == "backward":
            yield from self._backward(moment, earlier)
        else:
            divided = self._divided() if moment.accumulating and not sums_whole else 0.0
            yield from ((left, Held(earlier + divided, held.engine)) for left, held in self.evaluating(moment))

    def evaluating(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        # As in every forward pass, the output of a unit's all-gather is kept until the next one's has been copied out
        # (`wait_for_unshard`).
        copies = 2 if self.divides else 1
        if moment.place == "embeddings":
            yield moment, Held(engine=copies * (self.tied + self.front))
        elif moment.place == "head":
            before = self.unit if self.divides and not self.tail else 0
            yield moment, Held(engine=self.tied + before + copies * self.tail + self.trace.layers * self.staying)
        else:
            before = (self.trace.layers - 1 if moment.place == "last_layer" else 0) * self.staying
            yield moment, Held(engine=self.tied + before + copies * self.unit)
            if self.divides and moment.place == "last_layer":
                # The outputs of both all-gathers and the copy, before the layer begins.
                yield fewer(moment, 1), Held(engine=self.tied + before + 3 * self.unit)

    def stepping(self) -> Held:
        return Held(self._divided())

    def _divided(self) -> float:
        """One rank's share of all gradients."""
        trained = [each for each in self.trace.tensors if each.trained]
        return sum(each.count * shard(each, each.numel * self.local, self.over.gradients, True) for each in trained)

    def loading(self) -> float:
        return self.largest(trained=False) * WIDTH[self.types.load] if self.divides else 0.0

    def _backward(self, moment: Moment, earlier: float) -> Iterator[tuple[Moment, Held]]:
        unit, tied, layers, layer = self.unit, self.tied, self.trace.layers, self.layer(trained=True)
        head = self.trace.elements(trained=True, place="head")
        done = {"first_layer": layers - 1, "embeddings": layers}.get(moment.place, 0)
        gathers = self.divides and not self.keeps
        doubled = self.on_cpu and self.over.gradients > 1  # gloo reduces a copy.
        clone = layer * self.reduce if doubled else 0
        share = self.local / self.over.gradients
        shares = [(head + each * layer) * share for each in (done, done + 1)]
        if moment.accumulating and not earlier:
            # The sums of earlier micro-batches, and of a layer what is about to be added to them.
            shares = [self._divided(), self._divided() + layer * share]
        whole = [max(0.0, earlier - (head + each * layer) * self.reduce) for each in (done, done + 1)]
        if moment.place == "head":
            # The last layer is on its way already.
            made = moment.gradients.at(self.shape)
            ahead = unit if self.divides else 0
            sums = shares[0] if moment.accumulating and not earlier else earlier
            yield moment, Held(sums + made, tied + self.tail + layers * self.staying + ahead)
            return
        if moment.place == "embeddings":
            rest = self.trained - self.trace.elements(trained=True, place="layer") - head
            made = max(0.0, moment.gradients.at(self.shape) - (head + layers * layer) * self.computed)
            yield moment, Held(whole[0] + shares[0] + made, tied + self.front + layer * self.reduce + clone)
            gradients = rest * (self.reduce if earlier else self.computed)
            yield self.kept(moment, 0), Held(shares[0] + gradients, rest * self.reduce * (2 if doubled else 1))
            return
        # The layer, the next one on its way, and what the reduction before it reads until the next one begins.
        made = max(0.0, moment.gradients.at(self.shape) - (head + done * layer) * self.computed)
        ahead = (unit if done + 1 < layers else self.front) if gathers else 0
        waiting = (layer if done else head) * self.reduce
        staying = (layers - done - 1) * self.staying
        yield moment, Held(whole[0] + shares[0] + made, tied + staying + unit + ahead + waiting)
        if gathers:
            # While the layer's weights are copied out of the all-gather's output.
            left = self.kept(moment, layers - done)
            yield left, Held(whole[0] + shares[0], tied + 2 * unit + waiting + (_LINGERING * clone if done else 0))
        # The layer is over: its gradients are copied together, then divided (`foreach_reduce`).
        left, copied = self.kept(moment, layers - done - 1), layer * self.reduce
        computed = 0 if earlier else layer * self.computed
        yield left, Held(whole[0] + shares[0] + computed, tied + staying + ahead + copied)
        yield left, Held(whole[1] + shares[1], tied + staying + ahead + copied + (1 + _LINGERING / 2) * clone)
