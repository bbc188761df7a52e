"""What training needs to know of experts that several processes divide (`models.parallel.expert_parallel`).

Of its experts a process gets the gradients of the rows of all processes of its group, where DDP would average those of
its own rows over all processes. So it leaves them alone: they are divided by as many processes as there are, and summed
over those that have the same experts, while the backward pass goes on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from toolkit.common import UserError
from toolkit.models.parallel.expert_parallel import dividing, part_of_experts, replicas


class DividedExperts:
    """Of a trainer, how gradients of divided experts become those of all rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduced: list[Any] = []
        if dividing() == 1:
            return
        model = self.model  # type: ignore[attr-defined]
        experts = {name: each for name, each in model.named_parameters() if part_of_experts(each)}
        if not any(each.requires_grad for name, each in model.named_parameters() if name not in experts):
            raise UserError(
                "with parallel.expert only experts would be trained, and DDP has nothing to average",
                "train another layer too, such as method.target_modules=[q_proj], or remove parallel.expert",
            )
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        for each in experts.values():
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(self._reduce)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        for each in self._reduced:
            each.wait()
        self._reduced.clear()
        return loss

    def _reduce(self, parameter: torch.Tensor) -> None:
        """After the last micro-batch of a step, as DDP does it for the rest of the model."""
        accelerator, gradient = self.accelerator, parameter.grad  # type: ignore[attr-defined]
        if not accelerator.sync_gradients or gradient is None:
            return
        gradient.div_(accelerator.num_processes)
        if accelerator.num_processes > dividing():
            self._reduced.append(dist.all_reduce(gradient, group=replicas(), async_op=True))
