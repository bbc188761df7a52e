"""Clipping on a CPU: the norm in double precision, whatever gradients there are, and what is scaled by it."""

from __future__ import annotations

import pytest
import torch

from toolkit.train.trainers.gradients import clip_gradients

SHAPES = {"large": (300, 577), "rows": (64, 512), "small": (16, 8), "bias": (40_001,), "none": (0,), "one": (1,)}


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    made = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in SHAPES.values()]
    for number, each in enumerate(made):
        each.grad = (torch.randn(each.shape) * 10.0 ** (number - 3)).to(dtype)
    # As a layer whose weight is transposed has it.
    turned = torch.nn.Parameter(torch.empty(200, 300, dtype=dtype))
    turned.grad = torch.randn(300, 200).to(dtype).T
    return [*made, turned, torch.nn.Parameter(torch.empty(4))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_double_precision(dtype: torch.dtype) -> None:
    updated = parameters(dtype)
    gradients = [each.grad.double() for each in updated if each.grad is not None]
    expected = torch.stack([each.norm() for each in gradients]).norm()
    assert clip_gradients(updated, 1e9).item() == pytest.approx(expected.item(), rel=1e-7)
    assert all(torch.equal(each.grad.double(), before) for each, before in zip(updated, gradients, strict=False))


def test_larger_gradients_are_scaled_to_the_norm_that_is_asked() -> None:
    updated = parameters(torch.float32)
    directions = [each.grad.clone() for each in updated if each.grad is not None]
    norm = clip_gradients(updated, 0.5)
    for each, before in zip(updated, directions, strict=False):
        torch.testing.assert_close(each.grad, before * (0.5 / (norm + 1e-6)))
    assert clip_gradients(updated, 1.0).item() == pytest.approx(0.5, rel=1e-6)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_gradients([torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0
