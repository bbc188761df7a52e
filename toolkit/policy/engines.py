"""The strategy translated for its engine: the DeepSpeed dict, or the settings of FSDP2."""

from __future__ import annotations

from typing import Any

from toolkit.errors import UserError
from toolkit.policy.layout import World
from toolkit.policy.precision import dtypes
from toolkit.recipe import Recipe

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def deepspeed_config(recipe: Recipe) -> dict[str, Any]:
    """The dict DeepSpeed is given. "auto" stands where Transformers' Trainer fills in what TrainingArguments say.

    It names neither an optimizer nor a schedule: DeepSpeed's own would replace those of the recipe and decay norms.
    """
    reduce = _SHORT[dtypes(recipe).reduce]
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        # Without this key DeepSpeed clips at 1.0, whatever the Trainer was told.
        "gradient_clipping": "auto",
        **_precision(recipe),
        # By default gradients are summed in the 16-bit type they were computed in.
        "communication_data_type": reduce,
        "data_types": {"grad_accum_dtype": reduce},
        "zero_optimization": _zero(recipe),
        "zero_allow_untested_optimizer": True,
        # Otherwise every optimizer whose state is offloaded is replaced by an Adam with L2 decay.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


def _precision(recipe: Recipe) -> dict[str, Any]:
    if recipe.precision == "pure_bf16":
        # Masters, gradients and moments in bf16 too, which is what the recipe asks for.
        pure = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        return {"bf16": {"enabled": True, **pure}, "fp16": {"enabled": False}}
    # Loss scaling starts as torch's does, at 2**16.
    return {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}}


def _zero(recipe: Recipe) -> dict[str, Any]:
    strategy = recipe.strategy
    stage: dict[str, Any] = {
        "stage": strategy.zero_stage,
        "overlap_comm": strategy.overlap_comm,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": strategy.reduce_bucket_size,
    }
    if strategy.zero_stage < 3:
        stage |= {"allgather_partitions": True, "allgather_bucket_size": strategy.allgather_bucket_size}
    else:
        stage |= {
            "stage3_prefetch_bucket_size": strategy.prefetch_bucket_size,
            "stage3_param_persistence_threshold": strategy.param_persistence_threshold,
            "stage3_max_live_parameters": strategy.max_live_parameters,
            "stage3_max_reuse_distance": strategy.max_reuse_distance,
            # Otherwise no weights are written that anything but DeepSpeed can read.
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(strategy, key)
        if device != "none":
            stage[key] = {"device": device, "pin_memory": strategy.pin_memory}
        if device == "nvme":
            stage[key]["nvme_path"] = strategy.nvme_path
    return stage


def fsdp_config(recipe: Recipe) -> dict[str, Any]:
    """Transformers' `fsdp_config`. Every key is stated, because one left out is filled in from the environment."""
    strategy = recipe.strategy
    config: dict[str, Any] = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": reshards_after_forward(recipe),
        "cpu_offload": strategy.offload_param == "cpu",
        "state_dict_type": f"{strategy.state_dict_type.upper()}_STATE_DICT",
        "cpu_ram_efficient_loading": loads_on_first_process(recipe),
        # The model recomputes its layers itself, on every engine. FSDP2 gathers no parameter more often for it, while
        # its own wrappers rename modules, under which PEFT finds no adapters to save.
        "activation_checkpointing": False,
    }
    if strategy.wrap_classes:
        config["transformer_layer_cls_to_wrap"] = list(strategy.wrap_classes)
    return config


def fsdp_dtypes(recipe: Recipe) -> dict[str, str | None]:
    """FSDP's mixed precision policy: dtype names for `param_dtype`, `reduce_dtype` and `output_dtype`.

    Accelerate's own reduces gradients and returns the loss in 16 bits.
    """
    types = dtypes(recipe)
    return {"param_dtype": types.compute, "reduce_dtype": types.reduce, "output_dtype": None}


def fsdp_mesh(recipe: Recipe, world: World) -> dict[str, int] | None:
    """Sizes of accelerate's `ParallelismConfig` for `hybrid_shard`; None where one mesh spans all processes."""
    if recipe.strategy.name != "fsdp" or recipe.strategy.sharding != "hybrid_shard":
        return None
    if world.num_nodes < 2:
        raise UserError(
            "strategy.sharding=hybrid_shard replicates across nodes, and this launch has one",
            "set strategy.sharding=full_shard, or launch several nodes",
        )
    return {"dp_replicate_size": world.num_nodes, "dp_shard_size": world.local_world_size}


def reshards_after_forward(recipe: Recipe) -> bool:
    """Whether FSDP releases gathered parameters between the forward and the backward pass."""
    chosen = recipe.strategy.reshard_after_forward
    return recipe.strategy.sharding != "shard_grad_op" if chosen is None else chosen


def loads_on_first_process(recipe: Recipe) -> bool:
    """Quantized weights cannot travel through the meta device, so every process reads them."""
    strategy = recipe.strategy
    return strategy.name == "fsdp" and strategy.cpu_ram_efficient_loading and recipe.method.quantization == "none"
