"""What `checkpoint.staging: auto` comes to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import example_plan
import faults
import pytest
from ranks import Ranks

from toolkit.distributed.layout import World
from toolkit.recipe import Recipe
from toolkit.train import slow_disk
from toolkit.train.checkpoints import fast_folder
from toolkit.train.checkpoints.sealing import aside

GIB = 2**30


@pytest.mark.parametrize(
    ("part", "rate", "limit", "memory", "said"),
    [
        # A fast disk, a wait of half a second, and checkpoints for which no disk is measured.
        (8 * GIB, 1e9, 64, 32, ""),
        (GIB // 8, 300e6, 64, 32, ""),
        (2**24, 0.0, 64, 32, ""),
        (8 * GIB, 50e6, 64, 32, "takes 47.7 MiB/s, so checkpoints go through memory: 8 GiB of each machine"),
        # The plan's peak of 39 GiB leaves too little of the limit; other programs do of the memory.
        (8 * GIB, 50e6, 54, 32, "training will wait about 172 s for each checkpoint"),
        (8 * GIB, 50e6, 64, 15, "16 GiB of memory, 15 GiB are left, or checkpoint.staging=PATH of a fast disk"),
    ],
)
def test_memory_is_taken_where_the_disk_is_slow_and_twice_as_much_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, rate: float, limit: int, memory: int, said: str
) -> None:
    plan = example_plan.example_plan()
    plan = plan.model_copy(update={"disk": plan.disk.model_copy(update={"part": part})})
    monkeypatch.setattr(slow_disk, "_rate", lambda folder: rate)
    monkeypatch.setattr(slow_disk, "host_memory", lambda processes: SimpleNamespace(bytes=limit * GIB))
    monkeypatch.setattr(slow_disk.psutil, "virtual_memory", lambda: SimpleNamespace(available=memory * GIB))
    monkeypatch.setattr(slow_disk, "_free", lambda folder: 64 * GIB)
    rooms: list[Any] = []

    def exchange(topic: str, value: Any, judge: Any) -> Any:
        rooms.append(value)
        # A second machine, which has more.
        return judge({0: value, 1: [each + GIB for each in value]})

    alone: Any = SimpleNamespace(world=World(), exchange=exchange)
    staging, why = slow_disk._decided(plan, alone, tmp_path)
    assert said in why and bool(said) == bool(why) and rooms == [[limit * GIB, memory * GIB, 64 * GIB]]
    assert staging == ("/dev/shm" if "go through memory" in said else "none")


@pytest.mark.parametrize("engine", ["single", pytest.param("fsdp", marks=pytest.mark.matrix)])
def test_a_run_on_a_slow_disk_takes_memory_and_says_so(ranks: Ranks, tmp_path: Path, engine: str) -> None:
    processes, settings = faults.ENGINES[engine]
    home = faults.home(tmp_path)
    done = ranks.run(home, "recipe=small", *settings, processes=processes, entry="slow_disk")
    assert done.returncode == 0, done.stderr
    assert "takes 1,000 bytes/s, so checkpoints go through memory: " in " ".join(done.stdout.split())
    manifest = json.loads((home / "runs" / "small" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["chosen"]["checkpoint.staging"].startswith("/dev/shm: the disk of ")
    part = manifest["plan"]["disk"]["part"]
    assert manifest["plan"]["host"]["parts"]["staging"] == part > 0
    assert list(faults.saved(home / "runs" / "small")) == [4, 6]
    run = fast_folder._place(Recipe.model_validate(RECIPE), aside(home / "runs" / "small" / "checkpoints"))
    assert run.parent == Path("/dev/shm") and not run.exists()
    again = ranks.run(home, "recipe=small", "checkpoint.staging=none", *settings, processes=processes)
    assert again.returncode == 0 and "is finished" in again.stdout, "how checkpoints are saved is no other run"


RECIPE = {"model": {"path": "m"}, "data": {"sources": ["d"]}}


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    assert slow_disk._rate(tmp_path) > 0 and not [*tmp_path.iterdir()]
    assert slow_disk._free(tmp_path) > 0 == slow_disk._free(tmp_path / "missing")
