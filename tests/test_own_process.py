"""Modules of the package in processes of their own: found wherever they are started from, and gone with who started
them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import toolkit
from toolkit import own_process


def printed(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_the_working_folder_does_not_decide_what_is_run(tmp_path: Path) -> None:
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "__init__.py").touch()
    assert toolkit.__version__ in printed(own_process.command("toolkit", "--version"), tmp_path)


def test_a_checkout_that_is_not_installed_runs_its_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "checkout" / "toolkit"
    package.mkdir(parents=True)
    assert own_process.__file__
    copy = package / "own_process.py"
    copy.write_text(Path(own_process.__file__).read_text("utf-8"))
    (package / "__init__.py").touch()
    (package / "told.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    spec = importlib.util.spec_from_file_location("copied", copy)
    assert spec and spec.loader
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert printed(copied.command("toolkit.told", "a", "b c"), tmp_path) == "['a', 'b c'] __main__"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells a process that its parent has ended")
def test_a_module_ends_with_who_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it computes, and does not see that nobody will ask it any more."""
    (tmp_path / "busy.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    parent = (
        f"import os, subprocess; child = subprocess.Popen({own_process.command('busy')!r}, stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); os._exit(75)"
    )
    ended = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, timeout=60)
    pid, until = int(ended.stdout), time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert ended.returncode == os.EX_TEMPFAIL
