"""The launcher's environment compared with the recipe. The recipe owns the strategy; a launcher only starts processes.

`accelerate launch` turns its flags, its `--config_file` and the user's default config into environment variables, and
Accelerate fills every setting that is left open from them. So all of them are compared here, each one that differs is
named with both sides, and `environment` removes those that agree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.common import UserError
from toolkit.distributed.engines import (
    deepspeed_config,
    fsdp_config,
    fsdp_mesh,
    loads_on_first_process,
    reshards_after_forward,
)
from toolkit.distributed.layout import BatchLayout, World, batch_layout
from toolkit.recipe import Recipe
from toolkit.recipe.sections import Strategy

NVME_PLACEHOLDER = "/local_nvme"
"""Stands in rendered files for the folder that only the recipe knows."""

# Only logged by DeepSpeed, so a file may say about it what it likes.
_NO_MATTER = ("steps_per_print",)


@dataclass(frozen=True)
class _Difference:
    """One setting on which launcher and recipe differ; `follow` is the override that makes the recipe agree."""

    recipe: str
    launcher: str
    variable: str
    follow: str = ""

    def __str__(self) -> str:
        return f"the recipe says {self.recipe}, the launcher says {self.launcher}"


def check_launch(recipe: Recipe, world: World, environment: Mapping[str, str] = os.environ) -> None:
    """Compares what the launcher put into the environment with the recipe.

    Raises:
        UserError: If they differ, naming both sides of every difference; or if these processes cannot take the recipe.
    """
    assert not recipe.undecided, recipe.undecided
    _check_processes(recipe, world, environment)
    layout = batch_layout(recipe, world.world_size)
    fsdp_mesh(recipe, world)
    differences = [
        *_compiler(environment),
        *_precision(recipe, environment),
        *_deepspeed(recipe, layout, environment),
        *_fsdp(recipe, environment),
        *_others(recipe, world, layout, environment),
    ]
    if not differences:
        return
    what = str(differences[0])
    if len(differences) > 1:
        what = f"recipe and launcher differ in {len(differences)} settings" + "".join(f"\n  {d}" for d in differences)
    raise UserError(what, _remedy(differences, environment))


def _remedy(differences: list[_Difference], environment: Mapping[str, str]) -> str:
    follow = dict.fromkeys(difference.follow for difference in differences)
    # Following the launcher in some settings only would be refused again.
    agree = f"set {' '.join(follow)}, or " if all(follow) else ""
    # Every launcher of accelerate sets this one.
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        names = " ".join(sorted({difference.variable for difference in differences}))
        return f"{agree}remove what another launch left behind: `unset {names}`"
    places = "the flags and --config_file of accelerate launch"
    base = environment.get("XDG_CACHE_HOME", "~/.cache")
    default = Path(environment.get("HF_HOME", f"{base}/huggingface")).expanduser() / "accelerate/default_config.yaml"
    others = [str(file) for file in (default, Path(".deepspeed_env"), Path.home() / ".deepspeed_env") if file.is_file()]
    return f"{agree}launch with `toolkit launch`, or leave it out of {', '.join([places, *others])}"


def _check_processes(recipe: Recipe, world: World, environment: Mapping[str, str]) -> None:
    if recipe.strategy.name == "single" and world.world_size > 1:
        raise UserError(
            f"the recipe says strategy.name=single, the launcher started {world.world_size} processes",
            "set strategy.name=ddp, or launch one process",
        )
    if environment.get("WORLD_SIZE", "1") != "1" and "MASTER_ADDR" not in environment:
        raise UserError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is set without MASTER_ADDR, the host where the processes meet",
            "start with toolkit launch, accelerate launch, torchrun or srun",
        )
    # Accelerate's launcher for a single process announces a meeting point although it starts nobody else.
    if "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise UserError(
            "accelerate launch was asked for several processes and started one",
            "add --multi_gpu, which starts all of them without GPUs too, or use `toolkit launch`; for one process say "
            "--num_processes 1, and `unset MASTER_ADDR` if it is left over",
        )


def _compiler(environment: Mapping[str, str]) -> Iterator[_Difference]:
    compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if compiler != "no":
        name = f"--dynamo_backend {compiler}"
        yield _Difference("--dynamo_backend no (it has no compilation)", name, "ACCELERATE_DYNAMO_BACKEND")


def _precision(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[_Difference]:
    launched = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = {"fp32": "no", "pure_bf16": "no"}.get(recipe.precision, recipe.precision)
    # A bare `accelerate launch` says "no" for want of anything else.
    if launched not in ("no", wanted):
        follow = f"precision={launched}" if launched in ("bf16", "fp16") else ""
        launcher = f"--mixed_precision {launched}"
        yield _Difference(f"precision={recipe.precision}", launcher, "ACCELERATE_MIXED_PRECISION", follow)


def _deepspeed(recipe: Recipe, layout: BatchLayout, environment: Mapping[str, str]) -> Iterator[_Difference]:
    strategy, used = recipe.strategy, _is_true(environment, "ACCELERATE_USE_DEEPSPEED")
    prefix = "ACCELERATE_DEEPSPEED_"
    if not strategy.zero_stage:
        if used:
            stage = environment.get(f"{prefix}ZERO_STAGE", "")
            yield _Difference(
                f"strategy.name={strategy.name}",
                f"DeepSpeed{f' with --zero_stage {stage}' if stage else ''}",
                "ACCELERATE_USE_DEEPSPEED",
                f"strategy.name=zero{stage}" if stage in ("1", "2", "3") else "",
            )
        return
    in_stage_3 = "true" if strategy.zero_stage == 3 else None
    for name, key, expected in (
        ("ZERO_STAGE", "strategy.name", strategy.zero_stage),
        ("OFFLOAD_OPTIMIZER_DEVICE", "strategy.offload_optimizer", strategy.offload_optimizer),
        ("OFFLOAD_PARAM_DEVICE", "strategy.offload_param", strategy.offload_param),
        ("OFFLOAD_OPTIMIZER_NVME_PATH", "strategy.nvme_path", strategy.nvme_path),
        ("OFFLOAD_PARAM_NVME_PATH", "strategy.nvme_path", strategy.nvme_path),
        # Sharded loading and gathered weights are part of stage 3 here; for the other stages both mean nothing.
        ("ZERO3_INIT", "zero3_init_flag", in_stage_3),
        ("ZERO3_SAVE_16BIT_MODEL", "zero3_save_16bit_model", in_stage_3),
    ):
        said = environment.get(prefix + name)
        if said is not None and expected is not None and not _same(said, expected):
            shown = strategy.name if key == "strategy.name" else expected
            follow = f"{key}={'zero' * (key == 'strategy.name')}{said}" if key.startswith("strategy.") else ""
            yield _Difference(f"{key}={shown}", f"--{_flag(name)} {said}", prefix + name, follow)
    layers = f"{prefix}MOE_LAYER_CLS_NAMES"
    if layers in environment:
        yield _Difference("nothing of it", f"--deepspeed_moe_layer_cls_names {environment[layers]}", layers)
    if file := environment.get(f"{prefix}CONFIG_FILE"):
        yield from _deepspeed_file(recipe, layout, file)


def _deepspeed_file(recipe: Recipe, layout: BatchLayout, file: str) -> Iterator[_Difference]:
    """A DeepSpeed JSON key by key; what it leaves out or to "auto" is the recipe's to say."""
    variable = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    try:
        said = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"deepspeed_config_file {file} cannot be read: {error}",
            "launch from the folder it is relative to, or launch without it: the recipe has all of its settings",
        ) from None
    means = _deepspeed_values(recipe, layout)
    flat = _flat(said)
    stage = flat.get("zero_optimization.stage")
    if stage is not None:
        # DeepSpeed's own defaults: a file that names a stage and no offloading means none.
        unsaid_offload = {f"zero_optimization.{key}.device": "none" for key in ("offload_optimizer", "offload_param")}
        flat = unsaid_offload | flat
    # One difference is enough to say that the file is of another strategy, without the settings it brings along.
    brought = _deepspeed_values(_with_stage(recipe, stage), layout) if stage in (1, 2, 3) else {}
    for key, value in flat.items():
        top = key.partition(".")[0]
        if top in ("optimizer", "scheduler"):
            section = {"optimizer": "optimizer.name", "scheduler": "schedule.name"}[top]
            if key == f"{top}.type":
                own = recipe.optimizer.name if top == "optimizer" else recipe.schedule.name
                yield _Difference(f"{section}={own}", f"DeepSpeed's own {top} {value} ({file})", variable)
            continue
        nothing = key not in means and value in (None, False, "none", 0)
        # What a file says about a 16-bit type that is not used matters as little.
        unused = top in ("fp16", "bf16") and key != f"{top}.enabled" and not means.get(f"{top}.enabled")
        unsaid = "auto" in (value, means.get(key))
        other = key not in means and key in brought and _same(value, brought[key])
        if unsaid or nothing or unused or other or key in _NO_MATTER:
            continue
        if any(_same(value, meant) for meant in _meanings(recipe, key, means)):
            continue
        own_key = _recipe_key(key)
        if own_key == "strategy.name":
            own, follow = recipe.strategy.name, f"strategy.name=zero{value}" if value in (1, 2, 3) else ""
        else:
            own = _text(means[key]) if key in means else "nothing"
            follow = f"{own_key}={_text(value)}" if own_key.startswith("strategy.") else ""
        yield _Difference(f"{own_key or key}={own}", f"{key}={_text(value)} ({file})", variable, follow)


def _with_stage(recipe: Recipe, stage: int) -> Recipe:
    return recipe.model_copy(update={"strategy": recipe.strategy.model_copy(update={"name": f"zero{stage}"})})


def _deepspeed_values(recipe: Recipe, layout: BatchLayout) -> dict[str, Any]:
    """DeepSpeed's settings by dotted key, with what "auto" comes to."""
    filled = {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": recipe.optimizer.max_grad_norm,
        "bf16.enabled": recipe.precision == "bf16",
        "fp16.enabled": recipe.precision == "fp16",
    }
    flat = _flat(deepspeed_config(recipe))
    return {key: filled.get(key, value) if value == "auto" else value for key, value in flat.items()}


def _meanings(recipe: Recipe, key: str, means: Mapping[str, Any]) -> list[Any]:
    """The values of a DeepSpeed key that say what the recipe says. A rendered file stands for every precision."""
    values = [means[key]] if key in means else []
    if key.endswith("nvme_path"):
        values.append(NVME_PLACEHOLDER)
    if key in ("communication_data_type", "data_types.grad_accum_dtype") and recipe.strategy.reduce_dtype == "auto":
        values.append("fp32")
    return values


def _recipe_key(key: str) -> str:
    """The recipe's key for one of DeepSpeed's; empty if it is none that a recipe states."""
    *above, name = key.split(".")
    named = {
        "stage": "strategy.name",
        "device": f"strategy.{above[-1]}" if above else "",
        "communication_data_type": "strategy.reduce_dtype",
        "grad_accum_dtype": "strategy.reduce_dtype",
        "gradient_clipping": "optimizer.max_grad_norm",
        "train_batch_size": "batch.global_batch_size",
        "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    }
    own = name.removeprefix("stage3_")
    return named.get(name) or (f"strategy.{own}" if own in Strategy.model_fields else "")


def _fsdp(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[_Difference]:
    strategy, used = recipe.strategy, _is_true(environment, "ACCELERATE_USE_FSDP")
    if strategy.name != "fsdp":
        if used:
            launcher = f"FSDP{environment.get('FSDP_VERSION', '')}"
            yield _Difference(f"strategy.name={strategy.name}", launcher, "ACCELERATE_USE_FSDP", "strategy.name=fsdp")
        return
    config = fsdp_config(recipe)
    checkpointing = recipe.activation_checkpointing
    recomputes = checkpointing.mode != "none"
    classes = ",".join(strategy.wrap_classes)
    # Name, the values that agree, the recipe's side, and the override that follows the launcher.
    rows: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
        ("VERSION", ("2",), "FSDP2 (--fsdp_version 2)", ""),
        ("RESHARD_AFTER_FORWARD", (reshards_after_forward(recipe),), "", "strategy.reshard_after_forward"),
        # Accelerate ignores it with version 2, and says FULL_SHARD where the user says nothing.
        ("SHARDING_STRATEGY", ("FULL_SHARD", "1", strategy.sharding), f"strategy.sharding={strategy.sharding}", ""),
        ("OFFLOAD_PARAMS", (config["cpu_offload"],), f"strategy.offload_param={strategy.offload_param}", ""),
        ("AUTO_WRAP_POLICY", (config["auto_wrap_policy"],), "wrapping by class of layer", ""),
        ("TRANSFORMER_CLS_TO_WRAP", (classes,), f"strategy.wrap_classes=[{classes}]", ""),
        ("STATE_DICT_TYPE", (config["state_dict_type"],), f"strategy.state_dict_type={strategy.state_dict_type}", ""),
        # Quantized weights are the exception that no launcher knows of.
        (
            "CPU_RAM_EFFICIENT_LOADING",
            (strategy.cpu_ram_efficient_loading, loads_on_first_process(recipe)),
            "",
            "strategy.cpu_ram_efficient_loading",
        ),
        # Off is what accelerate says where the user says nothing.
        ("ACTIVATION_CHECKPOINTING", (recomputes, False), f"activation_checkpointing.mode={checkpointing.mode}", ""),
        (
            "ACTIVATION_CHECKPOINTING_OFFLOAD",
            (checkpointing.mode == "offload", False),
            f"activation_checkpointing.mode={checkpointing.mode}",
            "",
        ),
        ("IGNORED_MODULES", ("none",), "nothing of it", ""),
    )
    for name, agreeing, own, key in rows:
        said = environment.get(f"FSDP_{name}")
        if said is None or any(_same(said, value) for value in agreeing):
            continue
        unsaid = " (accelerate's default)" if (name, said) in _FSDP_DEFAULTS else ""
        launcher = f"--{_flag(f'FSDP_{name}')} {said}{unsaid}"
        # With any other sharding than the hybrid one, resharding is a part of what the sharding says.
        by_sharding = name == "RESHARD_AFTER_FORWARD" and strategy.sharding != "hybrid_shard"
        follow = f"{key}={said}" if key and not by_sharding else _fsdp_follow(name, said)
        yield _Difference(own or f"{key}={_text(agreeing[0])}", launcher, f"FSDP_{name}", follow)


_FSDP_DEFAULTS = {("VERSION", "1"), ("RESHARD_AFTER_FORWARD", "true"), ("OFFLOAD_PARAMS", "false")}


def _fsdp_follow(name: str, said: str) -> str:
    """The override that makes the recipe agree with an FSDP setting of the launcher."""
    value = said.lower()
    if name == "RESHARD_AFTER_FORWARD":
        return f"strategy.sharding={'full_shard' if value == 'true' else 'shard_grad_op'}"
    if name == "OFFLOAD_PARAMS":
        return f"strategy.offload_param={'cpu' if value == 'true' else 'none'}"
    if name == "SHARDING_STRATEGY" and value in ("full_shard", "shard_grad_op", "hybrid_shard"):
        return f"strategy.sharding={value}"
    if name == "STATE_DICT_TYPE" and value in ("sharded_state_dict", "full_state_dict"):
        return f"strategy.state_dict_type={value.partition('_')[0]}"
    if name == "TRANSFORMER_CLS_TO_WRAP":
        return f"strategy.wrap_classes=[{said}]"
    if name.startswith("ACTIVATION_CHECKPOINTING"):
        return f"activation_checkpointing.mode={'offload' if name.endswith('OFFLOAD') else 'full'}"
    return ""


def _others(recipe: Recipe, world: World, layout: BatchLayout, environment: Mapping[str, str]) -> Iterator[_Difference]:
    if _is_true(environment, "ACCELERATE_USE_MEGATRON_LM"):
        yield _Difference(f"strategy.name={recipe.strategy.name}", "Megatron-LM", "ACCELERATE_USE_MEGATRON_LM")
    if _is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        mesh = fsdp_mesh(recipe, world) or {"dp_replicate_size": 1, "dp_shard_size": world.world_size}
        for size in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            variable, expected = f"PARALLELISM_CONFIG_{size.upper()}", mesh.get(size, 1)
            said = environment.get(variable, "1")
            if not _same(said, expected):
                yield _Difference(f"{size}={expected}", f"--parallelism_config_{size} {said}", variable)
    for flag, own, value in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps", layout.gradient_accumulation_steps),
        ("gradient_clipping", "optimizer.max_grad_norm", recipe.optimizer.max_grad_norm),
    ):
        variable = f"ACCELERATE_{flag.upper()}"
        said = environment.get(variable, "auto")
        if said not in ("auto", "none") and not _same(said, value):
            follow = f"{own}={said}" if "." in own else ""
            yield _Difference(f"{own}={value}", f"--{flag} {said}", variable, follow)


def _flag(variable: str) -> str:
    """The option of `accelerate launch` behind a variable."""
    odd = {
        "ZERO3_INIT": "zero3_init_flag",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
    }
    return odd.get(variable, variable.lower())


def _is_true(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "false").lower() in ("true", "1", "yes")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _same(said: Any, meant: Any) -> bool:
    """Whether two values, as text or as they are, mean the same: `True` and `true`, `1e8` and `100000000`."""
    return _plain(said) == _plain(meant)


def _plain(value: Any) -> Any:
    text = str(value).strip().lower()
    try:
        return float(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
