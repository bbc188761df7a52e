"""How well vectors of held-out texts tell what belongs together, by the keys of an evaluation, with 95% intervals."""

from __future__ import annotations

import math

import torch

from toolkit.models.losses.embedding import ranks
from toolkit.report.held_out_rows import of_mean
from toolkit.report.rewards import MARGIN
from toolkit.train.evaluation.scoring import Z, wilson


def retrieval_figures(vectors: torch.Tensor, keys: torch.Tensor) -> dict[str, float]:
    """Of anchors that look for their positives among all held-out positives and negatives.

    Args:
        vectors: (rows, texts, width) of length 1.
        keys: (rows, texts) by which equal texts are known.

    Returns:
        `eval_recall_at_1` and `eval_recall_at_10`, the share of rows whose positive is the nearest or among the ten
        nearest, with the longer side of Wilson's interval; `eval_mrr_at_10`, the mean of 1 / place, 0 beyond ten, with
        half the width of a mean's; and `eval_candidates`.
    """
    places = ranks(vectors, keys).double()
    count = len(places)
    found: dict[str, float] = {}
    for most in (1, 10):
        share = wilson(int((places <= most).sum()), count)
        margin = max(abs(end - share.value) for end in (share.low, share.high) if end is not None)
        found |= {f"eval_recall_at_{most}": share.value, f"eval_recall_at_{most}{MARGIN}": margin}
    found |= _figure("mrr_at_10", *of_mean((1 / places).where(places <= 10, 0.0).cpu().numpy()))
    return found | {"eval_candidates": len(torch.unique(keys[:, 1:]))}


def correlation_figures(vectors: torch.Tensor, scores: torch.Tensor) -> dict[str, float]:
    """How cosines of pairs agree with their scores.

    Returns:
        `eval_spearman` (of ranks, ties at their mean) and `eval_pearson`, each with the longer side of its interval, by
        Fisher's transformation: atanh(r) has the standard deviation 1 / sqrt(n - 3), of ranks
        sqrt((1 + r² / 2) / (n - 3)) (Bonett and Wright 2000, Psychometrika 65:23). It is not estimated from the rows
        but known, so its quantile is the normal distribution's; of three rows and fewer nothing is known.
    """
    cosines = (vectors[:, 0] * vectors[:, 1]).sum(-1).double()
    scores = scores.double()
    found: dict[str, float] = {}
    for name, one, other in (
        ("spearman", _ranked(cosines), _ranked(scores)),
        ("pearson", cosines, scores),
    ):
        value = _correlation(one, other)
        freedom = len(scores) - 3
        spread = math.sqrt((1 + value**2 / 2 if name == "spearman" else 1) / freedom) if freedom > 0 else math.nan
        middle = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, value)))
        margin = max(abs(math.tanh(middle + side * Z * spread) - value) for side in (-1, 1))
        found |= _figure(name, value, margin)
    return found


def _figure(name: str, value: float, margin: float) -> dict[str, float]:
    """With how far its interval reaches, where that is known."""
    return {f"eval_{name}": value} | ({} if math.isnan(margin) else {f"eval_{name}{MARGIN}": margin})


def _ranked(values: torch.Tensor) -> torch.Tensor:
    """(n,) place of each value among all, from 0 on; equal ones share the mean of theirs."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2)[inverse]


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Pearson's; 0 where either is the same everywhere."""
    one, other = one - one.mean(), other - other.mean()
    size = (one.square().sum() * other.square().sum()).sqrt().item()
    return (one * other).sum().item() / size if size else 0.0
