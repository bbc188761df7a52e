"""FLOPs, tokens, time and money of a run.

FLOPs are those of the traced operations, not 6 N D, which leaves out attention and counts experts that no token meets;
the rule stands beside them. Tokens are counted from prepared data where it is there. Seconds come from `step`, at the
best guess and at both ends of what is expected of the hardware.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from itertools import zip_longest

from toolkit.data.statistics import DataStatistics, Dealt
from toolkit.distributed.layout import BatchLayout, Length, answered_at_once, run_length
from toolkit.models.attention.backends import VARLEN
from toolkit.planner.hardware import DOCUMENTS, End, Hardware
from toolkit.planner.pipeline import processes
from toolkit.planner.plan import Disk, Link, Range, Work
from toolkit.planner.speed.communication import Transfer, link_rate, transfers
from toolkit.planner.speed.step import OPPOSITE, Step, peak_dtype
from toolkit.planner.trace.types import Amount, Pass, Trace
from toolkit.planner.workload import Load, Workload
from toolkit.recipe import Recipe

PFLOP_DAY = 1e15 * 86400
COMPILE_SECONDS = {"value": 20.0, "low": 5.0, "high": 60.0}
"""What compiling the layers takes, once: 13 s for each graph on an H100's host of 16 cores (LoRA on 1.2B and 8B); less
where the cache knows them, more where layers differ."""
COMPILE_SECONDS_ON_CPU = {"value": 30.0, "low": 3.0, "high": 90.0}
"""Seconds to compile on a CPU: 29 s of processor time for SmolLM2-135M on two cores with AVX2, 3 s if cached."""
CHINCHILLA = 20
"""Training tokens per parameter at which a budget of compute is spent best (Hoffmann et al. 2022)."""


def work(
    workload: Workload,
    counted: DataStatistics | None = None,
    price: float | None = None,
    *,
    attention: str,
    experts: tuple[int, int] = (1, 1),
    drives: Disk | None = None,
    may_compile: bool = False,
) -> Work:
    """Everything of a plan that is not memory.

    Args:
        counted: Of its data; without it full sequences are assumed.
        price: Of a device-hour.
        attention: Backend as it will run.
        experts: See `model_configs.experts`.
        drives: Bytes of its checkpoints and models; without them none are counted.
        may_compile: Whether `compile: auto` may come to `layers`.
    """
    recipe, layout, hardware, trace = workload.recipe, workload.layout, workload.hardware, workload.trace
    load = micro_load(recipe, layout, counted, attention)
    ranks = layout.world_size * layout.gradient_accumulation_steps
    tokens = load.tokens * ranks / layout.tensor / layout.pipeline
    whole = trace.whole()
    parameters = whole.elements()
    useful, done = flops(recipe, trace, load, workload.passes_before)
    if workload.teacher:
        done += _executed(workload.teacher.trace, "evaluation", load)
    boundary = trace.boundary.of(trace.layers, load.padded, load.grid, load.longest)
    workload, sent = _slowest(workload, load, boundary, experts)
    known = counted or recipe.schedule.max_steps
    length = run_length(recipe, counted.rows if counted else None, layout) if known else None
    steps = length.total_steps if length else None
    ends = {end: Step(workload, load, sent, end, experts) for end in OPPOSITE}
    compiling = COMPILE_SECONDS_ON_CPU if hardware.device.kind == "cpu" else COMPILE_SECONDS
    compiles = recipe.compiles_layers
    if not compiles and recipe.compile == "auto" and may_compile:
        layers = dataclasses.replace(workload, recipe=recipe.with_values({"compile": "layers"}))
        compiled = {end: Step(layers, load, sent, end, experts) for end in OPPOSITE}
        saved = ends["value"].seconds - compiled["value"].seconds
        # Runs of unknown length are taken to be long enough.
        if compiles := steps is None or steps * saved > compiling["value"]:
            ends = compiled
    if not compiles:
        compiling = dict.fromkeys(compiling, 0.0)
    step = _range(ends, "seconds")
    drives = drives or Disk(checkpoint=0, kept=0, model=0, nvme=0)
    total = _total(ends, length, workload, counted, attention, drives, compiling) if length else None
    peak = hardware.device.flops[peak_dtype(workload)]
    from_scratch = recipe.objective == "language_modelling" and recipe.method.name == "full"
    hours = hardware.devices * total.value / 3600 if total else None
    power, grams = hardware.device.power, hardware.node.co2
    energy = hours * power / 1000 if hours is not None and power else None
    return Work(
        parameters=parameters,
        trained_parameters=whole.elements(trained=True),
        steps=steps,
        tokens_per_step=tokens,
        tokens=tokens * steps if steps else None,
        tokens_from="upper bound" if counted is None else "sampled" if counted.sample else "counted",
        model_flops_per_step=useful * ranks / layout.pipeline,
        hardware_flops_per_step=done * ranks / layout.pipeline,
        rule_flops_per_step=rule_flops(whole.met(experts), whole.met(experts, trained=True), tokens),
        links=_links(sent, hardware),
        compute_seconds=_range(ends, "compute"),
        communication_seconds=ends["value"].communication,
        contention_seconds=ends["value"].contention,
        offload_seconds=ends["value"].offload,
        bubble_seconds=ends["value"].bubble,
        step_seconds=step,
        generation_seconds=None if recipe.rollout.server else ends["value"].generation,
        compile_seconds=compiling["value"],
        saves=_saves(length) if length else 0,
        save_seconds=ends["value"].save_seconds(drives),
        snapshots=_snapshots(recipe, length) if length else 0,
        snapshot_seconds=ends["value"].snapshot_seconds(drives),
        total_seconds=total,
        tokens_per_second=tokens / step.value,
        mfu=useful * ranks / layout.pipeline / (step.value * peak * hardware.devices),
        pflop_days=useful * ranks / layout.pipeline * steps / PFLOP_DAY if steps else None,
        gpu_hours=hours,
        cost=hours * price if hours is not None and price is not None else None,
        cost_per_million_tokens=None if price is None else price * hardware.devices * 1e6 * step.value / tokens / 3600,
        energy_kwh=energy,
        co2_kg=energy * grams / 1000 if energy is not None and grams else None,
        chinchilla_tokens=CHINCHILLA * parameters if from_scratch else None,
    )


def _slowest(
    workload: Workload, load: Load, boundary: float, experts: tuple[int, int]
) -> tuple[Workload, list[Transfer]]:
    """The slowest process of a pipeline, and what it sends; without a pipeline, what every rank does."""
    every = [(each, transfers(each, boundary, load.padded, load.scored)) for each in processes(workload)]
    if len(every) == 1:
        return every[0]
    return max(every, key=lambda each: Step(each[0], load, each[1], experts=experts).seconds)


def flops(recipe: Recipe, trace: Trace, load: Load, passes_before: int = 0) -> tuple[float, float]:
    """FLOPs of a micro-batch that the model needs, and those that are executed.

    The first are what model FLOPs utilisation counts (Chowdhery et al. 2022, appendix B): no padding, nothing twice,
    attention within documents, of a causal mask's pairs the visible half, and of the output head's products those of
    trained tokens. The second have recomputed layers, padding, the pairs that the kernel does not skip, and what is
    passed over before (see `Workload.passes_before`). What a teacher computes is added to the second alone.
    """
    passes, layers, tokens = trace.passes, trace.layers, min(load.tokens, load.padded)
    share = load.scored / tokens
    # A decoder's mask hides half of the pairs. Of an encoder-decoder all are counted: most of it is not causal.
    pairs = load.within * (1.0 if recipe.objective == "seq2seq" else 0.5)
    useful = _once(passes).of(layers, tokens, load.within, load.longest, share)
    for name, sign in (("forward", 1), ("backward", 1), ("recompute", -1)):
        useful += sign * passes[name].attention.of(layers, tokens, pairs, load.longest)
    done = 0.0
    for name in ("forward", "backward", *["evaluation"] * passes_before):
        done += _executed(trace, name, load)
    return useful, done


def _executed(trace: Trace, name: str, load: Load) -> float:
    """FLOPs of a pass as they are executed."""
    each, layers = trace.passes[name], trace.layers
    done = each.matmul.of(layers, load.padded, load.grid, load.longest, load.scored / load.padded)
    return done + each.attention.of(layers, load.padded, load.attended, load.longest)


def _once(passes: Mapping[str, Pass]) -> Amount:
    """Products of a forward and a backward pass in which nothing is recomputed.

    Where embeddings are frozen, the gradient of what the first layer reads is formed only if layers are checkpointed;
    it counts either way, as each product of the forward pass has at least one in the backward pass.
    """
    parts = [passes[name].matmul for name in ("forward", "backward", "recompute", "evaluation")]
    outside = zip_longest(*(part.fixed for part in parts), fillvalue=0.0)
    inside = zip_longest(*(part.per_layer for part in parts), fillvalue=0.0)
    return Amount(
        fixed=tuple(max(there + back - again, 2 * once) for there, back, again, once in outside),
        per_layer=tuple(there + back - again for there, back, again, _ in inside),
        block=parts[0].block,
    )


def rule_flops(parameters: float, trained: float, tokens: float) -> float:
    """The rule of thumb C = 6 N D (Kaplan et al. 2020, section 2.1): per parameter and token 2 in the forward pass,
    2 for the gradient of its input, and 2 for its own gradient, which frozen parameters do not need. Of experts those
    count that a token meets."""
    return (4 * parameters + 2 * trained) * tokens


def micro_load(recipe: Recipe, layout: BatchLayout, counted: DataStatistics | None, backend: str) -> Load:
    """What a process has of a micro-batch on average; full sequences where the data has not been counted.

    Where processes share rows, each has a part of the tokens, and its heads' part of the pairs of all.
    """
    return _micro_load(recipe, layout, counted, backend).divided(layout.sharing)


def _micro_load(recipe: Recipe, layout: BatchLayout, counted: DataStatistics | None, backend: str) -> Load:
    size, length = layout.micro_batch_size, float(layout.seq_len)
    if counted is None:
        return load_of(recipe, backend, layout.answers * size, length, length**2)
    squared = counted.squared_tokens / counted.rows
    trained = counted.trained_tokens / counted.tokens
    dealt = counted.dealt(layout.global_batch_size, layout.micro_batches, backend in VARLEN, layout.answers)
    shared, documents = float(counted.shared(size)), size * counted.documents / counted.rows
    load = load_of(recipe, backend, size, counted.mean_length, squared, dealt, trained)
    return load.sharing(shared, shared / (documents - 1)) if shared else load


def load_of(
    recipe: Recipe,
    backend: str,
    size: int,
    mean: float,
    squared: float,
    dealt: Dealt | None = None,
    trained: float = 1.0,
) -> Load:
    """A batch of `size` sequences.

    Args:
        backend: Attention, resolved.
        mean: Tokens of a sequence.
        squared: Sum of the squares of the lengths of a sequence's documents.
        dealt: What there is with padding where the batch has rows; without it nothing is padded.
        trained: Share of the tokens that carry loss.
    """
    tokens, within = size * mean, size * squared
    padded, grid, longest = (dealt.tokens, dealt.grid, dealt.longest) if dealt else (tokens, size * mean**2, mean)
    attended, kernel, stretch = grid, "sdpa", longest
    if recipe.objective == "seq2seq":
        pass
    elif backend in VARLEN:
        padded, grid, attended = tokens, within, within / 2
        kernel, stretch = DOCUMENTS, within / tokens
    elif backend == "flex":
        attended = within / 2
    elif backend == "sdpa" and not recipe.data.packing and size == 1 == recipe.answers:
        # Where nothing is padded Transformers passes `is_causal`; a mask makes the kernel work through all pairs.
        attended = grid / 2
    # Targets are taken to be as long as their sources.
    scored = tokens if recipe.objective == "seq2seq" else tokens * trained
    return Load(tokens, padded, within, attended, grid, longest, scored, kernel, stretch)


def _links(sent: list[Transfer], hardware: Hardware) -> list[Link]:
    sizes: dict[str, float] = {}
    for each in sent:
        for name, size in each.sent.items():
            sizes[name] = sizes.get(name, 0.0) + each.times * size
    return [
        Link(name=name, bytes=round(size), seconds=size / link_rate(name, hardware))
        for name, size in sizes.items()
        if size
    ]


def _range(ends: Mapping[End, Step], name: str) -> Range:
    return Range(**{end: getattr(step, name) for end, step in ends.items()})


def _total(
    ends: Mapping[End, Step],
    length: Length,
    workload: Workload,
    counted: DataStatistics | None,
    backend: str,
    drives: Disk,
    compiling: Mapping[str, float],
) -> Range:
    """Compiling, steps, evaluations, the reference of DPO and KTO, checkpoints and kept models. Loading and answers to
    prompts are left out."""
    recipe, layout, steps = workload.recipe, workload.layout, length.total_steps
    settings = recipe.evaluation
    seconds = {end: steps * step.seconds for end, step in ends.items()}
    # Passes over rows without a backward pass: how often, over how many, of how many tokens.
    passes: list[tuple[int, float, float]] = []
    if counted and counted.eval_rows:
        # Before the first step, every so many steps, and at the end.
        evaluations = settings.at_start + (math.ceil(steps / settings.every_steps) if settings.every_steps else 1)
        passes.append((evaluations, counted.eval_rows, counted.eval_tokens))
    if counted and recipe.refers:
        # The reference, once of each row that is drawn.
        drawn = min(1.0, steps * layout.global_batch_size / counted.rows)
        number, tokens = drawn * counted.rows + counted.eval_rows, drawn * counted.tokens + counted.eval_tokens
        passes.append((1, number, tokens))
    if recipe.rollout.server:
        passes = []
    if recipe.reinforces and passes:
        # Each held-out prompt is answered once.
        ((times, number, tokens),) = passes
        assert counted is not None
        rows = answered_at_once(recipe, layout)
        prompt = max(1.0, tokens / number - recipe.rollout.max_completion_tokens)
        batches = times * math.ceil(number / rows / layout.data_parallel_size)
        at_once = math.ceil(min(rows, number))
        seconds = {end: seconds[end] + batches * each.generation_seconds(at_once, prompt) for end, each in ends.items()}
        passes = []
    if recipe.judges:
        # There, and when held-out rows are scored, the answers of other rows are as well.
        passes = [(2 * times, number, tokens) for times, number, tokens in passes]
    for times, number, tokens in passes:
        assert counted is not None
        rows = settings.batch_size or layout.micro_batch_size
        batches = times * math.ceil(number / rows / layout.data_parallel_size)
        mean = tokens / number / layout.answers
        # Never packed, and sorted by length, so that there is little padding.
        trained = counted.trained_tokens / counted.tokens
        load = load_of(recipe, backend, layout.answers * rows, mean, mean**2, trained=trained).divided(layout.sharing)
        seconds = {end: seconds[end] + batches * step.evaluation_seconds(load) for end, step in ends.items()}
    saves, kept = _saves(length), _snapshots(workload.recipe, length)
    return Range(
        **{
            end: compiling[end]
            + seconds[end]
            + saves * step.save_seconds(drives)
            + kept * step.snapshot_seconds(drives)
            for end, step in ends.items()
        }
    )


def _saves(length: Length) -> int:
    return (math.ceil(length.total_steps / length.save_steps) if length.save_steps else 0) + length.rehearses()


def _snapshots(recipe: Recipe, length: Length) -> int:
    """Models that are kept to be published, at most: each evaluation may be the best so far."""
    settings, every = recipe.checkpoint, recipe.evaluation.every_steps
    if settings.keep_best and every:
        return math.ceil(length.total_steps / every)
    return math.ceil(length.total_steps / length.save_steps) if settings.average_last and length.save_steps else 0
