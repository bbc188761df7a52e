"""What a tokenizer may make of a text: one that multiplies it takes all memory in a library, which ends the process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Regex
from tokenizers.normalizers import Replace

from toolkit.common import UserError

_GROWTH = 64
"""Times as many characters. Released tokenizers write up to a dozen for one, such as `<|newline|>`."""
_LONGEST = 10_000
"""Characters of a token, which an answer may repeat."""
_WORD = 1_000
"""Characters of a word that WordPiece looks up, for 0.1 s of a processor; released tokenizers say 100."""
_AROUND = 1_000
"""Characters or tokens that are put around a text, whatever its length."""


def check_growth(tokenizer: Any, name: str) -> None:
    """Refuses a tokenizer that makes far longer texts, or far more tokens, of what it is given.

    Args:
        tokenizer: One of Transformers; those that are written in Python are not looked at.
        name: What it is called, for the message.

    Raises:
        UserError: Names the part that does.
    """
    whole = getattr(tokenizer, "backend_tokenizer", None)
    if whole is None:
        return
    change = "correct its tokenizer.json, or set model.tokenizer to another"
    for part in ("normalizer", "decoder"):
        content = getattr(whole, part)
        steps = list(_steps(json.loads(content.__getstate__()))) if content else []
        if (times := _growth(steps)) > _GROWTH:
            what = f"its {part} makes texts {times:,.0f} times as long, or more"
            raise UserError(f"{name}: {what}; at most {_GROWTH} times are taken", change)
        if (before := sum(len(step.get("prepend") or "") for step in steps)) > _AROUND:
            what = f"its {part} puts {before:,} characters before a text"
            raise UserError(f"{name}: {what}; at most {_AROUND:,} are taken", change)
    if (tokens := len(whole.encode("").ids)) > _AROUND:
        raise UserError(f"{name}: it puts {tokens:,} tokens around a text; at most {_AROUND:,} are taken", change)
    if (times := len(whole.encode("a").ids) - tokens) > _GROWTH:
        raise UserError(f"{name}: it makes {times:,} tokens of a letter; at most {_GROWTH} are taken", change)
    if (longest := max(map(len, whole.get_vocab()), default=0)) > _LONGEST:
        raise UserError(f"{name}: a token has {longest:,} characters; at most {_LONGEST:,} are taken", change)
    if (word := getattr(whole.model, "max_input_chars_per_word", 0)) > _WORD:
        what = f"its max_input_chars_per_word is {word:,}, and a word takes time by the cube of its length"
        raise UserError(f"{name}: {what}; at most {_WORD:,} are taken", change)


def _steps(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if step["type"] == "Sequence":
        for each in step.get("normalizers") or step.get("decoders") or ():
            yield from _steps(each)
    else:
        yield step


def _growth(steps: Sequence[Mapping[str, Any]]) -> float:
    """How many times as long as it was a text may become; of what grows further, the first figure above the limit."""
    replaced = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    texts = [(pattern["String"], content) for pattern, content in replaced if "String" in pattern]
    times = 1.0
    for pattern, content in replaced:
        if "Regex" in pattern:
            # What matches no character too is put between all of them.
            empty = len(Replace(Regex(pattern["Regex"]), "xx").normalize_str("ab ")) > 6
            times *= max(1, len(content) + empty)
        if times > _GROWTH:
            return times
    return times * max((_grown(pattern * 4 or "ab", texts) for pattern, _ in texts), default=1.0)


def _grown(text: str, replaced: Sequence[tuple[str, str]]) -> float:
    length = len(text)
    for pattern, content in replaced:
        expected = len(text) + text.count(pattern) * (len(content) - len(pattern))
        if expected > _GROWTH * length:
            return expected / length
        text = text.replace(pattern, content)
    return max(1.0, len(text) / length)
