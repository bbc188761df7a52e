"""`toolkit sweep … --trials N`: what is chosen, what a stopped search goes on with, which runs are ended early."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import environment, write_jsonl
from small import place_with

from toolkit.cli.jobs import shares
from toolkit.cli.search import STATE, Search, Tried
from toolkit.cli.sweep import PAGE
from toolkit.common import UserError
from toolkit.report.load import read_manifest, read_run

place = place_with("llama")

HELD_OUT = ("recipe=small", "data.eval_split=0.2")
RATES = "learning_rate=tag(log,interval(1e-5,1e-1))"


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def search(*arguments: str, count: int = 8, prune: bool = False) -> Search:
    return Search([*HELD_OUT, *arguments], None, count, prune, lambda line: None)


def finished_run(folder: Path, losses: dict[int, float], status: str = "finished") -> None:
    """A run folder with nothing but what came out."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"status": status}))
    rows = ({"step": step, "eval_loss": loss} for step, loss in losses.items())
    write_jsonl(folder / "metrics.jsonl", rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seed=1"], ["no key has values"]),
        (["learning_rate=interval(1e-3,1e-5)"], ["not below its last"]),
        (["learning_rate=tag(log,interval(0,1e-3))"], ["logarithm of 0"]),
        (["seed=1,2", "seed=interval(1,9)"], ["seed is written twice"]),
        ([RATES, "data.eval_split=null"], ["held-out rows", "data.eval_split=0.1"]),
        ([RATES, "method.r=8"], ["full fine-tuning would ignore"]),
    ],
)
def test_what_cannot_be_searched_is_said_before_anything_starts(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        search(*arguments)
    for word in words:
        assert word in str(caught.value), word
    assert not Path("runs").exists()


def test_of_two_searches_in_one_folder_neither_forgets_what_the_other_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once; and one that waited goes on from all that the other one has tried."""
    asked = (RATES, "output.name=twice")
    first, second = search(*asked, count=2), search(*asked, count=3)

    def tries(chosen: Iterator[object], *of: object) -> int:
        if not first._state.tried:
            next(chosen)
            with pytest.raises(UserError, match=r"another process searches in .*twice-sweep right now"):
                second.run(shares(1, None))
        return len(list(chosen))

    monkeypatch.setattr("toolkit.cli.search.train", tries)
    first.run(shares(1, None))
    assert len(first._state.tried) == 2
    monkeypatch.setattr("toolkit.cli.search.finished", lambda trial: True)
    second.run(shares(1, None))
    kept = json.loads((second._folder / STATE).read_text(encoding="utf-8"))["tried"]
    assert [each["values"] for each in kept[:2]] == [each.values for each in first._state.tried] and len(kept) == 3


def test_seeds_that_hold_out_different_rows_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def warned(*arguments: str) -> bool:
        caplog.clear()
        search(RATES, *arguments)
        return "set data.eval_seed=1" in caplog.text

    assert warned("seed=1,2") and warned("seed=int(interval(1,9))") and warned("data.eval_seed=1,2")
    assert not warned("seed=1") and not warned("seed=1,2", "data.eval_seed=1")


def test_ending_runs_early_takes_evaluations_on_the_way() -> None:
    with pytest.raises(UserError, match=r"evaluation\.every_steps"):
        search(RATES, prune=True)


def test_a_run_is_ended_early_only_when_half_of_the_others_did_better(place: Path) -> None:
    asked = [RATES, "output.dir=early", "evaluation.every_steps=1"]
    folder = place / "early" / "small-sweep"
    for at, loss in enumerate([1.0, 1.1, 1.2, 1.3, 1.15, 2.0], start=1):
        status = "finished" if at < 5 else "running"
        finished_run(folder / f"{at:03}_learning_rate-0.00{at}", {0: 3.0, 1: loss, 2: loss - 0.1}, status)
    tried = [{"values": {"learning_rate": f"0.00{at}"}} for at in range(1, 7)]
    (folder / STATE).write_text(json.dumps({"arguments": [*HELD_OUT, *asked], "tried": tried}))

    found = search(*asked, prune=True)
    hopeful, hopeless = (found._trial(at, tried[at]["values"]) for at in (4, 5))
    assert not found._hopeless(hopeful)
    assert "pruned" not in (folder / STATE).read_text()
    assert found._hopeless(hopeless)
    # It is noted before it is ended: a search that is killed at that moment does not go on with it.
    assert [each["ended"] for each in json.loads((folder / STATE).read_text())["tried"]] == [""] * 5 + ["pruned"]
    with pytest.raises(UserError, match="holds another search"):
        search(*asked, "batch.seq_len=64", prune=True)


def test_later_values_are_chosen_by_what_earlier_ones_came_to(place: Path) -> None:
    """Of a loss that is least at a learning rate of 1e-3 later choices are nearer to it than the first ones."""
    asked = [RATES, "output.dir=chosen"]
    distances = []
    for at in range(24):
        found = search(*asked, count=24)
        values = found._choose()
        assert values is not None
        found._state.tried.append(Tried(values=values))
        found._write()
        exponent = math.log10(float(values["learning_rate"]))
        assert -5 <= exponent <= -1
        distances.append(abs(exponent + 3))
        finished_run(found._place(at), {2: 1 + distances[-1] ** 2})
    assert sum(distances[16:]) / 8 < sum(distances[:4]) / 4 and min(distances) < 0.3
    best = search(*asked, count=24)._best()
    assert best is not None and best[1] == pytest.approx(1 + min(distances) ** 2)


def test_a_run_that_failed_and_is_tried_again_counts(place: Path) -> None:
    asked = [RATES, "output.dir=again"]
    found = search(*asked)
    found._state.tried += [Tried(values={"learning_rate": "0.001"}), Tried(values={"learning_rate": "0.002"})]
    finished_run(found._place(0), {2: 1.5})
    finished_run(found._place(1), {0: 3.0}, status="failed")
    assert [each.state.name for each in found._study().trials] == ["COMPLETE", "FAIL"]
    shutil.rmtree(found._place(1))
    finished_run(found._place(1), {0: 3.0, 2: 1.0})
    assert [(each.state.name, each.value) for each in found._study().trials] == [("COMPLETE", 1.5), ("COMPLETE", 1.0)]


def test_values_that_the_processes_of_this_machine_cannot_take_are_left_out(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would end the search, and whenever it goes on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = search("batch.global_batch_size=4,3", "batch.micro_batch_size=1", "output.dir=processes")
    found._state.tried.append(Tried(values={"batch.global_batch_size": "4"}, ended="pruned"))
    assert list(found._ask(shares(1, None))) == []
    assert [(each.values["batch.global_batch_size"], each.ended) for each in found._state.tried[1:]] == [
        ("3", "refused")
    ]


def test_what_is_chosen_lies_between_the_ends(place: Path) -> None:
    """Of three digits most numbers next to 1 are 1, which is no beta."""
    asked, chosen = ["optimizer.beta2=interval(0.9992,0.9999)", "output.dir=ends"], set[float]()
    for _ in range(6):
        found = search(*asked)
        values = found._choose()
        assert values is not None
        found._trial(0, values)
        found._state.tried.append(Tried(values=values))
        found._write()
        chosen.add(float(values["optimizer.beta2"]))
    assert len(chosen) == 6 and min(chosen) >= 0.9992 and max(chosen) <= 0.9999


@pytest.mark.matrix
def test_a_search_that_is_killed_goes_on_where_it_was(place: Path) -> None:
    asked = [sys.executable, "-m", "toolkit", "sweep", *HELD_OUT, RATES, "schedule.max_steps=1", "output.dir=killed"]
    folder, asked = place / "killed" / "small-sweep", [*asked, "--trials", "3"]
    first = subprocess.Popen(asked, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while first.poll() is None and len(list(folder.glob("*/manifest.json"))) < 2:
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, first.communicate()[0].decode()
    before = json.loads((folder / STATE).read_text())["tried"]
    assert len(before) == 2

    again = subprocess.run(asked, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    tried = json.loads((folder / STATE).read_text())["tried"]
    assert tried[:2] == before and len(tried) == 3
    runs = sorted(folder.glob("*/"))
    assert len(runs) == 3 and all(read_manifest(each)[0].status == "finished" for each in runs)
    losses = [read_run(each).result["eval_loss"] for each in runs]  # type: ignore[index]
    assert f"best eval_loss {min(losses):.4g}, of run {losses.index(min(losses)) + 1}" in again.stderr
    assert (folder / PAGE).is_file()


def test_trainings_at_once_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    assert [(each.gpus, each.variables) for each in shares(2, None)] == [
        (2, {"CUDA_VISIBLE_DEVICES": "4,5"}),
        (2, {"CUDA_VISIBLE_DEVICES": "6,7"}),
    ]
    assert [each.variables["CUDA_VISIBLE_DEVICES"] for each in shares(3, 3)] == ["4", "5", "6"]
    with pytest.raises(UserError, match="--parallel 6"):
        shares(6, None)
