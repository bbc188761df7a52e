"""Turns a text and the ranges of it that are trained into tokens and labels.

A token is trained if it overlaps a range. Where it stands the tokenizer tells, for a quarter of the time that it takes
in all; the tokens of a byte-level tokenizer spell the text, so there their own lengths say the same.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unicodedata import is_normalized

from transformers import PreTrainedTokenizerBase, TokenizersBackend

from toolkit.common import UserError, in_a_line, panicked
from toolkit.data.rows import IGNORE

Span = tuple[int, int]
"""[start, end) of characters."""
Labelled = tuple[list[int], list[int], bool]
"""Tokens; labels aligned with them, -100 where they are not trained and at 0, which nothing predicts; whether a token
that is trained begins before its range."""


@contextmanager
def giving_up_named() -> Iterator[None]:
    """Around what a tokenizer does with a text, at which its library may give up: a search that tries too much."""
    try:
        yield
    except BaseException as error:
        if not panicked(error):
            raise
        raise UserError(
            f"The tokenizer gives up at this text: {in_a_line(error)}.",
            "Correct the expressions in its tokenizer.json, set model.tokenizer to another, or take the row out.",
        ) from None


class Labeller:
    """Tokenises texts, without special tokens around them, and labels the tokens. Picklable.

    Args:
        tokenizer: A fast tokenizer (with character offsets).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added_ids = frozenset(added)
        self._is_usual = type(tokenizer)._encode_plus is TokenizersBackend._encode_plus
        self._widths: _Widths | None = None
        if self._is_usual and _is_byte_level(tokenizer.backend_tokenizer):
            self._widths = _Widths(tokenizer, {token: len(each.content.encode()) for token, each in added.items()})

    def __call__(self, text: str, ranges: list[Span], gaps: Collection[Span] = ()) -> Labelled:
        """Tokens and labels of a text.

        Args:
            text: What to tokenise.
            ranges: What is trained, in order.
            gaps: What of it is not; nor is a token that lies in a gap in part.
        """
        if self._widths is not None and not gaps:
            data = text if text.isascii() else text.encode()
            ids = self._backend().encode_batch_fast([text], add_special_tokens=False)[0].ids
            ends = list(accumulate(map(self._widths.__getitem__, ids)))
            # They do not add up where a token takes spaces beside it that it does not spell.
            if (ends[-1] if ends else 0) == len(data) and (data is text or is_normalized("NFC", text)):
                if data is not text:
                    ranges = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in ranges]
                return ids, *self._by_ends(ids, ends, ranges)
        ids, offsets = self._with_offsets(text)
        labels, merged = self.by_offsets(ids, offsets, ranges)
        for position, (left, right) in enumerate(offsets if gaps else ()):
            if any(left < end and right > start for start, end in gaps):
                labels[position] = IGNORE
        return ids, labels, merged

    def by_offsets(self, ids: list[int], offsets: list[Span], ranges: list[Span]) -> tuple[list[int], bool]:
        """Labels of tokens that stand at `offsets`, and whether one that is trained begins before its range."""
        labels = [IGNORE] * len(ids)
        merged, position = False, 0
        for start, end in ranges:
            while position < len(ids) and offsets[position][0] < end:
                token, (left, right) = ids[position], offsets[position]
                # Control tokens that swallow the whitespace after them (Phi-3) belong to the header.
                if right > start and not (left < start and token in self._added_ids):
                    merged |= left < start
                    labels[position] = token if position else IGNORE
                position += 1
        return labels, merged

    def _by_ends(self, ids: list[int], ends: list[int], ranges: list[Span]) -> tuple[list[int], bool]:
        """As `by_offsets`, for tokens without gaps between them; `ends` says where each ends."""
        labels = [IGNORE] * len(ids)
        merged, position = False, 0
        for start, end in ranges:
            first = max(bisect_right(ends, start), position)
            position = max(bisect_left(ends, end) + 1, position)
            if first < min(position, len(ids)) and (ends[first - 1] if first else 0) < start:
                is_added = ids[first] in self._added_ids
                merged, first = merged or not is_added, first + is_added
            labels[first:position] = ids[first:position]
        labels[:1] = [IGNORE] * len(labels[:1])
        return labels, merged

    def _with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        if not self._is_usual:
            encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return encoding["input_ids"], encoding["offset_mapping"]
        encoded = self._backend().encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def _backend(self) -> Any:
        """What a call of the tokenizer comes to, which itself takes half as long again, in Python, for each text."""
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._tokenizer.split_special_tokens
        return backend


class _Widths(dict[int, int]):
    """Bytes that each token stands for, by its id; those that were never asked for are looked up."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, known: dict[int, int]) -> None:
        super().__init__(known)
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> int:
        # One character stands for each byte.
        self[token] = len(self._tokenizer.backend_tokenizer.id_to_token(token))
        return self[token]


def _is_byte_level(backend: Any) -> bool:
    """Whether tokens spell the text byte by byte, if their lengths add up to its own, and offsets are those of all that
    they spell."""
    normalizer, splitter, after = map(_settings, (backend.normalizer, backend.pre_tokenizer, backend.post_processor))
    return (
        normalizer in ("null", '{"type":"NFC"}')
        and '{"type":"ByteLevel","add_prefix_space":false' in splitter
        and '"trim_offsets":true' not in after
    )


def _settings(part: Any) -> str:
    """Those of a part of a tokenizer, as its file has them, without spaces."""
    return "null" if part is None else json.dumps(json.loads(part.__getstate__()), separators=(",", ":"))
