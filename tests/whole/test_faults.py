"""What is lost by each fault on each engine: nothing but the steps since the last checkpoint, and no weight differs.

Each run meets a real fault, and is started again with the same command; what it publishes in the end is compared with
the model of a run to which nothing happened. The result stands in `docs/recovery.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import faults
import pytest
from figures import record
from harness import metrics
from matrix import Difference, Result
from ranks import Ranks

from toolkit.seal import read_seal

ENGINES = ("single", "ddp", "zero2", "zero3", "fsdp")
DIVISIONS = tuple(faults.DIVISIONS)
SAVE_STEPS = 2


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("checkpoint-*"), key=lambda each: int(each.name.split("-")[1]))


def largest(place: Path) -> Path:
    """The largest file that a checkpoint's seal names."""
    files = read_seal(place)["files"]
    return place / max(files, key=lambda name: files[name][0])


def flip(run: Path) -> None:
    file = largest(newest(run))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(run: Path) -> None:
    file = largest(newest(run))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def unlock(run: Path) -> None:
    for place in (run, *run.glob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)


@dataclass(frozen=True)
class Fault:
    """A fault, and what may come of it.

    Attributes:
        happens: See `faults.main`.
        ends_well: Whether the exit code is 0, as of a clean stop.
        lost: Most steps that are trained again.
        taken: How far the first start comes, where the moment of the fault is to be shown by it.
        settings: Of the recipe, in both starts.
        then: Done to the run folder before it is started again.
        others: Whether that has another number of processes.
        says: What is said of it, as a pattern.
        several: Whether it takes more than one process.
    """

    happens: str
    ends_well: bool = False
    lost: int = SAVE_STEPS
    taken: int | None = None
    settings: tuple[str, ...] = ()
    then: Callable[[Path], object] = lambda run: None
    others: bool = False
    says: str = ""
    several: bool = False


SPIKES = ("faults.on_spike=stop", "faults.spike_window=2", "faults.spike_sigmas=20")
EVALUATES = ("evaluation.every_steps=2",)
HANGS = ("faults.hang_minutes=0.1",)
ENDED, STUCK, SILENT = r"rank {last} \(pid \d+\) ended without a word", "rank {last} is ", "rank {last} does not answer"
FAULTS = {
    "killed in a step": Fault("4 all kill"),
    "killed in a save": Fault("4 all kill_in_save", lost=SAVE_STEPS),
    "SIGTERM to one": Fault("4 last signal SIGTERM", ends_well=True, lost=0),
    "SIGTERM to all": Fault("4 all signal SIGTERM", ends_well=True, lost=0),
    "SIGTERM to one in a save": Fault("4 last signal_in_save SIGTERM", ends_well=True, lost=0, taken=5),
    "SIGTERM to all in a save": Fault("4 all signal_in_save SIGTERM", ends_well=True, lost=0, taken=5),
    "SIGTERM to one in an evaluation": Fault(
        "4 last signal_in_evaluation SIGTERM", ends_well=True, lost=0, taken=5, settings=EVALUATES
    ),
    "SIGTERM to all in an evaluation": Fault(
        "4 all signal_in_evaluation SIGTERM", ends_well=True, lost=0, taken=5, settings=EVALUATES
    ),
    "SIGINT to all": Fault("4 all signal SIGINT", ends_well=True, lost=0),
    "one process dies": Fault("4 last kill", says=ENDED),
    "no room for saves": Fault("4 all limit 20000", lost=2 * SAVE_STEPS),
    "read-only": Fault("3 all lock_out", lost=2 * SAVE_STEPS, then=unlock),
    "folder deleted": Fault("4 0 delete", lost=6),
    "file cut off": Fault("6 all kill", lost=2 * SAVE_STEPS, then=cut),
    "bit flipped": Fault("6 all kill", lost=2 * SAVE_STEPS, then=flip),
    "file missing": Fault("6 all kill", lost=2 * SAVE_STEPS, then=lambda run: largest(newest(run)).unlink()),
    "NaN": Fault("4 all scale nan"),
    "NaN in one process": Fault("4 last scale nan"),
    "spike": Fault("5 all scale 100", settings=SPIKES),
    "out of memory": Fault("4 all limit_memory"),
    "limit of a control group": Fault("4 all limit_group"),
    "hangs": Fault("4 last hang", settings=HANGS, says=STUCK),
    "SIGSTOP to one": Fault("4 last signal SIGSTOP", settings=HANGS, says=SILENT, several=True),
    "clock set back": Fault("5 0 age\n6 all kill"),
    "other processes": Fault("4 all kill", others=True),
}
FAST = [
    ("one process dies", ("zero2",)),
    ("bit flipped", ("fsdp",)),
    ("killed in a save", ("pipeline",)),
    ("one process dies", ("tensor",)),
]
"""Faults and engines that `make test` tries; the marked test tries all."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.home(tmp_path_factory.mktemp("home"))


def straight(ranks: Ranks, home: Path, engine: str, evaluates: bool) -> Path:
    """A run to which nothing happens."""
    folder = home / "runs" / f"{engine}{'-evaluates' * evaluates}"
    if not folder.is_dir():
        _, code, said = faults.run(ranks, home, engine, folder.name, "", *EVALUATES * evaluates)
        assert code == 0, said[-3000:]
    return folder


def steps_taken(run: Path, said: str) -> int:
    """How far a run came; where its metrics could not be written, it was said all the same."""
    rows = metrics(run) if (run / "metrics.jsonl").is_file() else []
    return max([*(row["step"] for row in rows if "loss" in row), *map(int, re.findall(r"step (\d+)/6", said))])


def of_other_processes(engine: str) -> tuple[str, int]:
    """How it goes on with one process in the place of two, or two in the place of one."""
    return {"single": ("ddp", 2), "ddp": ("single", 1)}.get(engine, (engine, 1))


TABLES = {
    ENGINES: "steps lost, and difference of the final weights, by fault",
    DIVISIONS: "the same, where processes divide more than rows",
}


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        *FAST,
        *(
            pytest.param(name, columns, marks=pytest.mark.matrix, id=f"{name}{' divided' * (columns is DIVISIONS)}")
            for columns in TABLES
            for name in FAULTS
        ),
    ],
)
def test_nothing_is_lost(
    ranks: Ranks,
    home: Path,
    name: str,
    engines: tuple[str, ...],
    record_property: Callable[[str, object], None],
) -> None:
    fault = FAULTS[name]
    columns = ENGINES if engines[0] in ENGINES else DIVISIONS
    cells = dict.fromkeys(columns, "")
    if "limit_group" in fault.happens:
        if not (group := faults.make_group("toolkit_fault_trial")):
            pytest.skip("needs the right to make control groups")
        group.rmdir()
    for engine in engines:
        if engine == "single" and fault.several:
            continue
        named = f"{engine} of {len(engines)} {name}".replace(" ", "-")
        run, code, said = faults.run(ranks, home, engine, named, fault.happens, *fault.settings)
        faults.remove_groups()
        assert (code == 0) == fault.ends_well, f"{engine}: {said[-3000:]}"
        assert not (run / "final").exists(), engine
        assert "Traceback" not in said, f"{engine}: {said[-3000:]}"
        processes = {**faults.ENGINES, **faults.DIVISIONS}[engine][0]
        if processes > 1:
            assert re.search(fault.says.format(last=processes - 1), said), f"{engine}: {said[-3000:]}"
        taken = steps_taken(run, said)
        assert fault.taken in (None, taken), f"{engine} came to step {taken}"
        fault.then(run)
        then, processes = of_other_processes(engine) if fault.others else (engine, 0)
        _, code, said = faults.run(ranks, home, then, named, "", *fault.settings, processes=processes)
        assert code == 0, f"{engine}: {said[-3000:]}"
        resumed = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["resumed_from"]
        lost = taken - int(resumed.rpartition("-")[2] if resumed else 0)
        assert 0 <= lost <= fault.lost, f"{engine} lost {lost} steps"
        unharmed = straight(ranks, home, engine, fault.settings == EVALUATES)
        difference = Difference.between(Result.read(run), Result.read(unharmed))
        assert max(vars(difference).values()) <= 1e-6, f"{engine}: {difference}"
        cells[engine] = f"{lost}, {difference.weights:.0e}"
    record(record_property, TABLES[columns], fault=name, **cells)
