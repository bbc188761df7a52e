"""NEFTune: noise on embeddings while a model is trained, as much as the length of each document says.

A document of L tokens with embeddings of d numbers gets noise that is uniform within alpha / sqrt(L d) (Jain et al.
2023, arXiv:2310.05914). Transformers takes the width of the batch for L. That is the longest row beside it, and where
documents lie end to end all of them together: the noise would depend on the micro-batch, on padding and on packing.
"""

from __future__ import annotations

from typing import Any

import torch


def add_noise(model: Any, alpha: float) -> None:
    """Adds noise to the input embeddings of a Transformers model (not one of PEFT) whenever it is in training mode; of
    an encoder-decoder to the encoder's."""
    given: dict[str, Any] = {}

    def remember(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given.clear()
        given.update(kwargs)

    def noisy(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        # (batch, seq or 1, 1)
        numbers = _lengths(args[0], given)[..., None] * output.shape[-1]
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + noise * (alpha / numbers.float().sqrt()).to(output.dtype)

    model.register_forward_pre_hook(remember, with_kwargs=True)
    # What encoder-decoders return themselves is only where both sides' weights are kept.
    reader = model.get_encoder() if model.config.is_encoder_decoder else model
    reader.get_input_embeddings().register_forward_hook(noisy)


def _lengths(ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Tokens of the document that each of `ids` (batch, seq) belongs to: (batch, seq), or (batch, 1) where it is one a
    row. Known without waiting for the device.

    Args:
        given: What the model was called with.
    """
    if (positions := given.get("position_ids")) is not None:
        documents = (positions == 0).cumsum(1) - 1
        counts = torch.zeros_like(positions).scatter_add_(1, documents, torch.ones_like(positions))
        return counts.gather(1, documents)
    mask = given.get("attention_mask")
    if mask is None or mask.shape != ids.shape:  # A decoder's tokens, where it has the same embeddings.
        return torch.full((1, 1), ids.shape[1], device=ids.device)
    return mask.sum(1, keepdim=True)
