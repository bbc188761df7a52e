"""Muon for the matrices of hidden layers and AdamW for all else, as the one optimizer that a trainer holds.

Muon orthogonalizes the momentum of each matrix (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), which
five matrix products in bf16 approximate; torch has both halves, and here they share groups and state. An update has the
size of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2), so one learning rate and one weight
decay serve both halves, as they were found for AdamW.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch

from toolkit.models.heads import head_modules


def hidden_matrices(model: Any) -> set[torch.nn.Parameter]:
    """All trained matrices, adapters' too, but for embeddings and the head, for the vocabulary or of the objective's
    own, where AdamW does better (Jordan et al. 2024)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    heads = [base.get_output_embeddings()] if hasattr(base, "get_output_embeddings") else []
    if heads == [None]:
        heads = [base.get_submodule(name) for name in head_modules(base)]
    outer = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) or module in heads]
    spared = {parameter for module in outer for parameter in module.parameters()}
    return {each for each in model.parameters() if each.requires_grad and each.ndim == 2} - spared


class Muon(torch.optim.Optimizer):
    """Two update rules over one set of parameter groups.

    Args:
        params: Groups. Each is divided into the two halves and keeps its weight decay.
        matrices: The parameters that Muon updates, see `hidden_matrices`.
        lr: Learning rate of both halves, likewise `weight_decay`.
        betas: Of AdamW, likewise `eps` and `fused`.
        momentum: Of Muon, likewise all that follow; see `torch.optim.Muon`.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        matrices: Collection[torch.nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        halves: dict[bool, Any] = {
            True: partial(
                torch.optim.Muon, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
            ),
            False: partial(torch.optim.AdamW, betas=betas, eps=eps, fused=fused),
        }
        groups = [
            {**group, "params": part, "muon": muon}
            for group in params
            for muon in halves
            if (part := [each for each in group["params"] if (each in matrices) == muon])
        ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._halves = {muon: make(own) for muon, make in halves.items() if (own := self._groups(muon))}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters."""
        for muon, half in self._halves.items():
            # Loading a checkpoint gives this optimizer other groups and another state.
            half.param_groups, half.state = self._groups(muon), self.state
            half.step()

    def _groups(self, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] == muon]
