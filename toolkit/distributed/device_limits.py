"""What cannot be trained on a kind of device; asked by plans for one and by runs on one.

Nothing here asks torch: a plan's device need not be here.
"""

from __future__ import annotations

from operator import attrgetter

from toolkit.common import UserError
from toolkit.recipe import Recipe
from toolkit.recipe.precisions import FP8_SCALING

_VOLTA, _AMPERE, _ADA = 7.0, 8.0, 8.9


def has_tf32(kind: str, capability: str | None) -> bool:
    """Whether torch computes fp32 products in TF32 on request. Of an unknown capability it is assumed.

    Args:
        kind: `cuda`, `rocm` or `cpu`.
        capability: CUDA's compute capability, such as `9.0`. ROCm reports numbers too, of AMD's generations.
    """
    return kind == "cuda" and float(capability or _AMPERE) >= _AMPERE


def has_bf16(kind: str, capability: str | None) -> bool:
    """Whether a GPU has units for bf16, see `has_tf32`; older ones emulate it, slower than fp32."""
    return kind == "rocm" or has_tf32(kind, capability)


def has_fp8(kind: str, capability: str | None) -> bool:
    """Whether a GPU multiplies in fp8, see `has_tf32`."""
    return kind == "cuda" and float(capability or _ADA) >= _ADA


def has_triton(kind: str, capability: str | None) -> bool:
    """Whether Triton, with which torch compiles layers, makes kernels for a GPU, see `has_tf32`."""
    return kind != "cuda" or float(capability or _VOLTA) >= _VOLTA


def without_bf16(recipe: Recipe) -> dict[str, str]:
    """What a recipe for bf16 must say instead on GPUs without it: scaled losses, fp32 masters, and nothing in bf16."""
    keys = ("model.dtype", "strategy.reduce_dtype")
    return {"precision": "fp16"} | {key: "auto" for key in keys if attrgetter(key)(recipe) == "bf16"}


def _instead_of_bf16(recipe: Recipe) -> str:
    return " and ".join(f"set {key}={value}" for key, value in without_bf16(recipe).items())


def check_device(
    recipe: Recipe, kind: str, capability: str | None, name: str, deepspeed_takes_fp16: bool = True
) -> None:
    """Refuses what does not train on a kind of device.

    Args:
        kind: See `has_tf32`, and so `capability`.
        name: Of the device, for people.
        deepspeed_takes_fp16: See `check_cpu`.

    Raises:
        UserError: Naming the setting to change.
    """
    if kind == "cpu":
        check_cpu(recipe, deepspeed_takes_fp16)
    elif recipe.precision in FP8_SCALING and not has_fp8(kind, capability):
        raise UserError(
            f"precision={recipe.precision}: {name} has no units for fp8, which NVIDIA's GPUs have from compute "
            "capability 8.9 on (L4, RTX 40, H100); AMD's were not tried",
            f"set precision={recipe.in_bf16}" if has_bf16(kind, capability) else _instead_of_bf16(recipe),
        )
    elif "bf16" in recipe.engine_precision and not has_bf16(kind, capability):
        raise UserError(
            f"precision={recipe.precision}: {name} has no bf16, which NVIDIA's GPUs have from Ampere on",
            _instead_of_bf16(recipe),
        )
    if recipe.tf32 is True and not has_tf32(kind, capability):
        raise UserError(f"tf32=true: {name} has no TF32, which NVIDIA's GPUs have from Ampere on", "remove tf32")
    if recipe.activation_checkpointing.mode == "elementwise" and not has_triton(kind, capability):
        raise UserError(
            "activation_checkpointing.mode=elementwise is done by compiled layers, which torch makes for NVIDIA's GPUs "
            f"from compute capability 7.0 on, and not for {name}",
            "set activation_checkpointing.mode=full",
        )


def check_cpu(recipe: Recipe, deepspeed_takes_fp16: bool = True) -> None:
    """Refuses what does not train on a CPU.

    Args:
        deepspeed_takes_fp16: Whether DeepSpeed computes in fp16 on this CPU; of another machine that is not known.

    Raises:
        UserError: Naming the setting to change.
    """
    # Left to the plan, it is no engine on a CPU.
    zero = recipe.strategy.name != "auto" and recipe.strategy.zero_stage
    if recipe.precision == "fp16" and not (zero and deepspeed_takes_fp16):
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


def check_engine(recipe: Recipe, kind: str, processes: int) -> None:
    """Refuses engines that accelerate does not offer on CPUs: FSDP, and DeepSpeed for several processes.

    Raises:
        UserError: Naming the setting to change.
    """
    strategy = recipe.strategy
    if kind == "cpu" and (strategy.name == "fsdp" or (strategy.zero_stage and processes > 1)):
        raise UserError(
            f"strategy.name={strategy.name}: accelerate offers its engines on GPUs only", "set strategy=ddp"
        )
