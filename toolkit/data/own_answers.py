"""Rows whose last answer a student writes itself: where their prompts end, and how long they may become."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.rows import IGNORE
from toolkit.recipe import Recipe

_ROWS_AT_ONCE = 1000

Array = NDArray[np.int64]


def prompt_lengths(labels: Array, lengths: Array) -> Array:
    """(rows,) tokens of each row before its last answer, which is its last run of trained tokens.

    Args:
        labels: Of all rows, end to end. The first of a row is never trained, so no run has tokens of two rows.
        lengths: (rows,) tokens of each, of which at least one is trained.
    """
    trained = labels != IGNORE
    begins = np.flatnonzero(trained & ~np.append(False, trained[:-1]))
    ends: Array = lengths.cumsum(dtype=np.int64)
    return np.asarray(begins[np.searchsorted(begins, ends) - 1] - (ends - lengths), dtype=np.int64)


def prompts_of(rows: Any) -> Array:
    """Where the prompt of each row of a data set ends. Untyped, as importing `datasets` would delay plans."""
    parts = [np.empty(0, np.int64)]
    for table in rows.with_format("arrow").select_columns("labels").iter(_ROWS_AT_ONCE):
        labels: Any = table["labels"].combine_chunks()
        ends = labels.offsets.to_numpy()
        parts.append(prompt_lengths(labels.flatten().to_numpy(), np.diff(ends)))
    return np.concatenate(parts)


def writable(recipe: Recipe, prompts: Any) -> Any:
    """Whether the longest answer fits behind each of some prompts; a row with a longer one keeps its own."""
    return np.asarray(prompts) + recipe.rollout.max_completion_tokens <= recipe.batch.seq_len


def longest_rows(recipe: Recipe, lengths: Any, prompts: Any) -> Any:
    """Tokens that each row may have: those of the given one, or of its prompt with the longest answer.

    Args:
        lengths: (rows,) tokens of each.
        prompts: (rows,) tokens of each before its last answer.
    """
    written = np.asarray(prompts) + recipe.rollout.max_completion_tokens
    return np.where(writable(recipe, prompts), np.maximum(lengths, written), lengths)
