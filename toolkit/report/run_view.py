"""What the report says of a run's data and machine, as sentences and small tables; the files hold every figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.common import bytes_text, compact, seconds_text
from toolkit.data.auditing.audit import Audit, Bucket, Lengths
from toolkit.report import plan_view
from toolkit.report.load import WARM_UP_STEPS, Record, Speed, number
from toolkit.report.manifest import Machine, Manifest
from toolkit.report.plan_view import flops_text, pipeline_text

Row = tuple[str, ...]


def source_rows(audit: Audit) -> list[Row]:
    """Name, format, rows read, rows used and share of the training rows of each source."""
    return [
        (
            each.path if each.split == "train" else f"{each.path} [{each.split}]",
            each.format,
            f"{each.rows:,}",
            f"{each.used_rows:,}" + (f" (each {each.repeats:.3g} times)" if each.repeats > 1 else ""),
            f"{each.share:.1%}" if each.role == "train" else "held out",
        )
        for each in audit.sources
    ]


def length_text(lengths: Lengths, longest: str) -> str:
    """Lengths of rows in a sentence; empty where they are not known."""
    figures = lengths.percentiles
    if not figures.keys() >= {"p50", "p99", "max"}:
        return ""
    return (
        f"Half of the rows have at most {figures['p50']:,} tokens, 99% at most {figures['p99']:,}, and the longest "
        f"{figures['max']:,} ({longest})."
    )


def bars(histogram: list[Bucket]) -> list[tuple[str, str, float]]:
    """Label, number of rows, and share of the largest number, for each range of lengths."""
    most = max((bucket.rows for bucket in histogram), default=0) or 1
    return [(f"{each.low:,}\N{EN DASH}{each.high:,}", f"{each.rows:,}", each.rows / most) for each in histogram]


STAGES = {
    "imports": "imports and checks",
    "data": "data",
    "plan": "the plan",
    "model": "loading the model",
    "evaluation": "answers and evaluation",
    "first_step": "the step itself",
}
"""See `startup.Stage`."""
_COUNTED = (
    "FLOPs are those of the model: of each token 6 for every parameter that it meets (4 where they are frozen), and of "
    "causal attention the visible half; padding and what is computed a second time do not count."
)


def speed_sentences(record: Record) -> list[str]:
    """How long the run took to start, how fast its steps were, and what it waited for."""
    texts, speed, stages = [], record.speed, record.manifest.start_up
    if stages:
        parts = ", ".join(f"{STAGES.get(name, name)} {seconds:.1f} s" for name, seconds in stages.items())
        texts.append(f"The first step had ended {sum(stages.values()):.1f} s after the process was started: {parts}.")
    if speed:
        left_out = f" (the first {WARM_UP_STEPS} steps are not counted)" * (len(record.training) > WARM_UP_STEPS)
        texts.append(f"{step_times(speed)}{left_out}.")
    if speed and speed.data_wait is not None:
        texts.append(f"Of that, {speed.data_wait:.1%} was waiting for batches.")
    if rates := token_rates(record):
        texts.append(f"{rates}.")
    if speed and speed.flops is not None:
        texts.append(_COUNTED)
    return [*texts, *_routing_sentences(record)]


def _routing_sentences(record: Record) -> list[str]:
    """How evenly the tokens of the newest steps were spread over a mixture's experts."""
    newest = record.training[-1] if record.training else {}
    keys = ("expert_load", "expert_load_worst", "idle_experts", "dropped_tokens", "process_load")
    load, worst, idle, dropped, process = (number(newest.get(key)) for key in keys)
    if load is None or worst is None or idle is None:
        return []
    text = f"In the newest steps the fullest expert of a layer met {load:.2f} times as many tokens as the mean of its "
    text += f"experts, {worst:.2f} times in the worst layer; {idle:.1%} of the experts met none"
    text += ", and no token was dropped." if dropped == 0 else "."
    if process is not None:
        text += f" The fullest of the processes that divide them computed {process:.2f} times the mean."
    return [text]


def straggler_text(found: Mapping[str, Any]) -> str:
    """A process that was slower than the others, of a row of `metrics.jsonl`; empty if the row is damaged."""
    keys = ("rank", "seconds", "others_seconds", "data_seconds", "others_data_seconds")
    rank, own, others, data, others_data = (number(found.get(key)) for key in keys)
    if rank is None or own is None or others is None or data is None or others_data is None:
        return ""
    text = f"rank {rank:.0f} ({found.get('host')}) holds the others up: a step takes it {seconds_text(own)} of its own "
    of_data = f", {seconds_text(data - others_data)} of that for its data" * (2 * (data - others_data) > own - others)
    return f"{text}work, the others {seconds_text(others)} (median){of_data}"


def step_times(speed: Speed) -> str:
    """Half, 90% and 99% of the steps."""
    half, most, nearly_all = map(seconds_text, (speed.median, speed.p90, speed.p99))
    return f"Half of the steps took at most {half}, 90% at most {most}, 99% at most {nearly_all}"


def token_rates(record: Record) -> str:
    """Tokens and FLOPs per second, and utilisation; empty where nothing was measured."""
    if record.tokens_per_second is None:
        return ""
    text, speed = f"{compact(record.tokens_per_second)} tokens a second", record.speed
    if speed and speed.trained_tokens is not None:
        text += f", {compact(speed.trained_tokens)} of them trained"
    if speed and speed.flops is not None and speed.mfu is not None:
        text += f": {flops_text(speed.flops)}/s, {speed.mfu:.1%} of the dense peak"
    return text


def machine_sentences(manifest: Manifest) -> list[str]:
    """What the run ran on, how a step was divided, how it computed, and from which code."""
    batch, machine, state, git = manifest.batch, manifest.hardware, manifest.effective, manifest.git
    texts = [_machine_text(machine)] if machine else []
    if batch:
        passes, size = batch.gradient_accumulation_steps, batch.micro_batch_size
        who = f" on each of {batch.world_size} processes" if batch.world_size > 1 else " on one process"
        together = batch.together * batch.pipeline
        if together > 1:
            ways = [("share them", batch.sharing), ("divide the layers", batch.tensor)]
            ways.append(("follow each other", batch.pipeline))
            what = " and ".join(way for way, size in ways if size > 1)
            who = f" on each of {batch.data_parallel_size} groups of {together} processes that {what}"
        if batch.expert > 1:
            which = "that" if batch.expert == batch.world_size else f"of which each {batch.expert}"
            who += f" {which} divide the experts"
        what, each = plan_view.rows_text(batch.answers, bool(manifest.plan and manifest.plan.texts))
        texts.append(
            f"A step is {batch.global_batch_size:,} {what} of up to {batch.seq_len:,} tokens{each}: {passes:,} "
            f"micro-batch{'es' if passes > 1 else ''} of {size}{who}."
        )
    if batch and batch.pipeline > 1 and manifest.plan:
        texts.append(f"As planned, its stages are {pipeline_text(manifest.plan)}.")
    if state and state.optimizer:
        engine = "without an engine" if state.engine in (None, "none") else f"under {state.engine}"
        compute = next((each for each in (state.autocast, state.compute_dtype) if each and each != "none"), None)
        attention = f", with {state.attention} attention" if state.attention else ""
        texts.append(
            f"It computed in {compute or state.trained_dtype} {engine}{attention}; {state.optimizer} updated "
            f"{state.master_dtype or state.trained_dtype} weights."
        )
    if git:
        texts.append(f"The code was commit {git.commit[:12]}{', with uncommitted changes' * git.dirty}.")
    return texts


def _machine_text(machine: Machine) -> str:
    cores = f"{machine.cpu_cores} cores" if machine.cpu_cores else "its cores"
    host = f"{cores} ({machine.cpu}) and {bytes_text(machine.ram_bytes)} of RAM"
    names = list(_gpus(machine))
    return f"It ran on {' and '.join(names)}, in a machine with {host}." if names else f"It ran on a CPU with {host}."


def _gpus(machine: Machine) -> Iterator[str]:
    """`8 NVIDIA H100 of 79.1 GiB` for each kind."""
    kinds = [(gpu.name, gpu.memory_bytes) for gpu in machine.gpus]
    for name, size in dict.fromkeys(kinds):
        yield f"{kinds.count((name, size))} {name} of {bytes_text(size)}"
