"""Frozen weights in 8-bit floating point under adapters: of linear layers, and of the fused experts of mixtures.

A weight is kept as e4m3 numbers with a power of two for each row, which loses no more than other scales would: the
numbers have an exponent of their own, and what is restored is exact in bf16. All of it is one tensor of bytes, so
engines move it and convert nothing. torchao 0.18's `Float8Tensor`, the alternative, cannot be broadcast by
DistributedDataParallel, and its product keeps the restored weight, twice its own size, for the backward pass.

Where a GPU multiplies in fp8, layers do: their inputs and gradients are scaled by row and rounded to e4m3. Elsewhere
the weight is restored for each product, in the forward pass and again in the backward pass. Experts are always
restored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_BIAS = 127
"""Of an exponent that is kept as a byte, as in fp32 and in the scales of the OCP's microscaling formats."""


@dataclass(frozen=True)
class Stored:
    """What a weight of bytes stands for.

    Args:
        shape: (..., rows, columns).
        dtype: What it was quantized from.
    """

    shape: torch.Size
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        """How many there are; as many bytes come first, and then a byte for each row."""
        return self.shape.numel()

    def split(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers, of `shape`, in e4m3, and what each row is multiplied with, (..., rows, 1), in fp32."""
        data = weight.flatten()
        exponents = data[self.numbers :].view(*self.shape[:-1], 1)
        return data[: self.numbers].view(_FP8).view(self.shape), (exponents.int() << 23).view(torch.float32)

    def restored(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in another type: exactly what is stored in bf16 and fp32."""
        numbers, scales = self.split(weight)
        return numbers.to(dtype).mul_(scales.to(dtype))


class Fp8Weight(nn.Parameter):
    """A frozen weight: as it is until `stored_in_fp8`, then (bytes, 1), with what they stand for."""

    quant_state: Stored | None = None

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Fp8Weight:
        return super().__new__(cls, data, requires_grad)


def stored_in_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Rounds a weight to e4m3, row by row.

    Args:
        weight: (..., rows, columns), in bf16, fp16 or fp32.
    """
    largest = weight.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest.float())
    # The least power of two by which the largest number of a row becomes at most 448, 0.875 times 2**9, and which the
    # weight's type has: fp16 ends at 2**-24.
    finest = torch.finfo(weight.dtype)
    least = max(1 - _BIAS, round(math.log2(finest.tiny * finest.eps)))
    exponent = (exponent - 9 + (mantissa > _LARGEST / 512)).clamp(least, _BIAS - 1) + _BIAS
    numbers = (weight / (exponent << 23).view(torch.float32).to(weight.dtype)).to(_FP8)
    data = torch.cat([numbers.view(torch.uint8).flatten(), exponent.to(torch.uint8).flatten()])
    return _of_bytes(data[:, None], Stored(weight.shape, weight.dtype))


def empty_in_fp8(parameter: Fp8Weight, dtype: torch.dtype) -> Fp8Weight:
    """What `stored_in_fp8` returns, without numbers."""
    shape = parameter.shape
    return _of_bytes(torch.empty((shape.numel() + shape[:-1].numel(), 1), dtype=torch.uint8), Stored(shape, dtype))


def _of_bytes(data: torch.Tensor, stored: Stored) -> Fp8Weight:
    weight = Fp8Weight(data)
    weight.quant_state = stored
    return weight


class Product(torch.autograd.Function):
    """Rows times the transpose of a stored weight. The weight is kept for the backward pass as it is stored."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, stored: Stored, in_fp8: bool) -> torch.Tensor:
        """(..., columns) in 16 bits or fp32; returns (..., rows) in the same type."""
        ctx.save_for_backward(weight)
        ctx.stored, ctx.in_fp8 = stored, in_fp8
        if not in_fp8:
            return nn.functional.linear(input, stored.restored(weight, input.dtype))
        numbers, scales = stored.split(weight)
        return _scaled(input, numbers, scales.flatten())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,), (weight,), stored = gradients, ctx.saved_tensors, ctx.stored
        if not ctx.in_fp8:
            return gradient @ stored.restored(weight, gradient.dtype), None, None, None
        numbers, scales = stored.split(weight)
        # Here a row of the weight is a term of each sum, so its scale goes to the other side, before that is rounded.
        scaled = gradient * scales.flatten().to(gradient.dtype)
        return _scaled(scaled, numbers.t().contiguous(), scales.new_ones(stored.shape[1])), None, None, None


def _scaled(rows: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product in fp8 of rows (..., k), each scaled to the range of e4m3, and the transpose of numbers (n, k)."""
    flat = rows.flatten(0, -2)
    own = flat.abs().amax(-1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
    product = torch._scaled_mm(
        (flat / own).to(_FP8), numbers.t(), scale_a=own, scale_b=scales[None], out_dtype=rows.dtype, use_fast_accum=True
    )
    return product.view(*rows.shape[:-1], -1)


class Fp8Linear(nn.Linear):
    """A linear layer whose frozen weight is stored in fp8.

    Args:
        source: The layer in whose place it is.
    """

    def __init__(self, source: nn.Linear | Conv1D) -> None:
        shape = source.weight.shape if isinstance(source, nn.Linear) else source.weight.shape[::-1]
        super().__init__(shape[1], shape[0], bias=False, device="meta")
        self.weight = Fp8Weight(torch.empty(shape, dtype=source.weight.dtype, device="meta"))
        self.bias = source.bias
        self.source_cls = type(source)
        self.device_multiplies = _has_products()
        self.requires_grad_(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in features); returns (..., out features)."""
        place = input.device.type
        if torch.is_autocast_enabled(place):
            input = input.to(torch.get_autocast_dtype(place))
        stored = Stored(torch.Size((self.out_features, self.in_features)), input.dtype)
        product = Product.apply(input, self.weight, stored, self.multiplies_in_fp8(input))
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def multiplies_in_fp8(self, rows: torch.Tensor) -> bool:
        """Whether there is a product in fp8, with a scale for each row, of this type and these sizes."""
        fits = rows.dtype == torch.bfloat16 and not (self.in_features % 16 or self.out_features % 16)
        return self.device_multiplies and rows.is_cuda and fits


def _has_products() -> bool:
    # Asked once for each layer, as graphs of compiled layers could not.
    return torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 9)


class Restored(nn.Module):
    """Parametrization of a stored weight that is read as a plain tensor."""

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self.quant_state = stored

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """(bytes, 1); returns the weight in the type it was quantized from."""
        return self.quant_state.restored(weight, self.quant_state.dtype)
