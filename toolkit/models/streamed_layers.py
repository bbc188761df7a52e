"""A model that is only asked, whose layers wait in the host's memory: each comes to the device when it computes.

The device holds the embeddings, the output head and one layer. All else crosses the bus in every pass, in the order in
which it computes and on the same stream, so nothing is overwritten while it is read.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from toolkit.common import UserError
from toolkit.models.layers import layers_of


def stream_layers(model: Any, device: torch.device, key: str) -> None:
    """Moves all of a model but its layers to a device, and has each layer come there for as long as it computes.

    Args:
        model: Frozen, on the host; its weights are stored as they are computed with.
        key: Of the recipe, which an error names.

    Raises:
        UserError: If the model's code does not say what its layers are.
    """
    layers = layers_of(model)
    if not layers:
        raise UserError(
            f"{key}: the code of a {model.config.model_type} does not say which of its modules are layers",
            f"set {key}=false, or quantize it",
        )
    of_layers = [_tensors(each) for each in layers]
    inside = set(itertools.chain.from_iterable(of_layers))
    for each in _tensors(model):
        if each not in inside:
            each.data = each.data.to(device)
    for layer, tensors in zip(layers, of_layers, strict=True):
        # The bus reads from fixed pages by itself; of others a copy is made first.
        kept = {each: each.data.pin_memory() if device.type == "cuda" else each.data for each in tensors}
        _put(kept)
        layer.register_forward_pre_hook(lambda _, args, kept=kept: _fetch(kept, device))
        layer.register_forward_hook(lambda *_, kept=kept: _put(kept), always_call=True)
        # What keeps documents apart is asked by gradients of inputs.
        layer.register_full_backward_pre_hook(lambda *_, kept=kept: _fetch(kept, device))
        layer.register_full_backward_hook(lambda *_, kept=kept: _put(kept))


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fetch(kept: dict[torch.Tensor, torch.Tensor], device: torch.device) -> None:
    for each, host in kept.items():
        each.data = host.to(device, non_blocking=True, copy=True)


def _put(kept: dict[torch.Tensor, torch.Tensor]) -> None:
    for each, host in kept.items():
        each.data = host
