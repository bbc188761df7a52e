"""Rows to the tensors of one batch for a head that scores texts or words, or for vectors of texts: padded, each text by
itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.data.answer_batches import answers_of
from toolkit.data.collate import Collator, Layout
from toolkit.data.rows import IGNORE
from toolkit.recipe.heads import EMBEDDING, REWARD


@dataclass(frozen=True)
class HeadCollator:
    """Lays out rows for a head.

    A batch has `input_ids` and, where anything is padded, `attention_mask` (B, L), padded on the right, for models that
    read them and rows of two texts `token_type_ids` (B, L), and `labels`: (B) classes, or (B, L) those of words, each
    at the word's first token. Of pairs of answers there are no labels, and 2 B texts, the chosen one of each before the
    rejected one. Of texts that belong together there are those of a row behind each other, and `rows` (B), their
    numbers, `keys` (B, texts) by which equal texts are known, and `scores` (B).

    Args:
        whole: Pads rows.
        objective: One of `recipe.heads.HEADED`.
        types: Whether the model reads which of two texts a token belongs to.
    """

    whole: Collator
    objective: str
    types: bool = False

    @property
    def layout(self) -> Layout:
        """That of the rows."""
        return self.whole.layout

    def width(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of rows of these lengths (rows, texts): all texts of a row as wide as the longest."""
        return np.repeat(self.whole.width(lengths.max(axis=1, keepdims=True)), lengths.shape[1], axis=1)

    def examples_of(self, examples: list[dict[str, Any]], batch: dict[str, Any]) -> torch.Tensor:
        """The example of each label; pairs of answers, and texts that belong together, have one loss."""
        labels = batch["labels"].numel() if "labels" in batch else len(examples)
        return torch.arange(labels) // max(1, labels // len(examples))

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Tensors for rows with `input_ids`, `labels` and, of pairs, `seq_lengths` of both answers."""
        several = self.objective in (REWARD, EMBEDDING)
        rows = [text for each in examples for text in answers_of(each)] if several else examples
        ids = [np.asarray(row["input_ids"], dtype=np.int64) for row in rows]
        batch = {"input_ids": self.whole.padded(ids, self.whole.pad_token_id)} | self.whole.mask(ids, guessed=True)
        if self.types and not several:
            given = [np.asarray(row.get("token_type_ids", ()), dtype=np.int64) for row in rows]
            kinds = [each if len(each) else np.zeros_like(row) for each, row in zip(given, ids, strict=True)]
            batch["token_type_ids"] = self.whole.padded(kinds, 0)
        if self.objective == "token_classification":
            batch["labels"] = self.whole.padded([np.asarray(row["labels"], dtype=np.int64) for row in rows], IGNORE)
        elif self.objective == EMBEDDING:
            batch["rows"] = torch.tensor([int(each["row"]) for each in examples])
            batch["keys"] = torch.tensor(np.stack([np.asarray(each["keys"], np.int64) for each in examples]))
            batch["scores"] = torch.tensor([float(each["score"]) for each in examples], dtype=torch.float64)
        elif not several:
            batch["labels"] = torch.tensor([int(row["labels"][0]) for row in rows])
        return batch
