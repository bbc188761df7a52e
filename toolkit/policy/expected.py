"""What a run must look like once its engine is built, in the words in which `effective.read` describes a live one."""

from __future__ import annotations

from typing import Any

from toolkit.policy.engines import reshards_after_forward
from toolkit.policy.layout import BatchLayout
from toolkit.policy.precision import dtypes
from toolkit.recipe import Recipe

_KEEPS_MASTER_DTYPE = ("adamw", "adamw_torch", "adamw_torch_fused", "lion", "lion_32bit", "sgd", "adagrad")


def expected_state(recipe: Recipe, layout: BatchLayout, optimizer: str, attention: str) -> dict[str, Any]:
    """The state that the recipe asks for.

    Args:
        optimizer: Name of the optimizer's class, see `optimization.optimizer_class`.
        attention: Transformers' name of the attention implementation.

    Returns:
        The settings that must hold. Keys that `effective.read` reports beyond these are for the record only.
    """
    strategy, types = recipe.strategy, dtypes(recipe)
    several = layout.world_size > 1
    stage = strategy.zero_stage or (3 if strategy.name == "fsdp" else 0)

    def spread(from_stage: int) -> str:
        return "sharded" if several and stage >= from_stage else "whole"

    state: dict[str, Any] = {
        "engine": _engine(recipe, several),
        "world_size": layout.world_size,
        "micro_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "max_grad_norm": recipe.optimizer.max_grad_norm,
        "optimizer": optimizer,
        "attention": attention,
        "activation_checkpointing": "none" if recipe.activation_checkpointing.mode == "none" else "model",
        "parameters": spread(3),
        "gradients": spread(2),
        "optimizer_state": spread(1),
        "trained_dtype": types.local,
        "not_updated": 0,
        "autocast": types.autocast or "none",
        "master_dtype": types.master,
    }
    if strategy.zero_stage or strategy.name == "fsdp":
        state["reduce_dtype"] = types.reduce
    if strategy.name == "fsdp":
        state["compute_dtype"] = types.compute
        state["reshard_after_forward"] = reshards_after_forward(recipe)
    if strategy.zero_stage:
        state["zero_stage"] = strategy.zero_stage
        state |= {key: getattr(strategy, key) for key in ("offload_optimizer", "offload_param")}
    elif strategy.name == "fsdp":
        state["offload_param"] = strategy.offload_param
    if recipe.optimizer.name in _KEEPS_MASTER_DTYPE:
        state["moments_dtype"] = types.master
    return state


def _engine(recipe: Recipe, several: bool) -> str:
    if recipe.strategy.zero_stage:
        return "deepspeed"
    return {"fsdp": "fsdp2"}.get(recipe.strategy.name, "ddp" if several else "none")
