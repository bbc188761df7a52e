"""Whether a loss reaches all parameters of a model, asked of a tiny copy: DistributedDataParallel must know.

Towers for images and sound, a decoder's attention to an encoder that is not there, and experts that no token of a batch
has chosen get no gradients, for which it would wait.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.models.tiny import VOCABULARY, tiny_model

_TOKENS = 64


def reaches_all(config: Any, objective: str, trust_remote_code: bool = False) -> bool:
    """Whether each batch of text gives all parameters of an architecture a gradient; no where that cannot be told.

    Args:
        config: The model's configuration object.
        objective: As in the recipe.
    """
    try:
        model = tiny_model(config, objective, trust_remote_code)
        experts = (each for name, each in model.named_modules() if name.endswith("experts"))
        if any(isinstance(each, torch.nn.ModuleList | torch.nn.ModuleDict) for each in experts):
            return False
        ids = torch.arange(_TOKENS)[None] % (VOCABULARY - 8) + 4
        pair = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        found = model(input_ids=ids, **pair)
        with torch.enable_grad():
            found["logits" if "logits" in found else "last_hidden_state"].sum().backward()
    except Exception:  # A model's own code may raise anything for sizes that do not fit together.
        return False
    # Transformers loads parameters that the model's code does not train, as biases of routers, as those that it does.
    return all(each.grad is not None for each in model.parameters())
