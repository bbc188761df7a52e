"""Frozen weights in fewer bits under adapters: of linear layers, and of the fused experts of mixtures.

What a weight is rounded to is a form's own matter, in a module with `size`, `packed` and `restored`: `fp8`, `int4`. All
of it, numbers and scales, is one tensor of bytes, so engines move and divide it and convert nothing.

The weight is restored for each product, in the forward pass and again in the backward pass, but where a GPU multiplies
in fp8. Experts are always restored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.models.quantization import fp8, int4

FORMS: dict[str, Any] = {"fp8": fp8, "int4": int4}
"""By their names in `method.quantization`."""


@dataclass(frozen=True)
class Stored:
    """What a weight of bytes stands for.

    Args:
        form: One of `FORMS`.
        shape: (..., rows, columns).
        dtype: What it was quantized from.
    """

    form: str
    shape: torch.Size
    dtype: torch.dtype

    def restored(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in another type."""
        return FORMS[self.form].restored(weight.flatten(), self.shape, dtype)


class StoredWeight(nn.Parameter):
    """A frozen weight: as it is until `stored_as`, then (bytes, 1), with what they stand for."""

    form: str
    quant_state: Stored | None = None

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, form: str = "") -> StoredWeight:
        weight = super().__new__(cls, data, requires_grad)
        weight.form = form
        return weight


def stored_as(form: str, weight: torch.Tensor) -> StoredWeight:
    """A weight (..., rows, columns) in bf16, fp16 or fp32 as it is kept.

    Raises:
        UserError: If the form cannot hold its numbers.
    """
    return _of_bytes(FORMS[form].packed(weight)[:, None], Stored(form, weight.shape, weight.dtype))


def stored_empty(parameter: StoredWeight, dtype: torch.dtype) -> StoredWeight:
    """What `stored_as` returns, without numbers."""
    data = torch.empty((FORMS[parameter.form].size(parameter.shape), 1), dtype=torch.uint8)
    return _of_bytes(data, Stored(parameter.form, parameter.shape, dtype))


def _of_bytes(data: torch.Tensor, state: Stored) -> StoredWeight:
    weight = StoredWeight(data, form=state.form)
    weight.quant_state = state
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
        numbers, scales = fp8.split(weight.flatten(), stored.shape)
        return fp8.product(input, numbers, scales.flatten())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,), (weight,), stored = gradients, ctx.saved_tensors, ctx.stored
        if not ctx.in_fp8:
            return gradient @ stored.restored(weight, gradient.dtype), None, None, None
        numbers, scales = fp8.split(weight.flatten(), stored.shape)
        # Here a row of the weight is a term of each sum, so its scale goes to the other side, before that is rounded.
        scaled = gradient * scales.flatten().to(gradient.dtype)
        return fp8.product(scaled, numbers.t().contiguous(), scales.new_ones(stored.shape[1])), None, None, None


class StoredLinear(nn.Linear):
    """A linear layer whose frozen weight is stored in fewer bits.

    Args:
        source: The layer in whose place it is.
        form: One of `FORMS`.
    """

    def __init__(self, source: nn.Linear | Conv1D, form: str) -> None:
        shape = source.weight.shape if isinstance(source, nn.Linear) else source.weight.shape[::-1]
        super().__init__(shape[1], shape[0], bias=False, device="meta")
        self.weight = StoredWeight(torch.empty(shape, dtype=source.weight.dtype, device="meta"), form=form)
        self.bias = source.bias
        self.source_cls = type(source)
        self.form = form
        # Asked once for each layer, as graphs of compiled layers could not.
        self.device_multiplies = form == "fp8" and fp8.has_products()
        self.requires_grad_(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in features); returns (..., out features)."""
        place = input.device.type
        if torch.is_autocast_enabled(place):
            input = input.to(torch.get_autocast_dtype(place))
        stored = Stored(self.form, torch.Size((self.out_features, self.in_features)), input.dtype)
        product = Product.apply(input, self.weight, stored, self.multiplies_in_fp8(input))
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def multiplies_in_fp8(self, rows: torch.Tensor) -> bool:
        """Whether there is a product in fp8, with a scale for each row, of this type and these sizes."""
        fits = rows.dtype == torch.bfloat16 and not (self.in_features % 16 or self.out_features % 16)
        return self.device_multiplies and rows.is_cuda and fits


class Restored(nn.Module):
    """Parametrization of a stored weight that is read as a plain tensor."""

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self.quant_state = stored

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """(bytes, 1); returns the weight in the type it was quantized from."""
        return self.quant_state.restored(weight, self.quant_state.dtype)
