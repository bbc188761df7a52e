"""Rows that a student answers itself: their prompts, told row by row, and how long they may become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from recipes import recipe_of
from toolkit.data import own_answers
from toolkit.data.batching.collate import Collator, documents_of
from toolkit.data.own_answers import longest_rows, prompt_lengths, prompts_of
from toolkit.data.rows import IGNORE

WRITES = "objective=distillation distillation.on_policy=1"


def some_rows() -> list[dict[str, list[int]]]:
    """Rows with one to three answers, of which some end with tokens that are not trained."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(50):
        parts = [[IGNORE] * int(generator.integers(1, 6)) + [7] * int(generator.integers(1, 5)) for _ in range(3)]
        labels = [label for part in parts[: int(generator.integers(1, 4))] for label in part]
        labels += [IGNORE] * int(generator.integers(0, 3))
        rows.append({"input_ids": generator.integers(1, 99, len(labels)).tolist(), "labels": labels})
    return rows


def test_a_prompt_ends_where_the_last_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_answers, "_ROWS_AT_ONCE", 7)
    rows = some_rows()
    wanted = []
    for row in rows:
        end = len(row["labels"])
        while row["labels"][end - 1] == IGNORE:
            end -= 1
        while row["labels"][end - 1] != IGNORE:
            end -= 1
        wanted.append(end)
    labels = np.concatenate([np.array(row["labels"]) for row in rows])
    assert prompt_lengths(labels, np.array([len(row["labels"]) for row in rows])).tolist() == wanted
    data = Dataset.from_list(rows)
    assert prompts_of(data).tolist() == wanted
    assert prompts_of(data.select([9, 3, 3])).tolist() == [wanted[9], wanted[3], wanted[3]]


def test_a_row_may_become_its_prompt_with_the_longest_answer() -> None:
    recipe = recipe_of(WRITES, "batch.seq_len=40 rollout.max_completion_tokens=10")
    lengths, prompts = np.array([20, 20, 35, 40, 39]), np.array([5, 15, 30, 31, 29])
    assert longest_rows(recipe, lengths, prompts).tolist() == [20, 25, 40, 40, 39]


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_rows_are_what_they_were_before_they_were_laid_out(layout: Any) -> None:
    rows = some_rows()[:6]
    batch = Collator(0, layout, 8)(rows)
    found = [row for row in documents_of(batch) if set(row["labels"]) != {IGNORE}]
    assert found == rows
    again = Collator(0, layout, 8)(found)
    assert all(torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(again[key])) for key in batch)
