"""`toolkit sweep`: which runs, in which folders; what goes on after a kill; what is refused before anything starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import environment, losses
from small import place_with

from toolkit.cli.jobs import shares
from toolkit.cli.main import main
from toolkit.cli.sweep import PAGE, trials
from toolkit.common import UserError
from toolkit.distributed.layout import World
from toolkit.report.load import read_manifest

place = place_with("llama")

ASKED = ("recipe=small", "schedule.max_steps=1")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "toolkit", "sweep", *ASKED, *arguments]


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_runs_are_checked_with_the_devices_of_the_folder_that_was_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(world: World, folder: str, environment: dict[str, str]) -> None:
        raise UserError(f"devices of {folder}")

    monkeypatch.setattr("toolkit.planner.launch.launched_on", asked)
    shutil.copytree(place / "recipes", place / "mine")
    (trial,) = trials([*ASKED, "strategy=auto", "seed=1,1"], "mine")
    (share,) = shares(1, None)
    with pytest.raises(UserError, match="devices of mine"):
        share.cluster(trial.loaded)


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (
            ["learning_rate=1e-4,2e-4", "seed=range(1,3)"],
            [f"learning_rate-{rate}_seed-{seed}" for rate in ("1e-4", "2e-4") for seed in (1, 2)],
        ),
        (["method=choice(lora,full)"], ["method-lora", "method-full"]),
        (
            ["method=lora", "method.target_modules=[q_proj],[k_proj,v_proj]"],
            ["target_modules-q_proj", "target_modules-k_proj-v_proj"],
        ),
        (["seed=1,1,2"], ["seed-1", "seed-2"]),
    ],
)
def test_every_combination_is_a_run_of_its_own(arguments: list[str], runs: list[str]) -> None:
    found = trials([*ASKED, *arguments])
    assert [each.folder for each in found] == [Path("runs/small-sweep") / name for name in runs]


def test_values_reach_the_recipe() -> None:
    found = trials([*ASKED, "optimizer.learning_rate=1e-4,2e-4", "output.name=mine", "output.dir=elsewhere/here"])
    assert [each.loaded.recipe.optimizer.learning_rate for each in found] == [1e-4, 2e-4]
    assert found[1].folder == Path("elsewhere/here/mine-sweep/learning_rate-2e-4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seed=1"], ["no key has several values", "learning_rate=1e-4,2e-4"]),
        (["learning_rate=interval(1e-5,1e-3)"], ["interval", "write the values"]),
        (["seed=1,2", "seed=3,4"], ["seed is written twice"]),
        (["learning_rate=1e-4,2e-4", "optimizer.learning_rate=3e-4"], ["optimizer.learning_rate is written twice"]),
        (["learning_rate=0.001,1e-3"], ["learning_rate=0.001 and learning_rate=1e-3 are the same training"]),
        (["optimizer=adamw,sgd", "optimizer.name=lion,adafactor"], ["optimizer=sgd optimizer.name=lion are the same"]),
        (["learning_rate=1e-4,-1", "seed=1,2"], ["learning_rate=-1 seed=1", "learning_rate=-1 seed=2", "nothing was"]),
        (["seed=1,2", "checkpoint.resume=never"], ["checkpoint.resume=auto"]),
    ],
)
def test_what_cannot_be_swept_is_said_before_anything_starts(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        trials([*ASKED, *arguments])
    for word in words:
        assert word in str(caught.value), word
    assert not Path("runs").exists()


def test_seeds_that_hold_out_different_rows_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def warned(*arguments: str) -> bool:
        caplog.clear()
        trials([*ASKED, *arguments])
        return "set data.eval_seed=1" in caplog.text

    assert warned("seed=1,2", "data.eval_split=0.5") and warned("seed=1,2", "data={eval_split: a, eval_max_samples: 1}")
    assert warned("data.eval_seed=1,2", "data.eval_split=0.5")
    assert not warned("seed=1,2", "data.eval_split=0.5", "data.eval_seed=1")
    assert not warned("learning_rate=1e-4,2e-4", "data.eval_split=0.5") and not warned("seed=1,2", "data.eval_split=a")


def test_what_is_printed_trains_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *ASKED, "seed=1,2", "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"toolkit launch recipe=small schedule.max_steps=1 seed={seed} "
        f"output.dir=runs/small-sweep output.name=seed-{seed}"
        for seed in (1, 2)
    ]


@pytest.mark.parametrize(
    ("rates", "seeds", "ended"),
    [
        pytest.param("1e-3,2e-3", "1", 1, marks=pytest.mark.slow),
        pytest.param("1e-3,2e-3,3e-3", "1,2,3", 4, marks=pytest.mark.matrix),
    ],
    ids=["two", "nine"],
)
def test_runs_killed_half_way_go_on_where_they_were(rates: str, seeds: str, ended: int, place: Path) -> None:
    count = len(rates.split(",")) * len(seeds.split(","))
    asked = command(f"learning_rate={rates}", f"seed={seeds}", "precision=auto", f"output.dir=killed-{count}")
    folder = place / f"killed-{count}" / "small-sweep"
    first = subprocess.Popen(asked, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done: list[Path] = []
    while len(done) < ended and first.poll() is None:
        time.sleep(0.2)
        done = [each for each in folder.glob("*/") if read_manifest(each)[0].status == "finished"]
    os.kill(first.pid, signal.SIGKILL)
    assert len(done) == ended, first.communicate()[0].decode()
    first.wait()
    before = {each: (each / "final").stat().st_mtime_ns for each in done}

    again = subprocess.run(asked, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    runs = sorted(folder.glob("*/"))
    assert len(runs) == count and all(read_manifest(each)[0].status == "finished" for each in runs)
    before_this = re.findall(r"run (\d+) of \d+, .*: finished before", again.stderr)
    assert len(before_this) >= ended and before_this == sorted(before_this)
    assert {each: (each / "final").stat().st_mtime_ns for each in done} == before
    assert len({tuple(losses(each)) for each in runs}) == len(seeds.split(",")), (
        "the first step's loss depends on the seed alone"
    )
    assert "learning_rate" in again.stdout and (folder / PAGE).is_file()

    changed = subprocess.run([*asked, "batch.seq_len=64"], env=environment(), capture_output=True, text=True)
    assert changed.returncode != 0 and "holds another run" in changed.stderr and "seq_len" in changed.stderr


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("sent", ["SIGTERM", "SIGHUP"])
def test_a_sweep_that_is_stopped_ends_with_the_code_of_that(
    sent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the training saves, and ends well; the next one is not started."""
    training = (
        f"import os, signal, sys, time\nsignal.signal(signal.{sent}, lambda *_: sys.exit(0))\n"
        f"os.kill(os.getppid(), signal.{sent})\ntime.sleep(30)"
    )
    monkeypatch.setattr("toolkit.cli.launch.line", lambda *_: [sys.executable, "-c", training])
    assert main(["sweep", *ASKED, "seed=5,6", "output.name=stopped"]) == 128 + signal.Signals[sent]
    assert [line for line in capsys.readouterr().err.splitlines() if line] == ["[sweep] run 1 of 2, seed-5"]


def test_a_run_that_fails_does_not_stop_the_others(place: Path) -> None:
    Path("broken.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    asked = command("data.sources=[broken.jsonl],[chat.jsonl]", "output.dir=failing", "--parallel", "2")
    done = subprocess.run(asked, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "1 of 2 runs failed" in done.stderr and "the same command tries them again" in done.stderr
    folder = place / "failing" / "small-sweep"
    statuses = {read_manifest(each)[0].status for each in folder.glob("*/")}
    assert "finished" in statuses
    # Trainings that run at once do not write over each other in the terminal.
    (log,) = folder.glob("*broken*.log")
    assert "broken.jsonl" in log.read_text() and "broken.jsonl:1" not in done.stderr
