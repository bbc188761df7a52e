"""Device memory of a rank, phase by phase: the states it holds, and what each moment of a pass puts on top.

States are counted per parameter (`states`), engines add their buffers (`engines`, `zero`, `fsdp`), the trace adds what
the model's code keeps and allocates. The peak is the fullest moment: a sum of each part's maximum would count what is
never there at once. What remains uncertain, fragmentation and the CUDA context, is a range.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

from toolkit.distributed.environment import segments_grow
from toolkit.distributed.layout import answered_at_once
from toolkit.planner.generation import SCORES, generates, kept, turns
from toolkit.planner.memory import teacher
from toolkit.planner.memory.engine import Engine, Held
from toolkit.planner.memory.fsdp import Fsdp
from toolkit.planner.memory.offload import offloaded
from toolkit.planner.memory.pipeline import Piped
from toolkit.planner.memory.states import states, weights, whole_model
from toolkit.planner.memory.zero import Bf16Zero1, Zero2, Zero3
from toolkit.planner.pipeline import processes
from toolkit.planner.plan import PARTS, Memory, Range
from toolkit.planner.workload import WIDTH, Workload

Parts = dict[str, float]

_FRAGMENTATION = {True: (0.04, 0.01, 0.15), False: (0.17, 0.08, 0.40)}
"""Reserved beyond allocated memory, as a share: estimate, low, high. With segments that grow in place, as our runs have
them (`distributed.environment`), holes inside them remain; where a user's `PYTORCH_CUDA_ALLOC_CONF` has none, 12 to 22%
were measured in the median, 10 to 30% on one GPU and 26 to 43% on two are published (`benchmarks/published.yaml`)."""
_KEPT = (1.0, 0.1, 1.6)
"""On a CPU, freed memory that glibc keeps, as a share of what comes and goes in a step: 0.1 to 0.7 of it were measured
after 8 steps (1.8 where that was a third of a GiB), 1.4 after 72 with rows of many lengths. Of more than a GiB most is
in blocks that it hands back at once (`process.prepare_process`)."""
_CONTEXT = {"cuda": (520, 350, 800), "rocm": (600, 400, 1000), "cpu": (700, 450, 1100)}
"""MiB that a process takes beside its tensors: the CUDA context with the kernels of torch and cuBLAS on an H100; on a
CPU Python with torch, Transformers and TRL, of which the processes of a node share a part, and oneDNN's kernels: 0.1 to
0.3 GiB where rows have many lengths."""
_COLLECTIVES = {"cuda": (400, 150, 1000), "rocm": (400, 150, 1000), "cpu": (0, 0, 0)}
"""MiB of NCCL's channels and buffers, with more than one process."""
_WORKSPACE, _OLDER_WORKSPACE = 2 * 4096 * 8 * 1024, 2 * (4096 * 2 + 16 * 8) * 1024
"""cuBLAS's workspaces, which cuBLASLt shares, one for each thread that launches (forward and backward): 32 MiB from
Hopper on, 8.1 MiB before (torch's `CublasHandlePool.cpp`, `parseChosenWorkspaceSize`)."""


def memory(workload: Workload) -> list[Memory]:
    """What each kind of rank holds, the fullest first."""
    if workload.stages and workload.place is None:
        return sorted(each_process(workload), key=lambda each: -each.total.value)
    ranks = _RankMemory(workload)
    every = ranks.describe("every rank", ranks.phases(first=True))
    others = ranks.describe("other ranks", ranks.phases(first=False))
    if workload.layout.world_size == 1 or others.total == every.total:
        return [every]
    return [every.model_copy(update={"ranks": "rank 0"}), others]


def each_process(workload: Workload) -> list[Memory]:
    """What those of a pipeline hold, in order."""
    count = workload.layout.pipeline
    every = [(_RankMemory(part), part.place or 0) for part in processes(workload)]
    return [
        ranks.describe(f"process {place + 1} of {count} of each pipeline", ranks.phases(first=place == 0))
        for ranks, place in every
    ]


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
        base, standing = self._base(), self.engine.standing()._asdict()
        loaded = {key: base[key] for key in ("parameters", "adapters", "masters", "teacher")}
        between = _add(base, standing)
        # Ids, labels, and mask or positions, 8 bytes each: Trainer fetches all micro-batches of a step at once, and
        # accelerate the one after them.
        batch = (self.layout.gradient_accumulation_steps + 1) * self.engine.shape.tokens * 3 * 8.0
        newer = float(self.workload.hardware.device.capability or 0) >= 9
        workspace = (_WORKSPACE if newer else _OLDER_WORKSPACE) if self.kind == "cuda" else 0.0
        training = _add(between, {"batch": batch, "workspace": workspace})
        asked = {"teacher": teacher.states_kept(self.workload)}
        phases = {
            "load": _add(loaded, standing, self._loading(first)),
            "generation": self._generation(training),
            "teacher": self._teacher(training),
            "forward": self._pass("forward", _add(training, asked)),
            "backward": self._pass("backward", _add(training, asked)),
            "step": _add(training, self._on_device(self.engine.stepping()), {"workspace": self._temporaries()}),
            # Held-out prompts are answered, too; a pass over given answers is for a reference.
            "evaluation": {} if self.recipe.reinforces else self._pass("evaluation", _add(training, asked)),
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
        base, shares = allocated, _FRAGMENTATION[self.on_cpu or segments_grow(os.environ)]
        if self.on_cpu:
            # Between steps, as after resuming, only states are there.
            base, shares = min(allocated - sums.get("resume", 0), 2**30), _KEPT
        collectives = _COLLECTIVES[self.kind] if self.layout.world_size > 1 else (0, 0, 0)
        context = [sum(sizes) * 2**20 for sizes in zip(_CONTEXT[self.kind], collectives, strict=True)]
        reserved = [allocated + share * base for share in shares]
        return Memory(
            ranks=ranks,
            phases=rounded,
            peak_phase=peak,
            allocated=allocated,
            reserved=_range(reserved),
            context=context[0],
            total=_range([sum(sizes) for sizes in zip(reserved, context, strict=True)]),
        )

    def _base(self) -> Parts:
        """States on the device between steps, without gradients."""
        held, strategy = self.states, self.recipe.strategy
        parts: Parts = {
            "parameters": held.parameters + self.trace.buffers,
            "adapters": held.adapters,
            "masters": held.masters,
            "optimizer": held.optimizer - (held.paged if not self.on_cpu else 0),
            "teacher": teacher.held(self.workload),
        }
        if self.on_cpu:
            # What is offloaded stays; what only offloading needs comes on top.
            extra = offloaded(self.workload, held)
            gradients = extra.get("gradients", 0.0) if strategy.zero_stage else 0.0
            return _add(parts, {"engine": extra.get("staging", 0.0), "gradients": gradients})
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
            batch = self.layout.answers * (self.recipe.evaluation.batch_size or self.layout.micro_batch_size)
            length = self.workload.evaluation_len or shape.seq_len
            shape = dataclasses.replace(shape, batch=batch / self.layout.sharing, seq_len=length)
            moments = self.engine.evaluating
        compared = teacher.compared(self.workload)
        candidates = [
            _add(
                base,
                {part: getattr(left, part).at(shape) for part in ("activations", "casts")},
                {"logits": max(left.logits.at(shape), compared if moment.place == "head" else 0.0)},
                self._on_device(held),
            )
            for moment in self.trace.moments
            if moment.phase == phase and self.engine.happens(moment)
            for left, held in moments(moment)
        ]
        fullest = max(candidates, key=lambda parts: math.fsum(parts.values()), default={})
        if not fullest or phase == "evaluation":
            return fullest
        compiled = self._compiled() if phase == "backward" else 0.0
        again = self._keys_again(phase == "backward")
        return _add(fullest, {"casts": self._cast(), "activations": compiled + self._exchanged() + again})

    def _generation(self, base: Parts) -> Parts:
        """While answers are generated: what the sequences keep, and the fullest moment of a pass over their prompts;
        nothing where none are, or a server does. The reference of such a training is the model itself, and its pass
        over a micro-batch needs less than the forward pass in training."""
        if not generates(self.recipe):
            return {}
        _, count = turns(self.workload)
        if self.recipe.reinforces:  # Held-out prompts are answered, too, and more at once only where that is asked for.
            count = max(count, answered_at_once(self.recipe, self.layout))
        shape = self.engine.shape
        prompt = max(1, shape.seq_len - self.recipe.rollout.max_completion_tokens)
        asked = dataclasses.replace(shape, batch=count, seq_len=prompt)
        moments = [
            _add(
                base,
                {part: getattr(left, part).at(asked) for part in ("activations", "casts")},
                self._on_device(held),
            )
            for moment in self.trace.moments
            if moment.phase == "evaluation" and self.engine.happens(moment)
            for left, held in self.engine.evaluating(moment)
        ]
        fullest = max(moments, key=lambda parts: math.fsum(parts.values()), default=dict(base))
        scores = float(count * self.trace.vocabulary * SCORES)
        return _add(fullest, {"cache": kept(self.workload, count), "logits": scores})

    def _teacher(self, base: Parts) -> Parts:
        """While a teacher's layers see a micro-batch; its head waits for the student's. Nothing without one."""
        if self.workload.teacher is None:
            return {}
        taught = _RankMemory(self.workload.teacher)
        shape = taught.engine.shape
        moments = [
            _add(base, {part: getattr(moment, part).at(shape) for part in ("activations", "casts")})
            for moment in taught.trace.moments
            if moment.phase == "evaluation" and moment.place != "head" and taught.engine.happens(moment)
        ]
        return max(moments, key=lambda parts: math.fsum(parts.values()), default=dict(base))

    def _exchanged(self) -> float:
        """What attention returned, which is kept twice where processes share rows: as it left the kernel for its own
        backward pass, and as the part of this process for that of the layer after it. On a CPU attention keeps none."""
        (heads, _, size), layout = self.workload.heads, self.layout
        # What is gathered of context is traced, and this with it.
        if self.on_cpu or layout.sequence == 1:
            return 0.0
        return self._layers_kept() * self.engine.shape.tokens * heads / layout.tensor * size * WIDTH[self.types.compute]

    def _keys_again(self, backward: bool) -> float:
        """Keys and values of beginnings that documents have in common, which attention gets for each of them; in the
        backward pass their gradients in one layer, too."""
        (_, shared, size), tensor = self.workload.heads, self.layout.tensor
        layers = self._layers_kept() + backward
        return layers * self.workload.keys_again * 2 * shared / tensor * size * WIDTH[self.types.compute]

    def _layers_kept(self) -> float:
        """Layers whose activations are there at once."""
        checkpointing = self.recipe.activation_checkpointing
        recomputed = 1 / checkpointing.every_n_layers if checkpointing.of_layers else 0.0
        return max(1.0, self.trace.layers * (1 - recomputed))

    def _cast(self) -> float:
        """The adapters' 16-bit copies, which stay for a whole step (`models.step_casts`). Without checkpointing a trace
        holds all of them at its fullest moments; with it, those of one layer."""
        recipe, dtype = self.recipe, self.types.autocast
        if recipe.method.name != "lora" or dtype is None or not recipe.activation_checkpointing.of_layers:
            return 0.0
        others = self.trace.elements(trained=True) - self.engine.layer(trained=True)
        return 0.0 if recipe.compile == "layers" else WIDTH[dtype] * others

    def _compiled(self) -> float:
        """What a compiled layer holds more than it does uncompiled when it is recomputed: its widest tensor, and two
        hidden states. Measured on an H100 (LoRA on 1.2B, four rows of 4,096 tokens): 0.37 GiB, as this says; later, on
        an H200, 0.4 GiB less than that. What compiled layers keep without recomputing is traced."""
        if self.recipe.compile != "layers" or not self.recipe.activation_checkpointing.of_layers:
            return 0.0
        shape = self.engine.shape
        inside = (each.shape[-2] for each in self.trace.tensors if each.place == "layer" and len(each.shape) > 1)
        widest = shape.tokens * max(inside, default=0) * WIDTH[self.types.compute]
        return widest + 2 * self.trace.boundary.at(shape)

    def _on_device(self, held: Held) -> Parts:
        """Without gradients, where FSDP keeps them on the host, or the optimizer frees each as soon as it is made."""
        strategy = self.recipe.strategy
        on_host = not self.on_cpu and strategy.name == "fsdp" and strategy.offload_param != "none"
        whole = self.engine.accumulates and not strategy.sync_each_batch
        away = self.recipe.optimizer.traits.in_backward or (on_host and not whole)
        return {"gradients": 0.0 if away else held.gradients, "engine": held.engine}

    def _temporaries(self) -> float:
        """What the optimizer allocates while it updates."""
        traits, strategy, updated = self.recipe.optimizer.traits, self.recipe.strategy, self.workload.owned
        if not self.on_cpu and strategy.offload_optimizer != "none":
            return 0.0
        flat = strategy.zero_stage > 0
        trained = [each for each in self.trace.tensors if each.trained and traits.updates(each.shape, each.place)]
        share = 1 / self.over.optimizer if strategy.name == "fsdp" else 1.0
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
        if self.on_cpu and self.recipe.parallel.divides:
            # Whole ones, of which parts are then kept.
            whole = weights(self.workload, self.trace.whole().tensors, WIDTH[self.types.load])
            extra += whole - weights(self.workload, self.trace.tensors, WIDTH[self.types.load])
        if self.layout.tensor > 1 and self.recipe.strategy.name == "fsdp" and not self.on_cpu:
            # A unit's parts are on the device before they are sharded.
            return {"engine": extra + self._largest_unit()}
        if self.on_cpu and self.recipe.strategy.shards_parameters and self.over.parameters > 1:
            whole = weights(self.workload, self.trace.tensors, WIDTH[self.types.load])
            standing = self.engine.standing()
            if self.recipe.strategy.name == "fsdp":
                extra += whole  # Where the weights are read, they are on the device already.
            elif first:
                extra = max(extra, whole - self.states.masters - standing.gradients - standing.engine)
        return {"engine": extra}

    def _largest_unit(self) -> float:
        """Bytes of a layer, the embeddings or the head, whichever has the most."""
        width, units = WIDTH[self.types.load], {"layer": max(1, self.trace.layers)}
        return max(
            weights(self.workload, (each for each in self.trace.tensors if each.place == place), width)
            / units.get(place, 1)
            for place in {each.place for each in self.trace.tensors}
        )

    def _saving(self, first: bool) -> float:
        """Copies of weights that are made to publish them (`train.checkpoints.save`)."""
        strategy, full = self.recipe.strategy, self.recipe.method.name == "full"
        casts = full and self.types.export != self.types.local
        exported, whole = WIDTH[self.types.export], whole_model(self.workload)
        if strategy.shards_parameters:
            # Gathered one after the other, on their way to the memory of the first process's host.
            copies = 1 + (exported / WIDTH[self.types.local] if casts else 0)
            gathered = whole * copies if self.on_cpu and first else 0.0
            largest = max(
                (each.parts * each.numel * self.workload.width(each) for each in self.trace.tensors), default=0
            )
            return largest + gathered if self.over.parameters > 1 else gathered
        if self.recipe.parallel.divides:
            # Whole ones are put together on the host of the first process, each of its parts at first.
            divided = [each for each in self.trace.tensors if each.parts > 1 and (each.trained or full)]
            joined = weights(self.workload, dataclasses.replace(self.trace, tensors=tuple(divided)).whole().tensors)
            largest = max((each.parts * each.numel * self.workload.width(each) for each in divided), default=0)
            cast = exported / WIDTH[self.types.local] if casts else 0.0
            return 2 * largest + (joined + whole * cast if self.on_cpu and first else 0.0)
        if strategy.zero_stage and full and first:
            # They share one flat vector, out of which each is copied to be written.
            return whole * exported / WIDTH[self.types.local]
        return self.engine.largest() * float(exported) if casts else 0.0


def _range(ends: Sequence[float]) -> Range:
    value, low, high = ends
    return Range(value=value, low=low, high=high)


def _add(*parts: Mapping[str, float]) -> Parts:
    return {key: sum(each.get(key, 0.0) for each in parts) for key in PARTS if any(key in each for each in parts)}


def engine(workload: Workload) -> Engine:
    """The recipe's engine."""
    strategy = workload.strategy
    kind: type[Engine] = Engine if workload.place is None else Piped
    if strategy.zero_stage == 3:
        kind = Zero3
    elif strategy.zero_stage:
        kind = Bf16Zero1 if workload.reduces_at_the_end else Zero2
    elif strategy.name == "fsdp":
        kind = Fsdp
    return kind(workload)
