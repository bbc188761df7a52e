"""Parameters of which a process has a part, as others of a group have the rest: of layers (`tensor_parallel`) or of
experts (`expert_parallel`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from toolkit.models.parallel import expert_parallel, layer_sums, sharded_parts, tensor_parallel
from toolkit.models.parallel.expert_parallel import part_of_experts


def require_plans(config: Any, expert: int) -> None:
    """Refuses what is not divided before its weights are read.

    Raises:
        UserError: If so many processes cannot divide the experts of a model with this configuration.
    """
    if expert > 1:
        expert_parallel.plan_of(config)


def divide_model(model: Any, tensor: int, expert: int, rank: int) -> None:
    """Keeps one process's part of the layers and of the experts of a model, see `divide_layers`, `divide_experts`."""
    tensor_parallel.divide_layers(model, tensor, rank % tensor)
    expert_parallel.divide_experts(model, expert, rank % expert)


def sizes(model: Any) -> dict[str, int]:
    """Over how many processes layers and experts really are divided."""
    return {"tensor": sharded_parts.divides(model), "expert": expert_parallel.divides(model)}


def holds_parts() -> bool:
    """Whether this process has parts of some parameters."""
    return layer_sums.dividing() > 1 or expert_parallel.dividing() > 1


def is_part(parameter: Any) -> bool:
    """Whether a process has only a part of this parameter."""
    return part_of_experts(parameter) is not None or tensor_parallel.is_part(parameter)


def parts_of(parameter: Any) -> int:
    """How many processes have a part of this parameter each; 1 where each has all of it."""
    return whole_shape(parameter).numel() // max(1, parameter.numel()) if is_part(parameter) else 1


def whole_shape(parameter: Any) -> torch.Size:
    """The shape of a parameter as one process would have it."""
    part = part_of_experts(parameter)
    return part.whole if part else tensor_parallel.whole_shape(parameter)


def part_of(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """What this process has of something of a parameter's whole shape."""
    if part := part_of_experts(parameter):
        return part.of(whole, dist.get_rank(expert_parallel.group()))
    return tensor_parallel.part_of(parameter, whole)


def whole_of(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """Something of a parameter's whole shape, of the parts of it. All processes of a group call this."""
    if experts := part_of_experts(parameter):
        return experts.joined(part) if part.shape == parameter.shape else part
    return tensor_parallel.whole_of(parameter, part)


def group_of(parameter: Any) -> Any:
    """The processes that have the rest of a parameter of which this one has a part; None of a whole one."""
    if part_of_experts(parameter):
        return expert_parallel.group()
    return layer_sums.layer_group() if tensor_parallel.is_part(parameter) else None


def whole_state(model: Any, keep: Callable[[Any], bool], first: bool) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name, without second names of tied ones, each whole in host memory of the first
    process; nothing on the others.

    Every process must call this.

    Args:
        keep: Which parameters are asked for.
        first: Whether this is the first process.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {}
    for name, held in model.state_dict().items():
        parameter = parameters.get(name)
        if name in tied or (parameter is not None and not keep(parameter)):
            continue
        whole = held if parameter is None else whole_of(parameter, held)
        if first:
            state[name] = whole.detach().cpu()
    return state
