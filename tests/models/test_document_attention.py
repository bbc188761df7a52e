"""Attention within documents on CPUs, against torch's own of each document alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from toolkit.models.attention.document_attention import document_attention

LENGTHS = (1, 127, 128, 129, 300, 2)
"""Of documents, around the blocks that are computed at a time."""


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    parts = []
    for begin, end in itertools.pairwise(itertools.accumulate(LENGTHS, initial=0)):
        back = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        allowed = (back >= 0) & (back < (window or end))
        heads = [each[:, begin:end].repeat_interleave(len(query) // len(each), 0) for each in (query, key, value)]
        parts.append(scaled_dot_product_attention(*heads, attn_mask=allowed, scale=scale))
    return torch.cat(parts, 1).transpose(0, 1)


@pytest.mark.parametrize("window", [0, 1, 64, 128, 200, 1000])
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_those_of_each_document_alone(
    dtype: torch.dtype, heads: int, shared: int, window: int
) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    sizes = [(heads, tokens, 24), (shared, tokens, 24), (shared, tokens, 16)]
    boundaries = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    upstream = torch.randn(tokens, heads, 16).to(dtype)
    exact = [torch.randn(size).to(dtype).float().requires_grad_() for size in sizes]
    inputs = [each.detach().to(dtype).requires_grad_() for each in exact]

    expected = alone(*exact, scale=0.3, window=window)
    out = document_attention(*inputs, boundaries, boundaries, 0.3, window)
    wanted = torch.autograd.grad(expected, exact, upstream.float())
    found = torch.autograd.grad(out, inputs, upstream)

    assert out.dtype == dtype and out.is_contiguous()
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for each, other in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(each.float(), other, **near)


def test_scores_are_not_kept_for_the_backward_pass() -> None:
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    heads = [torch.randn(2, 512, 8, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        document_attention(*heads, *2 * [torch.tensor([0, 512])], 1.0, 0)
    assert kept <= 3 * heads[0].nbytes + 64


def test_compilers_leave_it_whole_and_check_what_they_are_told_of_it() -> None:
    heads = [torch.randn(2, 6, 8, requires_grad=True) for _ in range(3)]
    boundaries = torch.tensor([0, 4, 6], dtype=torch.int32)
    torch.library.opcheck(document_attention, (*heads, boundaries, boundaries.clone(), 1.0, 0))
