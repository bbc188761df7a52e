"""This process: its devices and threads, and the TrainingArguments that start its process group."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import Seq2SeqTrainingArguments
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig

from toolkit import optimization
from toolkit.errors import UserError
from toolkit.folder import RunFolder
from toolkit.policy import (
    BatchLayout,
    Length,
    World,
    fsdp_dtypes,
    fsdp_mesh,
    training_arguments,
)
from toolkit.recipe import Recipe

# malloc.h: from which size on blocks are mapped one by one, and how much free memory is kept.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def prepare_process() -> None:
    """Settings of libraries that must be made before they start working."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _keep_memory()
    if not sys.stderr.isatty():
        disable_progress_bar()


def _keep_memory() -> None:
    """Lets glibc keep what is freed.

    It hands large blocks back to the kernel after every operation, which then clears each page anew: 12 demo steps took
    31 s instead of 23.
    """
    with contextlib.suppress(AttributeError, OSError):  # Not every C library has it.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**26)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)


def check_devices(recipe: Recipe, world: World) -> None:
    """Refuses what this machine cannot run, before anything is loaded.

    Raises:
        UserError: Naming the setting to change, or what to install.
    """
    gpus = torch.cuda.device_count()
    if gpus > 1 and world.world_size == 1:
        raise UserError(
            f"this machine has {gpus} GPUs and one process was started",
            f"start all of them with `toolkit launch recipe=… --gpus {gpus}`, or make one visible with "
            "CUDA_VISIBLE_DEVICES=0",
        )
    if recipe.precision == "fp16" and not gpus and not (recipe.strategy.zero_stage and _deepspeed_takes_fp16()):
        raise UserError(
            "precision=fp16 needs a GPU: its loss scaling does not run on a CPU", "set precision=bf16 or fp32"
        )
    if recipe.precision == "bf16" and gpus and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{torch.cuda.get_device_name()} has no bf16", "set precision=fp16 or fp32")
    if recipe.activation_checkpointing.mode == "offload" and not gpus:
        raise UserError(
            "activation_checkpointing.mode=offload moves activations from a GPU to host memory; there is no GPU here",
            "set activation_checkpointing.mode=full",
        )
    optimization.check_available(recipe)
    for tracker in recipe.logging.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise UserError(
                f"logging.trackers: {tracker} is not installed",
                f"run `pip install {tracker}`, or remove it from the list",
            )


def _deepspeed_takes_fp16() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


def build_arguments(
    recipe: Recipe, layout: BatchLayout, length: Length, folder: RunFolder | None, world: World, swap: Path | None
) -> Any:
    """TrainingArguments. Building them starts the process group, and it must happen before the model is loaded.

    Args:
        swap: What stands in for `strategy.nvme_path`, see `nvme.swap_folder`.

    Raises:
        UserError: If accelerate does not see all the processes that were launched.
    """
    kwargs = training_arguments(recipe, layout, length)
    cuda, plain = torch.cuda.is_available(), recipe.strategy.name in ("single", "ddp")
    kwargs |= {
        "output_dir": str(folder.checkpoints) if folder else "unset",
        "dataloader_pin_memory": cuda,
        "use_cpu": not cuda and plain,
    }
    if cuda:
        kwargs["tf32"] = recipe.tf32
    if folder:
        kwargs["run_name"] = folder.path.name
        if "tensorboard" in recipe.logging.trackers:
            os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder.path / "tensorboard"))
    if swap:
        for part in kwargs["deepspeed"]["zero_optimization"].values():
            if isinstance(part, dict) and "nvme_path" in part:
                part["nvme_path"] = str(swap)
    if mesh := fsdp_mesh(recipe, world):
        kwargs["parallelism_config"] = ParallelismConfig(**mesh)
    no_engine = UserError(
        f"strategy.name={recipe.strategy.name}: accelerate offers its engines on GPUs only, and there is none here",
        "set strategy.name=ddp",
    )
    try:
        arguments = _kind(recipe)(**kwargs)
    except ValueError as error:
        if cuda or plain:
            raise
        raise no_engine from error
    if arguments.world_size != world.world_size:
        if not cuda and not plain:
            raise no_engine
        raise UserError(
            f"{world.world_size} processes were launched, and accelerate sees {arguments.world_size}",
            "start with `toolkit launch`, `accelerate launch` or torchrun, from a shell without their variables",
        )
    if recipe.strategy.name == "fsdp":
        arguments.fsdp_plugin_args |= _fsdp_plugin(recipe)
    return arguments


def _kind(recipe: Recipe) -> Any:
    """The class of TrainingArguments; what the data is made of is decided elsewhere."""
    if recipe.objective == "seq2seq":
        return Seq2SeqTrainingArguments
    return functools.partial(SFTConfig, max_length=None, packing=False, dataset_kwargs={"skip_prepare_dataset": True})


def _fsdp_plugin(recipe: Recipe) -> dict[str, Any]:
    """What accelerate's FSDP plugin takes and TrainingArguments do not pass on."""
    types = {key: getattr(torch, name) if name else None for key, name in fsdp_dtypes(recipe).items()}
    plugin: dict[str, Any] = {
        "mixed_precision_policy": MixedPrecisionPolicy(**types),  # type: ignore[arg-type]
    }
    if recipe.strategy.offload_param == "cpu":
        plugin["cpu_offload"] = CPUOffloadPolicy(pin_memory=recipe.strategy.pin_memory)
    return plugin
