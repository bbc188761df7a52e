"""What really runs, read from the live objects: engine, dtypes, sharding, optimizer, clipping and attention.

Attributes are read and nothing is communicated, which costs milliseconds. Each engine keeps its own elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from toolkit.data.batching.batches import MicroBatches
from toolkit.distributed.engine_state import EngineState
from toolkit.models import compiled_layers, coverage, device, liger_kernels
from toolkit.models.parallel.parts import sizes as parts
from toolkit.models.parallel.shared_rows import sizes
from toolkit.models.tiled_mlp import tiles_of
from toolkit.train.optimizer import inner_optimizer, moments_of, not_updated, updated_by
from toolkit.train.trainers.distillation import DistillationTrainer, state_of
from toolkit.train.trainers.trainer import CausalTrainer


def read(trainer: Any) -> EngineState:
    """The effective state of a trainer whose engine is built. Reads attributes only; nothing is communicated."""
    engine, loader = trainer.model_wrapped, trainer.callback_handler.train_dataloader
    model = trainer.accelerator.unwrap_model(engine)
    deepspeed = engine if trainer.is_deepspeed_enabled else None
    optimizer = inner_optimizer(trainer.optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    state: dict[str, Any] = {
        "engine": _engine(engine, deepspeed),
        "device": str(trainer.args.device),
        "world_size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        **sizes(),
        **parts(model),
        **(trainer.pipeline.effective() if trainer.pipeline else {"pipeline": 1}),
        "optimizer": type(optimizer).__name__,
        "attention": str(model.config._attn_implementation),
        "activation_checkpointing": _checkpointing(model),
        "mlp_tiles": tiles_of(model),
        "parameters": _spread(trained + frozen),
        "trained_parameters": sum(_numel(parameter) for parameter in trained),
        "frozen_parameters": sum(_numel(parameter) for parameter in frozen),
        "trained_dtype": _dtypes(trained),
        "quantization": coverage.stored_form(model),
        "tf32": device.computes_tf32(),
        "fp8_products": next((each.fp8_scaling for each in model.modules() if hasattr(each, "fp8_scaling")), "none"),
        "compile": "layers" if compiled_layers.compiled(model) else "off",
        "liger_modules": liger_kernels.modules_with(model),
        "micro_batch_size": _micro_batch_size(loader.batch_sampler),
        "num_workers": loader.num_workers,
        "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
    }
    if isinstance(trainer, CausalTrainer):
        state["output_head"] = "fused" if trainer.output_head.fused else "own"
    if frozen:
        state["frozen_dtype"] = _dtypes(frozen)
    if isinstance(trainer, DistillationTrainer):
        state |= state_of(trainer.teacher.model)
    if moments := moments_of(optimizer):
        state["moments_dtype"] = _dtypes(moments)
    if deepspeed:
        in_engine = _deepspeed(deepspeed, optimizer, trained)
        for key in ("micro_batch_size", "gradient_accumulation_steps"):
            if state[key] != in_engine[key]:
                in_engine[key] = f"{in_engine[key]} in DeepSpeed and {state[key]} in the trainer"
        return EngineState(**state | in_engine)
    state |= {
        "not_updated": not_updated(trained, updated_by(optimizer)),
        "max_grad_norm": trainer.args.max_grad_norm,
        "gradients": _spread(trained),
        "optimizer_state": _spread(updated_by(optimizer)),
        "master_dtype": _dtypes(updated_by(optimizer)),
        "autocast": _autocast(trainer.accelerator, model),
    }
    if isinstance(model, FSDPModule):
        accumulation = trainer.accelerator.gradient_state.plugin_kwargs
        state |= _fsdp(model) | {"sync_each_batch": accumulation.get("sync_each_batch", False)}
    return EngineState(**state)


def _micro_batch_size(sampler: Any) -> int:
    """Rows of a micro-batch, on average, of what accelerate divides among processes where there are several."""
    sampler = getattr(sampler, "batch_sampler", sampler)
    return sampler.micro_batch_size if isinstance(sampler, MicroBatches) else sampler.batch_size


def _engine(engine: Any, deepspeed: Any) -> str:
    if deepspeed:
        return "deepspeed"
    if isinstance(engine, FSDPModule):
        return "fsdp2"
    # Of one process it replicates nothing.
    return "ddp" if isinstance(engine, DistributedDataParallel) and torch.distributed.get_world_size() > 1 else "none"


def _deepspeed(engine: Any, optimizer: Any, trained: list[Any]) -> dict[str, Any]:
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    # Stage 3 lends its optimizer one group of masters at a time.
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or updated_by(optimizer)
    total = sum(_numel(parameter) for parameter in trained)
    whole = engine.dp_world_size == 1 or sum(master.numel() for master in masters) >= total
    offloaded = {
        "offload_optimizer": getattr(engine.zero_offload_optimizer(), "device", None),
        "offload_param": getattr(engine.zero_offload_param(), "device", None),
    }
    gradients = stage == 3 or getattr(zero, "partition_gradients", False)
    # Named differently by each of DeepSpeed's optimizers; their masters are these laid end to end.
    names = ("fp16_groups", "bit16_groups", "bf16_groups")
    groups = next(getattr(zero, name) for name in names if hasattr(zero, name))
    return {
        "not_updated": not_updated(trained, [parameter for group in groups for parameter in group]),
        "zero_stage": stage,
        "sharded_over": torch.distributed.get_world_size(zero.dp_process_group),
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "max_grad_norm": float(engine.gradient_clipping()),
        "gradients": "sharded" if gradients and engine.dp_world_size > 1 else "whole",
        # The size of what this process updates, with padding, not a setting.
        "optimizer_state": "whole" if whole else "sharded",
        "master_dtype": _dtypes(masters),
        "reduce_dtype": _name(engine.communication_data_type),
        "autocast": "none",
        **{key: getattr(device, "value", device) or "none" for key, device in offloaded.items()},
    }


def _fsdp(model: Any) -> dict[str, Any]:
    groups = [
        group for module in model.modules() if isinstance(module, FSDPModule) for group in _parameter_groups(module)
    ]
    outermost = _parameter_groups(model)
    policies = {_name(group.mp_policy.reduce_dtype) for group in groups if group.mp_policy.reduce_dtype}
    return {
        "compute_dtype": "+".join(sorted({_name(group.mp_policy.param_dtype) for group in groups})),
        "reduce_dtype": "+".join(sorted(policies)),
        "sharded_over": max(group.mesh_info.shard_mesh_size for group in groups),
        # Of all but the outermost unit, which FSDP itself keeps gathered from the first forward pass on.
        "reshard_after_forward": any(group._reshard_after_forward for group in groups if group not in outermost),
        "offload_param": "cpu" if any(isinstance(each.offload_policy, CPUOffloadPolicy) for each in groups) else "none",
        "fsdp_units": len(groups),
    }


def reshard(model: Any) -> None:
    """Returns FSDP's units to their shards after forward passes that no backward pass followed.

    FSDP keeps the outermost one gathered. Before torch 2.13 it also takes a unit to be within its forward pass until
    each of its modules was called; the fused output head never calls `lm_head`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._modules_to_run_forward.clear()
            for part in (state, *_parameter_groups(module)):
                part._training_state = TrainingState.IDLE
            module.reshard()


def _parameter_groups(module: Any) -> list[Any]:
    """What FSDP gathers together for a module; before torch 2.13 that was one group at most."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [group for group in [state._fsdp_param_group] if group]


def _numel(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def _spread(parameters: Iterable[Any]) -> str:
    """Whether this process holds all of these tensors, by what lies in its memory."""
    local = total = 0
    for parameter in parameters:
        total += _numel(parameter)
        if hasattr(parameter, "ds_tensor"):
            local += parameter.ds_tensor.ds_numel
        else:
            local += parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
    return "sharded" if local < total else "whole"


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    return "+".join(sorted({_name(tensor.dtype) for tensor in tensors}))


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _autocast(accelerator: Any, model: Any) -> str:
    """The type in which the model's forward pass runs, if accelerate has wrapped it."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    return names.get(accelerator.mixed_precision, "none") if hasattr(model, "_original_forward") else "none"


def _checkpointing(model: Any) -> str:
    """Who recomputes activations: the `model`'s own layers, the `engine`'s wrappers around them, `graphs` of compiled
    layers, several of these, or none."""
    recomputed_by = {"graphs"} if compiled_layers.recomputes_elementwise(model) else set()
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            recomputed_by.add("engine")
        elif getattr(module, "gradient_checkpointing", False):
            recomputed_by.add("model")
    return "+".join(sorted(recomputed_by)) or "none"
