"""`held_out_rows.json`: of each held-out row the sum of its losses, before training and after, so that evaluations of
the same rows are compared row by row.

A loss of 3.2577 against one of 3.2579 says nothing until it is known by how much such a figure would differ on other
rows of the same kind. Rows that are hard for one model are hard for another one, so the difference of two models on the
same rows is known far better than either loss: its interval is that of each row's own difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

FILE = "held_out_rows.json"
MOST = 16_384
"""Entries of an evaluation: of more held-out rows, neighbours are joined. The width of an interval of so many is itself
known to a hundredth, and the file takes about a megabyte."""
_Z = 1.959963984540054
_ROUNDING = 1e-4
"""Relative. A loss is summed in fp32 within a batch, those of rows in double precision."""


class Estimate(NamedTuple):
    """A figure, and half the width of its 95% interval; not a number where that is not known."""

    value: float
    half: float

    @property
    def is_certain(self) -> bool:
        """Whether the interval holds no zero."""
        return abs(self.value) > self.half

    def negative(self) -> Estimate:
        """The negated estimate, for a loss that is minus a reward."""
        return Estimate(-self.value, self.half)

    def text(self) -> str:
        """`-1.2200 ± 0.0512 (95% interval, the same rows)`, of a change."""
        return f"{' '.join(self.texts())} (95% interval, the same rows)"

    def texts(self, sign: str = "+") -> tuple[str, str]:
        """`+0.0123` and `± 0.0045`, of as many digits as say something of the interval, four at least."""
        known = math.isfinite(self.half) and self.half > 0
        digits = max(4, min(8, 1 - math.floor(math.log10(self.half)))) if known else 4
        return f"{self.value:{sign}z.{digits}f}", "± ?" if math.isnan(self.half) else f"± {self.half:.{digits}f}"


def per_count(sums: ArrayLike, counts: ArrayLike) -> Estimate:
    """The ratio of two sums over rows, such as losses to tokens, of rows drawn from many.

    Tokens of a row are alike, so it is rows that are counted (Cochran 1977, Sampling Techniques, section 6.5): of
    R = sum of x / sum of n the variance is rows / (rows - 1) times the sum of (x - R n)² over the square of the sum of
    n. It is estimated from the same rows, so the interval is Student's: of eight rows it is a fifth wider than that of
    the normal distribution.

    Args:
        sums: (rows,) x.
        counts: (rows,) n; rows without any do not count.
    """
    x, n = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    rows, total = int(np.count_nonzero(n)), float(n.sum())
    if not total:
        return Estimate(math.nan, math.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = float(x.sum()) / total
        if rows < 2:
            return Estimate(ratio, math.nan)
        spread = float(np.square(x - ratio * n).sum())
    return Estimate(ratio, _student(rows - 1) * math.sqrt(spread * rows / (rows - 1)) / total)


def of_mean(values: ArrayLike) -> Estimate:
    """The mean of (rows,) values of rows drawn from many, see `per_count`."""
    each = np.asarray(values, dtype=np.float64)
    return per_count(each, np.ones_like(each))


def _student(freedom: int) -> float:
    """The quantile of Student's distribution that leaves 2.5% above it: of one and two degrees of freedom as it is, of
    more by its expansion (Abramowitz and Stegun, 26.7.5), to 0.1% of three and far better of more."""
    if freedom <= 2:
        return 0.95 / math.sqrt(2 * 0.975 * 0.025) if freedom == 2 else math.tan(math.pi * 0.475)
    terms = (
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
        (79 * _Z**9 + 776 * _Z**7 + 1482 * _Z**5 - 1920 * _Z**3 - 945 * _Z) / 92160,
    )
    return _Z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def joined(columns: NDArray[np.float64]) -> list[list[float]]:
    """Sums of losses, and what they are divided by, of as many entries as are kept, in the order of the rows.

    Args:
        columns: (2, rows) both of each row.
    """
    rows = columns.shape[1]
    starts = np.arange(0, rows, -(-rows // MOST))
    kept: list[list[float]] = np.add.reduceat(columns, starts, axis=1).tolist()
    return kept


class RowLosses(NamedTuple):
    """An evaluation's, of each entry.

    Args:
        measured: A hash of the rows, and of how their losses are made.
        counts: What sums of losses are divided by, such as trained tokens.
        sums: Of losses.
    """

    measured: str
    counts: list[float]
    sums: list[float]

    def is_alike(self, other: RowLosses) -> bool:
        """Whether the other's are the same losses of the same rows, of another model."""
        return (self.measured, self.counts) == (other.measured, other.counts)

    def since(self, other: RowLosses | None) -> Estimate | None:
        """By how much the loss is higher than another model's on the same rows; None where they are not the same."""
        if other is None or not self.is_alike(other):
            return None
        return per_count(np.subtract(self.sums, other.sums), self.counts)


class HeldOutRows(BaseModel):
    """What is in the file."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    measured: str
    """See `RowLosses`."""
    joined: int = Field(1, ge=1)
    """Neighbouring rows in an entry."""
    counts: list[float]
    sums: dict[int, list[float]]
    """By the step of the evaluation."""

    def of(self, row: Mapping[str, Any] | None) -> RowLosses | None:
        """Those of an evaluation, which is a row of `metrics.jsonl`; None where they are not kept, or are another's."""
        sums, total = self.sums.get(row["step"]) if row else None, sum(self.counts)
        if row is None or sums is None or len(sums) != len(self.counts) or not total:
            return None
        loss, own = row["eval_loss"], sum(sums) / total
        same = isinstance(loss, int | float) and math.isclose(own, loss, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        return RowLosses(self.measured, self.counts, sums) if same else None
