"""Splits answers into their thoughts and what follows them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

_MARKS = (
    ("<think>", "</think>"),  # DeepSeek, Qwen and most others.
    ("[THINK]", "[/THINK]"),  # Magistral.
    ("<seed:think>", "</seed:think>"),  # Seed-OSS.
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A.
    ("<|channel>thought", "<channel|>"),  # Gemma 4.
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),  # gpt-oss.
)
"""Between which models write their thoughts. For some they are special tokens, which texts of answers leave out."""
_ANSWER = "<|channel|>final<|message|>"
"""What gpt-oss writes before its answer."""
_MARK = re.compile("|".join(re.escape(mark) for pair in _MARKS for mark in pair) + "|" + re.escape(_ANSWER))


def text_of(tokenizer: Any, ids: Sequence[int], kept: Collection[str] = ()) -> str:
    """The text of an answer without special tokens, but for those that tell its thoughts from what it says.

    Args:
        kept: Other special tokens that belong to the text.
    """
    mark = re.compile("|".join([_MARK.pattern, *map(re.escape, kept)]))
    plain, whole = (str(tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (True, False))
    if (marks := mark.findall(whole)) == mark.findall(plain):
        return plain
    special = [re.escape(each) for each in special_tokens(tokenizer)]
    others = [re.sub("|".join(special), "", part) for part in mark.split(whole)]
    return "".join(part for pair in zip(others, [*marks, ""], strict=True) for part in pair)


def special_tokens(tokenizer: Any) -> list[str]:
    """Those that are left out of texts, unless they are asked for."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def spoken(answer: str) -> str:
    """What an answer says once it has been thought over: nothing where it was cut before that."""
    for begin, end in _MARKS:
        answer = answer.rpartition(end)[2].partition(begin)[0]
    return answer.removeprefix(_ANSWER)


def begun(prompt: str) -> str:
    """The mark that opens thoughts at the end of a prompt, as many templates write it: an answer goes on behind it."""
    end = prompt.rstrip()
    return next((prompt[len(end) - len(begin) :] for begin, _ in _MARKS if end.endswith(begin)), "")


def thought(answer: str) -> str:
    """What an answer says before that, between the marks of thoughts."""
    return _MARK.sub("", answer.removesuffix(spoken(answer))).strip()
