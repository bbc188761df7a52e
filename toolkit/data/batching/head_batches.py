"""Collator for a head that scores texts or words, or for vectors of texts: padded, or end to end for decoders whose
attention takes lengths."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.data.batching.answer_batches import answers_of
from toolkit.data.batching.collate import Collator, Layout, mask_of
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

    End to end all texts are one row (1, T), as of a flat `Collator`, and `read_at` (texts) is where each is read: at
    its last token, and by heads where Transformers does, at the last one that is no padding by its id.

    Args:
        whole: Lays out rows, `padded` or `flat`.
        objective: One of `recipe.heads.HEADED`.
        types: Whether the model reads which of two texts a token belongs to.
    """

    whole: Collator
    objective: str
    types: bool = False

    @property
    def layout(self) -> Layout:
        """The layout of the rows."""
        return self.whole.layout

    def width(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of rows of these lengths (rows, texts): end to end (rows, 1), or each text padded to the row's
        longest."""
        if self.layout == "flat":
            return self.whole.width(lengths.sum(axis=1, keepdims=True))
        return np.repeat(self.whole.width(lengths.max(axis=1, keepdims=True)), lengths.shape[1], axis=1)

    def examples_of(self, examples: list[dict[str, Any]], batch: dict[str, Any]) -> torch.Tensor:
        """The example of each label; pairs of answers, and texts that belong together, have one loss."""
        labels = batch["labels"].numel() if "labels" in batch else len(examples)
        places = torch.arange(labels)
        if self.objective == "token_classification":
            return self.whole.example_at(places, examples, batch["labels"].shape[1])
        return places // max(1, labels // len(examples))

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Tensors for rows with `input_ids`, `labels` and, of pairs, `seq_lengths` of both answers."""
        several = self.objective in (REWARD, EMBEDDING)
        rows = [text for each in examples for text in answers_of(each)] if several else examples
        ids = [np.asarray(row["input_ids"], dtype=np.int64) for row in rows]
        batch = self._flat(ids) if self.layout == "flat" else self._padded(ids)
        if self.types and not several:
            given = [np.asarray(row.get("token_type_ids", ()), dtype=np.int64) for row in rows]
            kinds = [each if len(each) else np.zeros_like(row) for each, row in zip(given, ids, strict=True)]
            batch["token_type_ids"] = self._laid_out(kinds, 0)
        if self.objective == "token_classification":
            batch["labels"] = self._laid_out([np.asarray(row["labels"], dtype=np.int64) for row in rows], IGNORE)
        elif self.objective == EMBEDDING:
            batch["rows"] = torch.tensor([int(each["row"]) for each in examples])
            batch["keys"] = torch.tensor(np.stack([np.asarray(each["keys"], np.int64) for each in examples]))
            batch["scores"] = torch.tensor([float(each["score"]) for each in examples], dtype=torch.float64)
        elif not several:
            batch["labels"] = torch.tensor([int(row["labels"][0]) for row in rows])
        return batch

    def _padded(self, ids: list[NDArray[np.int64]]) -> dict[str, Any]:
        return {"input_ids": self._laid_out(ids, self.whole.pad_token_id)} | self.whole.mask(ids, guessed=True)

    def _flat(self, ids: list[NDArray[np.int64]]) -> dict[str, Any]:
        batch = self.whole([{"input_ids": row, "labels": np.full_like(row, IGNORE)} for row in ids])
        for name in ("labels", "label_positions", "text_counts"):
            batch.pop(name, None)
        begins = np.cumsum([0, *map(len, ids[:-1])])
        return batch | {"read_at": torch.from_numpy(begins + [self._read_at(row) for row in ids])}

    def _read_at(self, row: NDArray[np.int64]) -> int:
        if self.objective == EMBEDDING:
            return len(row) - 1
        return int(np.flatnonzero(row != self.whole.pad_token_id).max(initial=0))

    def _laid_out(self, rows: list[NDArray[np.int64]], value: int) -> torch.Tensor:
        return self.whole.padded([np.concatenate(rows)] if self.layout == "flat" else rows, value)


def texts_of(batch: dict[str, Any]) -> int:
    """How many texts a batch has."""
    return len(batch["read_at"] if "read_at" in batch else batch["input_ids"])


def tokens_of(batch: dict[str, Any]) -> torch.Tensor:
    """How many tokens they have, padding left out."""
    return batch["cu_seq_lens_q"][texts_of(batch)] if "read_at" in batch else mask_of(batch).sum()


def apart(values: torch.Tensor, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Values of the tokens of a batch, text by text; of padded texts with those of their padding."""
    if "read_at" not in batch:
        return [*values]
    ends = batch["cu_seq_lens_q"].tolist()
    return [values[0, begin:end] for begin, end in itertools.pairwise(ends[: texts_of(batch) + 1])]
