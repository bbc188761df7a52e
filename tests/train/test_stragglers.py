"""A process that is regularly slower than the others by its own work is named, and nobody else is."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from harness import write_jsonl
from ranks import Finished, Ranks
from small import place_with

from toolkit.report.run_page import write_report
from toolkit.train.health.stragglers import Totals, slower

place = place_with("llama")
SLOW = """
import os, time
import cpu_engines
from toolkit.data.batching import collate
from toolkit.train.health import stragglers, watchdog
from toolkit.train.trainers import trainer

def main(arguments):
    what, who = os.environ["SLOW"], os.environ["WHO"]
    stragglers.WINDOW_SECONDS, watchdog.TICK_SECONDS = 0.5, 0.2
    make, loss = collate.Collator.__call__, trainer._ExactMixin.compute_loss
    calls, ended = [], []

    def often():
        calls.append(1)
        if os.environ.get("RANK") == who and (what != "once" or len(calls) == 30):
            # However busy the machine is, twice as long as the rest of a step takes.
            rest = time.monotonic() - ended[-1] if ended else 0
            time.sleep(2 if what == "once" else max(0.2, 2 * rest))
            ended.append(time.monotonic())

    def collator(self, rows):
        often()
        return make(self, rows)

    def compute_loss(self, *args, **kwargs):
        often()
        return loss(self, *args, **kwargs)

    if what in ("data", "once"):
        collate.Collator.__call__ = collator
    elif what == "forward":
        trainer._ExactMixin.compute_loss = compute_loss
    return cpu_engines.main(arguments)
"""
SLOWED = [("data", "ddp", 2), ("forward", "zero3", 2)]
MORE = [
    ("forward", "ddp", 2),
    *((what, engine, 3) for what in ("data", "forward") for engine in ("ddp", "zero2", "zero3", "fsdp")),
]


UNEVEN = ["data.sources=[uneven.jsonl]", "batch.seq_len=1024"]
"""Of eight rows one is forty times as long as the others."""


def trained(
    place: Path, folder: Path, ranks: Ranks, what: str, engine: str, processes: int, steps: int, *own: str
) -> Finished:
    (place / "slow.py").write_text(SLOW, encoding="utf-8")
    rows = [{"text": "a word and another " * (120 if number % 8 == 0 else 3)} for number in range(80)]
    write_jsonl(place / "uneven.jsonl", rows)
    batch = [f"global_batch_size={2 * processes}", "batch.micro_batch_size=2", "data.num_workers=0", "save_steps=500"]
    batch += [f"max_steps={steps}", f"strategy={engine}", f"output.dir={folder}", "checkpoint.rehearse=false"]
    return ranks.run(place, "recipe=small", *batch, *own, processes=processes, entry="slow", SLOW=what, WHO="1")


def stragglers(run: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [each for row in rows for each in row.get("stragglers", [])]


@pytest.mark.parametrize(
    ("what", "engine", "processes"), [*SLOWED, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE)]
)
def test_slow_process_is_named_once(
    what: str, engine: str, processes: int, place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    done = trained(place, tmp_path, ranks, what, engine, processes, steps=40)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert said.count("holds the others up") == 1 and "rank 1 (" in said, said[-3000:]
    (found,) = stragglers(tmp_path / "small")
    assert found["rank"] == 1 and found["host"] == os.uname().nodename
    assert found["seconds"] > found["others_seconds"] + 0.09, found
    # One micro-batch has a fifth of a second more, of which the others get some back on a machine that is busy.
    assert (found["data_seconds"] > found["others_data_seconds"] + 0.09) == (what == "data"), found
    page = write_report(tmp_path / "small").read_text()
    assert "rank 1 (" in page and "holds the others up" in page


@pytest.mark.parametrize("what", ["nothing", "once"])
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.matrix) for name in ("ddp", "zero2", "zero3", "fsdp")]
)
def test_nobody_is_named_for_a_chance(what: str, engine: str, place: Path, tmp_path: Path, ranks: Ranks) -> None:
    done = trained(place, tmp_path, ranks, what, engine, 2, steps=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "holds the others up" not in done.stdout + done.stderr and not stragglers(tmp_path / "small")


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["nothing", "data", "forward"])
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp"])
def test_nobody_is_named_for_long_rows(what: str, engine: str, place: Path, tmp_path: Path, ranks: Ranks) -> None:
    """The first process has the longest row of each step; the other one is named if it really is slow."""
    done = trained(place, tmp_path, ranks, what, engine, 2, 40, *UNEVEN, "global_batch_size=16", "micro_batch_size=8")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [each["rank"] for each in stragglers(tmp_path / "small")] == ([] if what == "nothing" else [1])


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_process_that_is_stopped_again_and_again_is_named(
    engine: str, place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    (place / "slow.py").write_text(SLOW, encoding="utf-8")
    own = ["batch.micro_batch_size=2", "data.num_workers=0", "max_steps=300", f"strategy={engine}"]
    launch = ranks.start(
        place, "recipe=small", *own, f"output.dir={tmp_path}", processes=2, entry="slow", SLOW="nothing", WHO=""
    )
    while launch.running():
        os.kill(launch.pids[1], signal.SIGSTOP)
        time.sleep(0.15)
        os.kill(launch.pids[1], signal.SIGCONT)
        time.sleep(0.1)
    done = launch.wait()
    assert done.codes == [0, 0], done.stderr[-3000:]
    assert {each["rank"] for each in stragglers(tmp_path / "small")} == {1}


def totals(seconds: float, waited: float, tokens: int = 1000, longest: int = 100) -> Totals:
    return Totals(1, seconds, waited, 0.0, tokens, tokens * longest)


@pytest.mark.parametrize(
    ("slow", "other", "named"),
    [
        (totals(1.0, 0.1), totals(1.0, 0.4), True),
        # Just a little.
        (totals(1.0, 0.1), totals(1.0, 0.2), False),
        # It has as many more tokens.
        (totals(1.0, 0.1, tokens=1500), totals(1.0, 0.4), False),
        # Its rows are longer, and attention takes time with their square.
        (totals(1.0, 0.1, longest=150), totals(1.0, 0.4), False),
        # That explains less than there is.
        (totals(1.0, 0.1, tokens=1500), totals(1.0, 0.7), True),
        # Both wait for their GPUs.
        (totals(1.0, 0.6), totals(1.0, 0.8), False),
    ],
)
def test_more_work_takes_more_time(slow: Totals, other: Totals, named: bool) -> None:
    assert bool(slower(0, {0: slow, 1: other, 2: other})) is named
    assert not slower(1, {0: slow, 1: other, 2: other})
