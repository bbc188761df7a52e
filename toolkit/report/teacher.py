"""How near a student is to its teacher, as text for the terminal, the report and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.report.rewards import mean_and_margin

NEARNESS = {"eval_kl": "KL(teacher || student)", "eval_agreement": "same next token as the teacher"}
"""Keys of evaluations that have 95% intervals, and what they are."""


def nearness(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """The metrics of an evaluation in `NEARNESS`, each with half the width of its interval; empty without a teacher."""
    found = {key: mean_and_margin(row, key) for key in NEARNESS}
    return {key: (mean, half) for key, (mean, half) in found.items() if mean is not None and half is not None}


def nearness_text(key: str, mean: float, half: float) -> str:
    """`0.0312 ± 0.0021`, or of a share `91.2% ± 0.6%`."""
    return f"{mean:.1%} ± {half:.1%}" if key == "eval_agreement" else f"{mean:.4f} ± {half:.4f}"


def teacher_text(row: Mapping[str, Any]) -> str:
    """Both metrics in one line; empty without a teacher."""
    return ", ".join(f"{NEARNESS[key]} {nearness_text(key, *each)}" for key, each in nearness(row).items())
