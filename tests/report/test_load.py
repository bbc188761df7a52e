"""What a run left is read as it was written, and as far as it goes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from example_run import AUDIT, MANIFEST, SAMPLES, example_run
from pages import eval_line, step_line, write_metrics

from toolkit.common import in_background
from toolkit.report.load import read_manifest, read_metrics, read_run


def test_a_run_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = example_run(tmp_path / "demo")
    manifest, problems = read_manifest(run)
    assert not problems and manifest.model_dump(mode="json") == {
        **MANIFEST,
        "parameters": manifest.parameters.model_dump(),
    }
    record = read_run(run)
    assert record.audit.model_dump() == AUDIT and [sample.model_dump() for sample in record.samples] == SAMPLES


def test_a_line_cut_off_by_a_kill_is_skipped(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", step_line(1), step_line(2), end='{"step": 3, "loss": 1')
    training, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in training] == [1, 2]


def test_losses_that_were_not_finite_are_numbers_again(tmp_path: Path) -> None:
    """Also as files of before have them."""
    evaluated = eval_line(2, 0.0) | {"eval_loss": "Infinity"}
    write_metrics(tmp_path / "run", step_line(1, loss="NaN"), step_line(2, loss=math.nan), evaluated)
    record = read_run(tmp_path / "run")
    assert [f"{row['loss']:.1f}" for row in record.training] == ["nan", "nan"]
    assert record.evaluations[0]["eval_loss"] == math.inf


def test_after_a_resume_the_abandoned_steps_are_forgotten(tmp_path: Path) -> None:
    before = [step_line(1), step_line(2), eval_line(2, 3.0), step_line(3), step_line(4), eval_line(4, 2.0)]
    write_metrics(tmp_path / "run", eval_line(0, 4.0), *before, step_line(3, loss=0.5))
    record = read_run(tmp_path / "run")
    assert [(row["step"], row["loss"]) for row in record.training] == [(1, 3.99), (2, 3.98), (3, 0.5)]
    assert [row["step"] for row in record.evaluations] == [0, 2]


def test_what_cannot_be_read_is_named_in_the_same_order_every_time(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(
        json.dumps(dict.fromkeys(("plan", "hashes", "batch", "git", "versions"), 7))
    )
    _, (problem,) = read_manifest(tmp_path)
    assert problem.endswith("left out: versions, git, hashes, batch, plan")


def test_a_step_that_is_no_whole_number_is_read_as_one(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", step_line(1) | {"step": "1"}, eval_line(2, 3.0) | {"step": 2.0})
    record = read_run(tmp_path / "run")
    assert [row["step"] for row in record.training + record.evaluations] == [1, 2]


def test_percentiles_of_steps_leave_the_first_ones_out(tmp_path: Path) -> None:
    times = [100.0, 100.0, *(step / 100 for step in range(1, 101))]
    write_metrics(tmp_path / "run", *(step_line(step, step_seconds=time) for step, time in enumerate(times, 1)))
    speed = read_run(tmp_path / "run").speed
    assert speed and (speed.median, speed.p90, speed.p99) == (0.5, 0.9, 0.99)
    assert (speed.trained_tokens, speed.data_wait, speed.mfu) == (160.0, 0.01, 0.23)


def test_runs_that_did_not_time_their_steps_have_no_speed(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", {"step": 1, "loss": 2.0})
    assert read_run(tmp_path / "run").speed is None


def test_numbers_that_nothing_can_hold_are_left_out(tmp_path: Path) -> None:
    run = example_run(tmp_path / "demo", total_steps=10**400)
    manifest, problems = read_manifest(run)
    assert manifest.total_steps is None and manifest.name == MANIFEST["name"] and "total_steps" in problems[0]


def test_a_manifest_with_a_key_of_half_a_character_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "x", "\\ud800": 1}', encoding="ascii")
    manifest, problems = read_manifest(tmp_path)
    assert not manifest.name and "cannot read" in problems[0]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize(
    "name", ["manifest.json", "metrics.jsonl", "audit.json", "samples.json", "recipe.yaml", "held_out_rows.json"]
)
def test_what_is_no_file_is_not_waited_for(name: str, kind: str, tmp_path: Path) -> None:
    run = example_run(tmp_path / "demo")
    (run / name).unlink(missing_ok=True)
    {
        "pipe": os.mkfifo,
        "device": lambda place: place.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
    }[kind](run / name)
    record = in_background(lambda: read_run(run)).result(timeout=30)
    assert not record.problems or name in " ".join(record.problems)
