"""Rewards of answers, as text for the terminal, the report and the model card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.report.load import number

MARGIN = "_plus_minus"
"""Behind the key of a mean: half the width of its 95% interval."""
_KEY = "eval_reward"


def mean_and_margin(row: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    """A mean of an evaluation and half the width of its 95% interval; None for what the row does not say."""
    return number(row.get(key)), number(row.get(key + MARGIN))


def held_out(row: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Name, mean and half the interval of an evaluation's total reward, whose name is empty, and of each of its
    parts."""
    if number(row.get(_KEY + MARGIN)) is None:  # Of preferences there are rewards, too, of another kind.
        return
    for key in row:
        value, margin = mean_and_margin(row, key)
        if key.startswith(_KEY) and value is not None and margin is not None:
            yield key.removeprefix(_KEY).removeprefix("_"), value, margin


def reward_text(row: Mapping[str, Any]) -> str:
    """`reward 1.31 ± 0.20: numeric 0.41 ± 0.12, format 0.90 ± 0.07`; empty where nothing is rewarded."""
    parts = [f"{name or 'reward'} {value:.3f} ± {margin:.3f}" for name, value, margin in held_out(row)]
    return parts[0] + (f": {', '.join(parts[1:])}" if len(parts) > 2 else "") if parts else ""
