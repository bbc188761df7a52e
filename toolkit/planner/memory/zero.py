"""DeepSpeed's ZeRO: buckets, gradients on their way, gathered weights. Read from the source of version 0.19.8."""

from __future__ import annotations

import math
from collections.abc import Iterator

from toolkit.planner.memory.engine import Engine, Held, fewer
from toolkit.planner.memory.states import gathered
from toolkit.planner.trace.types import Moment
from toolkit.planner.workload import Workload

ALL_REDUCE = 500_000_000
"""Elements that `buffered_allreduce_fallback` flattens at a time (`MEMORY_OPT_ALLREDUCE_SIZE`)."""
SUB_GROUP = 1_000_000_000
"""Elements that ZeRO-3 updates at a time (`sub_group_size`)."""


class _Zero(Engine):
    """What the stages have in common: each gradient goes into a bucket as soon as it is made."""

    def happens(self, moment: Moment) -> bool:
        return not moment.accumulating

    def filled(self, at_the_end: bool) -> float:
        """Elements that are reduced at a time: parameters until the next one does not fit into the bucket; one that is
        larger than the bucket by itself.

        Args:
            at_the_end: Whether the pass has come to the embeddings.
        """
        bucket = self.strategy.reduce_bucket_size
        layers = max(1, self.trace.layers)
        each_layer, outside = [], []
        for each in self.trace.tensors:
            if each.trained and each.place == "layer":
                each_layer += [each.numel] * math.ceil(each.count / layers)
            elif each.trained and (at_the_end or each.place == "head"):
                outside += [each.numel] * each.count
        # Buckets fill alike every few layers.
        repeats = min(layers, 1 + 4 * math.ceil(bucket / sum(each_layer))) if each_layer else 0
        most = total = 0
        for numel in [*outside, *(each_layer * repeats)]:
            if total + numel > bucket:
                most, total = max(most, total), 0
            if numel > bucket:
                most = max(most, numel)
            else:
                total += numel
        return max(most, total)

    def reduced_at(self, moment: Moment) -> tuple[Moment, float, float]:
        """The moment of the fullest reduction at a place: what is left then, the elements that are reduced, and layers
        whose backward pass is over since the moment given."""
        if moment.place == "embeddings":
            return self.kept(moment, 0), self.filled(True), 0.0
        elements, layer = self.filled(False), self.layer(trained=True)
        if moment.place != "last_layer" or not layer:
            return moment, elements, 0.0
        done = max(0.0, elements - self.trace.elements(trained=True, place="head")) / layer
        if done >= self.trace.layers:
            return self.kept(moment, 0), elements, self.trace.layers
        return fewer(moment, done), elements, done


class Zero2(_Zero):
    """ZeRO-1 and 2 (`runtime/zero/stage_1_and_2.py`), except ZeRO-1 in bf16.

    Attributes:
        compact: Whether gradients of a partition are summed in one fp32 vector (`_use_compact_grad_partition_buffer`).
        keeps_whole: ZeRO-1 reduces after the last micro-batch only; until then each rank has all gradients.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.offloads = self.strategy.offload_optimizer != "none"
        self.compact = self.reduce == 4 and self.local < 4
        self.keeps_whole = self.strategy.zero_stage == 1 and self.accumulates

    def standing(self) -> Held:
        # temp_grad_buffer_for_gpu_offload
        return Held(engine=self.largest() * self.local if self.offloads else 0)

    def passing(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        # `setup_buckets`: in the dtype of the gradients, two of them where reductions overlap.
        width = self.reduce if self.strategy.zero_stage == 1 and self.compact else self.local
        buckets = (1 + self.strategy.overlap_comm) * self.strategy.reduce_bucket_size * width
        # Gradients of earlier micro-batches, and those of this one that are reduced and not added to them.
        whole, partition = self.trained * (self.reduce if self.compact else self.local), self._partition()
        earlier = whole if self.keeps_whole else partition if self.accumulates else 0
        now = 0 if self.keeps_whole or (self.compact and self.accumulates) else partition
        if moment.phase == "forward" or moment.place == "head":
            yield moment, Held(earlier, buckets if self.keeps_whole else 0)
            return
        # Before the first reduction there is nothing to keep.
        yield moment, Held(earlier + (now if moment.place != "last_layer" else 0), buckets)
        # In the middle of a reduction (`allreduce_bucket`): flattened, and once more in the dtype of the reduction.
        # What goes to one partition is one slice already, unless each gradient goes into that vector by itself.
        left, elements, _ = self.reduced_at(moment)
        flattened = self.local if self.compact or self.over.optimizer > 1 else 0
        flat = elements * (flattened + (self.reduce if self.reduce != self.local else 0))
        yield left, Held(earlier + now + self._oversized(), buckets + flat)

    def stepping(self) -> Held:
        if self.offloads:
            return Held(self._partition())
        if self.compact:
            # `get_grad_norm_direct` converts one gradient at a time to fp64.
            return Held(self._partition() + self._oversized(), 8 * min(self.largest(), self.owned))
        # `step` flattens the gradients of the partition once more, group by group; matrices are nearly all.
        return Held(self._partition(), self.owned * self.local)

    def loading(self) -> float:
        # Parameters are flattened while the single tensors are still there; masters come after that.
        masters = self.owned * (4 if self.types.master == "float32" else 2)
        return max(0.0, self.trained * self.local - masters)

    def _partition(self) -> float:
        """Gradients of one rank's partition."""
        if self.compact:
            return self.owned * self.reduce
        if self.offloads:
            return 0.0  # They go to the host one by one (`async_inplace_copy_grad_to_fp32_buffer_from_gpu`).
        # `grads_in_partition` has whole parameters, also those that lie across an edge of the partition.
        across = max((each.numel for each in self.trace.tensors if each.trained and each.place == "layer"), default=0)
        edges = min(across / 2, self.trained - self.owned) if self.over.optimizer > 1 else 0
        return (self.owned + edges) * self.local

    def _oversized(self) -> float:
        """16-bit gradients of the partition that did not fit into a bucket: without offloading nothing frees them
        before the step, although they have been added to the fp32 ones (`copy_grads_in_partition`)."""
        bucket = self.strategy.reduce_bucket_size
        numel = sum(each.numel * each.count for each in self.trace.tensors if each.trained and each.numel > bucket)
        return numel / self.over.optimizer * self.local if self.compact and not self.offloads else 0.0


class Bf16Zero1(_Zero):
    """ZeRO-1 in bf16 with gradients summed in fp32 (`runtime/bf16_optimizer.py`): every rank has them whole."""

    def standing(self) -> Held:
        return Held(self.trained * self.reduce)

    def passing(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        made = self.trained * self.local
        if moment.phase == "forward":
            # Those of the micro-batch before are there until the next backward pass (`clear_lp_grads`).
            yield moment, Held(made if self.accumulates else 0)
            return
        yield moment, Held(moment.gradients.at(self.shape))
        # In the end all are added to the fp32 gradients, and these are flattened to be reduced.
        yield self.kept(moment, 0), Held(made, min(self.trained, ALL_REDUCE) * self.reduce)

    def loading(self) -> float:
        masters = self.owned * 4
        return max(0.0, self.trained * self.local - masters - self.trained * self.reduce)


class Zero3(_Zero):
    """ZeRO-3 (`runtime/zero/stage3.py`, `partitioned_param_coordinator.py`, `partition_parameters.py`).

    Attributes:
        gathers: Whether weights are away from the device while they are not needed.
        width: Bytes of an element, on average.
        persistent: Bytes of parameters so small that they stay whole.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.gathers = self.over.parameters > 1 or self.strategy.offload_param != "none"
        self.bytes = gathered(workload, self.trace.tensors)
        self.width = self.bytes / max(1, self.trace.elements())
        threshold = self.strategy.param_persistence_threshold
        small = [each for each in self.trace.tensors if each.numel <= threshold and self.gathers]
        self.persistent = gathered(workload, small)

    def standing(self) -> Held:
        # A bucket, and gradients of the partition, which stay between steps (`_setup_for_real_optimizer`).
        held = self.owned * self.reduce if self.strategy.offload_optimizer == "none" else 0
        return Held(held, self.strategy.reduce_bucket_size * self.reduce + self.persistent)

    def passing(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        whole = self._gathered(moment)
        yield moment, Held(engine=whole)
        if moment.phase == "forward" or moment.place == "head":
            return
        # `__avg_scatter_grads`: a copy in the dtype of the reduction, if the gradient did not fit into the bucket; one
        # with the partitions in order, if there are several (`reduce_scatter_coalesced`); gloo makes one more.
        left, elements, done = self.reduced_at(moment)
        alone = elements > self.strategy.reduce_bucket_size
        copies = (0 if alone and self.reduce == self.local else 1) + (self.on_cpu and self.over.gradients > 1)
        released = min(whole, done * self.layer() * self.width)
        yield left, Held(engine=whole - released + elements * self.reduce * copies)

    def stepping(self) -> Held:
        if self.strategy.offload_optimizer != "none":
            return Held()
        # `_prepare_fp32_grad_for_sub_group` flattens gradients of up to a sub-group; weights that stay whole are
        # gathered again after it.
        flat = min(self.owned, SUB_GROUP) * self.reduce
        return Held(engine=max(0.0, flat - self.persistent))

    def evaluating(self, moment: Moment) -> Iterator[tuple[Moment, Held]]:
        yield moment, Held(engine=self._gathered(moment))

    def loading(self) -> float:
        return self.largest(trained=False) * self.width

    def _gathered(self, moment: Moment) -> float:
        """Bytes of weights that are whole at a moment, beside those that always are.

        A weight is released after its use, unless it is used again within `max_reuse_distance` elements
        (`__params_to_release`): the last layers stay from the forward to the backward pass. With every module's
        weights, up to a bucket of those that come next are fetched, until `max_live_parameters` are there
        (`fetch_sub_module`). Those fetched together come in one vector, out of which each is copied
        (`AllGatherCoalescedHandle.wait`).

        After an evaluation before the first step it is less: `__params_to_release` remembers its answers, and in the
        order of an evaluation nothing is used again.
        """
        if not self.gathers:
            return 0.0
        width, everything = self.width, max(0.0, self.bytes - self.persistent)
        largest = self.largest(trained=False) * width
        bucket = min(everything, self.strategy.prefetch_bucket_size * width)
        together = bucket if bucket > largest else 0.0
        ahead = self.strategy.max_live_parameters * width if bucket else largest
        reused = self.workload.kept_for_backward * width if moment.phase != "evaluation" else 0
        full = min(everything, max(ahead, reused + largest))
        in_layers = self.trace.elements(place="layer")
        layer, outside = self.layer() * width, (self.trace.elements() - in_layers) * width
        if moment.place in ("head", "last_layer"):
            # All that a small model has was fetched at once, at the start.
            return full + (together if full < everything else 0)
        if moment.phase == "backward":
            return min(full, outside + (layer if moment.place == "first_layer" else 0))
        return min(full, outside + layer + bucket) + together
