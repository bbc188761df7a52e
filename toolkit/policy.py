"""The recipe translated for the engines: batch layout, dtypes, TrainingArguments, environment. Pure, without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import UserError
from toolkit.recipe import Recipe

MICRO_BATCH_TOKENS = 16_384
"""A micro-batch of this many tokens keeps a current GPU busy; more only costs memory."""

_OPTIMIZERS = {"adamw": "adamw_torch_fused", "lion": "lion_32bit"}


@dataclass(frozen=True)
class World:
    """The processes of a run, as the launcher describes them in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Reads RANK, LOCAL_RANK and WORLD_SIZE, which torchrun and accelerate set."""
        values = (int(environment.get(key, default)) for key, default in _WORLD_KEYS)
        return cls(*values)


_WORLD_KEYS = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launch(recipe: Recipe, world: World, environment: Mapping[str, str] = os.environ) -> None:
    """Compares what the launcher put into the environment with the recipe. The recipe owns the strategy.

    Raises:
        UserError: If they differ; names both sides.
    """
    name = recipe.strategy.name
    if name == "single" and world.world_size > 1:
        raise UserError(
            f"the recipe says strategy.name=single, the launcher started {world.world_size} processes",
            "set strategy.name=ddp, or launch one process",
        )
    for variable, engine in _ENGINES.items():
        if environment.get(variable, "false").lower() in ("true", "1"):
            raise UserError(
                f"the recipe says strategy.name={name}, the launcher says {engine} ({variable} is set)",
                "launch without an engine in `accelerate launch` or its default config; the recipe selects it",
            )
    compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() != "no":
        raise UserError(
            f"the recipe does not compile the model, the launcher says --dynamo_backend {compiler.lower()}",
            "launch with --dynamo_backend no, or remove it from accelerate's default config",
        )
    launched = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = {"fp32": "no", "pure_bf16": "no"}.get(recipe.precision, recipe.precision)
    # A bare `accelerate launch` says "no" for want of anything else.
    if launched not in ("no", wanted):
        same = f"set precision={launched}, or " if launched in ("bf16", "fp16") else ""
        raise UserError(
            f"the recipe says precision={recipe.precision}, the launcher says --mixed_precision {launched}",
            f"{same}launch without --mixed_precision",
        )


@dataclass(frozen=True)
class BatchLayout:
    """How one optimizer step is put together: sizes in sequences, `seq_len` in tokens."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    seq_len: int

    @property
    def tokens_per_step(self) -> int:
        """Upper bound of the tokens in a step; reached when every sequence is full."""
        return self.global_batch_size * self.seq_len


def batch_layout(recipe: Recipe, world_size: int) -> BatchLayout:
    """Divides the global batch over processes and accumulation steps.

    Raises:
        UserError: If a division does not come out; names the nearest sizes that do.
    """
    batch = recipe.batch
    tokens = batch.tokens_per_step
    total = batch.sequences_per_step
    unit = world_size * (batch.micro_batch_size or 1)
    if total % unit:
        parts = f"{world_size} process" + ("es" if world_size > 1 else "")
        parts += f" x batch.micro_batch_size {batch.micro_batch_size}" if batch.micro_batch_size else ""
        nearest = sorted({max(1, total // unit) * unit, (total // unit + 1) * unit})
        scale = batch.seq_len if tokens else 1
        key = "batch.tokens_per_step" if tokens else "batch.global_batch_size"
        change = f"set {key}=" + " or ".join(str(size * scale) for size in nearest)
        sizes = [size for size in range(1, total + 1) if total % (world_size * size) == 0]
        if batch.micro_batch_size and sizes:
            smaller = [size for size in sizes if size < batch.micro_batch_size][-1:]
            larger = [size for size in sizes if size > batch.micro_batch_size][:1]
            change += f", or batch.micro_batch_size={' or '.join(map(str, smaller + larger))}"
        raise UserError(f"a global batch of {total} sequences does not divide into {parts}", change)
    per_process = total // world_size
    fitting = max(1, MICRO_BATCH_TOKENS // batch.seq_len)
    micro_batch = batch.micro_batch_size or max(size for size in _divisors(per_process) if size <= fitting)
    return BatchLayout(total, micro_batch, per_process // micro_batch, world_size, batch.seq_len)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Dtypes:
    """Names of torch dtypes (`float32`, …): how weights are loaded, computed with and exported."""

    load: str
    compute: str
    adapter: str
    autocast: str | None
    export: str


def dtypes(recipe: Recipe) -> Dtypes:
    """The same masters on every engine: fp32 unless `pure_bf16`; adapters have fp32 masters over a 16-bit base."""
    compute = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "pure_bf16": "bfloat16"}[recipe.precision]
    pure = recipe.precision == "pure_bf16"
    named = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(recipe.model.dtype)
    masters = "bfloat16" if pure else "float32"
    load = named or (masters if recipe.method.name == "full" else compute)
    autocast = None if pure or recipe.precision == "fp32" else compute
    return Dtypes(load=load, compute=compute, adapter=masters, autocast=autocast, export=compute)


@dataclass(frozen=True)
class Length:
    """How long a run is, in optimizer steps."""

    total_steps: int
    steps_per_epoch: float | None
    warmup_steps: int
    save_steps: int | None


def run_length(recipe: Recipe, num_rows: int | None, layout: BatchLayout) -> Length:
    """Steps from epochs. Rows continue into the next epoch inside a batch, so no row is dropped and no batch is short.

    Args:
        num_rows: Training sequences (packed ones when packing); None for a stream.
    """
    schedule = recipe.schedule
    per_epoch = num_rows / layout.global_batch_size if num_rows else None
    total = schedule.max_steps or math.ceil((schedule.num_epochs or 1.0) * (per_epoch or 0))
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = math.ceil((schedule.warmup_ratio or 0.0) * total)
    save = recipe.checkpoint.save_steps
    if recipe.checkpoint.save_epochs and per_epoch:
        save = max(1, math.ceil(recipe.checkpoint.save_epochs * per_epoch))
    return Length(total, per_epoch, warmup, save)


def training_arguments(recipe: Recipe, layout: BatchLayout, length: Length) -> dict[str, Any]:
    """Keyword arguments of Transformers' TrainingArguments that follow from the recipe alone.

    Evaluation, data order and progress are ours, so the Trainer's own are switched off here.
    """
    optimizer, schedule = recipe.optimizer, recipe.schedule
    checkpointing = recipe.activation_checkpointing
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
        "bf16": recipe.precision == "bf16",
        "fp16": recipe.precision == "fp16",
        "activation_checkpointing": checkpointing.mode != "none",
        "activation_checkpointing_kwargs": _checkpointing_kwargs(recipe),
        "average_tokens_across_devices": True,
        "ddp_find_unused_parameters": False,
        "eval_strategy": "no",
        "save_strategy": "steps" if length.save_steps else "no",
        "save_steps": length.save_steps or 0,
        "save_total_limit": recipe.checkpoint.save_total_limit,
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
    return arguments


def _checkpointing_kwargs(recipe: Recipe) -> dict[str, Any] | None:
    checkpointing = recipe.activation_checkpointing
    if checkpointing.mode == "none":
        return None
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if checkpointing.mode == "selective":
        kwargs["selective"] = True
    elif checkpointing.every_n_layers > 1:
        kwargs["every_n_layers"] = checkpointing.every_n_layers
    if checkpointing.mode == "offload":
        kwargs["offload"] = True
    return kwargs


def environment() -> dict[str, str]:
    """Variables that libraries read at import; the runner sets those that the user has not set."""
    return {
        # The tokenizer's own threads fight with the processes that tokenise and with data loader workers.
        "TOKENIZERS_PARALLELISM": "false",
        # Grows segments in place: less fragmentation where sequence lengths vary.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # On a CPU every new sequence length adds compiled kernels for every layer; oneDNN's default of 1,024 let the
        # demo grow by a GiB.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }
