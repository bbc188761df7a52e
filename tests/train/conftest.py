"""Trainings are not about their plans, but in `test_plan_guard.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def planned(formulas: None) -> None:
    """By formulas, unless a module says otherwise."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is flushed to the drive, and `renamed`: a machine that loses its power keeps what was flushed
    before, and no more."""
    flush, rename, found = os.fsync, Path.rename, list[str]()

    def flushed(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def renamed(place: Path, target: Path) -> Path:
        found.append("renamed")
        return rename(place, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    return found
