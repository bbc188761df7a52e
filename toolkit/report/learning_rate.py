"""Transfers the best learning rate of a small model's sweep to a larger model, with an interval.

Near its least the loss is a parabola over the logarithm of the learning rate, the same for every group of runs that
differ in something else, such as the seed, but for a constant. Where it is least, and how sure that is, follows from
least squares. How it changes with the width of a model is either measured, by sweeps of two widths or more, or it is
only known to lie between not at all and in inverse proportion, as for matrices trained with Adam in the limit of width
(Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, table 3). Real models follow such laws roughly, small ones and
short runs least, so an exponent is another one between the widths that were swept and the one that is asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.common import UserError

SHARE = 0.9
"""Probability that an interval covers."""
_DRAWS, _SEED = 20_000, 0
_WANDERS = 0.5
"""Standard deviation of that change of an exponent. Llamas trained from scratch for 80 steps had 0.9 between hidden
sizes of 64 and 192, and 1.6 between 192 and 384."""
_NEIGHBOURS = 2
"""Rates on either side of the best that are fitted: further away the loss is no parabola."""


@dataclass(frozen=True)
class Point:
    """A run of a sweep.

    Args:
        rate: Its learning rate.
        loss: On held-out rows.
        group: What else its recipe says; runs of one group differ in the rate alone.
    """

    rate: float
    loss: float
    group: str


@dataclass(frozen=True)
class Estimate:
    """A learning rate, and the ends of its interval; `draws` are equally likely natural logarithms of it."""

    draws: np.ndarray

    @property
    def ends(self) -> tuple[float, float, float]:
        """Low end, median, high end."""
        low, middle, high = np.exp(np.quantile(self.draws, [(1 - SHARE) / 2, 0.5, (1 + SHARE) / 2]))
        return float(low), float(middle), float(high)

    def text(self) -> str:
        """`2.1e-3 (90%: 1.5e-3 to 3e-3)`."""
        low, middle, high = self.ends
        return f"{middle:.2g} ({SHARE:.0%}: {low:.2g} to {high:.2g})"


def best_rate(points: Sequence[Point]) -> Estimate:
    """Where the loss of a sweep is least.

    Args:
        points: At least three rates.

    Raises:
        UserError: If the least is not between the rates, or nothing like a least is to be seen.
    """
    alike = _comparable(points)
    rates = sorted({point.rate for point in alike})
    if len(rates) < 3:
        with_all_else = " with all else the same" if len(alike) < len(points) else ""
        raise UserError(
            f"{len(rates)} learning rates were tried{with_all_else}", "sweep three or more, each twice the one before"
        )
    best = int(np.argmin(_levels(alike, rates)))
    if best in (0, len(rates) - 1):
        raise UserError(
            f"the {'lowest' if best == 0 else 'highest'} learning rate that was tried, {rates[best]:g}, is the best",
            f"sweep {'lower' if best == 0 else 'higher'} ones too",
        )
    near = rates[max(0, best - _NEIGHBOURS) : best + _NEIGHBOURS + 1]
    used = [point for point in points if near[0] <= point.rate <= near[-1]]
    groups = sorted({point.group for point in used})
    center = math.log(rates[best])
    x = np.array([math.log(point.rate) - center for point in used])
    matrix = np.column_stack([x**2, x, *([point.group == name for point in used] for name in groups)]).astype(float)
    losses = np.array([point.loss for point in used])
    solution, *_ = np.linalg.lstsq(matrix, losses, rcond=None)
    freedom = len(used) - np.linalg.matrix_rank(matrix)
    if solution[0] <= 0:
        raise UserError(
            "the losses near the best learning rate have no least between them", "sweep more rates or seeds"
        )
    draw = np.random.default_rng(_SEED)
    if freedom < 1:
        # Three runs say nothing of their noise: anything between the neighbours may be the best.
        return Estimate(draw.uniform(math.log(rates[best - 1]), math.log(rates[best + 1]), _DRAWS))
    variance = float(((losses - matrix @ solution) ** 2).sum()) / freedom
    spread = np.linalg.cholesky(np.linalg.pinv(matrix.T @ matrix)[:2, :2] * variance + 1e-18 * np.eye(2))
    # Student's distribution: the noise is estimated as well.
    scale = np.sqrt(draw.chisquare(freedom, _DRAWS) / freedom)
    bends, slopes = solution[:2, None] + spread @ draw.standard_normal((2, _DRAWS)) / scale
    # A least that lies further out than the rates that were tried was not seen.
    ends = math.log(near[0]) - center, math.log(near[-1]) - center
    least = np.where(bends > 0, -slopes / (2 * np.where(bends > 0, bends, 1.0)), np.sign(-slopes) * math.inf)
    return Estimate(center + np.clip(least, *ends))


def _comparable(points: Sequence[Point]) -> list[Point]:
    """The most runs whose rates can be compared: each has the rate or all else in common with another of them. Where
    all runs differ in both, as those of a search may, nothing says which of the two makes a loss."""
    parts = list[list[Point]]()
    for point in points:
        joined = [part for part in parts if any(point.rate == each.rate or point.group == each.group for each in part)]
        parts = [*(part for part in parts if part not in joined), [*itertools.chain(*joined), point]]
    return max(parts, key=len, default=[])


def _levels(points: Sequence[Point], rates: Sequence[float]) -> np.ndarray:
    """(rates,) the loss at each rate, but for a constant: that of its runs, less what their groups add to any rate. A
    mean would be higher where the run of a better group is missing."""
    groups = sorted({point.group for point in points})
    columns = [[point.rate == rate for point in points] for rate in rates]
    columns += [[point.group == name for point in points] for name in groups[1:]]
    losses = np.array([point.loss for point in points])
    return np.linalg.lstsq(np.array(columns).T.astype(float), losses, rcond=None)[0][: len(rates)]


def for_width(found: Sequence[tuple[int, Estimate]], width: int) -> Estimate:
    """The best learning rate, estimated for a model of another width.

    Args:
        found: Hidden size of a model, and what its sweep found.
        width: Hidden size of the model that is to be trained.
    """
    logs = np.log([size for size, _ in found])
    draws = np.array([estimate.draws for _, estimate in found])
    far, draw = math.log(width), np.random.default_rng(_SEED + 1)
    offered = draws.mean(0)
    if len(set(logs)) > 1:
        centered = logs - logs.mean()
        offered += (centered @ (draws - offered)) / (centered @ centered) * (far - logs.mean())
    else:
        offered -= draw.uniform(0.0, 1.0, draws.shape[1]) * (far - logs[0])
    beyond = np.abs(far - logs).min()
    return Estimate(offered + draw.normal(0.0, _WANDERS, draws.shape[1]) * beyond)
