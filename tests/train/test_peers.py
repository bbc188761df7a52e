"""A process that ends takes the others with it, and each of them says in one message who it was."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from ranks import ON_CPU, Launch, Ranks
from small import place_with

place = place_with("llama")
ENDLESS = ["recipe=small", "max_steps=4000", "batch.micro_batch_size=1"]

FAILS = """
import os, time
from transformers import TrainerCallback
import cpu_engines
from toolkit.train import setup

class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and os.environ["RANK"] == os.environ["FAILS"]:
            raise KeyError("nobody expects this")

def main(arguments):
    begin = setup.Callbacks.__init__
    def begin_and_fail(self, session):
        begin(self, session)
        session.trainer.add_callback(Fails())
    setup.Callbacks.__init__ = begin_and_fail
    return cpu_engines.main(arguments)
"""


def wait_for_steps(run: Path, launch: Launch) -> None:
    end = time.monotonic() + 120
    while not (run / "metrics.jsonl").is_file() or '"loss"' not in (run / "metrics.jsonl").read_text():
        assert launch.running() and time.monotonic() < end
        time.sleep(0.05)


ENGINES = ["ddp", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("zero2", "zero3", "fsdp"))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_process_is_named_by_each_of_the_others(
    engine: str, killed: int, place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    run = tmp_path / "small"
    launch = ranks.start(
        place,
        *ENDLESS,
        "global_batch_size=6",
        f"strategy={engine}",
        f"output.dir={tmp_path}",
        processes=3,
        entry=ON_CPU,
    )
    wait_for_steps(run, launch)
    began = time.monotonic()
    os.kill(launch.pids[killed], signal.SIGKILL)
    done = launch.wait()
    assert time.monotonic() - began < 30
    assert [code for rank, code in enumerate(done.codes) if rank != killed] == [os.EX_TEMPFAIL] * 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    says = f"rank {killed} (pid {launch.pids[killed]}) ended without a word: killed, or crashed"
    lowest, other = sorted({0, 1, 2} - {killed})
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert sorted(errors) == sorted([f"error: {says}", f"error on process {other}: {says}"]), done.stderr[-3000:]
    assert "the same command goes on from the newest whole checkpoint" in done.stderr
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "failed" and says in manifest["error"]
    assert "Traceback" in (run / "stacks" / f"rank-{lowest}.txt").read_text()


@pytest.mark.parametrize("fails", [0, 1])
def test_others_say_what_a_process_failed_with(fails: int, place: Path, tmp_path: Path, ranks: Ranks) -> None:
    (place / "fails.py").write_text(FAILS)
    done = ranks.run(place, *ENDLESS, f"output.dir={tmp_path}", processes=2, entry="fails", FAILS=str(fails))
    # Of the one that fails, the harness makes it 1.
    assert done.codes == [os.EX_TEMPFAIL if rank != fails else 1 for rank in range(2)], done.stderr[-3000:]
    # Its own traces, and those of nobody else.
    assert done.stderr.count("Traceback") == 1 and "nobody expects this" in done.stderr
    other = "error: " if fails else "error on process 1: "
    assert f"{other}rank {fails}: KeyError: 'nobody expects this'" in done.stderr
    assert json.loads((tmp_path / "small" / "manifest.json").read_text())["status"] == "failed"
