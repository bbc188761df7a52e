"""Locks of DeepSpeed's operations: a dead process's goes, a living one's is waited for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from toolkit.distributed import compiled_ops


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an operation that nobody has worked at for an hour."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    file = tmp_path / "py311_cpu" / "async_io" / "lock"
    file.parent.mkdir(parents=True)
    file.touch()
    os.utime(file, (time.time() - 3600,) * 2)
    return file


def test_what_a_killed_process_left_behind_goes(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "toolkit.distributed"):
        compiled_ops.wait_for_compilers()
    assert not lock.exists() and "whoever compiled there was stopped" in caplog.text


def test_who_compiles_is_waited_for_however_long_it_takes(lock: Path) -> None:
    held = lock.open()
    ended = threading.Event()

    def end() -> None:
        ended.set()
        held.close()
        lock.unlink()

    threading.Timer(1.5, end).start()
    compiled_ops.wait_for_compilers()
    assert ended.is_set()


def test_another_machine_that_writes_into_the_same_folder_is_waited_for(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_ops, "ELSEWHERE_SECONDS", 2)
    (lock.parent / "aio.o").touch()
    began = time.monotonic()
    compiled_ops.wait_for_compilers()
    assert not lock.exists() and time.monotonic() - began > 1
