"""A process that ends takes the others with it, and each of them says in one message who it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from ranks import ON_CPU, Ranks
from small import place_with

from toolkit.train.process import Terminated, told_to_stop

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
            raise KeyboardInterrupt if os.environ.get("STOPS") else KeyError("nobody expects this")

def main(arguments):
    begin = setup.Callbacks.__init__
    def begin_and_fail(self, session):
        begin(self, session)
        session.trainer.add_callback(Fails())
    setup.Callbacks.__init__ = begin_and_fail
    return cpu_engines.main(arguments)
"""


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
    launch.wait_for_steps(run)
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


@pytest.mark.parametrize("stopped", [0, 1])
def test_who_is_stopped_alone_ends_the_others_as_stopped(
    stopped: int, place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """And not as what another start may not meet again."""
    (place / "fails.py").write_text(FAILS)
    own = {"FAILS": str(stopped), "STOPS": "1"}
    done = ranks.run(place, *ENDLESS, f"output.dir={tmp_path}", processes=2, entry="fails", **own)
    assert done.codes == [130, 130], done.stderr[-3000:]
    other = "error: " if stopped else "error on process 1: "
    assert f"{other}rank {stopped}: stopped by Ctrl-C" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "small" / "manifest.json").read_text())["status"] == "interrupted"


def killed_after_two(place: Path, folder: Path, ranks: Ranks, *own: str) -> Path:
    """A run of two processes, of which one dies after the second step; there is a checkpoint of it."""
    (place / "fails.py").write_text(FAILS)
    own = ("save_steps=1", "checkpoint.rehearse=false", *own)
    done = ranks.run(place, *ENDLESS, *own, f"output.dir={folder}", processes=2, entry="fails", FAILS="1")
    assert done.returncode, done.stderr[-3000:]
    return folder / "small"


def test_a_run_that_is_continued_ends_with_a_word_too(place: Path, tmp_path: Path, ranks: Ranks) -> None:
    run = killed_after_two(place, tmp_path, ranks)
    shutil.rmtree(run / "stacks")
    launch = ranks.start(place, *ENDLESS, "save_steps=1", f"output.dir={tmp_path}", processes=2, entry=ON_CPU)
    lines = (run / "metrics.jsonl").read_bytes()
    end = time.monotonic() + 120
    while not (run / "metrics.jsonl").read_bytes().startswith(lines) or lines == (run / "metrics.jsonl").read_bytes():
        assert launch.running() and time.monotonic() < end
        time.sleep(0.05)
    os.kill(launch.pids[0], signal.SIGKILL)
    done = launch.wait()
    says = f"rank 0 (pid {launch.pids[0]}) ended without a word"
    assert f"error: {says}" in done.stderr, done.stderr[-3000:]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["resumed_from"] and manifest["status"] == "failed" and says in manifest["error"]
    assert (run / "stacks" / "rank-1.txt").is_file()


def files(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("[!.]*") if file.is_file()}


def test_a_start_that_is_refused_changes_nothing(place: Path, tmp_path: Path, ranks: Ranks) -> None:
    """The first process finds another model than the run began with, and says so when the other one waits for it in
    their group."""
    before = files(run := killed_after_two(place, tmp_path, ranks))
    weights = place / "llama" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    again = [*ENDLESS, "save_steps=1", f"output.dir={tmp_path}"]
    done = ranks.run(place, *again, processes=2, entry=ON_CPU)
    assert "changed since the run began" in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert files(run) == before


REFUSES = """
import os
import cpu_engines
from toolkit.common import UserError
from toolkit.train.checkpoints import checkpoint

def main(arguments):
    def refuse(*of_the_first_process):
        raise UserError("no such thing", "change the recipe")
    checkpoint.check_fits = refuse
    return cpu_engines.main(arguments)
"""


def test_a_recipe_may_be_changed_after_a_set_up_that_failed(place: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Where the other process was then is no result of another run."""
    (place / "refuses.py").write_text(REFUSES)
    own = ["recipe=small", "max_steps=2", f"output.dir={tmp_path}"]
    done = ranks.run(place, *own, processes=2, entry="refuses")
    assert "rank 0: no such thing" in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    done = ranks.run(place, *own, "learning_rate=3e-5", processes=2, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "damaged" not in done.stderr and "cannot be read" not in done.stderr, done.stderr[-3000:]


STOPS = """
import os, signal, time
import cpu_engines
from toolkit.train.evaluation.samples import Samples

def main(arguments):
    def answer(self, when):
        if when == "after":
            seconds, name = os.environ["SENT"].split()[int(os.environ.get("RANK", "0"))].split(":")
            time.sleep(float(seconds))
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(30)
    Samples.answer = answer
    return cpu_engines.main(arguments)
"""


@pytest.mark.parametrize(
    ("sent", "codes", "status", "says"),
    [
        ("0:SIGTERM", [143], "interrupted", "stopped by SIGTERM"),
        ("0:SIGHUP", [129], "interrupted", "stopped by SIGHUP"),
        ("0:SIGTERM 0:SIGTERM", [143, 143], "interrupted", "stopped by SIGTERM"),
        # As torch's agent does once a process of its machine has ended.
        ("0.5:SIGTERM 0:SIGKILL", [os.EX_TEMPFAIL, -signal.SIGKILL], "failed", "ended without a word: killed"),
    ],
)
def test_sigterm_where_nothing_is_left_to_be_saved_is_told(
    sent: str, codes: list[int], status: str, says: str, place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    (place / "stops.py").write_text(STOPS, encoding="utf-8")
    own = ["recipe=small", "batch.micro_batch_size=1", f"output.dir={tmp_path}"]
    done = ranks.run(place, *own, processes=len(codes), entry="stops", SENT=sent, timeout=60)
    assert done.codes == codes, done.stderr[-3000:]
    manifest = json.loads((tmp_path / "small" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == status and says in manifest["error"]
    assert (says if status == "failed" else "the same command goes on") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_what_stops_a_training_ends_what_it_has_forked_as_usual(sent: signal.Signals) -> None:
    before = signal.getsignal(sent)
    with told_to_stop():
        if not (child := os.fork()):
            os.kill(os.getpid(), sent)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == sent
        with pytest.raises(Terminated, match=sent.name):
            os.kill(os.getpid(), sent)
        # Shells and launchers send it twice, and the first one's clearing away is not cut off.
        os.kill(os.getpid(), sent)
    assert signal.getsignal(sent) == before


class Cleared:
    """What somebody stops the process over while it is cleared away."""

    def __init__(self, sent: signal.Signals) -> None:
        self.sent = sent

    def __del__(self) -> None:
        os.kill(os.getpid(), self.sent)
        for _ in range(10):
            pass


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_is_stopped_while_an_object_is_cleared_away_stops(
    sent: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python drops what is raised there, with a stack trace."""
    before, said = sys.unraisablehook, KeyboardInterrupt if sent == signal.SIGINT else Terminated
    with told_to_stop(), pytest.raises(said):
        Cleared(sent)
        time.sleep(20)
    assert "Traceback" not in capsys.readouterr().err and sys.unraisablehook == before


def test_a_closed_terminal_does_not_stop_what_nohup_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with told_to_stop():
        os.kill(os.getpid(), signal.SIGHUP)
    # torch's agent hears it all the same, and would kill those that it has told of it.
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    with told_to_stop(), pytest.raises(Terminated):
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
