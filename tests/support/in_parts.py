"""Trains on one process whose layers sum as those of two processes do that divide them (`parallel.tensor=2`).

Where inputs of a product are divided, sums of other numbers are rounded: a training then differs from that of a process
which sums all at once as much as it does from that of processes which divide layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

PARTS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """What `cpu_engines` does, with products in parts."""
    import cpu_engines

    from toolkit.train import model as loading

    loading.divide_model = in_parts
    return cpu_engines.main(arguments)


def in_parts(model: Any, *_: Any) -> None:
    """Has the products of divided layers be formed in parts."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = base.get_decoder()
    plan = base.config.get_text_config().base_model_tp_plan
    patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
    for name, module in decoder.named_modules():
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(name)), "")
        if style not in ("colwise", "rowwise"):
            continue
        if style == "rowwise":
            module.forward = functools.partial(_rows, module)
            continue
        for each in (getattr(module, "base_layer", module), *getattr(module, "lora_B", {}).values()):
            each.forward = functools.partial(_columns, each)


def _columns(layer: Any, inputs: torch.Tensor, result: torch.Tensor | None = None) -> torch.Tensor:
    """Of a layer, or of LoRA's B what it adds to a result."""
    added: Any = layer.bias if result is None else result
    parts = [None] * PARTS if added is None else added.chunk(PARTS, -1)
    return torch.cat([_linear(inputs, *each) for each in zip(layer.weight.chunk(PARTS), parts, strict=True)], -1)


def _rows(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """With its adapter, if it has one, which drops nothing."""
    layer, total = getattr(module, "base_layer", module), None
    for number, part in enumerate(inputs.chunk(PARTS, -1)):
        product = F.linear(part, layer.weight.chunk(PARTS, 1)[number])
        for name, down in getattr(module, "lora_A", {}).items():
            inner = F.linear(part, down.weight.chunk(PARTS, 1)[number]) * module.scaling[name]
            product = _linear(inner, module.lora_B[name].weight, product)
        total = product if total is None else total + product
    assert total is not None
    return total if layer.bias is None else total + layer.bias


def _linear(inputs: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    if added is None or added.ndim == 1:
        return F.linear(inputs, weight, added)
    return F.linear(inputs.flatten(0, -2), weight, added.flatten(0, -2)).view(added.shape)
