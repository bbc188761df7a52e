"""MLPs that take some of the tokens at a time (tiled MLP, Bekman et al. 2025, arXiv:2506.13996).

An MLP works on each token by itself, and is several times as wide inside as what enters and leaves. Of long rows these
inner activations are the largest part of a layer. Computed one tile after the other, and again in the backward pass,
they exist for one tile at a time. Autograd sums the gradients of weights over the tiles before an engine sees them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from toolkit.common import UserError
from toolkit.models.layers import layers_of

_NAMES = ("mlp", "feed_forward", "ffn")
"""What Transformers' models call the MLP of a layer."""


def tile_mlps(model: Any, tiles: int) -> None:
    """Has the MLP of each layer compute the tokens of a row in so many tiles; 1 leaves a model as it is.

    After adapters and kernels have changed the MLPs, and before layers are compiled or sharded.

    Raises:
        UserError: If no layers are found, or one has no MLP that takes hidden states alone.
    """
    if tiles == 1:
        return
    if not (layers := layers_of(model)):
        raise UserError(
            "activation_checkpointing.mlp_tiles: this model's layers are not marked as such",
            "remove activation_checkpointing.mlp_tiles",
        )
    for layer in layers:
        mlp = next((found for name in _NAMES if (found := getattr(layer, name, None)) is not None), None)
        if mlp is None or not _takes_hidden_states_alone(mlp):
            raise UserError(
                f"activation_checkpointing.mlp_tiles: layers of kind {type(layer).__name__} have no MLP that takes "
                "hidden states alone",
                "remove activation_checkpointing.mlp_tiles",
            )
        mlp.forward = functools.partial(_in_tiles, mlp.forward, tiles)


def tiles_of(model: Any) -> int:
    """In how many tiles the MLPs of a model really compute; 0 where layers differ."""
    found = {_tiles(layer) for layer in layers_of(model)} or {1}
    return found.pop() if len(found) == 1 else 0


def _tiles(layer: Any) -> int:
    forwards = [vars(found).get("forward") for name in _NAMES if (found := getattr(layer, name, None)) is not None]
    parts = [each for each in forwards if isinstance(each, functools.partial) and each.func is _in_tiles]
    return int(parts[0].args[1]) if parts else 1


def _takes_hidden_states_alone(mlp: Any) -> bool:
    needed = [
        each
        for each in inspect.signature(mlp.forward).parameters.values()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    return len(needed) == 1


def _in_tiles(forward: Callable[[torch.Tensor], torch.Tensor], tiles: int, hidden: torch.Tensor) -> torch.Tensor:
    """`forward` of hidden states, shape (rows, tokens, width)."""
    parts = hidden.chunk(tiles, dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([forward(part) for part in parts], dim=1)
    return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in parts], dim=1)
