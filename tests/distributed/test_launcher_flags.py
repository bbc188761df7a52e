"""Every variable of `accelerate launch` beside a recipe: values that agree, and what another value is answered."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.distributed.launcher_flags import Difference, engine_differences, same, text_of, variable_differences
from toolkit.distributed.layout import World, batch_layout
from toolkit.recipe import Recipe

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "zero2": {"name": "zero2", "offload_optimizer": "cpu"},
    "nvme": {"name": "zero3", "offload_param": "nvme", "nvme_path": "/scratch"},
    "fsdp": {"name": "fsdp", "wrap_classes": ["LlamaDecoderLayer", "Embedding"]},
    "grad_op": {"name": "fsdp", "sharding": "shard_grad_op", "offload_param": "cpu"},
    "hybrid": {"name": "fsdp", "sharding": "hybrid_shard", "cpu_ram_efficient_loading": False},
}


def recipe(strategy: str, **sections: Any) -> Recipe:
    base = {"model": {"path": "m"}, "data": {"sources": ["d.jsonl"]}, "strategy": STRATEGIES[strategy]}
    return Recipe.model_validate({**base, "precision": "bf16", **sections})


def differences(made: Recipe, variables: dict[str, str], world: World | None = None) -> list[Difference]:
    world = world or World(0, 0, 2, 1)
    return list(variable_differences(made, world, batch_layout(made, world.world_size), variables))


DS = "ACCELERATE_DEEPSPEED_"
# Strategy, variable, values that agree, another value, how its user wrote that, what the recipe says (nothing
# where another value trains the same), and what follows the launcher.
ROWS = [
    ("ddp", "ACCELERATE_DYNAMO_BACKEND", ("no", "NO"), "INDUCTOR", "--dynamo_backend inductor", "compile=auto", ""),
    ("ddp", "ACCELERATE_MIXED_PRECISION", ("no", "bf16"), "fp16", "--mixed_precision fp16", "precision=bf16", "fp16"),
    ("ddp", "ACCELERATE_MIXED_PRECISION", ("no", "bf16"), "fp8", "--mixed_precision fp8", "precision=bf16", ""),
    (
        *("zero2", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("auto", "none", "1"), "4"),
        *("--gradient_accumulation_steps 4", "gradient_accumulation_steps=1", ""),
    ),
    (
        *("zero2", "ACCELERATE_GRADIENT_CLIPPING", ("auto", "none", "1", "1.0"), "0.5", "--gradient_clipping 0.5"),
        *("optimizer.max_grad_norm=1.0", "optimizer.max_grad_norm=0.5"),
    ),
    ("zero2", f"{DS}ZERO_STAGE", ("2",), "3", "--zero_stage 3", "strategy.name=zero2", "strategy.name=zero3"),
    ("nvme", f"{DS}ZERO_STAGE", ("3",), "1", "--zero_stage 1", "strategy.name=zero3", "strategy.name=zero1"),
    ("nvme", f"{DS}ZERO_STAGE", ("3",), "0", "--zero_stage 0", "strategy.name=zero3", ""),
    (
        *("zero2", f"{DS}OFFLOAD_OPTIMIZER_DEVICE", ("cpu",), "none", "--offload_optimizer_device none"),
        *("strategy.offload_optimizer=cpu", "strategy.offload_optimizer=none"),
    ),
    (
        *("nvme", f"{DS}OFFLOAD_PARAM_DEVICE", ("nvme",), "cpu", "--offload_param_device cpu"),
        *("strategy.offload_param=nvme", "strategy.offload_param=cpu"),
    ),
    (
        *("nvme", f"{DS}OFFLOAD_PARAM_NVME_PATH", ("none", "/scratch"), "/tmp"),
        *("--offload_param_nvme_path /tmp", "", ""),
    ),
    (
        *("nvme", f"{DS}OFFLOAD_OPTIMIZER_NVME_PATH", ("none", "/scratch"), "/tmp"),
        *("--offload_optimizer_nvme_path /tmp", "", ""),
    ),
    ("nvme", f"{DS}ZERO3_INIT", ("true", "True"), "false", "--zero3_init_flag false", "", ""),
    ("nvme", f"{DS}ZERO3_SAVE_16BIT_MODEL", ("true",), "false", "--zero3_save_16bit_model false", "", ""),
    (
        *("fsdp", "FSDP_VERSION", ("2",), "1", "--fsdp_version 1 (accelerate's default)"),
        *("FSDP2 (--fsdp_version 2)", ""),
    ),
    (
        *("fsdp", "FSDP_RESHARD_AFTER_FORWARD", ("true",), "false", "--fsdp_reshard_after_forward false"),
        *("strategy.reshard_after_forward=true", "strategy.sharding=shard_grad_op"),
    ),
    (
        *("grad_op", "FSDP_RESHARD_AFTER_FORWARD", ("false",), "true"),
        "--fsdp_reshard_after_forward true (accelerate's default)",
        *("strategy.reshard_after_forward=false", "strategy.sharding=full_shard"),
    ),
    (
        *("hybrid", "FSDP_RESHARD_AFTER_FORWARD", ("true",), "false", "--fsdp_reshard_after_forward false"),
        *("strategy.reshard_after_forward=true", "strategy.reshard_after_forward=false"),
    ),
    (
        *("grad_op", "FSDP_SHARDING_STRATEGY", ("FULL_SHARD", "1", "SHARD_GRAD_OP"), "HYBRID_SHARD"),
        *("--fsdp_sharding_strategy HYBRID_SHARD", "strategy.sharding=shard_grad_op", "strategy.sharding=hybrid_shard"),
    ),
    (
        *("fsdp", "FSDP_SHARDING_STRATEGY", ("FULL_SHARD", "1"), "SHARD_GRAD_OP"),
        *("--fsdp_sharding_strategy SHARD_GRAD_OP", "strategy.sharding=full_shard", "strategy.sharding=shard_grad_op"),
    ),
    (
        *("fsdp", "FSDP_OFFLOAD_PARAMS", ("false", "False"), "true", "--fsdp_offload_params true"),
        *("strategy.offload_param=none", "strategy.offload_param=cpu"),
    ),
    (
        *("grad_op", "FSDP_OFFLOAD_PARAMS", ("true",), "false", "--fsdp_offload_params false (accelerate's default)"),
        *("strategy.offload_param=cpu", "strategy.offload_param=none"),
    ),
    ("fsdp", "FSDP_IGNORED_MODULES", ("none",), "a.*", "--fsdp_ignored_modules a.*", "nothing of it", ""),
    (
        *("fsdp", "FSDP_AUTO_WRAP_POLICY", ("TRANSFORMER_BASED_WRAP",), "NO_WRAP"),
        *("--fsdp_auto_wrap_policy NO_WRAP", "", ""),
    ),
    (
        *("fsdp", "FSDP_TRANSFORMER_CLS_TO_WRAP", ("LlamaDecoderLayer,Embedding",), "Block"),
        *("--fsdp_transformer_layer_cls_to_wrap Block", "", ""),
    ),
    (
        *("fsdp", "FSDP_STATE_DICT_TYPE", ("SHARDED_STATE_DICT",), "FULL_STATE_DICT"),
        *("--fsdp_state_dict_type FULL_STATE_DICT", "", ""),
    ),
    (
        *("fsdp", "FSDP_CPU_RAM_EFFICIENT_LOADING", ("true",), "false"),
        *("--fsdp_cpu_ram_efficient_loading false", "", ""),
    ),
    (
        *("hybrid", "FSDP_CPU_RAM_EFFICIENT_LOADING", ("false",), "true"),
        *("--fsdp_cpu_ram_efficient_loading true", "", ""),
    ),
    (
        *("fsdp", "FSDP_ACTIVATION_CHECKPOINTING", ("false",), "true"),
        *("--fsdp_activation_checkpointing true", "", ""),
    ),
    (
        *("fsdp", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", ("false",), "true"),
        *("--fsdp_activation_checkpointing_offload true", "", ""),
    ),
    ("fsdp", "FSDP_MIN_NUM_PARAMS", ("100000000", "1e8"), "2", "--fsdp_min_num_params 2", "", ""),
    ("fsdp", "FSDP_BACKWARD_PREFETCH", (), "NO_PREFETCH", "--fsdp_backward_prefetch NO_PREFETCH", "", ""),
    ("fsdp", "FSDP_FORWARD_PREFETCH", ("false",), "true", "--fsdp_forward_prefetch true", "", ""),
    ("fsdp", "FSDP_USE_ORIG_PARAMS", ("true",), "false", "--fsdp_use_orig_params false", "", ""),
    ("fsdp", "FSDP_SYNC_MODULE_STATES", ("true",), "false", "--fsdp_sync_module_states false", "", ""),
]


@pytest.mark.parametrize(
    ("strategy", "variable", "agreeing", "other", "launcher", "said", "follow"),
    ROWS,
    ids=[f"{row[0]}-{row[1]}-{row[3]}" for row in ROWS],
)
def test_what_each_variable_is_answered(
    strategy: str, variable: str, agreeing: tuple[str, ...], other: str, launcher: str, said: str, follow: str
) -> None:
    made = recipe(strategy)
    for value in agreeing:
        assert differences(made, {variable: value}) == [], value
    (difference,) = differences(made, {variable: other})
    assert (difference.launcher, difference.variable, difference.file) == (launcher, variable, "")
    assert difference.recipe == said or (said and difference.recipe.startswith(f"{said} ("))
    assert difference.follow == (f"precision={follow}" if follow == "fp16" else follow)


def test_recomputed_activations_agree_with_what_the_launcher_recomputes() -> None:
    full, offload = (recipe("fsdp", activation_checkpointing={"mode": mode}) for mode in ("full", "offload"))
    names = ("FSDP_ACTIVATION_CHECKPOINTING", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
    for value in ("true", "false"):
        assert differences(full, {names[0]: value}) == differences(offload, {names[1]: value}) == []
    assert len(differences(full, {names[1]: "true"})) == 1


def test_quantized_weights_are_read_by_every_process_whatever_the_launcher_says() -> None:
    made = recipe("fsdp", method={"name": "lora", "quantization": "nf4"})
    for value in ("true", "false"):
        assert differences(made, {"FSDP_CPU_RAM_EFFICIENT_LOADING": value}) == []


@pytest.mark.parametrize(
    ("strategy", "world", "sizes"),
    [
        ("hybrid", World(0, 0, 8, 4), {"DP_REPLICATE": 2, "DP_SHARD": 4, "TP": 1, "CP": 1, "SP": 1}),
        ("fsdp", World(0, 0, 8, 4), {"DP_REPLICATE": 1, "DP_SHARD": 8, "TP": 1, "CP": 1, "SP": 1}),
    ],
)
def test_sizes_of_a_parallelism_config(strategy: str, world: World, sizes: dict[str, int]) -> None:
    made, used = recipe(strategy), {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    names = {f"PARALLELISM_CONFIG_{name}_SIZE": size for name, size in sizes.items()}
    assert differences(made, used | {name: str(size) for name, size in names.items()}, world) == []
    for name, size in names.items():
        (difference,) = differences(made, {**used, name: "16"}, world)
        key = name.removeprefix("PARALLELISM_CONFIG_").removesuffix("_SIZE")
        own = {"TP": "parallel.tensor", "CP": "parallel.context", "SP": "parallel.sequence"}
        assert difference.recipe == f"{own.get(key, f'{key.lower()}_size')}={size}"
        assert differences(made, {name: "16"}, world) == [], "not used"
        assert differences(made, {**used, name: "1"}, world) == [], "accelerate's default"


@pytest.mark.parametrize(
    ("variables", "strategy", "expected"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "fsdp", ("DeepSpeed", "strategy.name=fsdp", "")),
        (
            {"ACCELERATE_USE_DEEPSPEED": "1", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            "ddp",
            ("DeepSpeed with --zero_stage 2", "strategy.name=ddp", "strategy.name=zero2"),
        ),
        (
            {"ACCELERATE_USE_FSDP": "yes", "FSDP_VERSION": "2"},
            "zero2",
            ("FSDP2", "strategy.name=zero2", "strategy.name=fsdp"),
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, "ddp", ("FSDP", "strategy.name=ddp", "strategy.name=fsdp")),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "fsdp", ("Megatron-LM", "strategy.name=fsdp", "")),
    ],
)
def test_another_engine_is_named(variables: dict[str, str], strategy: str, expected: tuple[str, str, str]) -> None:
    (difference,) = engine_differences(recipe(strategy), variables)
    assert (difference.launcher, difference.recipe, difference.follow) == expected
    assert difference.variable == next(iter(variables))
    off = {name: "false" if name.startswith("ACCELERATE_USE") else value for name, value in variables.items()}
    assert list(engine_differences(recipe(strategy), off)) == []


def test_a_difference_names_the_file_that_says_so() -> None:
    assert str(Difference("a=1", "b=2", "V")) == "the recipe says b=2, the launcher says a=1"
    assert str(Difference("a=1", "b=2", "V", file="ds.json")) == "the recipe says b=2, the launcher says a=1 (ds.json)"


def test_values_are_the_same_however_they_are_written() -> None:
    for left, right in (("True", True), ("1e8", 100_000_000), (" cpu ", "CPU"), ("none", None), (1, 1.0)):
        assert same(left, right)
    for left, right in (("true", False), ("1e8", 1), ("cpu", "nvme")):
        assert not same(left, right)
    assert [text_of(value) for value in (None, True, False, 0.5, "Lion")] == ["null", "true", "false", "0.5", "Lion"]
