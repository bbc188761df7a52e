"""Reads what a run left in its folder, as far as it goes if the run was killed, goes on or is damaged."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Record:
    """The readable contents of a run folder; what is missing or unreadable is empty and named in `problems`."""

    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    training: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of training steps, by rising step."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of evaluations, by rising step."""
    audit: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    recipe: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def peak_memory(self) -> tuple[str, float] | None:
        """What was measured (`GPU` or `host`) and its largest value in bytes."""
        for key, device in (("device_memory_bytes", "GPU"), ("memory_bytes", "host")):
            values = finite(self.training + self.evaluations, key)
            if values:
                return device, max(values)
        return None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the steps."""
        values = finite(self.training, "tokens_per_second")
        return statistics.median(values) if values else None

    @property
    def train_seconds(self) -> float | None:
        """Duration from the manifest, or the time of the last metrics line."""
        seconds = number(self.manifest.get("train_seconds"))
        if seconds is None or not math.isfinite(seconds):
            seconds = max(finite(self.training + self.evaluations, "seconds"), default=None)
        return seconds

    def section(self, key: str) -> dict[str, Any]:
        """A mapping of the manifest, empty if it is missing or something else."""
        value = self.manifest.get(key)
        return value if isinstance(value, dict) else {}


def read_run(folder: Path) -> Record:
    """Reads a run folder; never raises for what is in it."""
    record = Record(folder)
    manifest = _read_json(record, "manifest.json", {})
    audit = _read_json(record, "audit.json", {})
    samples = _read_json(record, "samples.json", [])
    record.manifest = manifest if isinstance(manifest, dict) else {}
    record.audit = audit if isinstance(audit, dict) else {}
    record.samples = [row for row in samples if isinstance(row, dict)] if isinstance(samples, list) else []
    recipe = folder / "recipe.yaml"
    if recipe.is_file():
        record.recipe = recipe.read_text(encoding="utf-8", errors="replace")
    record.training, record.evaluations = read_metrics(folder / "metrics.jsonl")
    return record


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training and the evaluation lines of a metrics file, each step once.

    A line cut off by a kill is skipped. When training goes back to an earlier step (it was resumed), everything
    measured after that step belongs to a past that was thrown away, and is dropped.
    """
    training: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                row = _parse(line)
                step = number(row.get("step"))
                if step is None or not math.isfinite(step):
                    continue
                step = int(step)
                if "eval_loss" in row:
                    evaluations[step] = row
                elif "loss" in row:
                    if training and step <= next(reversed(training)):
                        training = {key: value for key, value in training.items() if key < step}
                        evaluations = {key: value for key, value in evaluations.items() if key <= step}
                    training[step] = row
    return list(training.values()), [evaluations[step] for step in sorted(evaluations)]


def number(value: Any) -> float | None:
    """A float, also from the strings that stand for NaN and infinity in strict JSON; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def finite(rows: list[dict[str, Any]], key: str) -> list[float]:
    """The finite values of one metric."""
    values = (number(row.get(key)) for row in rows)
    return [value for value in values if value is not None and math.isfinite(value)]


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _read_json(record: Record, name: str, missing: Any) -> Any:
    path = record.folder / name
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError) as error:
        record.problems.append(f"{name} cannot be read: {error}")
        return missing
