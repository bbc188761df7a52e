"""Collators for rows of answers: pairs that are compared, answers that are judged, and prompts whose answers are yet
to be generated."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.data.batching.collate import Collator, Layout
from toolkit.data.rows import IGNORE


@dataclass(frozen=True)
class _OneLossEach:
    """What the collators of this module have in common: each row has one loss, or one reward.

    Args:
        whole: Lays out the documents.
    """

    whole: Collator

    @property
    def layout(self) -> Layout:
        """The layout of the documents."""
        return self.whole.layout

    def examples_of(self, examples: list[dict[str, Any]], batch: dict[str, Any]) -> torch.Tensor:
        """(B,) the example of each loss."""
        return torch.arange(len(examples))


@dataclass(frozen=True)
class AnswerCollator(_OneLossEach):
    """Lays out pairs of answers: each answer as a document of its own, the chosen one before the rejected one.

    Beside what the documents become a batch has

    - `rows` (B), the number of each pair among all rows, for what is known of it from before training;
    - `answer_tokens`, host integers, the trained tokens of each of the 2 B answers, in the order of `label_positions`.
    """

    def width(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of pairs whose answers have these lengths (rows, 2): end to end (rows, 1), or each padded to the
        longer one."""
        if self.layout == "flat":
            return self.whole.width(lengths.sum(axis=1, keepdims=True))
        return np.repeat(self.whole.width(lengths.max(axis=1, keepdims=True)), 2, axis=1)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Tensors for rows with `input_ids`, `labels`, `seq_lengths` of both answers, and `row`, their number."""
        return _counted(self.whole, [answer for each in examples for answer in answers_of(each)]) | _rows(examples)


@dataclass(frozen=True)
class JudgedCollator(_OneLossEach):
    """Lays out answers that are judged, and apart from them, as `others`, the same prompts with answers of other rows.

    Beside what the documents become, both have `answer_tokens`, and a batch `rows`, as of an `AnswerCollator`; and
    `desirable` (B), which of the answers are good.
    """

    def width(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that answers of these lengths take in the layout."""
        return self.whole.width(lengths)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Tensors for rows with `input_ids`, `labels`, `seq_lengths` of both answers, `desirable`, and `row`."""
        own, others = zip(*map(answers_of, examples), strict=True)
        desirable = torch.tensor([bool(example["desirable"]) for example in examples])
        both = {"others": _counted(self.whole, list(others)), "desirable": desirable}
        return _counted(self.whole, list(own)) | both | _rows(examples)


@dataclass(frozen=True)
class PromptCollator(_OneLossEach):
    """Names the rows of a batch, `rows` (B), whose answers are yet to come; and lays out those that have.

    Args:
        whole: Lays out prompts with their answers.
        answer: Tokens that an answer may have.
    """

    answer: int

    def width(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of prompts of these lengths (rows, 1) with the longest answer."""
        return self.whole.width(lengths + self.answer)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """The numbers of rows."""
        return _rows(examples)

    def answered(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
        """Tensors for prompts and their answers, all whose tokens are trained, with `answer_tokens`."""
        return _counted(self.whole, [*map(answered_row, prompts, answers)])


def answered_row(asked: list[int], given: list[int]) -> dict[str, Any]:
    """A prompt with an answer to it, all whose tokens are trained."""
    return {"input_ids": [*asked, *given], "labels": [*[IGNORE] * len(asked), *given]}


def _counted(whole: Collator, answers: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [int(np.count_nonzero(np.asarray(answer["labels"]) != IGNORE)) for answer in answers]
    return whole(answers) | {"answer_tokens": counts}


def _rows(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"rows": torch.tensor([int(example["row"]) for example in examples])}


def answers_of(pair: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of a row: two answers, or texts that belong together."""
    ends = [*itertools.accumulate((int(each) for each in pair["seq_lengths"]), initial=0)]
    return [{name: pair[name][slice(*part)] for name in ("input_ids", "labels")} for part in itertools.pairwise(ends)]
