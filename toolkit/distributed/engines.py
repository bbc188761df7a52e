"""The recipe in the engines' terms.

Masters, clipping and sums of gradients are the same on every engine, so every value that an engine would choose by
itself is stated. In this order: dtypes, DeepSpeed, FSDP2, TrainingArguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.common import UserError
from toolkit.distributed.layout import BatchLayout, Length, World
from toolkit.recipe import Recipe
from toolkit.recipe.libraries import flat
from toolkit.recipe.sections import ActivationCheckpointing

_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "pure_bf16": "bfloat16"}


@dataclass(frozen=True)
class Dtypes:
    """Names of torch dtypes (`float32`, …).

    Args:
        load: How weights are read into memory; for adapters, how the frozen base is stored.
        local: How trained parameters lie in the model between steps.
        compute: What matrix products are computed in.
        autocast: The dtype of `torch.autocast`, or None where parameters come to the computation in `compute`.
        reduce: What gradients are summed in, over micro-batches and processes.
        master: What the optimizer updates.
        export: How a fully trained model is published.
    """

    load: str
    local: str
    compute: str
    autocast: str | None
    reduce: str
    master: str
    export: str


def dtypes(recipe: Recipe) -> Dtypes:
    """Masters are fp32 unless the precision is pure, whatever the engine does by itself.

    Replicated and FSDP parameters are their own masters. DeepSpeed computes with 16-bit parameters and keeps fp32
    masters in its optimizer. Without an engine, gradients are summed in the dtype of the parameters they belong to.
    """
    compute = _NAMES[recipe.engine_precision]
    master = "bfloat16" if recipe.pure else "float32"
    zero = recipe.strategy.zero_stage > 0
    local = compute if zero else master
    load = _NAMES.get(recipe.model.dtype) or (local if recipe.method.name == "full" else compute)
    return Dtypes(
        load=load,
        local=local,
        compute=compute,
        # FSDP computes with gathered copies of this type; accelerate wraps no forward pass around it.
        autocast=None if zero or recipe.strategy.name == "fsdp" or compute == master else compute,
        reduce=_NAMES.get(recipe.strategy.reduce_dtype, master),
        master=master,
        export=compute,
    )


def teacher_dtype(teaches: Recipe) -> str:
    """The torch dtype in which a teacher computes: that of its weights, or of what quantized ones stand for.

    Args:
        teaches: See `teaching.of_teacher`.
    """
    types = dtypes(teaches)
    return types.load if teaches.method.quantization == "none" else types.compute


_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def deepspeed_config(recipe: Recipe, further: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The dict DeepSpeed is given. "auto" stands where Transformers' Trainer fills in what TrainingArguments say.

    It names neither an optimizer nor a schedule: DeepSpeed's own would replace those of the recipe and decay norms.

    Args:
        further: Settings that a recipe has no key for, by dotted key, see `launcher.Launch.taken_over`.

    Example:
        >>> recipe = load_checked("smollm2_135m_lora_demo", ["precision=bf16", "strategy=zero2"]).recipe
        >>> deepspeed_config(recipe)["zero_optimization"]["stage"]
        2
    """
    reduce = _SHORT[dtypes(recipe).reduce]
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        # Without this key DeepSpeed clips at 1.0, whatever the Trainer was told.
        "gradient_clipping": "auto",
        # Loss scaling starts as torch's does, at 2**16.
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        # By default gradients are summed in the 16-bit type they were computed in.
        "communication_data_type": reduce,
        "data_types": {"grad_accum_dtype": reduce},
        "zero_optimization": _zero(recipe),
        "zero_allow_untested_optimizer": True,
        # Otherwise every optimizer whose state is offloaded is replaced by an Adam with L2 decay.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if recipe.pure:
        # Masters, gradients and moments in bf16 too, which is what the recipe asks for.
        pure = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        config |= {"bf16": {"enabled": True, **pure}, "fp16": {"enabled": False}}
    for key, value in (flat(recipe.extra.deepspeed) | dict(further or {})).items():
        section = config
        *parents, name = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return config


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
    """Quantized weights cannot travel through the meta device, and of divided layers processes keep unlike parts: these
    every process reads."""
    strategy = recipe.strategy
    alike = recipe.method.quantization == "none" and recipe.parallel.tensor == 1
    return strategy.name == "fsdp" and strategy.cpu_ram_efficient_loading and alike


def loads_on_device(recipe: Recipe) -> bool:
    """Whether every process with a GPU reads the weights straight to it.

    Not where they are divided first, nor from GGUF files, which are taken apart on the host; what is quantized of them
    there goes to the GPU weight by weight.
    """
    name, quantized = recipe.strategy.name, recipe.method.quantization != "none"
    divided = name == "zero3" or (name == "fsdp" and not quantized) or recipe.parallel.divides
    return not divided and (quantized or not reads_gguf(recipe))


def reads_gguf(recipe: Recipe) -> bool:
    """Whether the weights lie in a GGUF file."""
    return recipe.model.gguf_file is not None or recipe.model.path.endswith(".gguf")


def training_arguments(
    recipe: Recipe, layout: BatchLayout, length: Length, further: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments of Transformers' TrainingArguments that follow from the recipe.

    Evaluation, data order and progress are ours, so the Trainer's own are switched off here.

    Args:
        further: Settings of DeepSpeed, see `deepspeed_config`.

    Example:
        >>> recipe = load_checked("smollm2_135m_lora_demo", ["micro_batch_size=2", "global_batch_size=8"]).recipe
        >>> layout = batch_layout(recipe, world_size=2)
        >>> training_arguments(recipe, layout, run_length(recipe, 1000, layout))["gradient_accumulation_steps"]
        2
    """
    optimizer, schedule, strategy = recipe.optimizer, recipe.schedule, recipe.strategy
    workers, checkpointing = recipe.data.decided_workers, recipe.activation_checkpointing
    recomputes = checkpointing.of_layers
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "max_steps": length.total_steps,
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": optimizer.max_grad_norm,
        "optim": optimizer.traits.transformers_name or optimizer.name,
        "lr_scheduler_type": schedule.name,
        "lr_scheduler_kwargs": dict(schedule.args),
        "warmup_steps": length.warmup_steps,
        # DeepSpeed has no other way to hold parameters in bf16.
        "bf16": recipe.engine_precision == "bf16" or (recipe.pure and strategy.zero_stage > 0),
        "fp16": recipe.precision == "fp16",
        "activation_checkpointing": recomputes,
        "activation_checkpointing_kwargs": checkpointing_kwargs(checkpointing) if recomputes else None,
        "average_tokens_across_devices": True,
        "ddp_find_unused_parameters": False,
        "eval_strategy": "no",
        "save_strategy": "steps" if length.save_steps else "no",
        "save_steps": length.save_steps or 0,
        "logging_strategy": "steps",
        "logging_steps": recipe.logging.every_steps,
        # A NaN loss must be seen, not averaged away.
        "logging_nan_inf_filter": False,
        "report_to": list(recipe.logging.trackers) or "none",
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "remove_unused_columns": False,
        "dataloader_num_workers": workers,
        # Batches of a stream hold host integers, which accelerate's dispatcher cannot join.
        "accelerator_config": {"dispatch_batches": False},
        "disable_tqdm": True,
        "push_to_hub": False,
        "log_level": "error",
    }
    if recipe.faults.hang_minutes:
        # The watchdog knows what a process waits for, and ends what hangs.
        arguments["ddp_timeout"] = 86_400
    if workers:
        # The loop asks for all micro-batches of a step at once.
        arguments["dataloader_prefetch_factor"] = max(2, math.ceil(layout.gradient_accumulation_steps / workers))
    if strategy.zero_stage:
        arguments["deepspeed"] = deepspeed_config(recipe, further)
    elif strategy.name == "fsdp":
        arguments |= {"fsdp": True, "fsdp_config": fsdp_config(recipe)}
        if strategy.sync_each_batch:
            arguments["accelerator_config"] |= {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return arguments | recipe.extra.training_arguments


def checkpointing_kwargs(checkpointing: ActivationCheckpointing) -> dict[str, Any]:
    """Keyword arguments of Transformers' activation checkpointing."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if checkpointing.mode == "selective":
        kwargs["selective"] = True
    elif checkpointing.every_n_layers > 1:
        kwargs["every_n_layers"] = checkpointing.every_n_layers
    if checkpointing.mode == "offload":
        kwargs["offload"] = True
    return kwargs
