"""Weights in e4m3: what rounding costs, and products of them on devices that have such."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from toolkit.common import UserError
from toolkit.models.quantization import fp8
from toolkit.models.quantization.stored import StoredLinear, stored_as


def restored(weight: torch.Tensor) -> torch.Tensor:
    return fp8.restored(fp8.packed(weight), weight.shape, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_costs_what_three_bits_of_mantissa_do_whatever_the_size_of_a_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, 64)[:, None]
    weight = (torch.randn(64, 256) * sizes).to(dtype)
    weight[5] = 0
    kept = restored(weight)
    lost = (kept - weight.float()).norm(dim=1) / weight.float().norm(dim=1).clamp(min=1e-30)
    assert lost.max() < 0.031 and lost[5] == 0
    # No number is further off than half of the last bit, or of the smallest one.
    finest = weight.float().abs().amax(1, keepdim=True) / 448 * 2**-9
    assert ((kept - weight.float()).abs() <= weight.float().abs() / 16 + finest).all()
    assert torch.equal(fp8.restored(fp8.packed(weight), weight.shape, torch.bfloat16).float(), kept)
    assert torch.equal(restored(kept), kept), "nothing is lost twice"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_the_smallest_numbers_of_a_type_are_kept(dtype: torch.dtype) -> None:
    finest = torch.finfo(dtype)
    weight = torch.tensor([[1.0, -2.0, 0.0], [6.0, 1.0, -0.5]]) * max(finest.tiny * finest.eps * 4, 2.0**-126)
    assert torch.equal(restored(weight.to(dtype)), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_number_is_restored_as_torch_converts_it(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()]
    scales = torch.tensor([126, 127, 121], dtype=torch.uint8)  # Halves, ones and 64ths.
    data = torch.cat([*[numbers.view(torch.uint8)] * 3, scales])
    expected = numbers.to(dtype) * torch.tensor([[0.5], [1], [2**-6]], dtype=dtype)
    result = fp8.restored(data, torch.Size((3, len(numbers))), dtype)
    assert result.dtype == dtype and torch.equal(result, expected)
    assert torch.equal(result.signbit(), expected.signbit()), "zeros keep their signs"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(UserError, match="not finite"):
        fp8.packed(torch.tensor([[1.0, 2.0], [number, 3.0]]))


def test_a_row_uses_the_range_of_e4m3_and_does_not_leave_it() -> None:
    weight = torch.tensor([[448.0, 1.0], [448.1, 1.0], [7.0, 0.5], [-7.01, 0.5]])
    numbers, scales = fp8.split(fp8.packed(weight), weight.shape)
    assert scales.flatten().tolist() == [1, 2, 2**-6, 2**-5]
    assert numbers.float().abs().amax(1).tolist() == [448, 224, 448, 224]


def test_products_in_fp8_are_as_close_as_rounding_of_rows_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's way; torch multiplies in fp8 on CPUs too, but slowly."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 48, bias=False).bfloat16()
    quantized: Any = StoredLinear(plain, "fp8")
    quantized.weight = stored_as("fp8", plain.weight.detach())
    weight = restored(plain.weight.detach())
    input = torch.randn(2, 40, 64).bfloat16().requires_grad_()
    # Rows of very different sizes, as activations and gradients have.
    sizes = torch.logspace(-2, 2, 40)[:, None].bfloat16()
    later = torch.randn(2, 40, 48).bfloat16() * sizes

    def passes() -> tuple[torch.Tensor, torch.Tensor]:
        output = quantized(input * sizes)
        (gradient,) = torch.autograd.grad(output, input, later)
        return output.float(), gradient.float()

    exact = passes()
    assert not quantized.multiplies_in_fp8(input), "a CPU"
    monkeypatch.setattr(StoredLinear, "multiplies_in_fp8", lambda layer, rows: True)
    for rounded, wanted in zip(passes(), exact, strict=True):
        off = (rounded - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert 0.01 < off.max() < 0.06
    zeros = functional.linear(torch.zeros(1, 64), weight)
    assert torch.equal(quantized(torch.zeros(1, 64, dtype=torch.bfloat16)).float(), zeros), "nothing is divided by zero"
