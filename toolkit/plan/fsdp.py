"""FSDP2: gathered units and gradients on their way. Read from torch 2.13, `torch/distributed/fsdp/_fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.plan.engine import Engine, Held, fewer
from toolkit.plan.states import WIDTH, shard
from toolkit.plan.trace import Moment
from toolkit.policy.engines import reshards_after_forward


class Fsdp(Engine):
    """Each layer is a unit; what is outside them is the root's, which stays gathered through both passes."""

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
        unit, root, layers = self._unit(), self._root(), self.trace.layers
        gathers = self.over.parameters > 1
        if moment.place == "embeddings":
            yield moment, Held(engine=(2 if gathers else 1) * root)
        elif moment.place == "head":
            yield moment, Held(engine=root + self._staying(layers) + (unit if gathers else 0))
        else:
            before = self._staying(layers - 1 if moment.place == "last_layer" else 0)
            yield moment, Held(engine=root + before + (2 if gathers else 1) * unit)
            if gathers and moment.place == "last_layer":
                # The outputs of both all-gathers and the copy, before the layer begins.
                yield fewer(moment, 1), Held(engine=root + before + 3 * unit)

    def _backward(self, moment: Moment, earlier: float) -> Iterator[tuple[Moment, Held]]:
        unit, root, layers = self._unit(), self._root(), self.trace.layers
        layer, done = self.layer(trained=True), self.layers_done(moment)
        gathers = self.over.parameters > 1 and not self._keeps
        clone = layer * self.reduce if self.on_cpu and self.over.gradients > 1 else 0
        share = layer * self.local / self.over.gradients
        whole = [max(0.0, earlier - each * layer * self.reduce) for each in (done, done + 1)] if earlier else [0.0, 0.0]
        made = max(0.0, moment.gradients.at(self.shape) - done * layer * self.computed)
        if moment.place == "head":
            yield moment, Held(earlier + made, root + self._staying(layers) + (unit if self.over.parameters > 1 else 0))
            return
        if moment.place == "embeddings":
            # The root's own gradients are divided last.
            outside = self.outside(trained=True)
            yield moment, Held(whole[0] + done * share + made, root + layer * self.reduce + clone)
            gradients = outside * (self.reduce if earlier else self.computed)
            reducing = outside * self.reduce * (2 if clone else 1)
            yield self.kept(moment, 0), Held(gradients + done * share, reducing)
            return
        # The layer, the next one on its way, and what the reduction before it reads until the next one begins.
        ahead = unit if gathers and done + 1 < layers else 0
        waiting = layer * self.reduce if done else 0
        staying = self._staying(layers - done - 1)
        yield moment, Held(whole[0] + done * share + made, root + staying + unit + ahead + waiting)
        held = self.outside("head", trained=True) * self.computed if not earlier else 0.0
        if gathers:
            # While the layer's weights are copied out of the all-gather's output.
            left = self.kept(moment, layers - done)
            yield left, Held(whole[0] + done * share + held, root + 2 * unit + waiting + (clone if done else 0))
        # The layer is over: its gradients are copied together, then divided (`foreach_reduce`).
        left, copied = self.kept(moment, layers - done - 1), layer * self.reduce
        computed = 0 if earlier else layer * self.computed
        yield left, Held(whole[0] + done * share + held + computed, root + staying + ahead + copied)
        yield left, Held(whole[1] + (done + 1) * share + held, root + staying + ahead + copied + clone)

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
        tensors = [each for each in self.trace.tensors if each.place == "layer"]
        return sum(each.count * self.stored(each, self.computed) for each in tensors) / max(1, self.trace.layers)

    def _root(self) -> float:
        """Bytes of all that is outside the layers, gathered."""
        return sum(
            each.count * self.stored(each, self.computed) for each in self.trace.tensors if each.place != "layer"
        )
