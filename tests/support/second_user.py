"""Runs Python as another user, in folders that both may enter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import environment

NOBODY = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of this user's that others may enter and read; pytest's own are closed to them."""
    if os.geteuid() != 0:
        pytest.skip("only root may act for another user")
    folder = Path(tempfile.mkdtemp(prefix="toolkit-shared-"))
    folder.chmod(0o755)
    home = folder / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def as_nobody(shared: Path, imports: str, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code as user `nobody`, with a home and the shared cache `shared/cache`.

    What it imports is imported before: Python itself may lie in a folder that is closed to others.
    """
    own = {"HOME": str(shared / "home"), "TOOLKIT_CACHE": str(shared / "cache")}
    become = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); os.umask(0o022)"
    return subprocess.run(
        [sys.executable, "-c", f"{imports}\n{become}\n{code}"],
        cwd=shared / "home",
        env=environment() | own | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
