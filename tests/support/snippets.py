"""Code of model cards, as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


def run_snippet(card: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Executes the card's code inside the model's folder; returns its variables."""
    code = re.search(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert code
    monkeypatch.chdir(folder)
    variables: dict[str, Any] = {}
    exec(code[1], variables)
    return variables
