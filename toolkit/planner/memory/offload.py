"""What an engine moves off the device into host memory, and the pinned buffers it needs there to do so."""

from __future__ import annotations

import math

from toolkit.planner.memory.states import States
from toolkit.planner.memory.zero import SUB_GROUP
from toolkit.planner.workload import WIDTH, Workload

_NVME_BUFFERS = 5
"""ZeRO-3's buffers for parameters on NVMe (`offload_param.buffer_count`), each as large as the largest part of one."""
_MAX_IN_CPU = 1_000_000_000
"""Elements of trained parameters that a process keeps in host memory although they are offloaded to NVMe
(`offload_param.max_in_cpu`)."""
_SWAP_BUFFERS = 4
"""Pinned buffers for optimizer state on NVMe (`offload_optimizer.buffer_count`), each as large as a sub-group."""


def offloaded(workload: Workload, held: States) -> dict[str, float]:
    """What one process keeps in host memory instead of on its device, by part; `staging` is there in addition.

    Sources: DeepSpeed 0.19.8, `zero/stage_1_and_2.py` and `zero/stage3.py`; torch 2.13, FSDP2's `CPUOffloadPolicy`.
    """
    strategy, types, share = workload.strategy, workload.types, workload.owned
    parts: dict[str, float] = {"optimizer": held.paged} if held.paged else {}
    if strategy.offload_optimizer == "cpu":
        # All keep a gradient beside the masters; stage 3 has its flat vector of gradients there too, and stages 1 and
        # 2 what they accumulate, where it is not summed in fp32 on the device.
        twice = strategy.zero_stage == 3 or (workload.accumulates and types.local == types.reduce)
        gradients = share * (WIDTH[types.master] + (WIDTH[types.reduce] if twice else 0))
        parts |= {"optimizer": held.optimizer, "masters": held.masters, "gradients": gradients}
        if strategy.zero_stage < 3:
            largest = max((each.numel for each in workload.trace.tensors if each.trained), default=0)
            # param_buffer_of_bit16_for_cpu_offload_groups, temp_grad_buffer_for_cpu_offload
            parts["staging"] = (share + largest) * WIDTH[types.local]
    elif strategy.offload_optimizer == "nvme":
        parts["staging"] = _SWAP_BUFFERS * min(SUB_GROUP, share) * WIDTH[types.master]
        parts["gradients"] = share * WIDTH[types.reduce]
    if strategy.name == "fsdp" and strategy.offload_param == "cpu":
        parts |= {"parameters": held.parameters + held.adapters, "optimizer": held.optimizer}
        parts["gradients"] = held.gradients
    elif strategy.offload_param == "cpu":
        parts["parameters"] = held.parameters + held.adapters
    elif strategy.offload_param == "nvme":
        part = max((each.numel for each in workload.trace.tensors), default=0) / workload.over.parameters
        kept = kept_from_nvme(workload)
        # `reserve_partitioned_swap_space`: what changes on the drive goes there by sub-groups.
        changed = min(SUB_GROUP, share) if kept < share else 0.0
        parts["parameters"] = kept * WIDTH[types.local]
        parts["staging"] = parts.get("staging", 0) + (_NVME_BUFFERS * part + changed) * WIDTH[types.local]
    return parts


def kept_from_nvme(workload: Workload) -> float:
    """Elements that one process keeps in host memory of parameters that are offloaded to NVMe: trained ones."""
    return min(_MAX_IN_CPU, workload.owned)


def offloaded_activations(workload: Workload) -> float:
    """Inputs of the checkpointed layers that one process holds in host memory until the backward pass."""
    trace, every = workload.trace, workload.recipe.activation_checkpointing.every_n_layers
    return trace.boundary.at(workload.shape) * math.ceil(trace.layers / every)
