"""A training that hangs ends, with the stacks of every process and the name of the one that holds the others up."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from ranks import ON_CPU, Ranks
from small import place_with, set_up

from toolkit.train.main import main

place = place_with("llama")
ENDLESS = ["recipe=small", "max_steps=4000", "batch.micro_batch_size=1"]

HANGS = """
import ctypes, os, threading, time
import cpu_engines
from toolkit.data.batching import collate
from toolkit.train import train
from toolkit.train.trainers import trainer
from toolkit.train.health import watchdog

def long():
    print("now", flush=True)
    while os.environ.get("HOLDS"):
        ctypes.PyDLL(None).sleep(600)  # Without letting go of Python's lock.
    time.sleep(600)

def main(arguments):
    what, (rank, seconds) = os.environ["HANGS"], os.environ["WHO"].split()
    mine = os.environ.get("RANK", "0") == rank
    if os.environ.get("LINGERS"):
        # Between both the hanging process ends, and the main thread's connection to it breaks.
        note, failed, noted_too = watchdog.Watchdog._note, train._failed, threading.Event()
        def noting(self, *args):
            note(self, *args)
            if not mine:
                noted_too.wait(4)
        def failing(*args):
            failed(*args)
            noted_too.set()
            time.sleep(60)
        watchdog.Watchdog._note, train._failed = noting, failing
    if what == "collective":
        loss = trainer._ExactMixin.compute_loss
        def compute_loss(self, *args, **kwargs):
            if mine and self.state.global_step == 2:
                long()
            return loss(self, *args, **kwargs)
        trainer._ExactMixin.compute_loss = compute_loss
    elif what in ("data", "slow"):
        make, calls = collate.Collator.__call__, []
        def collator(self, rows):
            calls.append(1)
            if mine and len(calls) == 20:
                long() if what == "data" else time.sleep(float(seconds))
            return make(self, rows)
        collate.Collator.__call__ = collator
    elif what == "disk":
        save = trainer._ExactMixin._save_checkpoint
        def save_checkpoint(self, *args):
            trainer.beat("saving the checkpoint of step 2")
            long() if mine else save(self, *args)
        trainer._ExactMixin._save_checkpoint = save_checkpoint
    return cpu_engines.main(arguments)
"""
LIMIT = 4
HANG = [f"faults.hang_minutes={LIMIT / 60}", "data.num_workers=0"]


def check(done, run: Path, hung: int, what: str, processes: int) -> None:
    """All have ended in time and said who it was."""
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == processes, done.stderr[-3000:]
    assert all(what in line for line in errors) and sum(line.startswith("error: ") for line in errors) == 1, errors
    assert "stacks shows where each process was" in done.stderr and "faults.hang_minutes" in done.stderr
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "failed" and what in manifest["error"]


@pytest.mark.parametrize(
    ("what", "engine", "says"),
    [
        ("data", "ddp", "rank 1 is waiting for the data of step "),
        pytest.param("collective", "ddp", "rank 1 is in step 3, at ", marks=pytest.mark.matrix),
        pytest.param("disk", "ddp", "rank 1 is saving the checkpoint of step 2, at ", marks=pytest.mark.matrix),
        *(
            pytest.param(what, engine, f"rank 1 is {says}", marks=pytest.mark.matrix)
            for engine in ("zero2", "zero3", "fsdp")
            for what, says in (("collective", "in step 3, at "), ("data", "waiting for the data of step "))
        ),
    ],
)
def test_hanging_process_ends_the_run_and_is_named(
    what: str, engine: str, says: str, place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    (place / "hangs.py").write_text(HANGS)
    own = [*ENDLESS, *HANG, f"strategy={engine}", f"output.dir={tmp_path}", "save_steps=2"]
    began = time.monotonic()
    done = ranks.run(place, *own, processes=2, entry="hangs", HANGS=what, WHO="1 0")
    assert done.codes == [os.EX_TEMPFAIL] * 2 and time.monotonic() - began < 60, done.stderr[-3000:]
    run = tmp_path / "small"
    check(done, run, 1, says, 2)
    assert "time.sleep(600)" in (run / "stacks" / "rank-1.txt").read_text()
    assert "backward" in (other := (run / "stacks" / "rank-0.txt").read_text()) or "distributed" in other


def test_what_ended_a_run_is_not_hidden_by_the_connection_that_breaks_then(
    place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    (place / "hangs.py").write_text(HANGS)
    own = [*ENDLESS, *HANG, "strategy=ddp", f"output.dir={tmp_path}"]
    done = ranks.run(place, *own, processes=2, entry="hangs", HANGS="data", WHO="1 0", LINGERS="1")
    check(done, tmp_path / "small", 1, "rank 1 is waiting for the data of step ", 2)


def test_one_process_that_hangs_ends_too(place: Path, tmp_path: Path, ranks: Ranks) -> None:
    (place / "hangs.py").write_text(HANGS)
    done = ranks.run(place, *ENDLESS, *HANG, f"output.dir={tmp_path}", entry="hangs", HANGS="data", WHO="0 0")
    assert done.codes == [os.EX_TEMPFAIL], done.stderr[-3000:]
    check(done, tmp_path / "small", 0, "the training has not got on for", 1)
    assert "it is waiting for the data of step " in done.stderr
    assert "time.sleep(600)" in (tmp_path / "small" / "stacks" / "rank-0.txt").read_text()


def test_one_process_that_hangs_and_holds_pythons_lock_ends_too(place: Path, tmp_path: Path, ranks: Ranks) -> None:
    (place / "hangs.py").write_text(HANGS)
    own = [*ENDLESS, *HANG, f"output.dir={tmp_path}"]
    began = time.monotonic()
    done = ranks.run(place, *own, entry="hangs", HANGS="collective", WHO="0 0", HOLDS="1", timeout=60)
    assert done.codes == [-signal.SIGKILL] and time.monotonic() - began < 30, done.stderr[-3000:]
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert f"the training has not got on for {LIMIT} s and holds Python's lock: it is in step 3, at File" in error
    assert "hangs.py" in error and "in long" in error and "stacks shows where each process was" in done.stderr
    assert "compute_loss" in (tmp_path / "small" / "stacks" / "rank-0.txt").read_text()


@pytest.mark.matrix
def test_process_that_holds_pythons_lock_is_named_by_the_others(place: Path, tmp_path: Path, ranks: Ranks) -> None:
    (place / "hangs.py").write_text(HANGS)
    own = [*ENDLESS, *HANG, "strategy=ddp", f"output.dir={tmp_path}"]
    done = ranks.run(place, *own, processes=2, entry="hangs", HANGS="collective", WHO="1 0", HOLDS="1", timeout=60)
    assert done.codes == [os.EX_TEMPFAIL, -signal.SIGKILL], done.stderr[-3000:]
    check(done, tmp_path / "small", 1, "rank 1 does not answer", 1)
    assert "in long" in (tmp_path / "small" / "stacks" / "rank-1.txt").read_text()


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "engine", ["ddp", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("zero2", "zero3", "fsdp"))]
)
def test_stopped_process_is_named_and_ended(
    stopped: int, engine: str, place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    own = [*ENDLESS, *HANG, f"strategy={engine}", f"output.dir={tmp_path}"]
    launch = ranks.start(place, *own, processes=2, entry=ON_CPU)
    launch.wait_for_steps(tmp_path / "small")
    os.kill(launch.pids[stopped], signal.SIGSTOP)
    end = time.monotonic() + 90
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < end:
            launch.running()
            for pid in launch.pids:
                os.kill(pid, 0)
                time.sleep(0.2)
    time.sleep(5)
    launch.running()
    left = [pid for pid in launch.pids if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    done = launch.wait()
    assert not left and done.codes[1 - stopped] == os.EX_TEMPFAIL, done.stderr[-3000:]
    says = f"rank {stopped}{'' if stopped else ', or its launcher,'} does not answer"
    check(done, tmp_path / "small", stopped, says, 1)


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_what_only_takes_long_goes_on(stopped: bool, place: Path, tmp_path: Path, ranks: Ranks) -> None:
    """A process that waits below the limit, and one that was stopped for longer, as by Ctrl-Z, and goes on."""
    (place / "hangs.py").write_text(HANGS)
    steps = ["max_steps=400"] if stopped else ["max_steps=8"]
    limit = ["faults.hang_minutes=0.5"] if stopped else HANG
    own = [*ENDLESS, *limit, *steps, f"output.dir={tmp_path}"]
    launch = ranks.start(place, *own, entry="hangs", HANGS="slow", WHO="0 2")
    if stopped:
        launch.wait_for_steps(tmp_path / "small")
        os.kill(launch.pids[0], signal.SIGSTOP)
        time.sleep(35)
        os.kill(launch.pids[0], signal.SIGCONT)
    done = launch.wait()
    assert done.codes == [0], done.stderr[-3000:]
    assert not (tmp_path / "small" / "stacks").exists()


def test_no_limit_is_no_limit(place: Path, tmp_path: Path) -> None:
    assert main(["recipe=small", "faults.hang_minutes=null", f"output.dir={tmp_path}"]) == 0


@pytest.mark.parametrize("steps", [0, 2])
def test_no_process_is_left_behind(steps: int, place: Path, tmp_path: Path) -> None:
    """Neither by a training in this process nor by one that was set up and given up."""
    before = psutil.Process().children(recursive=True)
    if steps:
        assert main(["recipe=small", f"max_steps={steps}", "data.num_workers=0", f"output.dir={tmp_path}"]) == 0
    else:
        set_up(f"output.dir={tmp_path}")
    assert psutil.Process().children(recursive=True) == before
