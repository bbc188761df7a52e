"""Device memory of a rank, phase by phase: the states it holds, and what each moment of a pass puts on top.

States are counted per parameter (`states`), engines add their buffers (`engines`, `zero`, `fsdp`), the trace adds what
the model's code keeps and allocates. The peak is the fullest moment: a sum of each part's maximum would count what is
never there at once. What remains uncertain, fragmentation and the CUDA context, is a range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from toolkit.planner.memory.engine import Engine, Held
from toolkit.planner.memory.fsdp import Fsdp
from toolkit.planner.memory.offload import offloaded
from toolkit.planner.memory.states import States, states, whole_model
from toolkit.planner.memory.zero import Bf16Zero1, Zero2, Zero3
from toolkit.planner.plan import PARTS, Memory, Range
from toolkit.planner.trace.types import Shape
from toolkit.planner.workload import WIDTH, Workload

Parts = dict[str, float]

_FRAGMENTATION = (0.04, 0.01, 0.15)
"""Reserved beyond allocated memory, as a share: estimate, low, high. With segments that grow in place
(`distributed.environment`) holes inside them remain; without, 12 to 22% were measured in the median."""
_KEPT = (1.0, 0.1, 1.6)
"""On a CPU, freed memory that glibc keeps, as a share of what comes and goes in a step: 0.1 to 0.7 of it were measured
after 8 steps (1.8 where that was a third of a GiB), 1.4 after 72 with rows of many lengths. Of more than a GiB most is
in blocks that it hands back at once (`process.prepare_process`)."""
_CONTEXT = {"cuda": (520, 350, 800), "rocm": (600, 400, 1000), "cpu": (600, 450, 900)}
"""MiB that a process takes beside its tensors: the CUDA context with the kernels of torch and cuBLAS on an H100; on a
CPU Python with torch, Transformers and TRL, of which the processes of a node share a part; at most also oneDNN's
kernels for many lengths."""
_COLLECTIVES = {"cuda": (400, 150, 1000), "rocm": (400, 150, 1000), "cpu": (0, 0, 0)}
"""MiB of NCCL's channels and buffers, with more than one process."""
_WORKSPACE, _OLDER_WORKSPACE = 2 * 4096 * 8 * 1024, 2 * (4096 * 2 + 16 * 8) * 1024
"""cuBLAS's workspaces, which cuBLASLt shares, one for each thread that launches (forward and backward): 32 MiB from
Hopper on, 8.1 MiB before (torch's `CublasHandlePool.cpp`, `parseChosenWorkspaceSize`)."""


def memory(workload: Workload) -> list[Memory]:
    """What each kind of rank holds, the fullest first."""
    ranks = _RankMemory(workload)
    first = ranks.describe("every rank", ranks.phases(first=True))
    if workload.layout.world_size == 1 or first.peak_phase != "save":
        return [first]
    others = ranks.describe("other ranks", ranks.phases(first=False))
    return [first.model_copy(update={"ranks": "rank 0"}), others]


class _RankMemory:
    """One recipe on one machine."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.recipe, self.layout = workload, workload.recipe, workload.layout
        self.trace, self.types, self.over = workload.trace, workload.types, workload.over
        self.on_cpu, self.kind = workload.on_cpu, workload.hardware.device.kind
        self.states, self.engine = states(workload), engine(workload)

    def phases(self, first: bool) -> dict[str, Parts]:
        """Phase to part to bytes.

        Args:
            first: Of the rank that writes the model.
        """
        base = self._base()
        weights = {key: base[key] for key in ("parameters", "adapters", "masters")}
        between = _add(base, _held(self.engine.standing()))
        training = _add(between, {"batch": self._batch(), "workspace": self._workspace()})
        stepping = _held(self._device_share(self.engine.stepping()))
        phases = {
            "load": _add(weights, _held(self.engine.standing()), self._loading(first)),
            "forward": self._pass("forward", training),
            "backward": self._pass("backward", training),
            "step": _add(training, stepping, {"workspace": self._temporaries()}),
            "evaluation": self._pass("evaluation", training),
            "save": _add(between, {"engine": self._saving(first)}),
            "resume": dict(between),
        }
        return {phase: parts for phase, parts in phases.items() if parts}

    def describe(self, ranks: str, phases: Mapping[str, Parts]) -> Memory:
        """Sums and ranges."""
        rounded = {
            phase: {part: int(parts[part]) for part in PARTS if parts.get(part, 0) >= 1}
            for phase, parts in phases.items()
        }
        sums = {phase: sum(parts.values()) for phase, parts in rounded.items()}
        peak = max(sums, key=lambda phase: sums[phase])
        allocated = sums[peak]
        base, shares = allocated, _FRAGMENTATION
        if self.on_cpu:
            # Between steps, as after resuming, only states are there.
            base, shares = min(allocated - sums.get("resume", 0), 2**30), _KEPT
        value, low, high = (allocated + share * base for share in shares)
        reserved = Range(value=value, low=low, high=high)
        several = self.layout.world_size > 1
        context = [
            (own + (shared if several else 0)) * 2**20
            for own, shared in zip(_CONTEXT[self.kind], _COLLECTIVES[self.kind], strict=True)
        ]
        return Memory(
            ranks=ranks,
            phases=rounded,
            peak_phase=peak,
            allocated=allocated,
            reserved=reserved,
            context=context[0],
            total=Range(
                value=reserved.value + context[0], low=reserved.low + context[1], high=reserved.high + context[2]
            ),
        )

    def _base(self) -> Parts:
        """States on the device between steps, without gradients."""
        held: States = self.states
        parts: Parts = {
            "parameters": held.parameters + self.trace.buffers,
            "adapters": held.adapters,
            "masters": held.masters,
            "optimizer": held.optimizer - (held.paged if not self.on_cpu else 0),
        }
        if self.on_cpu:
            # What is offloaded stays; what only offloading needs comes on top.
            extra = offloaded(self.workload, held)
            gradients = extra.get("gradients", 0.0) if self.recipe.strategy.zero_stage else 0.0
            return _add(parts, {"engine": extra.get("staging", 0.0), "gradients": gradients})
        strategy = self.recipe.strategy
        if strategy.offload_optimizer != "none":
            parts["masters"] = parts["optimizer"] = 0.0
        if strategy.offload_param != "none":
            parts["parameters"], parts["adapters"] = float(self.trace.buffers), 0.0
            if strategy.name == "fsdp":
                parts["optimizer"] = 0.0
        return parts

    def _pass(self, phase: str, base: Parts) -> Parts:
        """The fullest moment of a pass."""
        shape, moments = self.engine.shape, self.engine.passing
        if phase == "evaluation":
            shape, moments = self._evaluation_shape(), self.engine.evaluating
        candidates = [
            _add(
                base,
                {part: getattr(left, part).at(shape) for part in ("activations", "casts", "logits")},
                _held(self._device_share(held)),
            )
            for moment in self.trace.moments
            if moment.phase == phase
            for left, held in moments(moment)
        ]
        return max(candidates, key=lambda parts: math.fsum(parts.values()), default={})

    def _evaluation_shape(self) -> Shape:
        batch = self.recipe.evaluation.batch_size or self.layout.micro_batch_size
        return Shape(self.trace.layers, batch, self.layout.seq_len)

    def _device_share(self, held: Held) -> Held:
        """Without gradients, where FSDP keeps them on the host, or the optimizer frees each as soon as it is made."""
        strategy = self.recipe.strategy
        if self.recipe.optimizer.traits.in_backward:
            return Held(0.0, held.engine)
        away = not self.on_cpu and strategy.name == "fsdp" and strategy.offload_param != "none"
        return Held(0.0, held.engine) if away and not self.engine.accumulates else held

    def _batch(self) -> float:
        """Ids, labels, and mask or positions, 8 bytes each: Trainer fetches all micro-batches of a step at once, and
        accelerate the one after them."""
        return (self.layout.gradient_accumulation_steps + 1) * self.engine.shape.tokens * 3 * 8.0

    def _workspace(self) -> float:
        """What libraries of matrix products keep."""
        if self.kind != "cuda":
            return 0.0
        return _WORKSPACE if float(self.workload.hardware.device.capability or 0) >= 9 else _OLDER_WORKSPACE

    def _temporaries(self) -> float:
        """What the optimizer allocates while it updates."""
        traits = self.recipe.optimizer.traits
        if not self.on_cpu and self.recipe.strategy.offload_optimizer != "none":
            return 0.0
        flat = self.recipe.strategy.zero_stage > 0
        updated = self.workload.owned
        trained = [each for each in self.trace.tensors if each.trained and traits.updates(each.shape, each.place)]
        share = 1 / self.over.optimizer if self.recipe.strategy.name == "fsdp" else 1.0
        one = updated if flat else max((each.numel for each in trained), default=0) * share
        # A copy of the one before is still there, at most as large as the largest of a layer.
        before = 0.0 if flat else max((each.numel for each in trained if each.place == "layer"), default=0) * share
        copied = traits.copies * one + before if traits.copies else 0.0
        if traits.family == "muon":
            # The update, its bf16 copy and the next one; the product of the shorter sides and its square, in bf16 too.
            copied = max((2.0 * each.numel + min(each.shape) ** 2 for each in trained), default=0.0)
        if traits.foreach:
            return WIDTH[self.types.master] * (copied if self.on_cpu else updated)
        return 4 * copied

    def _loading(self, first: bool) -> Parts:
        """What comes on top of weights and masters while they are put in place."""
        if self.recipe.method.quantization != "none":
            # Each is quantized from 16 bits, one by one.
            return {"parameters": self.engine.largest(trained=False) * float(WIDTH[self.types.compute])}
        extra = self.engine.loading()
        if self.on_cpu and self.recipe.strategy.shards_parameters and self.over.parameters > 1:
            whole = sum(each.count * self.engine.stored(each, WIDTH[self.types.load]) for each in self.trace.tensors)
            standing = self.engine.standing()
            if self.recipe.strategy.name == "fsdp":
                extra += whole  # Where the weights are read, they are on the device already.
            elif first:
                extra = max(extra, whole - self.states.masters - standing.gradients - standing.engine)
        return {"engine": extra}

    def _saving(self, first: bool) -> float:
        """Copies of weights that are made to publish them (`train.save`)."""
        strategy, full = self.recipe.strategy, self.recipe.method.name == "full"
        largest = max((each.numel * self.workload.width(each) for each in self.trace.tensors), default=0)
        whole = whole_model(self.workload)
        if strategy.shards_parameters:
            # Gathered one after the other, on their way to the memory of the first process's host.
            copies = 1 + (WIDTH[self.types.export] / WIDTH[self.types.local] if full and self._casts_to_publish else 0)
            gathered = whole * copies if self.on_cpu and first else 0.0
            return largest + gathered if self.over.parameters > 1 else gathered
        if strategy.zero_stage and full and first:
            # They share one flat vector, out of which each is copied to be written.
            return whole * WIDTH[self.types.export] / WIDTH[self.types.local]
        return self.engine.largest() * float(WIDTH[self.types.export]) if full and self._casts_to_publish else 0.0

    @property
    def _casts_to_publish(self) -> bool:
        return self.types.export != self.types.local


def _held(held: Held) -> Parts:
    return {"gradients": held.gradients, "engine": held.engine}


def _add(*parts: Mapping[str, float]) -> Parts:
    return {key: sum(each.get(key, 0.0) for each in parts) for key in PARTS if any(key in each for each in parts)}


def engine(workload: Workload) -> Engine:
    """The recipe's engine."""
    strategy, types = workload.strategy, workload.types
    kind: type[Engine] = Engine
    if strategy.zero_stage == 3:
        kind = Zero3
    elif strategy.zero_stage:
        # `_do_optimizer_sanity_check` of DeepSpeed's engine.
        bf16 = types.local == "bfloat16" and types.reduce == "float32" and strategy.offload_optimizer == "none"
        kind = Bf16Zero1 if bf16 and strategy.zero_stage == 1 else Zero2
    elif strategy.name == "fsdp":
        kind = Fsdp
    return kind(workload)
