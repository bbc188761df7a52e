"""Attention of a single query on a CPU, as generation computes it for each token.

Without padding, Transformers hands SDPA fewer heads of keys than of queries, and torch computes each head of queries by
itself: a token of 16 answers to prompts of 500 tokens takes three times as long as with heads that share keys as rows
of one product (SmolLM2-135M in bf16, one core of an EPYC). Where nothing is shared, two rows take half as long as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@contextmanager
def decoding(device: torch.device) -> Iterator[None]:
    """While this context lasts, models that attend by SDPA do so by `decode_attention` on a CPU.

    Args:
        device: Where the model computes.
    """
    if device.type != "cpu":
        yield
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = decode_attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention by SDPA, which says what is given and returned; for one query, computed as above."""
    if query.shape[2] != 1 or position_bias is not None or dropout:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **kwargs
        )
    batch, heads, _, size = query.shape
    rows = heads // key.shape[1]
    grouped = query.reshape(batch, key.shape[1], rows, size)
    if rows == 1 and query.dtype in (torch.bfloat16, torch.float16):
        grouped = grouped.expand(-1, -1, 2, -1)
    if attention_mask is not None and attention_mask.shape[1] == heads:
        attention_mask = attention_mask.reshape(-1, key.shape[1], rows, attention_mask.shape[-1])
    found = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )[:, :, :rows]
    return found.reshape(found.shape[0], 1, heads, value.shape[-1]).contiguous(), None
