"""What a run takes over from the one that its folder holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness import losses, write_recipe
from small import RECIPE, populate

from toolkit.planner.hardware import find
from toolkit.planner.hardware.calibration import LAYERS_VERSION, path_of
from toolkit.recipe import Loaded, load
from toolkit.report.load import read_manifest
from toolkit.train.continued import as_begun
from toolkit.train.main import main


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a recipe `small`, whose precision is `auto`."""
    write_recipe(tmp_path, "small", RECIPE.replace("precision: fp32", "precision: auto"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(text: str, *, step: bool = True) -> Path:
    """The folder of a run that began with such a recipe."""
    folder = Path("runs/small")
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(text)
    (folder / "manifest.json").write_text("{}")
    if step:
        (folder / "metrics.jsonl").write_text("{}")
    return folder


def small(*overrides: str) -> Loaded:
    return load("small", list(overrides))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_precision_is_that_of_the_run_that_goes_on(precision: str) -> None:
    begun(f"precision: {precision}")
    found = as_begun(small())
    assert found.recipe.precision == precision and found.chosen["precision"] == f"{precision}: as this run began"
    assert "precision: auto" not in found.to_yaml()


@pytest.mark.parametrize(
    ("text", "step", "overrides", "precision"),
    [
        ("precision: bf16", False, [], "auto"),
        ("precision: bf16", True, ["checkpoint.resume=never"], "auto"),
        ("precision: bf16", True, ["precision=fp32"], "fp32"),
        ("precision: bf16", True, ["output.name=another"], "auto"),
        ("precision: [bf16]", True, [], "auto"),
        ("precision: {", True, [], "auto"),
        ("", True, [], "auto"),
    ],
    ids=["no step was taken", "begins anew", "is stated", "another folder", "no precision", "no YAML", "empty"],
)
def test_precision_is_not_taken_over(text: str, step: bool, overrides: list[str], precision: str) -> None:
    begun(text, step=step)
    found = as_begun(small(*overrides))
    assert found.recipe.precision == precision and not found.chosen


def measured(bf16: float) -> None:
    """Figures of this CPU: FLOP/s of matrix products."""
    file = path_of(find("cpu").device)
    layers = {"half": 10, "bandwidth": 1e10, "launch_seconds": 0.0001, "attention": {}}
    speeds = {"fp32": {**layers, "matmul": 1e11}, "bf16": {**layers, "matmul": bf16}}
    facts = {"device": "cpu", "title": find("cpu").device.title, "processes": 1, "date": "2026-01-01", "versions": {}}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**facts, "layers": speeds, "layers_version": LAYERS_VERSION}))


@pytest.mark.usefixtures("formulas")
def test_a_run_is_the_same_where_another_precision_has_become_faster(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(place / "cache"))
    populate(place, "llama")
    saving = "checkpoint: {save_steps: 1, rehearse: false}\n"
    write_recipe(place, "small", RECIPE.replace("precision: fp32", "precision: auto") + saving)
    measured(bf16=5e11)
    assert main(["recipe=small"]) == 0
    assert read_manifest(place / "runs" / "small")[0].chosen["precision"].startswith("bf16: computed 5 times")
    measured(bf16=1e10)
    assert main(["recipe=small"]) == 0
    assert "This run is finished" in capsys.readouterr().out
    whole = losses(run := place / "runs" / "small")
    stopped = json.loads((run / "manifest.json").read_text()) | {"status": "interrupted", "final": None}
    (run / "manifest.json").write_text(json.dumps(stopped))
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    assert main(["recipe=small"]) == 0
    assert losses(run) == whole and "precision=bf16: as this run began" in (said := capsys.readouterr()).out
    assert "another precision is faster" not in said.err
    assert main(["recipe=small", "output.name=later"]) == 0
    assert read_manifest(place / "runs" / "later")[0].chosen["precision"].startswith("fp32: ")
    assert main(["recipe=small", "output.name=slow", "precision=bf16"]) == 0
    assert "another precision is faster: this CPU multiplies 10 times as fast in fp32" in capsys.readouterr().err
