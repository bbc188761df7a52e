"""The recipe translated: batch layout, dtypes, run length, and the launcher's environment."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.distributed.engines import deepspeed_config, dtypes, fsdp_mesh, training_arguments
from toolkit.distributed.environment import environment
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import World, batch_layout, run_length
from toolkit.recipe import Recipe
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.recipe.sections import SCHEDULES


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"model": {"path": "m"}, "data": {"sources": ["d.jsonl"]}, **sections})


@pytest.mark.parametrize(
    ("batch", "world_size", "expected"),
    [
        ({}, 1, (16, 8, 2)),
        ({}, 4, (16, 4, 1)),
        ({"global_batch_size": 64, "seq_len": 4096}, 2, (64, 4, 8)),
        ({"global_batch_size": 12, "micro_batch_size": 3}, 2, (12, 3, 2)),
        ({"tokens_per_step": 65536, "seq_len": 4096}, 1, (16, 4, 4)),
        ({"global_batch_size": 7}, 1, (7, 7, 1)),
        ({"global_batch_size": 11}, 1, (11, 1, 11)),
        ({"global_batch_size": 4, "seq_len": 32768}, 1, (4, 1, 4)),
        ({"global_batch_size": 1, "micro_batch_size": 1}, 1, (1, 1, 1)),
    ],
)
def test_batch_layout(batch: dict[str, int], world_size: int, expected: tuple[int, int, int]) -> None:
    layout = batch_layout(recipe(batch=batch), world_size)
    assert (layout.global_batch_size, layout.micro_batch_size, layout.gradient_accumulation_steps) == expected
    assert layout.tokens_per_step == layout.global_batch_size * layout.seq_len


def test_every_layout_is_exact_and_every_number_an_error_names_works() -> None:
    refused = 0
    for total, micro, world, tokens in itertools.product(
        (1, 2, 5, 7, 12, 16, 30), (None, 1, 3, 4, 9), (1, 2, 3, 8), (False, True)
    ):
        batch = {"seq_len": 128, "tokens_per_step" if tokens else "global_batch_size": total * (128 if tokens else 1)}
        batch |= {"micro_batch_size": micro} if micro else {}
        try:
            layout = batch_layout(recipe(batch=batch), world)
        except UserError as error:
            refused += 1
            assert str(total) in error.what
            key = "batch.tokens_per_step" if tokens else "batch.global_batch_size"
            assert f"set {key}=" in error.change
            for name, numbers in re.findall(r"batch\.(\w+)=(\d+(?: or \d+)*)", error.change):
                for number in map(int, numbers.split(" or ")):
                    fitted = batch_layout(recipe(batch={**batch, name: number}), world)
                    product = fitted.micro_batch_size * fitted.gradient_accumulation_steps * world
                    assert product == fitted.global_batch_size
                    if name == "micro_batch_size":
                        assert fitted.global_batch_size == total
            continue
        assert layout.micro_batch_size * layout.gradient_accumulation_steps * world == layout.global_batch_size == total
        assert micro in (None, layout.micro_batch_size)
    assert refused > 50


def test_named_numbers_are_the_nearest() -> None:
    with pytest.raises(UserError, match="a global batch of 10 sequences does not divide into 4 processes") as caught:
        batch_layout(recipe(batch={"global_batch_size": 10}), 4)
    assert caught.value.change == "set batch.global_batch_size=8 or 12"
    with pytest.raises(UserError, match="1 process x batch") as caught:
        batch_layout(recipe(batch={"global_batch_size": 16, "micro_batch_size": 5}), 1)
    assert caught.value.change == "set batch.global_batch_size=15 or 20, or batch.micro_batch_size=4 or 8"
    with pytest.raises(UserError) as caught:
        batch_layout(recipe(batch={"tokens_per_step": 1280, "seq_len": 128}), 4)
    assert caught.value.change == "set batch.tokens_per_step=1024 or 1536"


@pytest.mark.parametrize(
    ("precision", "method", "dtype", "expected"),
    [
        # load, compute, what is trained, autocast, export
        ("fp32", "full", "auto", ("float32", "float32", "float32", None, "float32")),
        ("bf16", "full", "auto", ("float32", "bfloat16", "float32", "bfloat16", "bfloat16")),
        ("fp16", "full", "auto", ("float32", "float16", "float32", "float16", "float16")),
        ("pure_bf16", "full", "auto", ("bfloat16", "bfloat16", "bfloat16", None, "bfloat16")),
        ("pure_bf16", "full", "bf16", ("bfloat16", "bfloat16", "bfloat16", None, "bfloat16")),
        ("fp32", "lora", "auto", ("float32", "float32", "float32", None, "float32")),
        ("bf16", "lora", "auto", ("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16")),
        ("bf16", "lora", "fp32", ("float32", "bfloat16", "float32", "bfloat16", "bfloat16")),
        ("fp16", "lora", "auto", ("float16", "float16", "float32", "float16", "float16")),
        ("pure_bf16", "lora", "auto", ("bfloat16", "bfloat16", "bfloat16", None, "bfloat16")),
    ],
)
def test_dtypes(precision: str, method: str, dtype: str, expected: tuple[str | None, ...]) -> None:
    found = dtypes(recipe(precision=precision, method={"name": method}, model={"path": "m", "dtype": dtype}))
    assert (found.load, found.compute, found.local, found.autocast, found.export) == expected


@pytest.mark.parametrize(
    ("sections", "rows", "expected"),
    [
        # total steps, warm-up steps, save steps
        ({}, 160, (10, 0, None)),
        ({}, 161, (11, 0, None)),
        ({}, 3, (1, 0, None)),
        ({"schedule": {"num_epochs": 2.5}}, 160, (25, 0, None)),
        ({"schedule": {"num_epochs": 3}}, 100, (19, 0, None)),
        ({"schedule": {"max_steps": 7}}, None, (7, 0, None)),
        ({"schedule": {"warmup_ratio": 0.03}}, 160, (10, 1, None)),
        ({"schedule": {"warmup_steps": 4}}, 160, (10, 4, None)),
        ({"checkpoint": {"save_steps": 3}}, 160, (10, 0, 3)),
        ({"checkpoint": {"save_epochs": 0.5}}, 160, (10, 0, 5)),
        ({"checkpoint": {"save_epochs": 0.01}}, 160, (10, 0, 1)),
    ],
)
def test_run_length(sections: dict[str, Any], rows: int | None, expected: tuple[int, int, int | None]) -> None:
    made = recipe(**sections)
    length = run_length(made, rows, batch_layout(made, 1))
    assert (length.total_steps, length.warmup_steps, length.save_steps) == expected


def test_plain_launches_are_accepted() -> None:
    for variables in ({}, {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}):
        for precision in ("fp32", "fp16", "bf16", "pure_bf16"):
            check_launch(recipe(precision=precision), World(world_size=2), variables)
    check_launch(recipe(precision="bf16"), World(), {"ACCELERATE_MIXED_PRECISION": "bf16"})
    check_launch(recipe(), World(), {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "0"})
    check_launch(recipe(strategy={"name": "single"}), World(), {})


@pytest.mark.parametrize(
    ("sections", "world", "variables", "words"),
    [
        ({}, World(), {"ACCELERATE_USE_DEEPSPEED": "true"}, ["strategy.name=ddp", "DeepSpeed"]),
        ({}, World(), {"ACCELERATE_USE_FSDP": "1"}, ["strategy.name=ddp", "FSDP"]),
        ({}, World(), {"ACCELERATE_USE_MEGATRON_LM": "true"}, ["strategy.name=ddp", "Megatron-LM"]),
        ({}, World(), {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ["--dynamo_backend inductor", "compile=auto"]),
        ({"precision": "fp32"}, World(), {"ACCELERATE_MIXED_PRECISION": "bf16"}, ["precision=fp32", "precision=bf16"]),
        ({"precision": "bf16"}, World(), {"ACCELERATE_MIXED_PRECISION": "fp16"}, ["precision=bf16", "precision=fp16"]),
        ({"precision": "bf16"}, World(), {"ACCELERATE_MIXED_PRECISION": "fp8"}, ["precision=bf16", "fp8"]),
        ({"strategy": {"name": "single"}}, World(world_size=2), {}, ["strategy.name=single", "2 processes", "ddp"]),
    ],
)
def test_launch_that_differs_is_refused_with_both_sides(
    sections: dict[str, Any], world: World, variables: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        check_launch(recipe(**sections), world, variables)
    for word in words:
        assert word in str(caught.value)
    # The advice never names what the recipe says already.
    assert f"set precision={sections.get('precision')}," not in caught.value.change


def test_launch_variables_that_accelerate_really_sets() -> None:
    """Names and values come from accelerate itself, so that a renamed variable does not go unseen."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    def launched(*flags: str) -> dict[str, str]:
        arguments = launch_command_parser().parse_args(
            ["--cpu", "--num_processes", "1", "--num_machines", "1", *flags, "script.py"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return prepare_simple_launcher_cmd_env(arguments)[1]

    check_launch(recipe(), World(), launched("--mixed_precision", "no", "--dynamo_backend", "no"))
    for flags, word in (
        (("--mixed_precision", "fp16", "--dynamo_backend", "no"), "fp16"),
        (("--mixed_precision", "no", "--dynamo_backend", "inductor"), "inductor"),
    ):
        with pytest.raises(UserError, match=word):
            check_launch(recipe(), World(), launched(*flags))


def test_world_of_a_launcher() -> None:
    assert World.from_environment({}) == World(0, 0, 1)
    assert World.from_environment({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) == World(3, 1, 4, 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_name_is_one_of_the_trainers(name: str) -> None:
    from transformers.training_args import OptimizerNames

    made = recipe(optimizer={"name": name})
    arguments = training_arguments(made, batch_layout(made, 1), run_length(made, 32, batch_layout(made, 1)))
    assert arguments["optim"] in {known.value for known in OptimizerNames}


def test_every_schedule_name_is_one_of_the_trainers() -> None:
    from transformers import SchedulerType

    assert set(SCHEDULES) <= {known.value for known in SchedulerType}


def test_training_arguments_say_what_the_recipe_says() -> None:
    made = recipe(
        precision="fp16",
        optimizer={"name": "adamw", "learning_rate": 1e-3, "beta2": 0.95, "max_grad_norm": 0.5},
        schedule={"name": "linear", "max_steps": 20, "warmup_ratio": 0.1},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        activation_checkpointing={"mode": "offload", "every_n_layers": 2},
        checkpoint={"save_steps": 5},
        logging={"every_steps": 4, "trackers": ["tensorboard"]},
        seed=7,
    )
    layout = batch_layout(made, 2)
    arguments = training_arguments(made, layout, run_length(made, None, layout))
    stated = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "warmup_steps": 2,
        "learning_rate": 1e-3,
        "adam_beta2": 0.95,
        "max_grad_norm": 0.5,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "linear",
        "fp16": True,
        "bf16": False,
        "save_steps": 5,
        "logging_steps": 4,
        "report_to": ["tensorboard"],
        "seed": 7,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2, "offload": True},
    }
    assert {key: arguments[key] for key in stated} == stated


@pytest.mark.parametrize("mode", ["none", "full", "selective", "offload"])
def test_training_arguments_are_accepted_by_transformers(mode: str) -> None:
    from transformers import TrainingArguments

    made = recipe(precision="fp32", schedule={"max_steps": 2}, activation_checkpointing={"mode": mode})
    layout = batch_layout(made, 1)
    arguments = training_arguments(made, layout, run_length(made, 8, layout))
    built = TrainingArguments(use_cpu=True, output_dir="unset", **arguments)
    assert built.activation_checkpointing == (mode != "none")


def test_environment_leaves_libraries_quiet_and_private() -> None:
    variables = environment(recipe(), World(), {})
    assert variables["TOKENIZERS_PARALLELISM"] == "false"
    assert variables["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_hybrid_sharding_divides_within_nodes_and_repeats_across_them() -> None:
    hybrid = recipe(strategy={"name": "fsdp", "sharding": "hybrid_shard"})
    assert fsdp_mesh(hybrid, World(0, 0, 24, 8)) == {"dp_replicate_size": 3, "dp_shard_size": 8}
    assert fsdp_mesh(recipe(strategy={"name": "fsdp"}), World(0, 0, 24, 8)) is None
    with pytest.raises(UserError, match="this launch has one"):
        fsdp_mesh(hybrid, World(0, 0, 8, 8))


def test_pure_bf16_keeps_masters_and_moments_in_bf16_under_deepspeed() -> None:
    pure, mixed = (
        deepspeed_config(recipe(strategy={"name": "zero2"}, precision=precision)) for precision in ("pure_bf16", "bf16")
    )
    assert pure["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert pure["fp16"] == {"enabled": False} and "bf16_optimizer_states" not in mixed.get("bf16", {})
