"""Reads a run folder as far as possible, also that of a run that was killed, is still running or is damaged.

Every file is checked against a typed model. What does not fit, because a disk was full or another version wrote it, is
left out and named in `Record.problems`: a person who looks for what went wrong must get a page, not a second error.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from toolkit.cache import LOCK, is_held
from toolkit.data.auditing.audit import Audit
from toolkit.data.rows import Sample
from toolkit.files import read_file
from toolkit.report import evaluation, held_out_rows
from toolkit.report.held_out_rows import Estimate, HeldOutRows, RowLosses
from toolkit.report.manifest import Manifest

Read = TypeVar("Read", bound=BaseModel)


WARM_UP_STEPS = 2
"""The first steps of a training, which are slower than the others."""


@dataclass(frozen=True)
class Speed:
    """What steps took; figures that are no percentiles of time are medians.

    Args:
        median: Seconds that half of the steps do not exceed; `p90` and `p99` are those of 90% and 99%.
        trained_tokens: Tokens with a label, per second.
        flops: Of the model, per second, see `Work.model_flops_per_step`.
        mfu: The same as a share of the devices' dense peak, see `Work.mfu`.
        data_wait: Share of a step in which the first process waited for its batches.
    """

    median: float
    p90: float
    p99: float
    trained_tokens: float | None
    flops: float | None
    mfu: float | None
    data_wait: float | None


@dataclass
class Record:
    """The readable contents of a run folder; what is missing or unreadable is empty and named in `problems`."""

    folder: Path
    manifest: Manifest = field(default_factory=Manifest)
    training: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of training steps, by rising step."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of evaluations, by rising step."""
    audit: Audit | None = None
    samples: list[Sample] = field(default_factory=list)
    asked: evaluation.Evaluation = field(default_factory=evaluation.Evaluation)
    """What `toolkit evaluate` found, after training."""
    held_out_rows: HeldOutRows | None = None
    recipe: str = ""
    problems: list[str] = field(default_factory=list)
    held: bool = True
    """Whether a process trains in the folder; only known of one that says so itself."""

    @property
    def status(self) -> str:
        """What the manifest says; `stopped` where it says that it runs, and no process does."""
        status = self.manifest.status or "unknown"
        return "stopped" if status == "running" and not self.held else status

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.manifest.name or self.folder.resolve().name

    @property
    def result(self) -> dict[str, Any] | None:
        """The evaluation of the published model: the last one of what has been trained, unless the manifest names its
        step."""
        chosen = self.manifest.published
        rows = [row for row in self.evaluations if (row["step"] == chosen.step if chosen else row["step"] > 0)]
        return rows[-1] if rows else None

    @property
    def row_losses(self) -> RowLosses | None:
        """Losses of held-out rows in the evaluation that is the result; None if they are not known."""
        return self.held_out_rows.of(self.result) if self.held_out_rows else None

    @property
    def change(self) -> Estimate | None:
        """Change of the held-out loss since before training, on the same rows; None if it is not known."""
        before = next((row for row in self.evaluations if row["step"] == 0), None)
        if not self.held_out_rows or not self.row_losses:
            return None
        return self.row_losses.since(self.held_out_rows.of(before))

    @property
    def accuracy_of(self) -> str:
        """What `accuracy` is the share of."""
        return "classes told rightly" if self.audit and self.audit.classes else "answers preferred rightly"

    @property
    def peak_memory(self) -> tuple[str, float] | None:
        """What was measured (`GPU` or `host`) and its largest value in bytes, also after the last line of the
        metrics."""
        at_end, rows = self.manifest, self.training + self.evaluations
        if values := finite(rows, "device_memory_bytes"):
            return "GPU", max(*values, at_end.measured.allocated or 0 if at_end.measured else 0)
        if values := finite(rows, "memory_bytes"):
            return "host", max(*values, at_end.peak_memory_bytes or 0)
        return None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the steps, the first ones left out where there are others."""
        later, every = (finite(rows, "tokens_per_second") for rows in (self.training[WARM_UP_STEPS:], self.training))
        return statistics.median(later or every) if every else None

    @property
    def speed(self) -> Speed | None:
        """What steps took, the first ones left out where there are others; None for runs that did not note it."""
        rows = [row for row in self.training[WARM_UP_STEPS:] or self.training if finite([row], "step_seconds")]
        if not rows:
            return None
        times = sorted(finite(rows, "step_seconds"))
        keys = ("trained_tokens_per_second", "model_flops", "mfu", "data_wait")
        medians = (statistics.median(values) if (values := finite(rows, key)) else None for key in keys)
        return Speed(*(times[math.ceil(share * len(times)) - 1] for share in (0.5, 0.9, 0.99)), *medians)

    @property
    def train_seconds(self) -> float | None:
        """Duration from the manifest, or the time of the last metrics line."""
        seconds = self.manifest.train_seconds
        if seconds is None or not math.isfinite(seconds):
            seconds = max(finite(self.training + self.evaluations, "seconds"), default=None)
        return seconds


def read_run(folder: Path) -> Record:
    """Reads a run folder; never raises for what is in it.

    Example:
        `read_run(Path("runs/demo")).manifest.parameters.trainable`
    """
    manifest, problems = read_manifest(folder)
    training, evaluations = read_metrics(folder / "metrics.jsonl")
    audit = _checked(Audit, _read_json(folder / "audit.json", problems), "audit.json", problems)
    content = _read_json(folder / "samples.json", problems)
    content = content if isinstance(content, list) else [content]
    samples = [sample for row in content if (sample := _checked(Sample, row, "samples.json", problems))]
    content = _read_json(folder / evaluation.FILE, problems)
    asked = _checked(evaluation.Evaluation, content, evaluation.FILE, problems) or evaluation.Evaluation()
    content = _read_json(folder / held_out_rows.FILE, problems)
    rows = _checked(HeldOutRows, content, held_out_rows.FILE, problems)
    file = folder / "recipe.yaml"
    recipe = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    held = manifest.status != "running" or is_held(folder / LOCK)
    return Record(folder, manifest, training, evaluations, audit, samples, asked, rows, recipe, problems, held)


def read_manifest(folder: Path, raised: Container[int] = ()) -> tuple[Manifest, list[str]]:
    """Reads a run folder's manifest; a key that cannot be read is as if it were missing.

    Args:
        raised: Numbers of errors that are raised, where a manifest that cannot be read is not as if it were empty.

    Returns:
        The manifest, empty if there is none, and what is wrong with it.
    """
    problems: list[str] = []
    content = _read_json(folder / "manifest.json", problems, raised)
    if not isinstance(content, dict):
        return _checked(Manifest, content, "manifest.json", problems) or Manifest(), problems
    try:
        return Manifest.model_validate(content), problems
    except ValidationError as error:
        # A key that is no text, such as half a character, is an error of the whole.
        unreadable = dict.fromkeys(key for each in error.errors() for key in each["loc"][:1] or content)
    problems.append(
        f"manifest.json holds what this version cannot read, and it is left out: {', '.join(map(str, unreadable))}"
    )
    return Manifest.model_validate({key: content[key] for key in content.keys() - unreadable.keys()}), problems


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
                row = parse_row(line)
                step = number(row.get("step"))
                if step is None or not math.isfinite(step):
                    continue
                row["step"] = step = int(step)
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


def parse_row(line: str | bytes) -> dict[str, Any]:
    """A line of `metrics.jsonl`, its numbers that are not finite as such; empty if it is damaged."""
    try:
        row = json.loads(line, parse_int=_whole)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(row, dict):
        return {}
    return {key: float(value) if value in ("NaN", "Infinity", "-Infinity") else value for key, value in row.items()}


def _whole(digits: str) -> float:
    """A whole number; one that no float can hold is infinite."""
    return int(digits) if len(digits) < 300 else float(digits)


def _read_json(file: Path, problems: list[str], raised: Container[int] = ()) -> Any:
    """Content of a JSON file; None where there is none."""
    try:
        return json.loads(read_file(file).decode("utf-8", "replace"), parse_int=_whole)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in raised:
            raise
        problems.append(f"{file.name} cannot be read: {error}")
        return None


def _checked(kind: type[Read], content: Any, name: str, problems: list[str]) -> Read | None:
    if content is None:
        return None
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        problems.append(f"{name} cannot be read: {f'{place}: ' if place else ''}{first['msg']}")
        return None
