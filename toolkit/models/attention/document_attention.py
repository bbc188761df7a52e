"""Causal attention within documents on CPUs, for which torch has variable-length kernels on GPUs only.

Each block of queries meets the keys of its own document up to its end, so neither padding nor other documents cost
anything, and scores are computed again in the backward pass instead of kept (Dao 2023, arXiv:2307.08691). What
Transformers offers there works through all pairs of a row: packed rows of 2,048 tokens take 5.8 times as long with
`sdpa` and a mask, and rows of 512 1.4 times as long with eager attention, which keeps all scores besides (two cores,
bf16, heads of SmolLM2-135M, forward and backward).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_BLOCK = 128
"""Queries at a time: scores of some heads and a thousand keys stay in a core's cache."""


@dataclass(frozen=True)
class _Block:
    """Queries `first` to `end` of a document, which see its keys from `low` on.

    A query's own key lies `ahead` places behind it, as there may be keys of earlier tokens without queries.
    """

    first: int
    end: int
    low: int
    ahead: int
    window: int

    @property
    def queries(self) -> slice:
        return slice(self.first, self.end)

    @property
    def keys(self) -> slice:
        return slice(self.low, self.end + self.ahead)

    def weights(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Attention weights (shared heads, groups, queries, keys) in fp32 of scaled queries (…, queries, size)."""
        shared, groups, rows, size = queries.shape
        scores = torch.bmm(queries.reshape(shared, groups * rows, size), keys.transpose(1, 2))
        scores = scores.view(shared, groups, rows, keys.shape[1])
        before = self.first + self.ahead - self.low
        scores[..., before:] += _later(rows, scores.dtype)
        if self.window and before + rows > self.window:
            gone = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(before - self.window)
            scores.masked_fill_(gone, -math.inf)
        return torch.softmax(scores, -1, dtype=torch.float32)


@functools.lru_cache(maxsize=2 * _BLOCK)
def _later(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, rows), -math.inf, dtype=dtype).triu(1)


def _blocks(boundaries: torch.Tensor, key_boundaries: torch.Tensor, window: int) -> Iterator[_Block]:
    documents = zip(*(itertools.pairwise(each.tolist()) for each in (boundaries, key_boundaries)), strict=True)
    for (begin, stop), (key_begin, key_stop) in documents:
        ahead = key_stop - stop
        for first in range(begin, stop, _BLOCK):
            low = max(key_begin, first + ahead - window + 1) if window else key_begin
            yield _Block(first, min(first + _BLOCK, stop), low, ahead, window)


@torch.library.custom_op("toolkit::document_attention", mutates_args=(), device_types="cpu")
def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    key_boundaries: torch.Tensor,
    scaling: float,
    window: int,
) -> torch.Tensor:
    """Attention of documents that lie end to end; an operation of its own, so that compilers leave it whole.

    Args:
        query: (heads, tokens, size).
        key: (shared heads, tokens, size); heads that share one are neighbours.
        value: (shared heads, tokens, size of values).
        boundaries: (documents + 1,) integers, cumulative lengths of the queries.
        key_boundaries: The same of the keys: as many, or more, of which a document's queries are those of the last.
        scaling: Of the scores.
        window: Tokens a query may look back to, itself included; 0 for all.

    Returns:
        (tokens, heads, size of values).
    """
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    queries, outs = _grouped(query * scaling, key), _grouped(out.transpose(0, 1), key)
    for block in _blocks(boundaries, key_boundaries, window):
        weights = block.weights(queries[:, :, block.queries], key[:, block.keys]).to(value.dtype)
        products = torch.bmm(weights.flatten(1, 2), value[:, block.keys])
        outs[:, :, block.queries] = products.view(*weights.shape[:3], -1)
    return out


@torch.library.custom_op("toolkit::document_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    key_boundaries: torch.Tensor,
    scaling: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, from that of the result."""
    to_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    # Several blocks add to the gradients of one key.
    to_key, to_value = (torch.zeros(each.shape, dtype=torch.float32) for each in (key, value))
    queries, to_queries = _grouped(query * scaling, key), _grouped(to_query, key)
    gradients = _grouped(gradient.transpose(0, 1), key)
    for block in _blocks(boundaries, key_boundaries, window):
        here, seen = block.queries, block.keys
        weights = block.weights(queries[:, :, here], key[:, seen])
        wanted = gradients[:, :, here].flatten(1, 2)
        to_weights = torch.bmm(wanted, value[:, seen].transpose(1, 2)).view_as(weights).float()
        to_scores = torch._softmax_backward_data(to_weights, weights, -1, torch.float32)
        to_scores = to_scores.to(query.dtype).flatten(1, 2)
        to_queries[:, :, here] = torch.bmm(to_scores, key[:, seen]).view(*weights.shape[:3], -1)
        to_key[:, seen] += torch.bmm(to_scores.transpose(1, 2), queries[:, :, here].flatten(1, 2))
        to_value[:, seen] += torch.bmm(weights.to(value.dtype).flatten(1, 2).transpose(1, 2), wanted)
    return to_query.mul_(scaling), to_key.to(key.dtype), to_value.to(value.dtype)


def _grouped(each: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(shared heads, groups, tokens, size) of (heads, tokens, size)."""
    return each.unflatten(0, (key.shape[0], -1))


@document_attention.register_fake
def _(query: Any, key: Any, value: Any, *args: Any) -> Any:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


@_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, *args: Any) -> Any:
    return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scaling, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return *_backward(gradient, *ctx.saved_tensors, ctx.scaling, ctx.window), None, None, None, None


document_attention.register_autograd(_gradients, setup_context=_keep)
