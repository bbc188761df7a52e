"""Attention of single queries on a CPU."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.models.attention.decode_attention import decode_attention

SEQUENCES, TOKENS, SIZE = 3, 7, 8


@pytest.mark.parametrize("mask", [None, "shared", "of heads", "numbers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("queries", [1, 2])
def test_one_query_attends_as_sdpa_has_it(
    heads: int, shared: int, dtype: torch.dtype, mask: str | None, queries: int
) -> None:
    """Whatever heads share keys and whatever masks there are; values have a size of their own."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(SEQUENCES, count, tokens, size, generator=generator).to(dtype)
        for count, tokens, size in ((heads, queries, SIZE), (shared, TOKENS, SIZE), (shared, TOKENS, SIZE + 4))
    )
    seen = torch.rand(SEQUENCES, heads if mask == "of heads" else 1, queries, TOKENS, generator=generator) < 0.6
    seen[..., -1] = True
    masks = {None: None, "shared": seen, "of heads": seen, "numbers": torch.where(seen, 0.5, -torch.inf).to(dtype)}
    module = torch.nn.Module()
    module.num_key_value_groups = heads // shared  # type: ignore[assignment]
    given = (module, query, key, value, masks[mask])
    found, wanted = (each(*given, scaling=0.3)[0] for each in (decode_attention, sdpa_attention_forward))
    assert found.shape == wanted.shape == (SEQUENCES, queries, heads, SIZE + 4) and found.is_contiguous()
    torch.testing.assert_close(found, wanted)
