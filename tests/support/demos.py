"""The shipped demos with fewer steps: what their evaluations measured before and after training a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import metrics
from ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1200
"""What a demo may take on a machine that does other work; pytest's own limit is to be above it."""


def before_and_after(name: str, folder: Path, ranks: Ranks, *less: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains `smollm2_135m_NAME_demo` in an empty folder.

    Args:
        less: Overrides with which it takes less time.

    Returns:
        The lines of the first and of the last evaluation.

    Raises:
        AssertionError: If it fails.
    """
    recipe = f"smollm2_135m_{name}_demo"
    done = ranks.run(folder, f"recipe={recipe}", "--recipes", str(ROOT / "recipes"), *less, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_, last = [row for row in metrics(folder / "runs" / recipe) if "eval_loss" in row]
    return first, last
