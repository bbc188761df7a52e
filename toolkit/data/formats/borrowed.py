"""Pairs the prompt of each judged answer with the answer to another prompt.

How likely the model makes answers that belong elsewhere tells how far it has moved in all (the divergence that KTO
subtracts, Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1). TRL pairs neighbours of a micro-batch for that, which
are often answers to one prompt. Here the rows are drawn into one ring by the seed, and each gets the answer of the one
before it: so none depends on how batches are made, and the answers that are borrowed are those that are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value

from toolkit.data.rows import IGNORE


def with_others(rows: Dataset, seq_len: int, seed: int) -> Dataset:
    """Rows of which each has, behind its own answer, its prompt with the answer to another one.

    Args:
        rows: With `input_ids`, `labels`, of which those of the answer are no `IGNORE`, and `desirable`.
        seq_len: Tokens to which the second of both is cut, of its answer at least one.

    Returns:
        The rows, `seq_lengths` (2) of both, as of pairs of answers.
    """
    ring = np.random.default_rng(seed).permutation(len(rows))
    before = np.empty_like(ring)
    before[ring] = np.roll(ring, 1)
    others = rows.select(before)

    def joined(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {"input_ids": [], "labels": [], "seq_lengths": []}
        borrowed = others[numbers]
        for ids, labels, ids_of_other, labels_of_other in zip(
            batch["input_ids"], batch["labels"], borrowed["input_ids"], borrowed["labels"], strict=True
        ):
            prompt = min(_answer(labels), seq_len - 1)
            answer = _answer(labels_of_other)
            other = [*ids[:prompt], *ids_of_other[answer:]][:seq_len]
            made["input_ids"].append([*ids, *other])
            made["labels"].append([*labels, *([IGNORE] * prompt + labels_of_other[answer:])[:seq_len]])
            made["seq_lengths"].append([len(ids), len(other)])
        return made

    features = Features({**rows.features, "seq_lengths": List(Value("int32"))})
    return rows.map(
        joined, with_indices=True, batched=True, features=features, load_from_cache_file=False,
        new_fingerprint=f"{rows._fingerprint[:32]}-others",
    )  # fmt: skip


def _answer(labels: list[int]) -> int:
    """Where the answer begins."""
    return next(n for n, label in enumerate(labels) if label != IGNORE)
