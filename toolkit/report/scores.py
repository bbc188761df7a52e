"""Names of the metrics of an evaluation beside its loss; all are better the higher they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.report.rewards import mean_and_margin

OF_TARGETS = {"eval_bleu": "BLEU", "eval_chrf": "chrF", "eval_exact_match": "exact match"}
OF_VECTORS = {
    **{"eval_recall_at_1": "recall@1", "eval_recall_at_10": "recall@10", "eval_mrr_at_10": "MRR@10"},
    **{"eval_spearman": "Spearman correlation", "eval_pearson": "Pearson correlation"},
}
"""How often an anchor's positive is the nearest, or among the ten nearest, of all held-out candidates, the mean of 1 /
its place, and how cosines agree with scores."""
OF_MODELS = {"eval_macro_f1": "F1, mean of classes", "eval_entity_f1": "F1 of entities", **OF_VECTORS}
"""Metrics of classes and of vectors."""


def of_tokens(row: Mapping[str, Any]) -> bool:
    """Whether the loss of an evaluation is one of tokens, and has a perplexity."""
    return not row.keys() & {"eval_accuracy", "eval_kl", "eval_reward", *OF_VECTORS}


def vector_text(row: Mapping[str, Any]) -> str:
    """`recall@1 0.412 ± 0.031, recall@10 …` of an evaluation; empty where no vectors were measured."""
    return ", ".join(f"{name} {text}" for key, name in OF_VECTORS.items() if (text := score_text(row, key)))


def score_text(row: Mapping[str, Any], key: str) -> str:
    """`0.812`, with half the width of its 95% interval where that is known: `0.812 ± 0.031`."""
    value, margin = mean_and_margin(row, key)
    if value is None:
        return ""
    return f"{value:.3f}" + ("" if margin is None else f" ± {margin:.3f}")
