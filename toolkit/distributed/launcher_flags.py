"""The flags of `accelerate launch`, as the variables it exports, compared with the recipe.

A table: a row says which values of a variable agree with the recipe, and whether any other would train something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.distributed.engines import fsdp_config, fsdp_mesh, loads_on_first_process, reshards_after_forward
from toolkit.distributed.layout import BatchLayout, World
from toolkit.recipe import Recipe


@dataclass(frozen=True)
class Difference:
    """One setting on which launcher and recipe differ.

    Args:
        launcher: The launcher's side as its user wrote it, such as `--zero_stage 2`.
        recipe: The recipe's side, such as `strategy.name=zero3`; empty where the difference trains the same.
        variable: The environment variable that says so.
        file: The file that it names, if it is one of settings.
        follow: The override that makes the recipe agree; empty if there is none.
    """

    launcher: str
    recipe: str
    variable: str
    follow: str = ""
    file: str = ""

    def __str__(self) -> str:
        file = f" ({self.file})" if self.file else ""
        return f"the recipe says {self.recipe}, the launcher says {self.launcher}{file}"


@dataclass(frozen=True)
class Row:
    """What the recipe says about one setting of a launcher.

    Args:
        agrees: The values that say the same.
        recipe: The recipe's side; empty where any other value trains the same.
        follow: The override that follows the launcher: a template for its value, or one for each value.
    """

    agrees: tuple[Any, ...]
    recipe: str = ""
    follow: str | Mapping[str, str] = ""

    @classmethod
    def of(cls, key: str, *agrees: Any) -> Row:
        """The setting that is a key of the recipe; the first of the values that agree is the recipe's."""
        return cls(agrees, f"{key}={text_of(agrees[0])}", f"{key}={{}}")

    def differs(self, value: Any, launcher: str, variable: str, file: str = "") -> Iterator[Difference]:
        """The difference, if the launcher's value is one."""
        if not any(same(value, agreeing) for agreeing in self.agrees):
            text = text_of(value)
            follow = self.follow.format(text) if isinstance(self.follow, str) else self.follow.get(text.lower(), "")
            yield Difference(launcher, self.recipe, variable, follow, file)


def engine_differences(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Difference]:
    """The engine itself, where the launcher names another one than the recipe."""
    strategy, own = recipe.strategy, f"strategy.name={recipe.strategy.name}"
    if _is_true(environment, "ACCELERATE_USE_DEEPSPEED") and not strategy.zero_stage:
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
        launcher = f"DeepSpeed{f' with --zero_stage {stage}' if stage else ''}"
        yield Difference(launcher, own, "ACCELERATE_USE_DEEPSPEED", STAGES.get(stage, ""))
    if _is_true(environment, "ACCELERATE_USE_FSDP") and strategy.name != "fsdp":
        launcher = f"FSDP{environment.get('FSDP_VERSION', '')}"
        yield Difference(launcher, own, "ACCELERATE_USE_FSDP", "strategy.name=fsdp")
    if _is_true(environment, "ACCELERATE_USE_MEGATRON_LM"):
        yield Difference("Megatron-LM", own, "ACCELERATE_USE_MEGATRON_LM")


def variable_differences(
    recipe: Recipe, world: World, layout: BatchLayout, environment: Mapping[str, str]
) -> Iterator[Difference]:
    """The variables of `accelerate launch` that differ from the recipe."""
    rows = {}
    if recipe.strategy.zero_stage:
        rows = _deepspeed_rows(recipe)
    elif recipe.strategy.name == "fsdp":
        rows = _fsdp_rows(recipe)
    if _is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        rows |= _mesh_rows(recipe, world)
    for variable, row in (rows | _common_rows(recipe, layout)).items():
        if (value := environment.get(variable)) is not None:
            flag = variable.removeprefix("ACCELERATE_").removeprefix("DEEPSPEED_").lower()
            default = " (accelerate's default)" if (variable, value) in _FSDP_DEFAULTS else ""
            value = value.lower() if flag == "dynamo_backend" else value
            yield from row.differs(value, f"--{_FLAGS.get(flag, flag)} {value}{default}", variable)


STAGES = {str(stage): f"strategy.name=zero{stage}" for stage in (1, 2, 3)}
# Options of `accelerate launch` that are not named like their variables.
_FLAGS = {
    "zero3_init": "zero3_init_flag",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}
_FSDP_DEFAULTS = (("FSDP_VERSION", "1"), ("FSDP_RESHARD_AFTER_FORWARD", "true"), ("FSDP_OFFLOAD_PARAMS", "false"))


def _common_rows(recipe: Recipe, layout: BatchLayout) -> dict[str, Row]:
    steps, norm = layout.gradient_accumulation_steps, recipe.optimizer.max_grad_norm
    precisions = {name: f"precision={name}" for name in ("bf16", "fp16")}
    return {
        "ACCELERATE_DYNAMO_BACKEND": Row(("no",), f"compile={recipe.compile} (of the layers, by itself)"),
        # A bare `accelerate launch` says "no" for want of anything else.
        "ACCELERATE_MIXED_PRECISION": Row(("no", recipe.engine_precision), f"precision={recipe.precision}", precisions),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Row(("auto", "none", steps), f"gradient_accumulation_steps={steps}"),
        "ACCELERATE_GRADIENT_CLIPPING": Row.of("optimizer.max_grad_norm", norm, "auto", "none"),
    }


MESH = {"tp_size": "tensor", "cp_size": "context", "sp_size": "sequence"}
"""What accelerate's `ParallelismConfig` calls a way to divide, to the recipe's key in `parallel`."""


def _mesh_rows(recipe: Recipe, world: World) -> dict[str, Row]:
    parallel = recipe.parallel
    groups = world.world_size // parallel.together
    mesh = fsdp_mesh(recipe, world) or {"dp_replicate_size": 1, "dp_shard_size": groups}
    # Accelerate's default of 1 says nothing of how many processes there are.
    rows = {size: Row((1, number), f"{size}={number}") for size, number in mesh.items()}
    rows |= {size: Row.of(f"parallel.{way}", getattr(parallel, way)) for size, way in MESH.items()}
    return {f"PARALLELISM_CONFIG_{size.upper()}": row for size, row in rows.items()}


def _deepspeed_rows(recipe: Recipe) -> dict[str, Row]:
    strategy = recipe.strategy
    rows = {"ZERO_STAGE": Row((strategy.zero_stage,), f"strategy.name={strategy.name}", STAGES)}
    for part in ("offload_optimizer", "offload_param"):
        rows[f"{part.upper()}_DEVICE"] = Row.of(f"strategy.{part}", getattr(strategy, part))
        rows[f"{part.upper()}_NVME_PATH"] = Row(("none", strategy.nvme_path))
    if strategy.zero_stage == 3:
        # Sharded loading and gathered weights are part of stage 3; for the other stages both mean nothing.
        rows |= {"ZERO3_INIT": Row(("true",)), "ZERO3_SAVE_16BIT_MODEL": Row(("true",))}
    return {f"ACCELERATE_DEEPSPEED_{name}": row for name, row in rows.items()}


def _fsdp_rows(recipe: Recipe) -> dict[str, Row]:
    strategy, config, checkpointing = recipe.strategy, fsdp_config(recipe), recipe.activation_checkpointing
    sharding, reshards = strategy.sharding, reshards_after_forward(recipe)
    # With any other sharding than the hybrid one, resharding is a part of what the sharding says.
    by_sharding = {"true": "strategy.sharding=full_shard", "false": "strategy.sharding=shard_grad_op"}
    shardings = {name: f"strategy.sharding={name}" for name in ("full_shard", "shard_grad_op", "hybrid_shard")}
    offloads = {"true": "strategy.offload_param=cpu", "false": "strategy.offload_param=none"}
    rows = {
        "VERSION": Row(("2",), "FSDP2 (--fsdp_version 2)"),
        "RESHARD_AFTER_FORWARD": Row(
            (reshards,),
            f"strategy.reshard_after_forward={text_of(reshards)}",
            "strategy.reshard_after_forward={}" if sharding == "hybrid_shard" else by_sharding,
        ),
        # Accelerate ignores it with version 2, and says FULL_SHARD where the user says nothing.
        "SHARDING_STRATEGY": Row(("FULL_SHARD", "1", sharding), f"strategy.sharding={sharding}", shardings),
        "OFFLOAD_PARAMS": Row((config["cpu_offload"],), f"strategy.offload_param={strategy.offload_param}", offloads),
        # Each process would train the parameters of such modules on its own.
        "IGNORED_MODULES": Row(("none",), "nothing of it"),
        "AUTO_WRAP_POLICY": Row((config["auto_wrap_policy"],)),
        "TRANSFORMER_CLS_TO_WRAP": Row((",".join(strategy.wrap_classes),)),
        "STATE_DICT_TYPE": Row((config["state_dict_type"],)),
        # Quantized weights are the exception that no launcher knows of.
        "CPU_RAM_EFFICIENT_LOADING": Row((strategy.cpu_ram_efficient_loading, loads_on_first_process(recipe))),
        # From here on what accelerate says where the user says nothing agrees too.
        "ACTIVATION_CHECKPOINTING": Row((checkpointing.of_layers, False)),
        "ACTIVATION_CHECKPOINTING_OFFLOAD": Row((checkpointing.mode == "offload", False)),
        "MIN_NUM_PARAMS": Row((1e8,)),
        "BACKWARD_PREFETCH": Row(()),
        "FORWARD_PREFETCH": Row((False,)),
        "USE_ORIG_PARAMS": Row((True,)),
        "SYNC_MODULE_STATES": Row((True,)),
    }
    return {f"FSDP_{name}": row for name, row in rows.items()}


def _is_true(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "false").lower() in ("true", "1", "yes")


def same(left: Any, right: Any) -> bool:
    """Whether two values, as text or as they are, mean the same: `True` and `true`, `1e8` and `100000000`."""
    return _plain(left) == _plain(right)


def _plain(value: Any) -> Any:
    text = str(value).strip().lower()
    try:
        return float(text)
    except ValueError:
        return text


def text_of(value: Any) -> str:
    """A value as a recipe and a command line write it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
