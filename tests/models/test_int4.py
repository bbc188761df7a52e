"""Weights in 4-bit integers: what rounding costs, which numbers are exact, and which are refused."""

from __future__ import annotations

import pytest
import torch

from toolkit.common import UserError
from toolkit.models.quantization import int4


def restored(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return int4.restored(int4.packed(weight), weight.shape, dtype)


def lost(weight: torch.Tensor) -> float:
    return ((restored(weight) - weight.float()).norm() / weight.float().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_less_is_lost_than_in_nf4_of_numbers_of_any_size(dtype: torch.dtype) -> None:
    from bitsandbytes import functional

    torch.manual_seed(0)
    weight = torch.randn(256, 1024).to(dtype)
    nf4 = functional.dequantize_4bit(*functional.quantize_4bit(weight.float(), quant_type="nf4"))
    of_nf4 = ((nf4 - weight.float()).norm() / weight.float().norm()).item()
    assert lost(weight) == pytest.approx(0.0836, abs=0.0005) and of_nf4 == pytest.approx(0.092, abs=0.0005)
    for size in (1e-3, 100.0):
        assert lost(weight * size) == pytest.approx(0.0836, abs=0.0005)


def test_no_group_loses_more_than_codes_at_equal_distances_over_its_range() -> None:
    torch.manual_seed(0)
    outliers = torch.distributions.StudentT(2.0).sample((50, 64))
    weight = torch.cat([torch.randn(50, 64), torch.rand(50, 64), -torch.rand(50, 64) - 1, outliers])
    weight /= weight.square().mean(0).sqrt()
    steps = (weight.amax(1).clamp(min=0) - weight.amin(1).clamp(max=0)) / 15
    assert ((restored(weight) - weight).square().mean(1).sqrt() <= steps / 2).all()


def test_columns_of_any_size_lose_alike() -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 1, 256)[torch.randperm(256)]
    for weight in (
        torch.randn(256, 256) * sizes,
        torch.randn(2, 256, 256) * torch.stack([sizes, sizes.flip(0)])[:, None],
    ):
        off = (restored(weight) - weight).norm(dim=-2) / weight.norm(dim=-2)
        assert off.max() < 0.11 and off.mean() == pytest.approx(0.084, abs=0.001)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_what_is_restored_in_16_bits_is_rounded_twice(dtype: torch.dtype, bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256) * 0.02
    exact = restored(weight)
    assert ((restored(weight, dtype).float() - exact).abs() <= exact.abs() * 2.01 * 2.0**-bits).all()


@pytest.mark.parametrize(("lowest", "step"), [(-8, 2.0**-5), (-3, 4.0), (0, 2.0**-10), (-15, 1.0)])
def test_codes_at_powers_of_two_are_exact(lowest: int, step: float) -> None:
    row = (torch.arange(16.0).repeat(4) + lowest) * step
    weight = torch.stack([row.roll(shift) for shift in range(64)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(restored(weight, dtype).float(), weight)


def test_zeros_stay_zeros() -> None:
    weight = torch.randn(8, 128)
    weight[3] = weight[:, 70:] = 0
    found = restored(weight)
    assert not found[3, :64].any() and not found[:, 70:].any() and found[0, 0]
    assert not restored(torch.zeros(8, 128)).any()


@pytest.mark.parametrize("shape", [(3, 5), (7, 64), (2, 9, 40), (64, 130)])
def test_last_groups_are_filled_up(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    data = int4.packed(weight)
    assert data.shape == (int4.size(weight.shape),) and data.dtype == torch.uint8
    assert restored(weight).shape == weight.shape and lost(weight) < 0.1


def test_large_weights_are_taken_in_parts() -> None:
    groups = (1 << 14) + 3
    found = restored(torch.randn(64).repeat(groups)[:, None]).view(groups, 64)
    assert (found == found[0]).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1e6])
def test_numbers_that_no_step_reaches_are_refused(wrong: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 3] = wrong
    with pytest.raises(UserError, match="not finite, or over 1860") as caught:
        int4.packed(weight)
    assert "quantization=fp8" in caught.value.change
    assert lost(torch.full((1, 64), 1860.0)) < 0.05
