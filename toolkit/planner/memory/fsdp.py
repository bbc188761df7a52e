"""FSDP2: gathered units and gradients on their way. Read from torch 2.13, `torch/distributed/fsdp/_fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.distributed.engines import reshards_after_forward
from toolkit.planner.memory.engine import Engine, Held, fewer
from toolkit.planner.memory.states import shard
from toolkit.planner.trace.types import Moment
from toolkit.planner.workload import WIDTH

_LINGERING = 0.8
"""gloo's threads let go of their copy of what is reduced some time after that: the chance that it is still there when
the next unit is gathered, and half of that when the next one is reduced, as seen in trainings on a CPU."""


class Fsdp(Engine):
    """Units as accelerate 1.15 makes them (`fsdp2_prepare_model`): each layer, the embeddings, and the final norm with
    the head, which stay gathered until their backward pass is over; tied embeddings belong to these."""

    def standing(self) -> Held:
        return Held()

    def passing(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        # accelerate sums the gradients of all but the last micro-batch without dividing them.
        if moment.accumulating and not self.accumulates:
            return
        earlier = self.trained * self.reduce if moment.accumulating else 0.0
        if moment.phase == "forward":
            for left, held in self._forward(moment):
                yield left, Held(earlier + held.gradients, held.engine)
            return
        yield from self._backward(moment, earlier)

    def evaluating(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        yield from self._forward(moment)

    def stepping(self) -> Held:
        return Held(
            sum(
                each.count * shard(each, each.numel * self.local, self.over.gradients, True)
                for each in self.trace.tensors
                if each.trained
            )
        )

    def loading(self) -> float:
        return self.largest(trained=False) * WIDTH[self.types.load] if self.over.parameters > 1 else 0.0

    def _forward(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        """The output of a unit's all-gather is kept until the next one's has been copied out (`wait_for_unshard`)."""
        unit, tied, front, tail, layers = self._unit(), self._tied(), self._front(), self._tail(), self.trace.layers
        gathers = self.over.parameters > 1
        copies = 2 if gathers else 1
        if moment.place == "embeddings":
            yield moment, Held(engine=copies * (tied + front))
        elif moment.place == "head":
            before = unit if gathers and not tail else 0
            yield moment, Held(engine=tied + before + copies * tail + self._staying(layers))
        else:
            before = self._staying(layers - 1 if moment.place == "last_layer" else 0)
            yield moment, Held(engine=tied + before + copies * unit)
            if gathers and moment.place == "last_layer":
                # The outputs of both all-gathers and the copy, before the layer begins.
                yield fewer(moment, 1), Held(engine=tied + before + 3 * unit)

    def _backward(self, moment: Moment, earlier: float) -> Iterator[tuple[Moment, Held]]:
        unit, tied, front, tail, layers = self._unit(), self._tied(), self._front(), self._tail(), self.trace.layers
        layer, done = self.layer(trained=True), self.layers_done(moment)
        head = self.outside("head", trained=True)
        gathers = self.over.parameters > 1 and not self._keeps
        doubled = self.on_cpu and self.over.gradients > 1  # gloo reduces a copy.
        clone = layer * self.reduce if doubled else 0
        share = self.local / self.over.gradients
        shares = [(head + each * layer) * share for each in (done, done + 1)]
        whole = [max(0.0, earlier - (head + each * layer) * self.reduce) for each in (done, done + 1)]
        if moment.place == "head":
            # The last layer is on its way already.
            made = moment.gradients.at(self.shape)
            ahead = unit if self.over.parameters > 1 else 0
            yield moment, Held(earlier + made, tied + tail + self._staying(layers) + ahead)
            return
        if moment.place == "embeddings":
            rest = self.outside(trained=True) - head
            made = max(0.0, moment.gradients.at(self.shape) - (head + layers * layer) * self.computed)
            yield moment, Held(whole[0] + shares[0] + made, tied + front + layer * self.reduce + clone)
            gradients = rest * (self.reduce if earlier else self.computed)
            yield self.kept(moment, 0), Held(shares[0] + gradients, rest * self.reduce * (2 if doubled else 1))
            return
        # The layer, the next one on its way, and what the reduction before it reads until the next one begins.
        made = max(0.0, moment.gradients.at(self.shape) - (head + done * layer) * self.computed)
        ahead = (unit if done + 1 < layers else front) if gathers else 0
        waiting = (layer if done else head) * self.reduce
        staying = self._staying(layers - done - 1)
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

    @property
    def computed(self) -> int:
        """Bytes of an element of a gathered weight, and of its gradient."""
        return WIDTH[self.types.compute]

    @property
    def _keeps(self) -> bool:
        """Whether gathered weights stay until the backward pass."""
        return not reshards_after_forward(self.recipe)

    def _staying(self, layers: int) -> float:
        """Bytes of that many layers, if they stay gathered."""
        return layers * self._unit() if self._keeps else 0.0

    def _unit(self) -> float:
        """Bytes of a layer, gathered."""
        return self._gathered(("layer",)) / max(1, self.trace.layers)

    def _tied(self) -> float:
        """Bytes outside the layers that are gathered all the time: embeddings that are the head's weight too."""
        return 0.0 if self._tail() else self._gathered(("embeddings", "other"))

    def _front(self) -> float:
        """Bytes of embeddings that are a unit of their own."""
        return self._gathered(("embeddings", "other")) if self._tail() else 0.0

    def _tail(self) -> float:
        """Bytes of the final norm and the head, where the head has a weight of its own."""
        own = any(each.place == "head" and len(each.shape) > 1 for each in self.trace.tensors)
        return self._gathered(("head",)) if own else 0.0

    def _gathered(self, places: tuple[str, ...]) -> float:
        return sum(each.count * self.stored(each, self.computed) for each in self.trace.tensors if each.place in places)
