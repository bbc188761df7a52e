"""Weights in 4-bit integers: for every 64 numbers a step between neighbouring values, and where zero is among them.

A number is (code - zero) * step * factor of its column. Factors are the columns' root mean squares, in a byte each:
inputs that are small are read by large weights and large ones by small, which would be lost among the others of their
groups (as in SINQ, Mueller et al. 2025, arXiv:2509.22944). The two constants of a group share 16 bits: a step of 5 bits
of exponent and 4 of mantissa, and a zero in eighths of a step from 0 to 15.875. They are fitted by least squares to the
codes that they give, from two starts: the group's range, and nine tenths of it, which clips its ends.

Of a matrix of normally distributed numbers 8.4% is lost in 4.25 bits. With the range alone, and constants of 16 bits
each, it would be 9.0% in 4.5 bits; torchao 0.18's half-quadratic search (HQQ), which fits the zero alone, loses 8.7%.
Groups of 128 lose 9.3% in 4.125 bits, of 32 7.2% in 4.5. bitsandbytes' nf4 loses 9.2% in 4.13.

torch's own int4 product (`_weight_int4pack_mm`) is not used: it wants a packing of its own that nothing restores, and
the backward pass needs the weight too.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from toolkit.common import UserError

_GROUP = 64
_LEVELS = 15
_LEAST_STEP, _LEAST_FACTOR = -24, -16
"""Powers of two."""
_STEPS = 1 << 9
_LARGEST = 1860.0
"""Of a number: half of 15 times the largest step, 248."""
_STARTS, _FITS = (1.0, 0.9), 5
_AT_ONCE = 1 << 14
"""Groups that are fitted at a time, which bounds what fitting takes beside the weight to some 30 MB."""


def size(shape: torch.Size) -> int:
    """Bytes of a weight (..., rows, columns): of every 64 numbers 32 of codes, and two of constants, of which the upper
    ones come first, and then one for the factor of each column."""
    return _groups(shape.numel()) * (_GROUP // 2 + 2) + _columns(shape)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The bytes of a weight (..., rows, columns) in bf16, fp16 or fp32.

    Raises:
        UserError: If a number is not finite, or larger than any step reaches.
    """
    sizes = torch.linalg.vector_norm(weight, dim=-2, keepdim=True, dtype=torch.float32)
    mean = sizes.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    factors = _shortened(sizes / mean, 3, _LEAST_FACTOR).clamp_(0, 255)
    numbers = (weight / _lengthened(factors, 3, _LEAST_FACTOR).to(weight.dtype)).flatten()
    lowest, highest = numbers.aminmax()
    if not (lowest >= -_LARGEST and highest <= _LARGEST):  # Comparing NaN is never true.
        raise UserError(
            f"method.quantization=int4: a weight has a number that is not finite, or over {_LARGEST:g}",
            "set method.quantization=fp8 or none, or model.path to weights that are whole",
        )
    if missing := -len(numbers) % _GROUP:
        numbers = functional.pad(numbers, (0, missing))
    parts = [_coded(each.float()) for each in numbers.view(-1, _GROUP).split(_AT_ONCE)]
    codes, constants = (torch.cat(each) for each in zip(*parts, strict=True))
    return torch.cat([each.to(torch.uint8).flatten() for each in (codes, constants >> 8, constants & 255, factors)])


def restored(data: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The weight of bytes: what is stored in fp32, rounded twice in 16 bits."""
    count, numbers = _groups(shape.numel()), shape.numel()
    pairs, upper, lower, factors = data.split([count * _GROUP // 2, count, count, _columns(shape)])
    pairs = pairs.view(count, -1)
    steps, zeros = _constants((upper.int() << 8 | lower)[:, None])
    # Codes and zeros are exact in 16 bits, and so is their difference.
    codes = torch.cat([pairs & 15, pairs >> 4], 1).to(dtype).sub_(zeros.to(dtype)).mul_(steps.to(dtype))
    columns = _lengthened(factors.int(), 3, _LEAST_FACTOR).to(dtype).view(*shape[:-2], 1, shape[-1])
    return codes.flatten()[:numbers].view(shape).mul_(columns)


def _coded(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups (n, 64) in fp32; returns their codes in pairs, (n, 32), of a number and the one 32 behind it, and
    constants, (n, 1), of which `_constants` makes steps and zeros."""
    # Zero is always within the range.
    lowest, highest = numbers.amin(1, keepdim=True).clamp_(max=0), numbers.amax(1, keepdim=True).clamp_(min=0)
    found, least = torch.zeros_like(lowest, dtype=torch.int32), torch.full_like(lowest, torch.inf)
    for share in _STARTS:
        steps = ((highest - lowest) * (share / _LEVELS)).clamp_(min=2.0**-24)
        zeros = -share * lowest / steps
        for _ in range(_FITS):
            codes = _nearest(numbers, steps, zeros)
            middle, mean = codes.mean(1, keepdim=True), numbers.mean(1, keepdim=True)
            spread = codes.square().mean(1, keepdim=True) - middle.square()
            slopes = (codes.mul_(numbers).mean(1, keepdim=True) - middle * mean) / spread
            steps = torch.where((spread > 0) & (slopes > 0), slopes, steps)
            zeros = middle - mean / steps
        upper = _shortened(steps, 4, _LEAST_STEP).clamp_(0, _STEPS - 1)
        constants = upper << 7 | (zeros * 8).round_().clamp_(0, 127).int()
        steps, zeros = _constants(constants)
        lost = (_nearest(numbers, steps, zeros).sub_(zeros).mul_(steps) - numbers).square_().sum(1, keepdim=True)
        found, least = torch.where(lost < least, constants, found), torch.minimum(lost, least)
    first, second = _nearest(numbers, *_constants(found)).int().chunk(2, 1)
    return second << 4 | first, found


def _nearest(numbers: torch.Tensor, steps: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return torch.addcdiv(zeros, numbers, steps).round_().clamp_(0, _LEVELS)


def _constants(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _lengthened(kept >> 7, 4, _LEAST_STEP), (kept & 127).float() / 8


def _shortened(numbers: torch.Tensor, mantissa: int, least: int) -> torch.Tensor:
    """Positive numbers in fp32 with so many bits of mantissa, counted from a power of two: 0 for it and below."""
    below = 23 - mantissa
    return ((numbers.view(torch.int32) + (1 << (below - 1))) >> below) - ((127 + least) << mantissa)


def _lengthened(counted: torch.Tensor, mantissa: int, least: int) -> torch.Tensor:
    return ((counted + ((127 + least) << mantissa)) << (23 - mantissa)).view(torch.float32)


def _groups(numbers: int) -> int:
    return -(-numbers // _GROUP)


def _columns(shape: torch.Size) -> int:
    return shape[:-2].numel() * shape[-1]
