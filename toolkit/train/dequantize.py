"""Quantized bases as plain fp32 weights, to merge adapters into: one layer at a time, where there is memory for them.

Transformers' `dequantize` leaves all layers on the GPU, restores each one twice and in 16 bits. In fp32 a model of 8
billion parameters takes 32 GB, for which a card that trains it in 4 bits has no room; the host computes the same.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch.nn.utils import parametrize

from toolkit.common import UserError
from toolkit.planner.hardware.detect import ram


def place_for(model: Any) -> tuple[torch.device, str]:
    """Where a model's weights can lie in fp32, with the largest three times over: restored, changed and checked.

    Returns:
        The device, and how much is needed and free there, for people.

    Raises:
        UserError: If there is room nowhere.
    """
    sizes = [_elements(parameter) for parameter in model.parameters()]
    needed = 4 * (sum(sizes) + 3 * max(sizes))
    free = {"host": min(psutil.virtual_memory().available, ram())}
    if torch.cuda.is_available():
        free = {"GPU": torch.cuda.mem_get_info()[0], **free}
    shown = ", ".join(f"{size / 1e9:.1f} GB free on the {name}" for name, size in free.items())
    text = f"fp32 weights of {needed / 1e9:.1f} GB; {shown}"
    for name, size in free.items():
        if needed <= size:
            return torch.device("cuda" if name == "GPU" else "cpu"), f"{text}: merged on the {name}"
    raise UserError(f"merging takes {text}", "merge on a machine with more memory; the adapter can be used as it is")


def dequantize(model: Any, place: torch.device) -> Any:
    """Replaces the layers and experts that bitsandbytes has quantized by plain ones in fp32; moves the others too.

    Beside the result no more than three forms of one layer are held, and its quantized form is given back with it.
    """
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    for name, layer in list(model.named_modules()):
        if type(getattr(layer, "weight", None)).__name__ in ("Params4bit", "Int8Params"):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            weight = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None))
            plain.weight = torch.nn.Parameter(weight.to(place, torch.float32), requires_grad=False)
            if layer.bias is not None:
                plain.bias = layer.bias
            model.set_submodule(name, plain)
        for key in list(getattr(layer, "parametrizations", ())):
            weight = getattr(layer, key)
            parametrize.remove_parametrizations(layer, key, leave_parametrized=False)
            layer._parameters[key] = torch.nn.Parameter(weight.to(place, torch.float32), requires_grad=False)
    model.hf_quantizer.remove_quantization_config(model)
    return model


def _elements(parameter: torch.nn.Parameter) -> int:
    """Of 4-bit weights, whose parameter holds two in a byte."""
    state = getattr(parameter, "quant_state", None)
    return state.shape.numel() if state is not None else parameter.numel()
