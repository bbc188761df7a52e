"""What of a model a loss over text reaches, asked of a tiny copy of it.

Towers for images and sound get no gradient, nor does a decoder's attention to an encoder that is not there, or an
expert that no token of a batch has chosen. DistributedDataParallel would wait for their gradients, ZeRO would decay
them, and adapters in them would never learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.models.tiny import VOCABULARY, tiny_model

_TOKENS = 64
_MANY = torch.nn.ModuleList | torch.nn.ModuleDict


@dataclass(frozen=True)
class Reach:
    """Where gradients come.

    Args:
        inside: Whether each batch of text gives a gradient to all parameters but those of `outside`; no where that
            cannot be told.
        outside: Names of modules and parameters that no text gives a gradient. Of what is repeated, as layers are,
            nothing is named: a copy has few of them.
    """

    inside: bool = False
    outside: tuple[str, ...] = ()

    def is_outside(self, name: str) -> bool:
        """Whether a module or parameter of this name is one of `outside`, or in one."""
        return any(name == each or name.startswith(f"{each}.") for each in self.outside)


EVERYWHERE = Reach(inside=True)


def reach_of(config: Any, objective: str, trust_remote_code: bool = False) -> Reach:
    """Which parameters of an architecture text reaches.

    Args:
        config: The model's configuration object.
        objective: As in the recipe.
    """
    try:
        model = tiny_model(config, objective, trust_remote_code)
        ids = torch.arange(_TOKENS)[None] % (VOCABULARY - 8) + 4
        pair = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        found = model(input_ids=ids, **pair)
        with torch.enable_grad():
            found["logits" if "logits" in found else "last_hidden_state"].sum().backward()
    except Exception:  # A model's own code may raise anything for sizes that do not fit together.
        return Reach()
    reach = Reach(outside=(*_without_gradient(model),))
    experts = (each for name, each in model.named_modules() if name.endswith("experts"))
    # Transformers loads parameters that the model's code does not train, as biases of routers, as those that it does.
    missed = (name for name, each in model.named_parameters() if each.grad is None and not reach.is_outside(name))
    return Reach(not any(isinstance(each, _MANY) for each in experts) and not any(missed), reach.outside)


def _without_gradient(module: torch.nn.Module, prefix: str = "") -> Iterator[str]:
    """The outermost modules and parameters that would be trained and got no gradient."""
    for name, parameter in module.named_parameters(prefix, recurse=False):
        if parameter.requires_grad and parameter.grad is None:
            yield name
    for name, child in module.named_children():
        trained = [each for each in child.parameters() if each.requires_grad]
        if trained and all(each.grad is None for each in trained):
            yield prefix + ("." if prefix else "") + name
        elif not isinstance(child, _MANY):
            yield from _without_gradient(child, prefix + ("." if prefix else "") + name)
