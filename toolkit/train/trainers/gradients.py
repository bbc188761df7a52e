"""The norm of gradients over all processes, and clipping by it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.models.parallel.parts import group_of, holds_parts
from toolkit.models.parallel.pipeline import counts, piped, pipeline_group

_ROW, _LARGE = 512, 2**14
"""Numbers whose squares are summed in fp32, and those of a gradient from which on that pays."""


class Clipping:
    """How a trainer clips, and what norm it logs. Goes before a trainer."""

    args: Any
    accelerator: Any
    optimizer: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._sums_norm_itself:
            return clip_gradients(self._updated(), self.args.max_grad_norm)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        # Theirs looks for gradients in all modules of a model.
        return self.accelerator.clip_grad_norm_(self._updated(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and self._sums_norm_itself:
            grad_norm = clip_gradients(self._updated(), math.inf)
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def _updated(self) -> list[torch.nn.Parameter]:
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    @property
    def _sums_norm_itself(self) -> bool:
        """On CPUs, except under DeepSpeed, which sums in double precision too; and of parts and stages, of which torch
        has none of the others."""
        ours = self.args.device.type == "cpu" or holds_parts() or piped() > 1
        return ours and not self.is_deepspeed_enabled


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales the gradients down to a norm of at most `max_norm`, and returns the norm that they had.

    torch's own norm on a CPU is off by 5e-6 of a gradient of 500,000 numbers in fp32, so engines would not agree.
    """
    updated = [(each, each.grad) for each in parameters if each.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for _, gradient in updated]
    norms = _norms(local)
    squares = torch.stack(norms).square() if norms else torch.zeros(0, dtype=torch.float64)
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, (parameter, gradient) in enumerate(updated):
        if counts(parameter):
            alike[_divided_over(parameter, gradient)].append(number)
    total = squares.new_zeros(())
    for groups, numbers in alike.items():
        part = squares[numbers].sum()
        for group in groups:
            torch.distributed.all_reduce(part, group=group)
        total += part
    if piped() > 1:
        torch.distributed.all_reduce(total, group=pipeline_group())
    norm = total.sqrt()
    # torch and DeepSpeed divide by a norm that is larger by this much.
    scale = max_norm / (norm.item() + 1e-6)
    if scale < 1:
        torch._foreach_mul_(local, scale)
    return norm.float()


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each gradient, in fp64. torch's kernel for a sum in another type than the gradient's takes one number
    after the other on a CPU: for 135M it took 118 ms, where those of large gradients by rows take 17."""
    by_rows = [each.device.type == "cpu" and each.numel() >= _LARGE for each in gradients]
    whole = [each for each, rows in zip(gradients, by_rows, strict=True) if not rows]
    others = iter(torch._foreach_norm(whole, 2, dtype=torch.float64) if whole else ())
    return [_by_rows(each) if rows else next(others) for each, rows in zip(gradients, by_rows, strict=True)]


def _by_rows(gradient: torch.Tensor) -> torch.Tensor:
    """The norm, to 1e-8: of short rows in fp32, and of these in fp64."""
    flat = gradient.reshape(-1)
    rows, left = divmod(flat.numel(), _ROW)
    of_rows = torch.linalg.vector_norm(flat[: rows * _ROW].view(rows, _ROW), dim=1, dtype=torch.float32)
    parts = (of_rows, flat[rows * _ROW :]) if left else (of_rows,)
    return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in parts]).norm()


def _divided_over(parameter: Any, gradient: Any) -> tuple[Any, ...]:
    """The process groups over which a gradient is divided: by FSDP, and with its layer or expert."""
    if isinstance(gradient, DTensor):
        dimensions = enumerate(gradient.placements)
        return tuple(gradient.device_mesh.get_group(index) for index, place in dimensions if _is_divided(place))
    group = group_of(parameter)
    return () if group is None else (group,)


def _is_divided(place: Any) -> bool:
    # FSDP's shards of parts are of a class of their own, which says of itself that it is no shard.
    return not place.is_replicate() and not place.is_partial()
