"""Keyword arguments of Transformers' TrainingArguments."""

from __future__ import annotations

from typing import Any

from toolkit.policy.engines import deepspeed_config, fsdp_config
from toolkit.policy.layout import BatchLayout, Length
from toolkit.recipe import Recipe
from toolkit.recipe.schema import ActivationCheckpointing

_OPTIMIZERS = {"adamw": "adamw_torch_fused", "lion": "lion_32bit"}


def training_arguments(recipe: Recipe, layout: BatchLayout, length: Length) -> dict[str, Any]:
    """Keyword arguments of Transformers' TrainingArguments that follow from the recipe alone.

    Evaluation, data order and progress are ours, so the Trainer's own are switched off here.
    """
    optimizer, schedule = recipe.optimizer, recipe.schedule
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    recomputes = checkpointing.mode != "none"
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
        "optim": _OPTIMIZERS.get(optimizer.name, optimizer.name),
        "lr_scheduler_type": schedule.name,
        "lr_scheduler_kwargs": dict(schedule.args),
        "warmup_steps": length.warmup_steps,
        # DeepSpeed has no other way to hold parameters in bf16.
        "bf16": recipe.precision == "bf16" or (recipe.precision == "pure_bf16" and strategy.zero_stage > 0),
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
        # Batches of a stream hold host integers, which accelerate's dispatcher cannot join.
        "accelerator_config": {"dispatch_batches": False},
        "disable_tqdm": True,
        "push_to_hub": False,
        "log_level": "error",
    }
    if strategy.zero_stage:
        arguments["deepspeed"] = deepspeed_config(recipe)
    elif strategy.name == "fsdp":
        arguments |= {"fsdp": True, "fsdp_config": fsdp_config(recipe)}
    return arguments


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
