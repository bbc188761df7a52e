"""What does not train on a CPU, asked by plans for one and by runs on one."""

from __future__ import annotations

from toolkit.common import UserError
from toolkit.recipe import Recipe


def check_cpu(recipe: Recipe, deepspeed_takes_fp16: bool = True) -> None:
    """Refuses what does not train on a CPU.

    Args:
        deepspeed_takes_fp16: Whether DeepSpeed computes in fp16 on this CPU; of another machine that is not known.

    Raises:
        UserError: Naming the setting to change.
    """
    if recipe.precision == "fp16" and not (recipe.strategy.zero_stage and deepspeed_takes_fp16):
        raise UserError(
            "precision=fp16 needs a GPU: its loss scaling does not run on a CPU", "set precision=bf16 or fp32"
        )
    if recipe.activation_checkpointing.mode == "offload":
        raise UserError(
            "activation_checkpointing.mode=offload moves activations from a GPU to host memory; there is no GPU here",
            "set activation_checkpointing.mode=full",
        )
    if recipe.optimizer.traits.gpu_only:
        raise UserError(f"optimizer.name={recipe.optimizer.name} needs a GPU", "set optimizer.name=adamw or adamw_8bit")
    if recipe.optimizer.args.get("capturable"):
        raise UserError("optimizer.args.capturable=true needs a GPU, whose graphs it is for", "remove capturable")
