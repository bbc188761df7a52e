"""Trainings of models are not about their plans."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def planned(formulas: None) -> None:
    """By formulas."""
