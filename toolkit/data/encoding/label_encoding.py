"""Labelled rows as tokens: where the label of a row or of a word goes, and what remains of a text that is truncated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from toolkit.data.rows import IGNORE


def text_ids(tokenizer: Any, text: str, second: str | None) -> tuple[list[int], list[int]]:
    """Tokens of a text as its tokenizer begins and ends it, and of two texts which of them each token belongs to.

    Two texts are joined by a line break where there is no token to stand between them.
    """
    if second is not None and tokenizer.sep_token is None:
        text, second = f"{text}\n{second}", None
    encoding = tokenizer(text, second)
    return encoding["input_ids"], encoding.get("token_type_ids", []) if second is not None else []


def word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[list[int], list[int]]:
    """Tokens of words with a space between them, and for each the number of the word that it begins, else -100.

    They are tokenised together, as the same words are in running text. A word that has no token has no number.
    """
    ends = [*itertools.accumulate(len(word) + 1 for word in words)]
    encoding = tokenizer(" ".join(words), return_offsets_mapping=True)
    labels, word, labelled = [IGNORE] * len(encoding["input_ids"]), 0, -1
    for place, (start, end) in enumerate(encoding["offset_mapping"]):
        while word < len(words) and end > start >= ends[word] - 1:
            word += 1
        # A token may begin with the space before its word, and some are of no character.
        begins = word < len(words) and end > start and end > ends[word] - 1 - len(words[word])
        if begins and word > labelled:
            labels[place] = labelled = word
    return encoding["input_ids"], labels


def closing(tokenizer: Any) -> int:
    """Tokens that the tokenizer puts behind every text, which stay where one is cut."""
    mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return sum(1 for _ in itertools.takewhile(bool, reversed(mask)))
