"""DeepSpeed's operations: compiled by one process, whose lock is waited for as long as it lives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from toolkit.common import UserError
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


def test_what_a_killed_process_left_behind_goes_also_where_the_clock_was_set_back(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_ops, "ELSEWHERE_SECONDS", 1)
    os.utime(lock, (time.time() + 86_400,) * 2)
    waiting = threading.Thread(target=compiled_ops.wait_for_compilers, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive() and not lock.exists()


def test_another_machines_folders_lie_deep_or_not(lock: Path) -> None:
    """torch puts a folder for each version of Python between, unless TORCH_EXTENSIONS_DIR is used as it is."""
    shallow = lock.parent.parent / "lock"
    shallow.touch()
    os.utime(shallow, (time.time() - 3600,) * 2)
    os.utime(lock.parent, (time.time() - 3600,) * 2)
    compiled_ops.wait_for_compilers()
    assert not lock.exists() and not shallow.exists()


class Builder:
    """One of DeepSpeed's."""

    name = "async_io"

    def __init__(self, compiles: Callable[[], None]) -> None:
        self.load = compiles


def test_one_process_compiles_and_says_so_where_nothing_is_compiled(
    lock: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compiled = lock.parents[2] / "new", []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))

    def compiles() -> None:
        with pytest.raises(Timeout), FileLock(folder / "toolkit.lock", timeout=0):
            pass
        library = folder / "py311_cpu" / "async_io" / "async_io.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        compiled.append(True)

    for told in (1, 1):
        with caplog.at_level("INFO", "toolkit.distributed"):
            compiled_ops.load(Builder(compiles), "")
        assert caplog.text.count("Compiling DeepSpeed's async_io: once") == told
    assert len(compiled) == 2


@pytest.mark.parametrize("error", [RuntimeError("no compiler\nand pages more"), ImportError("no compiler")])
def test_an_operation_that_cannot_be_compiled_names_what_it_needs(lock: Path, error: Exception) -> None:
    def compiles() -> None:
        assert not lock.exists(), "what a killed process left behind goes first"
        raise error

    with pytest.raises(UserError) as refused:
        compiled_ops.load(Builder(compiles), "install a compiler")
    assert refused.value.what == "DeepSpeed's async_io cannot be built on this machine: no compiler"
    assert refused.value.change == "install a compiler"
