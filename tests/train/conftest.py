"""Trainings are not about their plans, but in `test_plan_guard.py`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def planned(formulas: None) -> None:
    """By formulas, unless a module says otherwise."""
