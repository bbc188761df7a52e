"""For how many tokens the output head has logits at a time; without torch, so that a plan may ask."""

from __future__ import annotations

from collections.abc import Iterator

ON_CPU = 256
"""Tokens there: more make its products no faster."""
_MOST, _STEP = 4096, 128
"""On a GPU more tokens make products no faster either; a multiple of its tiles."""
_BYTES = 2**29
"""Logits on a GPU: with a vocabulary of 128,256 those of 2,048 tokens in 16 bits. A sum of a weight's gradient in fp32
is read and written for each chunk, which the product that it is added to hides from 1,000 tokens on."""
JUDGED = 512
"""Tokens on a GPU where a criterion holds several copies of their logits."""


def head_chunk(vocabulary: int, itemsize: int, on_cpu: bool) -> int:
    """Tokens whose logits are formed at a time.

    Args:
        vocabulary: Rows of the head's weight on this process; 0 without one.
        itemsize: Bytes of a logit.
        on_cpu: Whether they are formed on a CPU.
    """
    if on_cpu:
        return ON_CPU
    return max(_STEP, min(_MOST, _BYTES // max(1, vocabulary * itemsize)) // _STEP * _STEP)


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """So many tokens each; the last one may have fewer."""
    for start in range(0, tokens, size):
        yield slice(start, start + size)
