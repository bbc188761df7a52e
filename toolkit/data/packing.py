"""Several documents to one sequence, each of them whole, and long texts cut into sequences."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset

from toolkit.data.templates import IGNORE

_ROWS_AT_ONCE = 10_000
"""Rows packed together: enough that the last, part-filled sequence of each group does not matter."""


def pack(dataset: Dataset, seq_len: int) -> Dataset:
    """Packs whole rows into sequences of at most `seq_len` tokens (best-fit decreasing).

    The same rows give the same sequences. They come in a random order, because best-fit puts the longest rows first
    and training must not see rows sorted by length, shuffled or not.

    Args:
        dataset: rows with `input_ids` and `labels` of equal length; the first label of every row is -100.
        seq_len: tokens per packed sequence; no row may be longer or empty.

    Returns:
        Rows with `input_ids`, `labels` and `seq_lengths`, the tokens of each document in order.
    """
    from trl.data_utils import pack_dataset  # seconds to import, and only packing needs it

    dataset = dataset.select_columns(["input_ids", "labels"])
    for batch in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        lengths = pc.min_max(pc.list_value_length(batch["input_ids"])).as_py()
        assert lengths["min"] > 0 and lengths["max"] <= seq_len, f"rows of {lengths} tokens in sequences of {seq_len}"
    options = {"batch_size": _ROWS_AT_ONCE, "keep_in_memory": not dataset.cache_files}
    packed = pack_dataset(dataset, seq_len, strategy="bfd", map_kwargs=options)
    return packed.select(np.random.default_rng(0).permutation(len(packed)))


def split_row(input_ids: list[int], labels: list[int], seq_len: int) -> list[tuple[list[int], list[int]]]:
    """Cuts a long text into rows of at most `seq_len` tokens. The first token of each is context, not a target."""
    return [
        (input_ids[start : start + seq_len], [IGNORE, *labels[start + 1 : start + seq_len]])
        for start in range(0, len(input_ids), seq_len)
    ]
