"""Attention over rows whose tokens are divided over processes (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Before attention the processes of a group exchange their parts for heads, so that each attends with its share of the
heads over the whole row, and after it the other way round.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist

from toolkit.common import UserError
from toolkit.models.attention.attention_kernels import to_compute
from toolkit.models.parallel.shared_rows import Attention, group, sharing


def exchange(attend: Attention) -> Attention:
    """An attention function of Transformers that works on parts of rows, of one that takes boundaries of documents."""

    @functools.wraps(attend)
    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, row_tokens: int | None = None, **kwargs: Any
    ) -> tuple[Any, None]:
        if row_tokens is None:
            return attend(module, query, key, value, mask, **kwargs)
        size = sharing()
        if query.shape[1] % size:
            # Of layers that differ, no config says it before.
            raise UserError(
                f"parallel.sequence={size} does not divide the {query.shape[1]} attention heads of a layer",
                "set parallel.context instead, or a number that divides the heads of every layer",
            )
        query, key, value = to_compute(query, key, value)
        # Heads that share a key go together; where there are fewer keys than processes, copies of them go to several.
        copies = size // math.gcd(key.shape[1], size)
        if copies > 1:
            key, value = (each.repeat_interleave(copies, 1) for each in (key, value))
        query, key, value = (_to_heads(each, size) for each in (query, key, value))
        out, _ = attend(module, query, key, value, mask, **kwargs)
        return _to_tokens(out, size), None

    return attention


def _to_heads(part: torch.Tensor, size: int) -> torch.Tensor:
    """(1, heads / size, tokens, width) of (1, heads, tokens / size, width)."""
    _, heads, tokens, width = part.shape
    mine = _all_to_all(part[0].unflatten(0, (size, heads // size)))
    # (process, heads / size, tokens / size, width): processes lie in the order of their tokens.
    return mine.transpose(0, 1).reshape(1, heads // size, size * tokens, width)


def _to_tokens(part: torch.Tensor, size: int) -> torch.Tensor:
    """(1, tokens / size, heads, width) of (1, tokens, heads / size, width)."""
    _, tokens, heads, width = part.shape
    mine = _all_to_all(part[0].unflatten(0, (size, tokens // size)))
    # (process, tokens / size, heads / size, width): processes lie in the order of their heads.
    return mine.transpose(0, 1).reshape(1, tokens // size, size * heads, width)


@torch.library.custom_op("toolkit::all_to_all", mutates_args=())
def _all_to_all(parts: torch.Tensor) -> torch.Tensor:
    """The k-th of these parts goes to the k-th process, from which the k-th of the result comes.

    An operation of its own, so that compilers leave it whole.
    """
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group())
    return received


@_all_to_all.register_fake
def _(parts: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


# Gradients go back the way that the parts came.
_all_to_all.register_autograd(lambda ctx, gradient: _all_to_all(gradient))
