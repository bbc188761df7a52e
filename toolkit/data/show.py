"""Prepared rows as a person can read them: which tokens are trained, and where packed documents meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from toolkit.data.prepare import Prepared
from toolkit.data.templates import IGNORE

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {
    0x7F: 0x2421,
    0x9B: 0x241B,
}
"""Data may hold what steers a terminal; it is shown as the pictures Unicode has for it."""


def show(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, n: int, color: bool) -> str:
    """The first `n` training rows as text, special tokens included.

    Args:
        prepared: What `prepare` returned.
        tokenizer: The one it was prepared with.
        n: Rows to show.
        color: Trained text in green and the rest dimmed; otherwise trained text stands between « and ».
    """
    blocks = []
    for number, row in enumerate(itertools.islice(iter(prepared.train), n), 1):
        ids, labels = row["input_ids"], row["labels"]
        if prepared.audit["objective"] == "seq2seq":
            header = f"row {number}: source of {len(ids):,} tokens, target of {len(labels):,} tokens, all trained"
            source = _marked(tokenizer, ids, [False] * len(ids), color)
            target = _marked(tokenizer, labels, [True] * len(labels), color)
            blocks.append(f"── {header}\n{source}\n──▸\n{target}")
            continue
        trained = [label != IGNORE for label in labels]
        lengths = row.get("seq_lengths") or [len(ids)]
        documents = f" in {len(lengths)} documents" if "seq_lengths" in row else ""
        header = f"row {number}: {len(ids):,} tokens{documents}, {sum(trained):,} trained"
        texts = [_marked(tokenizer, ids[a:b], trained[a:b], color) for a, b in itertools.pairwise(_edges(lengths))]
        body = "".join(
            text if index == 0 else f"\n┄┄ document {index + 1}: {length:,} tokens\n{text}"
            for index, (text, length) in enumerate(zip(texts, lengths, strict=True))
        )
        blocks.append(f"── {header}\n{body}")
    return "\n\n".join(blocks)


def _edges(lengths: Sequence[int]) -> Iterator[int]:
    return itertools.accumulate(lengths, initial=0)


def _marked(tokenizer: PreTrainedTokenizerBase, ids: list[int], trained: list[bool], color: bool) -> str:
    marks = {True: (GREEN, RESET), False: (DIM, RESET)} if color else {True: ("«", "»"), False: ("", "")}
    result = []
    position, before = 0, ""
    for is_trained, run in itertools.groupby(trained):
        position += len(list(run))
        # A run decoded alone would lose a space at its start, and characters of several tokens.
        so_far = str(tokenizer.decode(ids[:position], clean_up_tokenization_spaces=False))
        if position < len(ids):
            so_far = so_far.rstrip("\ufffd")  # the first bytes of a character that the next run completes
        opening, closing = marks[is_trained]
        result.append(f"{opening}{so_far[len(before) :].translate(CONTROL_PICTURES)}{closing}")
        before = so_far
    return "".join(result)
