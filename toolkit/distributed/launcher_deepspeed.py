"""A user's own DeepSpeed JSON compared with the recipe, key by key.

Keys that decide what is trained are compared with the recipe's. Keys that the recipe has no counterpart for, and that
change speed, memory, logging or the scaling of fp16 losses alone, are taken over. Of all others, which also change none
of the results, the recipe's values stand. What a file leaves out or to "auto" is the recipe's to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from toolkit.common import UserError
from toolkit.distributed.engines import deepspeed_config
from toolkit.distributed.launcher_flags import STAGES, Difference, Row, same, text_of
from toolkit.distributed.layout import BatchLayout
from toolkit.recipe import Recipe
from toolkit.recipe.libraries import flat, uncounted
from toolkit.recipe.precisions import PURE

NVME_PLACEHOLDER = "/local_nvme"
"""Stands in rendered files for the folder that only the recipe knows."""

_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
# Values that say nothing, and those that switch off what a recipe does not use either.
_UNSAID = (None, "auto", NVME_PLACEHOLDER)
_OFF: tuple[Any, ...] = (False, 0, -1, "none", "", [])

_TAKEN_OVER_SECTIONS = ("aio", "comms_logger", "flops_profiler")
# Sections and keys of which a recipe has nothing, and which would train something else.
_OTHER = (
    *("amp", "fp8", "torch_autocast", "compile", "data_efficiency", "curriculum_learning", "progressive_layer_drop"),
    *("eigenvalue", "quantize_training", "compression_training", "weight_quantization", "sparse_attention"),
    *("elasticity", "autotuning", "hybrid_engine", "pipeline", "tensor_parallel", "optimizer", "scheduler"),
    *("fp16.fp16_master_weights_and_grads", "data_types.param_dtype", "zero_optimization.zero_quantized_*"),
    *("zero_optimization.mics_shard_size", "zero_optimization.zenflow.*", "zero_optimization.cpu_offload*"),
    "zero_optimization.offload_optimizer.super_offload",
)

# DeepSpeed's names of optimizers and schedules, to those of a recipe that train the same.
_OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adam"), ("adamw", "adamw_torch", "adamw_torch_fused")),
    "lion": ("lion", "lion_32bit"),
    "sgd": ("sgd",),
    "adagrad": ("adagrad",),
}
_SCHEDULES = {"warmuplr": ("constant_with_warmup",), "warmupdecaylr": ("linear",), "warmupcosinelr": ("cosine",)}
_WARMUP_TYPE, _UNSAID_WARMUP = "scheduler.params.warmup_type", "log (DeepSpeed's default)"


def compare(recipe: Recipe, layout: BatchLayout, file: str) -> tuple[list[Difference], dict[str, Any]]:
    """Where a file differs from the recipe, and what it adds to the recipe, by dotted key.

    Raises:
        UserError: If the file cannot be read.
    """
    stated, own = _stated(_read(file)), flat(deepspeed_config(recipe))
    rows, extra = _rows(recipe, layout, stated), flat(recipe.extra.deepspeed)
    differences: list[Difference] = []
    taken_over: dict[str, Any] = {}
    for key, value in stated.items():
        section, said = key.partition(".")[0], f"{key}={text_of(value)}"
        if key in rows:
            differences += rows[key].differs(value, said, _VARIABLE, file)
        elif key in extra:
            differences += [] if same(value, extra[key]) else [Difference(said, "", _VARIABLE)]
        elif section in _TAKEN_OVER_SECTIONS:
            taken_over[key] = value
        elif same(value, own.get(key)) or _is_unused(recipe, key, own) or (key not in own and value in _OFF):
            continue
        elif uncounted("deepspeed", key) is not None:
            taken_over[key] = value
        elif section in _OTHER or _matches(key, _OTHER):
            differences.append(Difference(said, "nothing of it", _VARIABLE, file=file))
        else:
            differences.append(Difference(said, "", _VARIABLE))
    return differences, taken_over


def _read(file: str) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"deepspeed_config_file {file} cannot be read: {error}",
            "launch from the folder it is relative to, or launch without it: the recipe has all of its settings",
        ) from None


def _stated(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says, by dotted key, without what is left open and sections that are switched off."""
    stated = flat(content)
    switches = [key for key, value in stated.items() if key.endswith(".enabled") and value in (False, "auto")]
    off = tuple(key.removesuffix("enabled") for key in switches if not key.startswith(("fp16.", "bf16.")))
    stated = {key: value for key, value in stated.items() if value not in _UNSAID and not key.startswith(off)}
    # DeepSpeed's own progress lines do not appear.
    stated.pop("steps_per_print", None)
    if "zero_optimization.stage" in stated:
        # DeepSpeed's own defaults: a file that names a stage and no offloading means none.
        for part in ("offload_optimizer", "offload_param"):
            stated.setdefault(f"zero_optimization.{part}.device", "none")
    if str(stated.get("scheduler.type")).startswith("Warmup"):
        stated.setdefault(_WARMUP_TYPE, _UNSAID_WARMUP)
    return stated


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(key, pattern) for pattern in patterns)


def _is_unused(recipe: Recipe, key: str, own: Mapping[str, Any]) -> bool:
    """Whether a key means nothing here: of a dtype, a stage or a place for offloading that the recipe does not use."""
    section, _, name = key.rpartition(".")
    if section in ("fp16", "bf16"):
        return section not in recipe.engine_precision
    if section.startswith("zero_optimization.offload_"):
        return f"{section}.device" not in own
    return name.startswith("allgather_" if recipe.strategy.zero_stage == 3 else "stage3_")


def _rows(recipe: Recipe, layout: BatchLayout, stated: Mapping[str, Any]) -> dict[str, Row]:
    """The keys that decide what is trained."""
    strategy, steps = recipe.strategy, layout.gradient_accumulation_steps
    reduce = deepspeed_config(recipe)["communication_data_type"]
    # A rendered file stands for every precision.
    reduces = Row.of("strategy.reduce_dtype", reduce, *["fp32"] * (strategy.reduce_dtype == "auto"))
    rows = {
        "train_batch_size": Row.of("batch.global_batch_size", layout.global_batch_size),
        "train_micro_batch_size_per_gpu": Row.of("batch.micro_batch_size", layout.micro_batch_size),
        "gradient_accumulation_steps": Row((steps,), f"gradient_accumulation_steps={steps}"),
        "gradient_clipping": Row.of("optimizer.max_grad_norm", recipe.optimizer.max_grad_norm),
        "gradient_allreduce_op": Row(("mean",), "gradient_allreduce_op=mean"),
        "sequence_parallel_size": Row((1,), "sequence_parallel_size=1"),
        "communication_data_type": reduces,
        "data_types.grad_accum_dtype": reduces,
        "bf16.enabled": _precision_row(recipe, "bf16", "pure_bf16"),
        "fp16.enabled": _precision_row(recipe, "fp16"),
        "zero_optimization.stage": Row((strategy.zero_stage,), f"strategy.name={strategy.name}", STAGES),
        "zero_optimization.offload_optimizer.device": Row.of("strategy.offload_optimizer", strategy.offload_optimizer),
        "zero_optimization.offload_param.device": Row.of("strategy.offload_param", strategy.offload_param),
        # Left out, it is true as well.
        "zero_force_ds_cpu_optimizer": Row((False,)),
    }
    if "bf16" in recipe.engine_precision:
        follow = {"true": f"precision={PURE.get(recipe.precision, 'pure_bf16')}"}
        pure = Row((recipe.pure,), f"precision={recipe.precision}", follow)
        rows |= {"bf16.bf16_master_weights_and_grads": pure, "bf16.bf16_optimizer_states": pure}
    if "train_batch_size" in stated:
        # Divided otherwise, the same batch trains the same.
        rows["train_micro_batch_size_per_gpu"] = Row((layout.micro_batch_size,))
        rows["gradient_accumulation_steps"] = Row((steps,))
    return rows | _optimizer_rows(recipe, stated)


def _optimizer_rows(recipe: Recipe, stated: Mapping[str, Any]) -> dict[str, Row]:
    """DeepSpeed's own optimizer is never used, for it would decay norms and biases too; nor is its scheduler."""
    optimizer, schedule = recipe.optimizer, recipe.schedule
    betas = [optimizer.beta1, optimizer.beta2]
    learning_rate, from_zero = Row.of("optimizer.learning_rate", optimizer.learning_rate), Row((0,), "a warm-up from 0")
    theirs = stated.get("optimizer.params.betas")
    follow = "optimizer.beta1={} optimizer.beta2={}".format(*theirs) if isinstance(theirs, list) else ""
    share = f"{schedule.warmup_ratio} of all steps" if schedule.warmup_ratio else 0
    return {
        "optimizer.type": _type_row("optimizer.name", optimizer.name, _OPTIMIZERS),
        "optimizer.params.lr": learning_rate,
        "optimizer.params.betas": Row(
            (betas,), f"optimizer.beta1={betas[0]} and optimizer.beta2={betas[1]}", {text_of(theirs): follow}
        ),
        "optimizer.params.eps": Row.of("optimizer.eps", optimizer.eps),
        "optimizer.params.weight_decay": Row.of("optimizer.weight_decay", optimizer.weight_decay),
        "optimizer.params.momentum": Row.of("optimizer.momentum", optimizer.stated_momentum),
        "optimizer.params.adam_w_mode": Row((True,), "decoupled weight decay"),
        "optimizer.params.torch_adam": Row((True, False)),
        "scheduler.type": _type_row("schedule.name", schedule.name, _SCHEDULES),
        "scheduler.params.warmup_max_lr": learning_rate,
        "scheduler.params.warmup_min_lr": from_zero,
        "scheduler.params.warmup_min_ratio": from_zero,
        "scheduler.params.warmup_num_steps": Row.of("schedule.warmup_steps", schedule.warmup_steps or share),
        _WARMUP_TYPE: Row(("linear",), "a linear warm-up" * (stated.get(_WARMUP_TYPE) != _UNSAID_WARMUP)),
        "scheduler.params.total_num_steps": Row.of("schedule.max_steps", schedule.max_steps),
        # DeepSpeed's own default ends at a ten-thousandth.
        "scheduler.params.cos_min_ratio": Row((0, 1e-4), "a decay to 0"),
    }


def _type_row(key: str, own: str, names: Mapping[str, tuple[str, ...]]) -> Row:
    agrees = tuple(name for name, same_as in names.items() if own in same_as)
    return Row(agrees, f"{key}={own}", {name: f"{key}={same_as[0]}" for name, same_as in names.items()})


def _precision_row(recipe: Recipe, *names: str) -> Row:
    follow = {"true": f"precision={names[0]}"}
    return Row((recipe.engine_precision in names,), f"precision={recipe.precision}", follow)
