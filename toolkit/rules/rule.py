"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.recipe import Recipe

Config = Mapping[str, Any]
"""The model's `config.json`; empty when it is not known without a download."""


@dataclass(frozen=True)
class Rule:
    """One combination that is refused.

    Args:
        id: Stable name, used in tests and documentation.
        path: The key the message points at.
        broken: Whether a recipe breaks the rule.
        why: What would happen. May name figures in braces, see `toolkit.rules.check`.
        change: The nearest allowed change.
        reference: Where to read about a failure that a test cannot show without the hardware.
    """

    id: str
    path: str
    broken: Callable[[Recipe, Config], bool]
    why: str
    change: str
    reference: str = ""
