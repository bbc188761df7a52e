"""Modules that ZeRO-3 gathers whole, such as the experts of a layer, lose no gradients.

DeepSpeed reduces the gradients of such a leaf module when those of what the module is given have been computed, and
knows of positional tensors alone. Where none of these has a gradient it does so before there is anything to reduce:
every gradient of the module is lost, or computed with weights that have been released.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.common import UserError


def watch(model: torch.nn.Module) -> None:
    """Has the first training forward of each leaf module that trains end the run where gradients would be lost."""
    for name, module in model.named_modules():
        if getattr(module, "_z3_leaf", False) and any(each.requires_grad for each in module.parameters()):
            _watch(name, module)


def _watch(name: str, module: torch.nn.Module) -> None:
    def check(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        if not any(torch.is_tensor(each) and each.requires_grad for each in given):
            raise UserError(
                f"DeepSpeed would lose the gradients of {name}, a {type(module).__name__} that is gathered whole: what "
                "it is given by position has no gradient",
                "name other modules in extra.deepspeed.zero_optimization.leaf_module.classes, where [] names none, or "
                "in the launcher's settings if it names them",
            )

    handle = module.register_forward_pre_hook(check)
