"""A folder of a user's own, for the tests of reading and composing recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import BASE, write


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the recipe `mine`."""
    monkeypatch.chdir(tmp_path)
    write("mine", BASE)
    return tmp_path
