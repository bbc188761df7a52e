"""One question to the planner, whose setting and hardware vary while better ones are looked for: the plan of each."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.common import bytes_text
from toolkit.data.statistics import DataStatistics
from toolkit.distributed.layout import BatchLayout, batch_layout
from toolkit.models.attention import backends
from toolkit.planner import kernels
from toolkit.planner.compiled import of_compiled, of_elementwise
from toolkit.planner.hardware import Hardware
from toolkit.planner.loader import loader_workers
from toolkit.planner.memory.device import memory
from toolkit.planner.memory.host import disk, host
from toolkit.planner.memory.serving import cache_of, serving
from toolkit.planner.notes import notes_of, require_quantized
from toolkit.planner.plan import Answer, Disk, Fit, Host, Memory, Plan
from toolkit.planner.ranges import less_sure, slower_or_faster, up_to
from toolkit.planner.speed.stages import stage_layers
from toolkit.planner.speed.work import micro_load, work
from toolkit.planner.trace import store
from toolkit.planner.trace.setting import Setting, setting_of
from toolkit.planner.trace.store import Tracing
from toolkit.planner.trace.types import Trace
from toolkit.planner.workload import Workload
from toolkit.recipe import Recipe, compilation, model_configs, prefixes
from toolkit.recipe.precisions import FP8_SCALING
from toolkit.recipe.teaching import of_teacher


@dataclasses.dataclass(frozen=True)
class Question:
    """What `estimate` is asked; the setting and the hardware vary while better ones are looked for."""

    name: str
    overrides: Sequence[str]
    price: float | None
    config: Mapping[str, Any]
    statistics: DataStatistics | None
    tracing: Tracing
    context: int | None = None
    teachers: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    """Configs of teachers that have been asked for."""

    def plan(self, recipe: Recipe, hardware: Hardware, may_trace: bool = False) -> Plan | None:
        """See `search.Estimate`."""
        layout, device = batch_layout(recipe, hardware.devices), hardware.device
        backend, why = self._attention(recipe, hardware)
        counted = self._counted(recipe, backend, layout)
        per_row, longest = self._fullest(recipe, layout, backend)
        fullest = dataclasses.replace(layout, seq_len=per_row)
        setting = setting_of(recipe, self.config, device.kind, backend, fullest)

        def find(setting: Setting) -> Trace | None:
            return store.obtain(setting, self.tracing) if may_trace else store.find(setting)

        # Uncompiled, products in fp8 keep what those in bf16 do.
        in_layers = dataclasses.replace(setting, products=FP8_SCALING.get(recipe.precision, ""))
        trace = find(setting) or store.find(setting.in_bf16())
        if trace is None:
            return None
        if (recipe.prefers or recipe.reinforces) and not recipe.headed:
            trace = trace.scored_twice()
        require_quantized(recipe, trace)
        taught = self._teacher(recipe, hardware, backend, layout, fullest, may_trace)
        if taught is None and of_teacher(recipe):
            return None
        heads = model_configs.attention_widths(self.config)
        workload = Workload(recipe, layout, hardware, trace, heads=heads, teacher=taught)
        experts = model_configs.experts(self.config)
        if recipe.writes:
            workload = dataclasses.replace(workload, cache=cache_of(self.config, trace.whole(), longest))
        if layout.pipeline > 1:
            load = micro_load(recipe, layout, counted, backend)
            balanced = bool(model_configs.text_config(self.config).get("router_aux_loss_coef"))
            workload = dataclasses.replace(
                workload,
                stages=stage_layers(workload, load, experts),
                routed=experts[0] if balanced and experts[0] > 1 else 0,
                usual=min(1.0, load.padded / (layout.in_sequences.micro_batch_size * per_row)),
            )
        kept = None
        if recipe.activation_checkpointing.mode == "elementwise":
            known = of_elementwise(trace, in_layers, device, find)
            if known is None:
                return None
            kept, again = known
            workload = dataclasses.replace(workload, written_again=again)
        drives = disk(workload)
        worked = functools.partial(
            work,
            counted=counted,
            price=self.price,
            attention=backend,
            experts=experts,
            drives=drives,
            may_compile=kernels.may_compile(hardware) and not compilation.unfit(recipe, self.config),
        )
        done, uncompiled = worked(workload), ""
        if done.compile_seconds and hardware.lacks:
            uncompiled = kernels.UNCOMPILED + hardware.lacks
            done = worked(dataclasses.replace(workload, recipe=recipe.with_values({"compile": "off"})))
        compiles = "layers" if done.compile_seconds else "off"
        if kept is None:
            kept = of_compiled(trace, in_layers, device, find) if compiles == "layers" else trace
        workers, chosen = recipe.data.num_workers, {}
        if workers == "auto":
            workers, takes = loader_workers(recipe, layout, hardware, done)
            chosen["data.num_workers"] = f"{workers}: {takes}"
        targets = counted.longest_target if counted else None
        largest = dataclasses.replace(
            workload,
            layout=fullest,
            teacher=taught and dataclasses.replace(taught, layout=fullest, longest=longest),
            trace=kept,
            longest=longest,
            target_len=targets and min(targets, longest),
            keys_again=_keys_again(counted, layout),
            evaluation_len=max(fullest.seq_len, self._evaluated(recipe, layout, backend)),
            recipe=recipe.with_values({"compile": compiles, "data.num_workers": workers}),
        )
        ranks, ram = memory(largest), host(largest)
        if counted and counted.sample:
            full = dataclasses.replace(largest, layout=layout, target_len=None, evaluation_len=None)
            # At the peak of full rows, which may be another, ranks that differ here may be alike.
            most = memory(full)
            ranks = [up_to(each, most[min(place, len(most) - 1)]) for place, each in enumerate(ranks)]
        if trace.origin == "formulas":
            ranks, done = [less_sure(each) for each in ranks], slower_or_faster(done)
        return Plan(
            recipe=self.name,
            overrides=list(self.overrides),
            hardware=hardware.name,
            devices=hardware.devices,
            nodes=hardware.nodes,
            device_memory=hardware.device.memory,
            strategy=_strategy(recipe),
            attention=backend,
            micro_batch_size=layout.micro_batch_size,
            gradient_accumulation_steps=layout.gradient_accumulation_steps,
            global_batch_size=layout.global_batch_size,
            answers=layout.answers,
            texts=recipe.embeds,
            seq_len=layout.seq_len,
            sequence=layout.sharing,
            tensor=layout.tensor,
            expert=layout.expert,
            pipeline=layout.pipeline,
            stages=list(workload.stages),
            schedule=recipe.parallel.schedule if workload.stages else "",
            num_workers=workers,
            chosen=chosen,
            memory=ranks,
            host=ram,
            host_memory=hardware.node.ram,
            host_limit=hardware.node.ram_limit,
            disk=drives,
            fit=fit(hardware, ranks, ram, drives),
            work=done,
            serving=serving(recipe.method, self.config, trace.whole(), device.memory, self.context or layout.seq_len),
            advice=[],
            origin=trace.origin,
            notes=[
                *filter(None, [why, uncompiled, _shared(counted, layout)]),
                *notes_of(recipe, hardware, trace, done, self.config),
            ],
        )

    def _teacher(
        self, recipe: Recipe, hardware: Hardware, backend: str, layout: BatchLayout, fullest: BatchLayout, traces: bool
    ) -> Workload | None:
        """The teacher's forward passes over the student's micro-batches; None without one, or without a trace."""
        teaches = of_teacher(recipe)
        if teaches is None:
            return None
        config = self._config_of(teaches)
        setting = setting_of(teaches, config, hardware.device.kind, backend, fullest)
        trace = store.obtain(setting, self.tracing) if traces else store.find(setting)
        trace = trace or store.find(setting.in_bf16())
        if trace is None:
            return None
        return Workload(teaches, layout, hardware, trace, experts=model_configs.experts(config))

    def _counted(self, recipe: Recipe, backend: str, layout: BatchLayout) -> DataStatistics | None:
        """The figures of the data as it is computed."""
        counted = self.statistics
        if counted is None or (
            prefixes.are_shared(recipe, self.config, backend) and counted.begins_alike(layout.micro_batch_size)
        ):
            return counted
        return dataclasses.replace(counted, in_common=())

    def _attention(self, recipe: Recipe, hardware: Hardware) -> tuple[str, str]:
        teaches = of_teacher(recipe)
        taught_by = self._config_of(teaches) if teaches else None
        return kernels.backend(recipe, hardware, self.config, self.statistics, taught_by)

    def _config_of(self, teaches: Recipe) -> Mapping[str, Any]:
        """Of a teacher, which each setting asks for; that in a GGUF file takes a process a second to read."""
        model = teaches.model.model_copy(update={"attention": "auto"}).model_dump_json()
        if model not in self.teachers:
            self.teachers[model] = config_of(teaches)
        return self.teachers[model]

    def _backend(self, recipe: Recipe, hardware: Hardware) -> str:
        return self._attention(recipe, hardware)[0]

    def _fullest(self, recipe: Recipe, layout: BatchLayout, backend: str) -> tuple[int, int]:
        """Tokens of the fullest micro-batch, by which memory is planned, for each of its rows on average, and tokens of
        the longest row."""
        counted = self._counted(recipe, backend, layout)
        if counted is None:
            return layout.seq_len, layout.seq_len
        flat = backend in backends.VARLEN
        longest = min(layout.seq_len, math.ceil(counted.lengths(flat)[-1]))
        dealt = counted.dealt(layout.global_batch_size, layout.micro_batches, flat, layout.answers)
        per_row = min(longest, math.ceil(dealt.fullest / layout.in_sequences.micro_batch_size))
        return per_row, per_row if flat else longest

    def _evaluated(self, recipe: Recipe, layout: BatchLayout, backend: str) -> int:
        """Tokens of a row in an evaluation's first batch: the longest rows together, at most all that are held out."""
        counted, size = self.statistics, recipe.evaluation.batch_size or layout.micro_batch_size
        if counted is None:
            return layout.seq_len
        flat = backend in backends.VARLEN
        longest = counted.longest_held_out(flat)
        if recipe.refers:  # The reference is asked of all rows, the longest ones together.
            return math.ceil(max(longest, counted.lengths(flat)[-1]))
        length, answers = longest * min(1.0, counted.eval_rows / size), layout.answers
        return math.ceil(min(length, counted.eval_tokens / size / answers) if flat else length)

    def batches(self, recipe: Recipe, hardware: Hardware) -> list[str]:
        """A note on what other micro-batches of the data need; empty where it is not known or all are alike."""
        counted, layout = self.statistics, batch_layout(recipe, hardware.devices)
        if counted is None or recipe.data.packing:
            return []
        flat, size = self._backend(recipe, hardware) in backends.VARLEN, layout.in_sequences
        dealt = counted.dealt(layout.global_batch_size, layout.micro_batches, flat, layout.answers)
        per_row = counted.mean_length / layout.answers if flat else dealt.tokens / size.micro_batch_size
        most = counted.lengths(flat)[-1]
        lengths = (per_row if flat else min(per_row, most), most)
        needs = []
        for length in lengths:
            plan = dataclasses.replace(self, statistics=counted.alike(length)).plan(recipe, hardware)
            if plan is None:  # Another trace would take seconds, for no more than a note.
                return []
            needs.append(f"{bytes_text(plan.memory[0].total.value)} for rows of {math.ceil(length):,} tokens")
        decides = "the fullest that an epoch is expected to have decides"
        return [f"a typical micro-batch needs {needs[0]}, the longest rows together {needs[1]}; {decides}"]

    def lengths(self, recipe: Recipe, hardware: Hardware, plan: Plan) -> str:
        """What its plan takes the rows' lengths to be where not all were counted; see `Plan.lengths`."""
        if self.statistics:
            sample = self.statistics.sample
            return f"row lengths are from {sample}; memory's range reaches to full rows" if sample else ""
        if recipe.data.packing or recipe.batch.seq_len == 1:
            return ""
        shorter = recipe.batch.seq_len // 2
        until = "" if recipe.data.streaming else ", until `toolkit data` has counted them"
        full = f"rows are taken to be full, {recipe.batch.seq_len:,} tokens{until}"
        sizes = {"batch.tokens_per_step": None, "batch.global_batch_size": recipe.batch.sequences_per_step}
        other = self.plan(recipe.with_values({"batch.seq_len": shorter, **sizes}), hardware)
        if other is None:  # As in `batches`.
            return full
        share = other.work.step_seconds.value / plan.work.step_seconds.value
        return f"{full}; rows of {shorter:,} need {bytes_text(other.memory[0].total.value)} and {share:.0%} of the time"


def config_of(recipe: Recipe) -> Mapping[str, Any]:
    """The config of a recipe's model, wherever it is.

    Raises:
        UserError: If it cannot be read.
    """
    return model_configs.config_of(recipe.model) or store.config_of(recipe)


def fit(hardware: Hardware, ranks: Sequence[Memory], ram: Host, drives: Disk) -> Fit:
    """Whether all fits; the scarcest place decides."""
    fullest = ranks[0]
    parts = fullest.parts_at_peak()
    part = max(parts, key=lambda key: parts[key])

    def into(where: str, available: int, needed: int, decides: str, worst: float = 0.0) -> Fit:
        answer: Answer = "no" if needed > available else "tight" if worst > available else "yes"
        margin = available - needed
        return Fit(answer=answer, where=where, needed=needed, available=available, margin=margin, decides=decides)

    if hardware.device.kind == "cpu":
        # Processes on a CPU share the host's memory, in which their tensors are counted already.
        worst = ram.peak * fullest.total.high / fullest.total.value
        fits = [into("host RAM", hardware.device.memory, ram.peak, part, worst)]
    else:
        needed, largest = int(fullest.total.value), max(ram.parts, key=lambda key: ram.parts[key])
        fits = [into("device memory", hardware.device.memory, needed, part, fullest.total.high)]
        fits.append(into("host RAM", hardware.node.ram, ram.peak, largest))
    if hardware.node.nvme_bytes is not None:
        fits.append(into("NVMe", hardware.node.nvme_bytes, drives.nvme, "optimizer"))
    return max(fits, key=lambda each: (("yes", "tight", "no").index(each.answer), each.needed / each.available))


def _shared(counted: DataStatistics | None, layout: BatchLayout) -> str:
    """A note on beginnings that are computed once; empty where there are none."""
    rows = layout.micro_batch_size
    share = counted.shared(rows) / (rows * counted.mean_length) if counted else 0.0
    return f"{share:.0%} of the tokens begin conversations alike and are computed once" if share else ""


def _keys_again(counted: DataStatistics | None, layout: BatchLayout) -> float:
    """See `Workload.keys_again`: each beginning is there once more than it is left out."""
    rows = layout.micro_batch_size
    documents = rows * counted.documents / counted.rows if counted else 1.0
    return float(counted.shared(rows)) * documents / (documents - 1) if counted and documents > 1 else 0.0


def _strategy(recipe: Recipe) -> str:
    strategy = recipe.strategy
    places = {"optimizer": strategy.offload_optimizer, "parameters": strategy.offload_param}
    return ", ".join([strategy.name, *(f"{part} on {place}" for part, place in places.items() if place != "none")])
