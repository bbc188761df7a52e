"""What `checkpoint.staging: auto` comes to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import example_plan
import pytest

from toolkit.distributed.layout import World
from toolkit.train import slow_disk

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


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    assert slow_disk._rate(tmp_path) > 0 and not [*tmp_path.iterdir()]
    assert slow_disk._free(tmp_path) > 0 == slow_disk._free(tmp_path / "missing")
