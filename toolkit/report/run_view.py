"""What the report says of a run's data and machine, as sentences and small tables; the files hold every figure."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.common import bytes_text
from toolkit.data.audit import Audit, Bucket, Lengths
from toolkit.report.load import Machine, Manifest

Row = tuple[str, ...]


def source_rows(audit: Audit) -> list[Row]:
    """Of each source: name, format, rows read, rows used, and its share of the training rows."""
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
    """Of each range of lengths: label, number of rows, and their share of the largest number."""
    most = max((bucket.rows for bucket in histogram), default=0) or 1
    return [(f"{each.low:,}\N{EN DASH}{each.high:,}", f"{each.rows:,}", each.rows / most) for each in histogram]


def machine_sentences(manifest: Manifest) -> list[str]:
    """What the run ran on, how a step was divided, how it computed, and from which code."""
    batch, machine, state, git = manifest.batch, manifest.hardware, manifest.effective, manifest.git
    texts = [_machine_text(machine)] if machine else []
    if batch:
        passes, size = batch.gradient_accumulation_steps, batch.micro_batch_size
        who = f" on each of {batch.world_size} processes" if batch.world_size > 1 else " on one process"
        texts.append(
            f"A step is {batch.global_batch_size:,} sequences of up to {batch.seq_len:,} tokens: {passes:,} "
            f"micro-batch{'es' if passes > 1 else ''} of {size}{who}."
        )
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
