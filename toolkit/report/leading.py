"""Which of several runs has the lowest held-out loss, and whether the difference is more than chance.

Runs that were evaluated on the same rows are compared row by row. The lowest is the best only where the interval of its
difference from every other holds no zero; runs without figures of rows, such as those of older versions, are compared
by their losses alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.report.held_out_rows import Estimate
from toolkit.report.load import Record, finite

_NAMED = 4
"""Runs that a sentence names."""


@dataclass(frozen=True)
class Leading:
    """What is known of the runs' order by held-out loss.

    Args:
        lowest: The run whose loss is lowest; None where fewer than two have one.
        best: Those that did best, as far as that can be said.
        above: By how much each run's loss is higher than the lowest; None where not all is known of both's rows.
        unlike: Whether there are runs that were evaluated on other rows, or by another measure.
    """

    lowest: int | None = None
    best: tuple[int, ...] = ()
    above: tuple[Estimate | None, ...] = field(default=())
    unlike: bool = False

    @property
    def alike(self) -> list[int]:
        """Runs that cannot be told from the lowest."""
        return [at for at, each in enumerate(self.above) if each is not None and not each.is_certain]

    def sentence(self, names: Sequence[str]) -> str:
        """Which runs cannot be told from the lowest; empty where all can."""
        if self.lowest is None or not self.alike:
            return ""
        named = [names[at] for at in self.alike[:_NAMED]]
        more = [f"{len(self.alike) - _NAMED} more"] if len(self.alike) > _NAMED else []
        *first, last = [*named, *more]
        whose = "the intervals of their differences hold" if more or first else "the interval of its difference holds"
        return (
            f"By held-out loss {', '.join(first)}{' and ' if first else ''}{last} cannot be told from the lowest, "
            f"{names[self.lowest]}: {whose} zero (≈; 95%, on the same rows)."
        )

    def texts(self, missing: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The difference of each run, after `≈` if its interval contains zero, and half the interval's width."""
        both = [
            (missing, missing) if each is None else (("" if each.is_certain else "≈ ") + texts[0], texts[1])
            for each in self.above
            for texts in [each.texts() if each else ("", "")]
        ]
        return tuple(first for first, _ in both), tuple(second for _, second in both)


def leading(records: Sequence[Record], losses: Sequence[float], comparable: bool) -> Leading:
    """Compares runs by their held-out losses.

    Args:
        losses: No finite number where there is none.
        comparable: Whether they are of as many tokens.
    """
    known = [at for at, loss in enumerate(losses) if math.isfinite(loss)]
    if len(known) < 2:
        return Leading(above=(None,) * len(losses))
    rows = [record.row_losses for record in records]
    lowest = min(known, key=lambda at: (losses[at], rows[at] is None))
    own = rows[lowest]
    above = tuple(each.since(own) if each and at != lowest else None for at, each in enumerate(rows))
    those = [each for each in rows if each]
    unlike = any(not each.is_alike(those[0]) for each in those[1:])
    least = losses[lowest]
    certain = all(each is None or each.is_certain for each in above)
    differ = len({losses[at] for at in known}) > 1
    best = tuple(at for at in known if losses[at] == least) if comparable and differ and certain and not unlike else ()
    return Leading(lowest, best, above, unlike and comparable)


def held_out_tokens(records: Sequence[Record]) -> set[float]:
    """The numbers of tokens over which the runs' held-out losses are means."""
    return {count for record in records if record.result for count in finite([record.result], "eval_tokens")}


def same_rows(records: Sequence[Record], order: Leading) -> bool:
    """Whether all were evaluated on the same rows, as far as is known, though losses may be made of them in other ways:
    an accuracy is then that of the same pairs, whatever `preference.beta` is."""
    data = {record.manifest.hashes.get("data") for record in records}
    return len(held_out_tokens(records)) < 2 and (not order.unlike or (len(data) < 2 and None not in data))
