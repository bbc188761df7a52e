"""Weights in 8-bit floating point: e4m3 numbers with a power of two for each row.

Other scales would lose no less, because the numbers have an exponent of their own, and what is restored is exact in
bf16. torchao 0.18's `Float8Tensor`, the alternative, cannot be broadcast by DistributedDataParallel, and its product
keeps the restored weight, twice its own size, for the backward pass.

Where a GPU multiplies in fp8, layers do: their inputs and gradients are scaled by row and rounded to e4m3.
"""

from __future__ import annotations

import math

import torch

from toolkit.common import UserError

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_BIAS = 127
"""Of an exponent that is kept as a byte, as in fp32 and in the scales of the OCP's microscaling formats."""


def size(shape: torch.Size) -> int:
    """Bytes of a weight (..., rows, columns): one for each number, and then one for each row."""
    return shape.numel() + shape[:-1].numel()


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The bytes of a weight (..., rows, columns) in bf16, fp16 or fp32, rounded to e4m3 row by row.

    Raises:
        UserError: If a number is not finite.
    """
    largest = weight.abs().amax(-1, keepdim=True)
    if not largest.isfinite().all():
        raise UserError(
            "method.quantization=fp8: a weight has a number that is not finite",
            "set method.quantization=none, or model.path to weights that are whole",
        )
    mantissa, exponent = torch.frexp(largest.float())
    # The least power of two by which the largest number of a row becomes at most 448, 0.875 times 2**9, and which the
    # weight's type has: fp16 ends at 2**-24.
    finest = torch.finfo(weight.dtype)
    least = max(1 - _BIAS, round(math.log2(finest.tiny * finest.eps)))
    exponent = (exponent - 9 + (mantissa > _LARGEST / 512)).clamp(least, _BIAS - 1) + _BIAS
    numbers = (weight / (exponent << 23).view(torch.float32).to(weight.dtype)).to(_FP8)
    return torch.cat([numbers.view(torch.uint8).flatten(), exponent.to(torch.uint8).flatten()])


def split(data: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers, of `shape`, in e4m3, and what each row is multiplied with, (..., rows, 1), in fp32."""
    count = shape.numel()
    exponents = data[count:].view(*shape[:-1], 1)
    return data[:count].view(_FP8).view(shape), (exponents.int() << 23).view(torch.float32)


def restored(data: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The weight of bytes: exactly what is stored in bf16 and fp32."""
    numbers, scales = split(data, shape)
    # On CPUs torch converts them one by one, unless it compiles that.
    moves = numbers.is_cpu and not torch.compiler.is_compiling()
    return (_moved(numbers, dtype) if moves else numbers.to(dtype)).mul_(scales.to(dtype))


def _moved(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Finite numbers of e4m3 in another type, by moving sign, exponent and mantissa to their places there: they differ
    by the power of two that is between both types' biases, in what is too small for an exponent too."""
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    finest = torch.finfo(dtype)
    places, sign = -round(math.log2(finest.eps)) - 3, torch.iinfo(bits).min
    moved = numbers.view(torch.int8).to(bits).bitwise_left_shift_(places).bitwise_and_(sign | 0x7F << places)
    return moved.view(dtype).mul_(2.0 ** (-6 - round(math.log2(finest.tiny))))


def product(rows: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product in fp8 of rows (..., k), each scaled to the range of e4m3, and the transpose of numbers (n, k)."""
    flat = rows.flatten(0, -2)
    own = flat.abs().amax(-1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
    result = torch._scaled_mm(
        (flat / own).to(_FP8), numbers.t(), scale_a=own, scale_b=scales[None], out_dtype=rows.dtype, use_fast_accum=True
    )
    return result.view(*rows.shape[:-1], -1)


def has_products() -> bool:
    """Whether there is a GPU here that multiplies in fp8."""
    return torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 9)
