"""What of a model a loss over text reaches, asked of a tiny copy of it.

Towers for images and sound get no gradient, nor does a decoder's attention to an encoder that is not there, or an
expert that no token of a batch has chosen. DistributedDataParallel would wait for their gradients, ZeRO would decay
them, and adapters in them would never learn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.models.tiny import by_itself, text_batch, tiny_model
from toolkit.models.weight_reads import any_layer, is_one_of

MANY = torch.nn.ModuleList | torch.nn.ModuleDict


@dataclass(frozen=True)
class Reach:
    """Where gradients come.

    Args:
        inside: Whether each batch of text gives a gradient to all parameters but those of `outside`; no where that
            cannot be told.
        outside: Names of modules and parameters that no text gives a gradient. Of what is repeated, as layers are,
            nothing is named: a copy has few of them.
        fixed: Patterns of parameters that the model's code says are not trained, and that get no gradient either, such
            as the biases of routers. Transformers loads them as those that are.
    """

    inside: bool = False
    outside: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    def is_outside(self, name: str) -> bool:
        """Whether a parameter of this name is one of these, or in one."""
        apart = any(name == each or name.startswith(f"{each}.") for each in self.outside)
        return apart or is_one_of(name, self.fixed)


EVERYWHERE = Reach(inside=True)


def reach_of(config: Any, objective: str, trust_remote_code: bool = False) -> Reach:
    """Which parameters of an architecture text reaches.

    Args:
        config: The model's configuration object.
        objective: As in the recipe.
    """
    try:
        model = tiny_model(config, objective, trust_remote_code)
        own = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
        for _, each in own:
            each.requires_grad_(True)
        with by_itself(), torch.enable_grad():
            found = model(**text_batch(model))
            found["logits" if "logits" in found else "last_hidden_state"].sum().backward()
    except Exception:  # A model's own code may raise anything for sizes that do not fit together.
        return Reach()
    fixed = sorted({any_layer(name) for name, each in own if each.grad is None})
    reach = Reach(outside=(*_without_gradient(model),), fixed=(*fixed,))
    experts = (each for name, each in model.named_modules() if name.endswith("experts"))
    chosen = any(isinstance(each, MANY) for each in experts) or bool(getattr(config, "zero_expert_num", 0))
    inside = not chosen and all(
        each.grad is not None or reach.is_outside(name) for name, each in model.named_parameters()
    )
    return dataclasses.replace(reach, inside=inside)


def _without_gradient(module: torch.nn.Module, prefix: str = "") -> Iterator[str]:
    """The outermost modules and parameters that would be trained and got no gradient."""
    for name, parameter in module.named_parameters(prefix, recurse=False):
        if parameter.grad is None:
            yield name
    for name, child in module.named_children():
        within = [*child.parameters()]
        if within and all(each.grad is None for each in within):
            yield prefix + ("." if prefix else "") + name
        elif not isinstance(child, MANY):
            yield from _without_gradient(child, prefix + ("." if prefix else "") + name)
