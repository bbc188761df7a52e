"""Scores of answers against references, with intervals, and what changed between two models' answers to the same rows.

A metric is figures of each row and a score of their sums, so that resampling rows costs no second scoring. Shares have
Wilson's interval and Newcombe's for paired ones, which hold also where all or none are right; the others are resampled.
"""

from __future__ import annotations

import functools
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.rewards import is_json, result_in
from toolkit.data.thoughts import spoken
from toolkit.report.evaluation import Interval, Score

RESAMPLES = 2000
"""Of the rows, for an interval."""
Z = 1.959963984540054
"""The quantile of the normal distribution that leaves 2.5% above it."""
Figures = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A way to score answers.

    Attributes:
        title: What it is called.
        figures: (rows, figures) of answers and references.
        score: Of the sums of figures over any number of rows.
        is_share: Whether it is the share of rows that are right, so that figures are 0 or 1.
        suits: Whether references are such that it says something.
    """

    title: str
    figures: Callable[[Sequence[str], Sequence[str]], Figures]
    score: Callable[[Figures, int], float]
    is_share: bool = False
    suits: Callable[[Sequence[str]], bool] = lambda references: True


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries"
    (2004), equations 2 to 4 with beta = 1, of one reference. Words are runs of letters and digits in any case."""
    one, other = map(_words, (answer, reference))
    if not one or not other:
        return float(one == other)
    longest = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for at, wanted in enumerate(other, start=1):
            diagonal, longest[at] = (
                longest[at],
                diagonal + 1 if word == wanted else max(longest[at], longest[at - 1]),
            )
    return 2 * longest[-1] / (len(one) + len(other))


def _words(text: str) -> list[str]:
    """Runs of letters and digits. Vowel signs and accents belong to the letter before them: without them Hindi, Bengali
    or Tamil would fall into single consonants."""
    kept = " "
    for each in text.lower():
        sign = unicodedata.category(each).startswith("M") and not kept.endswith(" ")
        kept += each if sign or each.isalnum() else " "
    return unicodedata.normalize("NFC", kept).split()


def _each(score: Callable[[str, str], float]) -> Callable[[Sequence[str], Sequence[str]], Figures]:
    def figures(answers: Sequence[str], references: Sequence[str]) -> Figures:
        return np.array([[score(*pair)] for pair in zip(answers, references, strict=True)], dtype=np.float64)

    return figures


def _mean(sums: Figures, rows: int) -> float:
    return float(sums[0]) / rows


@functools.cache
def _corpus_metric(name: str) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    return BLEU() if name == "bleu" else CHRF()


def _corpus(name: str, title: str) -> Metric:
    """A metric of sacrebleu, from the statistics that it, too, resamples (`sacrebleu.significance`)."""

    def figures(answers: Sequence[str], references: Sequence[str]) -> Figures:
        found = _corpus_metric(name)._extract_corpus_statistics(list(answers), [list(references)])
        return np.array(found, dtype=np.float64)

    def score(sums: Figures, rows: int) -> float:
        return float(_corpus_metric(name)._compute_score_from_stats(sums.astype(int).tolist()).score)

    return Metric(title, figures, score)


METRICS = {
    "exact_match": Metric("exact match", _each(lambda one, other: one.strip() == other.strip()), _mean, True),
    "numeric": Metric(
        "numeric answer",
        _each(lambda one, other: (found := result_in(one)) is not None and found == result_in(other)),
        _mean,
        True,
        lambda references: all(result_in(each) is not None for each in references),
    ),
    "json": Metric(
        "valid JSON", _each(lambda one, _: is_json(one)), _mean, True, lambda references: all(map(is_json, references))
    ),
    "rouge_l": Metric("ROUGE-L", _each(rouge_l), _mean),
    "bleu": _corpus("bleu", "BLEU"),
    "chrf": _corpus("chrf", "chrF"),
}
"""By the name that a user gives."""


def scored(
    name: str, before: Sequence[str] | None, after: Sequence[str], references: Sequence[str]
) -> tuple[Score, list[tuple[float | None, float]] | None]:
    """A metric of answers before and after training.

    Returns:
        Its score, and of metrics that are a mean over rows each row's (before, after).
    """
    metric = METRICS[name]
    after, references = [*map(spoken, after)], [*map(spoken, references)]
    before = None if before is None else [*map(spoken, before)]
    last = metric.figures(after, references)
    first = None if before is None else metric.figures(before, references)
    if metric.is_share:
        right = last[:, 0] > 0
        score = Score(name=metric.title, after=wilson(int(right.sum()), len(right)))
        if first is not None:
            was = first[:, 0] > 0
            score.before, score.change = wilson(int(was.sum()), len(was)), paired_shares(was, right)
    else:
        score = _resampled(metric, first, last)
    if metric.score is not _mean:
        return score, None
    starts = [None] * len(last) if first is None else first[:, 0].tolist()
    return score, list(zip(starts, last[:, 0].tolist(), strict=True))


def _resampled(metric: Metric, first: Figures | None, last: Figures) -> Score:
    """Percentiles of the score over rows drawn anew (Efron 1979); of a change both models get the same rows (Koehn,
    "Statistical Significance Tests for Machine Translation Evaluation", 2004)."""
    count = len(last)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(np.float64)

    def scores(figures: Figures) -> Figures:
        whole = np.vstack([figures.sum(axis=0), draws @ figures])
        return np.array([metric.score(sums, count) for sums in whole])

    def interval(values: Figures) -> Interval:
        low, high = np.quantile(values[1:], (0.025, 0.975))
        return Interval(value=float(values[0]), low=float(low), high=float(high))

    after = scores(last)
    score = Score(name=metric.title, after=interval(after))
    if first is not None:
        before = scores(first)
        score.before, score.change = interval(before), interval(after - before)
    return score


def wilson(right: int, count: int) -> Interval:
    """A share with its interval: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference"
    (1927)."""
    share, square = right / count, Z**2 / count
    middle = (share + square / 2) / (1 + square)
    width = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    # Where none or all are right, the share is an end.
    low, high = middle - width if right else 0.0, middle + width if right < count else 1.0
    return Interval(value=share, low=low, high=high)


def paired_shares(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Interval:
    """The difference of two shares of the same rows, with its interval: method 10 of Newcombe, "Improved confidence
    intervals for the difference between binomial proportions based on paired data" (1998)."""
    count = len(after)
    both, neither = int((before & after).sum()), int((~before & ~after).sum())
    one, other = wilson(int(after.sum()), count), wilson(int(before.sum()), count)
    assert one.low is not None and one.high is not None and other.low is not None and other.high is not None
    won, lost = int(after.sum()) - both, int(before.sum()) - both
    excess = float(both * neither - won * lost)
    excess = max(excess - count / 2, 0.0) if excess > 0 else excess
    product = (both + won) * (lost + neither) * (both + lost) * (won + neither)
    alike = excess / math.sqrt(product) if product else 0.0

    def distance(up: float, down: float) -> float:
        return math.sqrt(max(0.0, up**2 - 2 * alike * up * down + down**2))

    value = one.value - other.value
    low = value - distance(one.value - one.low, other.high - other.value)
    return Interval(value=value, low=low, high=value + distance(one.high - one.value, other.value - other.low))
