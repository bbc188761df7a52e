"""A user's own DeepSpeed JSON: compared where a recipe has the key, taken over where it has none."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.common import UserError
from toolkit.distributed import launcher_deepspeed
from toolkit.distributed.engines import deepspeed_config, training_arguments
from toolkit.distributed.launcher import Launch, check_launch
from toolkit.distributed.launcher_flags import Difference
from toolkit.distributed.layout import Length, World, batch_layout
from toolkit.recipe import Recipe

# The example for ZeRO-3 in the documentation of Transformers.
EXAMPLE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
    | {"hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"), "auto"),
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
BATCH = {"global_batch_size": 32, "micro_batch_size": 4}


def recipe(strategy: str | dict[str, Any] = "zero2", **sections: Any) -> Recipe:
    strategy = {"name": strategy} if isinstance(strategy, str) else strategy
    base = {"model": {"path": "m"}, "data": {"sources": ["d.jsonl"]}, "strategy": strategy, "batch": BATCH}
    return Recipe.model_validate({**base, "precision": "bf16", **sections})


@pytest.fixture
def launched(tmp_path: Path) -> Any:
    """Checks a recipe against a file of some content."""

    def check(made: Recipe, content: Any) -> Launch:
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(content))
        variables = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file),
        }
        return check_launch(made, World(), variables)

    return check


def test_the_recipes_own_settings_agree_however_they_are_written(launched: Any) -> None:
    made = recipe()
    exact = deepspeed_config(made)
    assert launched(made, exact).lines() == launched(made, {}).lines() == []
    numbers = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    same = {**exact, **numbers, "gradient_clipping": 1, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    assert launched(made, {**same, "wall_clock_breakdown": False, "steps_per_print": 10}).lines() == []


@pytest.mark.parametrize(
    ("content", "differences"),
    [
        (
            {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}},
            [
                "gradient_accumulation_steps=8, the launcher says gradient_accumulation_steps=1",
                "precision=bf16, the launcher says bf16.enabled=false",
            ],
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0.5},
            [
                "strategy.name=zero2, the launcher says zero_optimization.stage=3",
                "strategy.offload_optimizer=none, the launcher says zero_optimization.offload_optimizer.device=cpu",
                "optimizer.max_grad_norm=1.0, the launcher says gradient_clipping=0.5",
                "set strategy.name=zero3 strategy.offload_optimizer=cpu optimizer.max_grad_norm=0.5, or",
            ],
        ),
        (
            {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}},
            [
                "optimizer.name=adamw, the launcher says optimizer.type=Lion",
                "optimizer.learning_rate=2e-05, the launcher says optimizer.params.lr=0.001",
                "the launcher says optimizer.params.betas=[0.9, 0.95]",
            ],
        ),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}}, ["type=OneBitAdam", "freeze_step=400"]),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log", "warmup_num_steps": 100}}},
            [
                "schedule.name=cosine, the launcher says scheduler.type=WarmupLR",
                "a linear warm-up, the launcher says scheduler.params.warmup_type=log",
                "schedule.warmup_steps=0, the launcher says scheduler.params.warmup_num_steps=100",
            ],
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            ["strategy.reduce_dtype=fp32", "set strategy.reduce_dtype=bf16"],
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ["set precision=pure_bf16"]),
        ({"curriculum_learning": {"enabled": True}}, ["nothing of it, the launcher says curriculum_learning.enabled"]),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, ["zero_quantized_gradients=true"]),
        ({"train_micro_batch_size_per_gpu": 8}, ["batch.micro_batch_size=4", "set batch.micro_batch_size=8, or"]),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8},
            ["set batch.global_batch_size=64, or"],
        ),
    ],
)
def test_what_would_train_something_else_is_refused(content: Any, differences: list[str], launched: Any) -> None:
    with pytest.raises(UserError) as refused:
        launched(recipe(), content)
    assert [text for text in differences if text not in str(refused.value)] == [], str(refused.value)


ADAM = {"optimizer": {"name": "adamw", "weight_decay": 0.1, "eps": 1e-6}}
WARMS_UP = {"schedule": {"name": "linear", "max_steps": 100, "warmup_steps": 10}}
# Key of a file, what the recipe says beside its defaults, values that agree, another one, how the recipe says it
# (nothing where another value trains the same), and what follows the file.
ROWS: list[tuple[str, dict[str, Any], list[Any], Any, str, str]] = [
    ("train_batch_size", {}, [32], 64, "batch.global_batch_size=32", "batch.global_batch_size=64"),
    ("train_micro_batch_size_per_gpu", {}, [4], 8, "batch.micro_batch_size=4", "batch.micro_batch_size=8"),
    ("gradient_accumulation_steps", {}, [8], 2, "gradient_accumulation_steps=8", ""),
    ("gradient_clipping", {}, [1, 1.0], 0.3, "optimizer.max_grad_norm=1.0", "optimizer.max_grad_norm=0.3"),
    ("gradient_allreduce_op", {}, ["mean"], "sum", "gradient_allreduce_op=mean", ""),
    ("sequence_parallel_size", {}, [1], 2, "sequence_parallel_size=1", ""),
    ("communication_data_type", {}, ["fp32"], "bf16", "strategy.reduce_dtype=fp32", "strategy.reduce_dtype=bf16"),
    ("data_types.grad_accum_dtype", {}, ["fp32"], "bf16", "strategy.reduce_dtype=fp32", "strategy.reduce_dtype=bf16"),
    (
        "communication_data_type",
        {"precision": "pure_bf16"},
        ["bf16", "fp32"],
        "fp16",
        "strategy.reduce_dtype=bf16",
        "strategy.reduce_dtype=fp16",
    ),
    ("bf16.enabled", {}, [True], False, "precision=bf16", ""),
    ("bf16.enabled", {"precision": "pure_bf16"}, [True], False, "precision=pure_bf16", ""),
    ("bf16.enabled", {"precision": "pure_fp8"}, [True], False, "precision=pure_fp8", ""),
    ("fp16.enabled", {}, [False], True, "precision=bf16", "precision=fp16"),
    ("bf16.bf16_optimizer_states", {}, [False], True, "precision=bf16", "precision=pure_bf16"),
    ("bf16.bf16_optimizer_states", {"precision": "fp8"}, [False], True, "precision=fp8", "precision=pure_fp8"),
    ("bf16.bf16_optimizer_states", {"precision": "pure_fp8"}, [True], False, "precision=pure_fp8", ""),
    ("bf16.bf16_master_weights_and_grads", {}, [False], True, "precision=bf16", "precision=pure_bf16"),
    ("zero_optimization.stage", {}, [2], 1, "strategy.name=zero2", "strategy.name=zero1"),
    (
        *("zero_optimization.offload_optimizer.device", {}, ["none"], "cpu"),
        *("strategy.offload_optimizer=none", "strategy.offload_optimizer=cpu"),
    ),
    (
        "zero_optimization.offload_param.device",
        {},
        ["none"],
        "cpu",
        "strategy.offload_param=none",
        "strategy.offload_param=cpu",
    ),
    ("zero_force_ds_cpu_optimizer", {}, [False], True, "", ""),
    ("optimizer.type", {}, ["AdamW", "Adam", "adamw"], "Lion", "optimizer.name=adamw", "optimizer.name=lion"),
    ("optimizer.type", {"optimizer": {"name": "lion"}}, ["Lion"], "SGD", "optimizer.name=lion", "optimizer.name=sgd"),
    (
        "optimizer.type",
        {"optimizer": {"name": "sgd"}},
        ["SGD"],
        "Adagrad",
        "optimizer.name=sgd",
        "optimizer.name=adagrad",
    ),
    ("optimizer.type", {"optimizer": {"name": "adagrad"}}, ["Adagrad"], "Muon", "optimizer.name=adagrad", ""),
    *(
        (
            "optimizer.type",
            {"optimizer": {"name": name}},
            ["AdamW", "Adam"],
            "SGD",
            f"optimizer.name={name}",
            "optimizer.name=sgd",
        )
        for name in ("adamw_torch", "adamw_torch_fused")
    ),
    (
        "optimizer.type",
        {"optimizer": {"name": "lion_32bit"}},
        ["Lion"],
        "Adam",
        "optimizer.name=lion_32bit",
        "optimizer.name=adamw",
    ),
    ("optimizer.params.lr", {}, [2e-5, "2e-5"], 0.1, "optimizer.learning_rate=2e-05", "optimizer.learning_rate=0.1"),
    (
        *("optimizer.params.betas", {}, [[0.9, 0.999]], [0.8, 0.7], "optimizer.beta1=0.9 and optimizer.beta2=0.999"),
        "optimizer.beta1=0.8 optimizer.beta2=0.7",
    ),
    ("optimizer.params.eps", ADAM, [1e-6], 1e-8, "optimizer.eps=1e-06", "optimizer.eps=1e-08"),
    ("optimizer.params.weight_decay", ADAM, [0.1], 0.2, "optimizer.weight_decay=0.1", "optimizer.weight_decay=0.2"),
    (
        "optimizer.params.momentum",
        {"optimizer": {"name": "sgd"}},
        [0.9],
        0.5,
        "optimizer.momentum=0.9",
        "optimizer.momentum=0.5",
    ),
    ("optimizer.params.adam_w_mode", {}, [True], False, "decoupled weight decay", ""),
    ("optimizer.params.torch_adam", {}, [True, False], "x", "", ""),
    ("scheduler.type", {}, ["WarmupCosineLR"], "WarmupDecayLR", "schedule.name=cosine", "schedule.name=linear"),
    (
        "scheduler.type",
        WARMS_UP,
        ["WarmupDecayLR"],
        "WarmupLR",
        "schedule.name=linear",
        "schedule.name=constant_with_warmup",
    ),
    (
        *("scheduler.type", {"schedule": {"name": "constant_with_warmup"}}, ["WarmupLR"], "WarmupCosineLR"),
        *("schedule.name=constant_with_warmup", "schedule.name=cosine"),
    ),
    ("scheduler.params.warmup_max_lr", {}, [2e-5], 0.1, "optimizer.learning_rate=2e-05", "optimizer.learning_rate=0.1"),
    ("scheduler.params.warmup_min_lr", {}, [0, 0.0], 0.1, "a warm-up from 0", ""),
    ("scheduler.params.warmup_min_ratio", {}, [0], 0.1, "a warm-up from 0", ""),
    ("scheduler.params.warmup_num_steps", WARMS_UP, [10], 5, "schedule.warmup_steps=10", "schedule.warmup_steps=5"),
    ("scheduler.params.warmup_num_steps", {}, [0], 5, "schedule.warmup_steps=0", "schedule.warmup_steps=5"),
    (
        *("scheduler.params.warmup_num_steps", {"schedule": {"warmup_ratio": 0.1}}, [], 5),
        *("schedule.warmup_steps=0.1 of all steps", "schedule.warmup_steps=5"),
    ),
    ("scheduler.params.warmup_type", {}, ["linear"], "log", "a linear warm-up", ""),
    ("scheduler.params.total_num_steps", WARMS_UP, [100], 50, "schedule.max_steps=100", "schedule.max_steps=50"),
    ("scheduler.params.cos_min_ratio", {}, [0, 1e-4], 0.1, "a decay to 0", ""),
]


@pytest.mark.parametrize(
    ("key", "sections", "agreeing", "other", "said", "follow"), ROWS, ids=[f"{row[0]}-{row[3]}" for row in ROWS]
)
def test_what_each_key_is_answered(
    key: str, sections: dict[str, Any], agreeing: list[Any], other: Any, said: str, follow: str, tmp_path: Path
) -> None:
    made = recipe(**sections)

    def differences(value: Any) -> list[Difference]:
        content: dict[str, Any] = {}
        *parents, name = key.split(".")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(content))
        return launcher_deepspeed.compare(made, batch_layout(made, 1), str(file))[0]

    def of_key(value: Any) -> list[Difference]:
        return [each for each in differences(value) if each.launcher.startswith(f"{key}=")]

    for value in agreeing:
        assert of_key(value) == [], value
    (difference,) = of_key(other)
    assert (difference.recipe, difference.follow) == (said, follow)
    assert difference.variable == "ACCELERATE_DEEPSPEED_CONFIG_FILE" and difference.file == str(tmp_path / "ds.json")


def test_what_trains_the_same_is_ignored_in_one_line(launched: Any) -> None:
    zero = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8, "allgather_partitions": True}
    made = recipe({"name": "zero2", "offload_optimizer": "cpu"})
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    content = {"zero_optimization": zero, "train_batch_size": 32, "gradient_accumulation_steps": 4}
    keys = ["overlap_comm=false", "reduce_bucket_size=500000000.0", "offload_optimizer.pin_memory=false"]
    ignored = ", ".join([*(f"zero_optimization.{key}" for key in keys), "gradient_accumulation_steps=4"])
    assert launched(made, content).lines() == [f"ignored, the recipe decides: {ignored}"]


def test_sections_that_say_what_the_recipe_says_or_nothing_are_silent(launched: Any) -> None:
    made = recipe(optimizer={"weight_decay": 0.1}, schedule={"name": "linear", "max_steps": 100, "warmup_steps": 10})
    auto = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "weight_decay": 0.1}}}
    warmup = {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_max_lr": "auto", "warmup_type": "linear"}
    auto["scheduler"] = {"type": "WarmupDecayLR", "params": warmup}
    off = {"amp": {"enabled": "auto", "opt_level": "auto"}, "flops_profiler": {"enabled": False, "profile_step": 1}}
    unused = {"fp16": {"enabled": "auto", "hysteresis": 2}, "zero_optimization": {"stage3_max_live_parameters": 1e9}}
    assert launched(made, {**auto, **off, **unused}).lines() == []
    # DeepSpeed's warm-up is logarithmic where the file does not say.
    del warmup["warmup_type"]
    assert "scheduler.params.warmup_type=log (DeepSpeed's default)" in launched(made, auto).ignored


def test_what_no_recipe_states_is_taken_over_to_deepspeed(launched: Any, tmp_path: Path) -> None:
    content = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500},
        "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "stage3_allgather_sequential": True},
        "aio": {"block_size": 1048576, "overlap_events": False},
        "wall_clock_breakdown": True,
    }
    made = recipe("zero3", precision="fp16")
    launch = launched(made, content)
    keys = [
        *("fp16.initial_scale_power=12", "fp16.loss_scale_window=500", "zero_optimization.sub_group_size=1000000000.0"),
        *("zero_optimization.stage3_allgather_sequential=true", "aio.block_size=1048576", "aio.overlap_events=false"),
        "wall_clock_breakdown=true",
    ]
    assert launch.lines() == [f"taken over from {tmp_path / 'ds.json'}: {', '.join(keys)}"]
    plain, given = deepspeed_config(made), deepspeed_config(made, launch.taken_over)
    assert given["fp16"] == {**plain["fp16"], "initial_scale_power": 12, "loss_scale_window": 500}
    zero = {**plain["zero_optimization"], "sub_group_size": 1e9, "stage3_allgather_sequential": True}
    arguments = training_arguments(made, batch_layout(made, 1), Length(1, None, 0, None), launch.taken_over)
    assert (
        arguments["deepspeed"]
        == given
        == plain
        | {
            "fp16": given["fp16"],
            "zero_optimization": zero,
            "aio": content["aio"],
            "wall_clock_breakdown": True,
        }
    )


def test_an_order_of_parameters_that_deepspeed_confuses_is_not_taken_over(launched: Any) -> None:
    launch = launched(recipe("zero2"), {"zero_optimization": {"stage": 2, "round_robin_gradients": True}})
    assert not launch.taken_over and launch.ignored == ("zero_optimization.round_robin_gradients=true",)


def test_what_the_recipe_passes_on_reaches_deepspeed_and_stands_against_a_file(launched: Any) -> None:
    extra = {"deepspeed": {"zero_optimization": {"parameter_alignment": True}, "flops_profiler": {"enabled": True}}}
    made, plain = recipe("zero2", extra=extra), deepspeed_config(recipe("zero2"))
    zero = plain["zero_optimization"] | {"parameter_alignment": True}
    wanted = plain | {"zero_optimization": zero, "flops_profiler": {"enabled": True}}
    arguments = training_arguments(made, batch_layout(made, 1), Length(1, None, 0, None))
    assert arguments["deepspeed"] == deepspeed_config(made) == wanted
    assert launched(made, {"zero_optimization": {"stage": 2, "parameter_alignment": True}}).lines() == []
    launch = launched(made, {"zero_optimization": {"stage": 2, "parameter_alignment": False}, "dump_state": True})
    assert launch.ignored == ("zero_optimization.parameter_alignment=false",)
    assert deepspeed_config(made, launch.taken_over) == wanted | {"dump_state": True}
    # Each of several is told.
    made = recipe(
        "zero2", extra={"deepspeed": {"flops_profiler": {"enabled": True, "profile_step": 5, "top_modules": 2}}}
    )
    launch = launched(made, {"flops_profiler": {"enabled": True, "profile_step": 6, "top_modules": 3}})
    assert launch.ignored == ("flops_profiler.profile_step=6", "flops_profiler.top_modules=3")


def test_the_example_of_the_field_starts_a_recipe_of_the_same_strategy(launched: Any) -> None:
    offloads = {"name": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"}
    made = recipe(offloads, precision="fp16", schedule={"name": "constant_with_warmup"})
    launch = launched(made, EXAMPLE)
    assert launch.ignored == ("scheduler.params.warmup_type=log (DeepSpeed's default)",)
    scaling = ("fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale")
    assert tuple(launch.taken_over) == (*scaling, "zero_optimization.sub_group_size")
    with pytest.raises(UserError, match=r"schedule.name=cosine, the launcher says scheduler.type=WarmupLR"):
        launched(recipe(offloads), EXAMPLE)


CPU = {"device": "cpu", "pin_memory": True}
SCALING = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 32, "hysteresis": 2, "min_loss_scale": 1}
# In the forms that other projects ship: of each the recipe, the file, what is taken over, and what must be followed.
PUBLIC: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], str]] = {
    "everything offloaded, ZeRO's keys without their stage": (
        {"strategy": {"name": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"}},
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 0}
            | {"max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True},
            "bf16": {"enabled": True},
        },
        [],
        "",
    ),
    "loss scaling with a window of its own": (
        {"strategy": {"name": "zero3"}, "precision": "fp16"},
        {"zero_optimization": {"stage": 3}, "fp16": {"enabled": "auto", "auto_cast": False, **SCALING}},
        ["fp16.loss_scale_window", "fp16.initial_scale_power", "fp16.hysteresis", "fp16.min_loss_scale"],
        "",
    ),
    "DeepSpeed's own optimizer asked for where it is the default": (
        {"strategy": {"name": "zero3", "offload_optimizer": "cpu"}},
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "sub_group_size": 1e9, "overlap_comm": False},
            "zero_force_ds_cpu_optimizer": True,
        },
        ["zero_optimization.sub_group_size"],
        "",
    ),
    "buckets, granularity and partitioned activations": (
        {"strategy": {"name": "zero3"}},
        {
            "activation_checkpointing": {"partition_activations": True},
            "zero_optimization": {"stage": 3, "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8}
            | {"stage3_module_granularity_threshold": 16},
        },
        [],
        "",
    ),
    "optimizer and scheduler with figures": (
        {"strategy": {"name": "zero3"}},
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "total_num_steps": 100}},
        },
        [],
        "set batch.global_batch_size=64 optimizer.beta1=0.9 optimizer.beta2=0.95 optimizer.weight_decay=0.1 "
        "schedule.name=linear schedule.warmup_steps=20 schedule.max_steps=100, or",
    ),
    "fp8": ({"strategy": {"name": "zero3"}}, {"fp8": {"enabled": True}}, [], "nothing of it"),
    "a compiler": ({"strategy": {"name": "zero2"}}, {"compile": {"disable": False, "backend": "x"}}, [], "nothing of"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_forms_of_public_files(name: str, launched: Any) -> None:
    settings, content, taken_over, refused = PUBLIC[name]
    made = recipe(**settings)
    if refused:
        with pytest.raises(UserError) as caught:
            launched(made, content)
        assert refused in str(caught.value)
        changes = [part.split("=", 1) for part in refused.split()[1:-1] if "." in part]
        followed = made.with_values({key: yaml.safe_load(value.rstrip(",")) for key, value in changes})
        assert not changes or launched(followed, content)
    else:
        assert list(launched(made, content).taken_over) == taken_over


@pytest.mark.parametrize(
    "section",
    [
        *(
            "amp",
            "fp8",
            "torch_autocast",
            "data_efficiency",
            "curriculum_learning",
            "progressive_layer_drop",
            "eigenvalue",
        ),
        *("quantize_training", "compression_training", "weight_quantization", "sparse_attention", "elasticity"),
        *("autotuning", "hybrid_engine", "pipeline", "tensor_parallel", "zero_optimization.zenflow"),
        *("zero_optimization.mics_shard_size", "zero_optimization.zero_quantized_weights", "data_types.param_dtype"),
        *("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_params"),
        *("zero_optimization.offload_optimizer.super_offload", "fp16.fp16_master_weights_and_grads"),
    ],
)
def test_what_no_recipe_does_is_refused_and_silent_where_it_is_off(section: str, launched: Any) -> None:
    made = recipe({"name": "zero2", "offload_optimizer": "cpu"}, precision="fp16")
    offloads = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}

    def content(value: Any) -> dict[str, Any]:
        *parents, name = section.split(".")
        made = inner = json.loads(json.dumps(offloads))
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
        return made

    switched = section in ("zero_optimization.zenflow",) or "." not in section
    with pytest.raises(UserError, match=f"nothing of it, the launcher says {section}"):
        launched(made, content({"enabled": True, "level": 3} if switched else 2))
    # A section that is switched off says nothing, whatever else is in it.
    for off in [{"enabled": False, "level": 3}] if switched else [False, 0, -1, "none", "", [], None, "auto"]:
        assert launched(made, content(off)).lines() == []


@pytest.mark.parametrize("section", ["aio", "comms_logger", "flops_profiler"])
def test_sections_of_speed_and_logging_are_taken_over_whole(section: str, launched: Any) -> None:
    assert launched(recipe(), {section: {"enabled": True, "depth": -1}}).taken_over == {
        f"{section}.enabled": True,
        f"{section}.depth": -1,
    }


@pytest.mark.parametrize("content", ["not an object", [1]])
def test_a_file_that_is_no_object_is_told(content: Any, launched: Any) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        launched(recipe(), content)


def test_every_key_that_is_compared_is_one_that_deepspeed_reads() -> None:
    package = importlib.util.find_spec("deepspeed")
    assert package and package.submodule_search_locations
    root = Path(package.submodule_search_locations[0])
    files = [file for part in ("runtime", "ops", "utils") for file in (root / part).rglob("*.py")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    read = set(re.findall(r"[\"']([a-z0-9_]+)[\"']", source)) | set(
        re.findall(r"^ +(\w+)\s*[:=,]", source, re.MULTILINE)
    )
    for strategy, precision in (("zero2", "bf16"), ("zero3", "fp16"), ("zero1", "pure_bf16")):
        made = recipe(strategy, precision=precision)
        rows = launcher_deepspeed._rows(made, batch_layout(made, 1), {"train_batch_size": 32})
        assert len(rows) > 25
        assert {part for key in rows for part in key.split(".")} <= read
