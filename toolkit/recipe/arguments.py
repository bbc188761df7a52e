"""What the arguments of optimizers and schedules may be, which the libraries themselves hardly check.

They take what they are given, and fail at step 1, train something else, or end in NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """The values that one argument may have."""

    allowed: str
    """In words."""
    fits: Callable[[Any], bool]
    """Whether a value is among them."""


def number(low: float, high: float | None = None, *, above: bool = False, below: bool = False) -> Argument:
    """A finite number in a range. Its ends belong to it, but for a low end with `above` and a high end with `below`."""
    words = f"a number {'above' if above else 'from'} {low:g}"
    if high is not None:
        words += f" {'to below' if below else 'to'} {high:g}"

    def fits(value: Any) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (value > low or (value == low and not above))
            and (high is None or value < high or (value == high and not below))
        )

    return Argument(words if high is not None or above else f"{words} on", fits)


def count(low: int, high: int | None = None) -> Argument:
    """A whole number from `low` on, or to `high`."""
    words = f"a whole number from {low} {'on' if high is None else f'to {high}'}"
    return Argument(words, lambda value: type(value) is int and value >= low and (high is None or value <= high))


def one_of(*values: str | int | bool) -> Argument:
    """One of some values, of the same type."""
    words = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return Argument(words, lambda value: any(type(value) is type(each) and value == each for each in values))


FLAG = one_of(True, False)
SHARE = number(0, 1)
RATE = number(0, 1, below=True)
POSITIVE = number(0, above=True)


def wrong(given: Mapping[str, Any], known: Mapping[str, Argument]) -> dict[str, str]:
    """Name of each argument whose value does not fit, to what is allowed."""
    return {name: known[name].allowed for name, value in given.items() if name in known and not known[name].fits(value)}
