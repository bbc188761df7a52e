"""Collator for one of several processes that share rows: its part of each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.data.batching.collate import Collator, Layout, label_positions


@dataclass(frozen=True)
class PartCollator:
    """What one of several processes that share rows gets of a batch: as many tokens as each of them, in order.

    `input_ids`, `labels`, `position_ids` and `text_counts` are (1, T / size). Boundaries and lengths of documents stay
    those of the whole row, in which attention sees them. The first label is the one that follows the last token, so
    that labels rolled by one follow their tokens, and each label is in one part. Attention is told by

    - `row_tokens`, a host integer, that is T, where the part is one piece of the row;
    - `row_chunks`, where it is two, of each what `_chunk` says.

    Args:
        whole: Lays documents end to end, filled up to a multiple of `size * chunks`.
        index: Which part.
        size: Number of parts.
        chunks: 1 for a piece of the row; 2 for one of its front and one as far from its end.
    """

    whole: Collator
    index: int
    size: int
    chunks: int = 1

    @property
    def layout(self) -> Layout:
        """The layout of whole rows."""
        return self.whole.layout

    def width(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that whole rows of these lengths take in the layout."""
        return self.whole.width(lengths)

    def pieces(self, tokens: int) -> list[tuple[int, int]]:
        """First token and end of each piece of a row that is this part."""
        width = tokens // (self.size * self.chunks)
        places = [self.index, 2 * self.size - 1 - self.index][: self.chunks]
        return [(place * width, (place + 1) * width) for place in places]

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """(1, T / size) of (1, T)."""
        return torch.cat([tensor[:, first:end] for first, end in self.pieces(tensor.shape[1])], 1)

    def examples_of(self, examples: list[dict[str, Any]], batch: dict[str, Any]) -> torch.Tensor:
        """The example of each loss, found at the positions that the part's `label_positions` have in whole rows."""
        tokens = batch["input_ids"].shape[1] * self.size
        whole = self.part(torch.arange(tokens)[None])[0]
        return self.whole.example_at(whole[batch["label_positions"]], examples, tokens)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """The part of a batch."""
        batch = self.whole(examples)
        tokens = batch["input_ids"].shape[1]
        batch |= {key: self.part(batch[key]) for key in ("input_ids", "position_ids", "text_counts") if key in batch}
        batch["labels"] = self.part(batch["labels"].roll(-1, 1)).roll(1, 1)
        batch["label_positions"] = label_positions(batch["labels"].numpy(), pairs=False)
        if self.chunks == 1:
            return batch | {"row_tokens": tokens}
        boundaries = batch["cu_seq_lens_q"].numpy()
        return batch | {"row_chunks": [_chunk(boundaries, first, end) for first, end in self.pieces(tokens)]}


def _chunk(boundaries: NDArray[np.int32], first: int, end: int) -> dict[str, Any]:
    """How tokens `first` to `end` of a row attend to it.

    Returns:
        `tokens` of the chunk; `first` and `end` of the tokens of its documents up to its own end; of these documents
        `cu_seq_lens_q`, `max_length_q` of their tokens in the chunk, and `cu_seq_lens_k`, `max_length_k` of all.
    """
    begins, stops = boundaries[:-1], np.minimum(boundaries[1:], end)
    here = (stops > first) & (begins < end)
    begins, stops = begins[here], stops[here]
    told: dict[str, Any] = {"tokens": end - first, "first": int(begins[0]), "end": end}
    for name, lengths in (("q", stops - np.maximum(begins, first)), ("k", stops - begins)):
        told[f"cu_seq_lens_{name}"] = torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32))
        told[f"max_length_{name}"] = int(lengths.max())
    return told
