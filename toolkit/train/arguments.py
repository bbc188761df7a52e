"""TrainingArguments: those of the recipe, and those that this machine and this run decide.

Building them starts the process group and prepares the engine, so they come before the model. What follows from the
recipe alone is in `distributed.engines`, where plans and tests can ask without torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from trl import SFTConfig

from toolkit.common import UserError, concealed, first_line
from toolkit.distributed.engines import dtypes, fsdp_mesh, training_arguments
from toolkit.distributed.layout import BatchLayout, Length, World
from toolkit.models.parallel.process_groups import limit_waiting
from toolkit.recipe import Loaded, Recipe
from toolkit.train.run_folder import RunFolder


class _Described:
    """Arguments that are described, as they are to trackers, without values of the environment."""

    def to_dict(self) -> dict[str, Any]:
        return concealed(super().to_dict())  # type: ignore[misc]


class _CausalArguments(_Described, SFTConfig):
    pass


class _EncoderDecoderArguments(_Described, Seq2SeqTrainingArguments):
    pass


class _HeadArguments(_Described, TrainingArguments):
    pass


def build_arguments(
    loaded: Loaded, layout: BatchLayout, length: Length, folder: RunFolder, world: World, swap: Path | None
) -> Any:
    """TrainingArguments. Building them starts the process group, and it must happen before the model is loaded.

    Args:
        swap: What stands in for `strategy.nvme_path`, see `nvme.swap_folder`.

    Raises:
        UserError: If accelerate does not see all the processes that were launched.
    """
    recipe = loaded.recipe
    kwargs = training_arguments(recipe, layout, length, loaded.taken_over)
    cuda, plain = torch.cuda.is_available(), recipe.strategy.name in ("single", "ddp")
    kwargs |= {
        "output_dir": str(folder.checkpoints),
        "run_name": folder.path.name,
        "dataloader_pin_memory": kwargs.get("dataloader_pin_memory", cuda),
        "use_cpu": not cuda and plain,
    }
    if cuda and kwargs["dataloader_pin_memory"]:
        kwargs["accelerator_config"] |= {"non_blocking": True}
    if "tensorboard" in recipe.logging.trackers:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder.path / "tensorboard"))
    if swap:
        for part in kwargs["deepspeed"]["zero_optimization"].values():
            if isinstance(part, dict) and "nvme_path" in part:
                part["nvme_path"] = str(swap)
    if mesh := fsdp_mesh(recipe, world):
        kwargs["parallelism_config"] = ParallelismConfig(**mesh)
    kind: Any = _HeadArguments if recipe.headed else _EncoderDecoderArguments
    if not (recipe.headed or recipe.objective == "seq2seq"):
        # What the data is made of is decided elsewhere.
        prepared = {"max_length": None, "packing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
        kind, kwargs = _CausalArguments, kwargs | prepared
    if "ddp_timeout" in kwargs:
        limit_waiting(kwargs["ddp_timeout"])
    try:
        arguments = kind(**kwargs)
    except (TypeError, ValueError) as error:
        if not recipe.extra.training_arguments:
            raise
        raise UserError(
            f"extra.training_arguments: Transformers does not take them: {first_line(error)}",
            f"change {', '.join(recipe.extra.training_arguments)}",
        ) from error
    if arguments.world_size != world.world_size:
        raise UserError(
            f"{world.world_size} processes were launched, and accelerate sees {arguments.world_size}",
            "start with `toolkit launch`, `accelerate launch` or torchrun, from a shell without their variables",
        )
    if recipe.strategy.name == "fsdp":
        arguments.fsdp_plugin_args |= _fsdp_plugin(recipe)
    return arguments


def _fsdp_plugin(recipe: Recipe) -> dict[str, Any]:
    """What accelerate's FSDP plugin takes and TrainingArguments do not pass on."""
    types = dtypes(recipe)
    # Accelerate's own policy reduces gradients and returns the loss in 16 bits.
    policy = MixedPrecisionPolicy(getattr(torch, types.compute), getattr(torch, types.reduce), output_dtype=None)
    plugin: dict[str, Any] = {"mixed_precision_policy": policy}
    if recipe.strategy.offload_param == "cpu":
        plugin["cpu_offload"] = CPUOffloadPolicy(pin_memory=recipe.strategy.pin_memory)
    return plugin
