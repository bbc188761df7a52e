"""Runs trainings as a user would, in a folder of their own."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from toolkit.planner.hardware.calibration import LAYERS_VERSION, path_of
from toolkit.planner.hardware.detect import cpu
from toolkit.report.load import parse_row

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "toolkit" / "run.py"
SUPPORT = ROOT / "tests" / "support"


def write_recipe(folder: Path, name: str, text: str) -> None:
    """Writes `recipes/NAME.yaml` below a user's folder."""
    file = folder / "recipes" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Writes one JSON value per line and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    """All lines of a run's `metrics.jsonl`, as the toolkit reads them."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(map(strict_json, lines))
    return [parse_row(line) for line in lines]


def strict_json(text: str) -> Any:
    """What any reader of JSON reads, not only Python's, which takes bare `NaN` and `Infinity` too."""

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refused)


def losses(run: Path) -> list[float]:
    """Training loss by step."""
    return [row["loss"] for row in metrics(run) if "loss" in row]


def environment() -> dict[str, str]:
    """The environment of a fresh shell that can import this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


def untraced(setting: Any) -> Any:
    """Instead of `fit.trace`, which takes far longer than a tiny training: formulas plan it then."""
    raise NotImplementedError("only tests of the planner trace")


def leave_unmeasured(cache: Path) -> None:
    """Figures of this CPU without any figure in them: what plans would have measured first takes seconds."""
    device = cpu(1).device
    with patch.dict(os.environ, TOOLKIT_CACHE=str(cache)):
        file = path_of(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = f"title: {json.dumps(device.title)}, processes: 1, date: never, layers_version: {LAYERS_VERSION}"
    file.write_text(f"{{device: cpu, {facts}, versions: {{}}}}\n")


def compile_no_inference() -> None:
    """Keeps DeepSpeed from compiling, for a minute, an operation for inference on CPUs that no training calls."""
    # Of `deepspeed.comm`, the attribute `torch` is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
