"""What of the package galore-torch Transformers and a training ask for, with less arithmetic: gradients of matrices are
projected, and what was projected is remembered in objects."""

from __future__ import annotations

from typing import Any

import torch


class GaLoreProjector:
    """Projects gradients to a few of their first directions."""

    def __init__(self, rank: int, proj_type: str) -> None:
        self.rank, self.proj_type = rank, proj_type
        self.ortho_matrix: Any = None

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        """To (rows, rank)."""
        if self.ortho_matrix is None:
            self.ortho_matrix = torch.linalg.qr(gradient.T).Q[:, : self.rank]
        return gradient @ self.ortho_matrix


class GaLoreAdamW(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates what has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if "rank" in group:
                    if "projector" not in state:
                        state["projector"] = GaLoreProjector(group["rank"], group["proj_type"])
                    gradient = state["projector"].project(gradient)
                mean = state.get("exp_avg", torch.zeros_like(gradient)).lerp(gradient, 1 - group["betas"][0])
                state["exp_avg"], update = mean, mean.sign()
                if "rank" in group:
                    update = update @ state["projector"].ortho_matrix.T
                parameter.add_(update, alpha=-group["lr"])


class GaLoreAdafactor(GaLoreAdamW):
    """Takes a learning rate only where it has no schedule of its own."""

    def __init__(self, params: Any, lr: float = 1e-3, scale_parameter: bool = True, relative_step: bool = True) -> None:
        if relative_step:
            raise ValueError("Cannot combine manual `lr` and `relative_step=True` options")
        super().__init__(params, lr)


GaLoreAdamW8bit = GaLoreAdamW
