"""LoRA's update added to a layer's outputs by the product that forms it.

PEFT forms `result + B(A(x)) * scaling` in three passes over all outputs of a layer, and multiplies by the scaling again
in the backward pass. Here a GEMM adds to what the layer gave (its beta), and the scaling meets the `r` values per token
that come out of A. In fp32 that is the same number but for its last bits; in 16 bits it is rounded once less.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

_PLAIN = {
    ("peft.tuners.lora.layer", "Linear.forward"),
    ("peft.tuners.lora.bnb", "Linear4bit.forward"),
    ("peft.tuners.lora.bnb", "Linear8bitLt.forward"),
}
"""PEFT's forward passes for which `_forward` stands, by name: to import bitsandbytes takes a second."""


def add_by_product(model: torch.nn.Module) -> None:
    """Has the linear layers that PEFT adapted, quantized ones too, add their updates so.

    What is not plain LoRA (DoRA and other variants, biases, layers of kinds that compute otherwise) stays PEFT's.
    """
    layer: Any
    for layer in model.modules():
        forward = type(layer).forward
        if (forward.__module__, forward.__qualname__) not in _PLAIN:
            continue
        if layer.lora_variant or any(up.bias is not None for up in layer.lora_B.values()):
            continue
        for up in layer.lora_B.values():
            up.forward = types.MethodType(_added, up)
        layer.forward = types.MethodType(_forward, layer)


@contextmanager
def without_idle(model: torch.nn.Module) -> Iterator[None]:
    """Leaves out the updates that are zero because their B is, as LoRA's is before the first step: a model that is only
    read gives the same numbers in less time.

    Args:
        model: One that has gone through `add_by_product`, whose parameters lie whole on this process.
    """
    layers: list[Any] = [each for each in model.modules() if getattr(each.forward, "__func__", None) is _forward]
    idle = [
        layer
        for layer in layers
        if not layer.disable_adapters and not any(bool(up.weight.any()) for up in layer.lora_B.values())
    ]
    # Not PEFT's own switch, which has adapters frozen meanwhile and all of them trained afterwards.
    for layer in idle:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in idle:
            layer._disable_adapters = False


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Has a model compute what its frozen base does; nothing is frozen or moved for it."""
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if args or kwargs or layer.disable_adapters or layer.merged or len(names) != 1:
        return type(layer).forward(layer, x, *args, **kwargs)
    (name,) = names
    down, up, result = layer.lora_A[name], layer.lora_B[name], layer.base_layer(x)
    x = layer._cast_input_dtype(x, down.weight.dtype)
    inner = down(layer.lora_dropout[name](x)) * layer.scaling[name]
    if torch.compiler.is_compiling() and result.dtype.itemsize == 2:
        # In fp32, as a sum in 16 bits would be made one `addmm`, which copies what the layer gave before it adds to it;
        # this one becomes a part of the kernel that reads it next.
        return (result.float() + up(inner).float()).to(result.dtype)
    if inner.dtype != result.dtype:
        return (result + up(inner)).to(result.dtype)
    return up(inner, result)


def _added(up: torch.nn.Linear, inner: torch.Tensor, result: torch.Tensor | None = None) -> torch.Tensor:
    """What B makes of `inner`, added to a result if one is given.

    A module's own call, so that engines that gather parameters for it do.
    """
    if result is None:
        return F.linear(inner, up.weight)
    if hasattr(up.weight, "ds_id"):
        # ZeRO-3 has put a `linear` of its own there, which keeps no gathered weight and knows vectors as biases alone.
        return result + F.linear(inner, up.weight)
    # `torch.addmm` with the weight transposed would be cast by autocast in every micro-batch: it keeps copies of
    # parameters, not of their views. With a matrix as its bias, `linear` is that `addmm`.
    return F.linear(inner.flatten(0, -2), up.weight, result.flatten(0, -2)).view(result.shape)
