"""The recipe translated: batch layout, dtypes, run length, and the launcher's environment."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest

from recipes import recipe
from toolkit.common import UserError
from toolkit.distributed.engine_state import expected_state
from toolkit.distributed.engines import (
    checkpointing_kwargs,
    deepspeed_config,
    dtypes,
    fsdp_mesh,
    loads_on_device,
    loads_on_first_process,
    reshards_after_forward,
    training_arguments,
)
from toolkit.distributed.environment import environment
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import World, batch_layout, micro_batch_sizes, run_length
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.recipe.sections import SCHEDULES


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
    assert layout.micro_batches * layout.micro_batch_size == layout.global_batch_size


def test_processes_that_share_rows_divide_the_batch_as_one() -> None:
    for world, sequence in ((2, 2), (4, 2), (8, 4)):
        made = recipe(batch={"global_batch_size": 8}, parallel={"sequence": sequence})
        layout = batch_layout(made, world)
        assert (layout.world_size, layout.data_parallel_size) == (world, world // sequence)
        assert layout.micro_batch_size * layout.gradient_accumulation_steps == 8 // (world // sequence)
        assert layout.micro_batches * layout.micro_batch_size == 8


def test_processes_that_divide_experts_have_rows_of_their_own() -> None:
    layout = batch_layout(recipe(batch={"global_batch_size": 8}, parallel={"expert": 2}), 4)
    assert (layout.expert, layout.data_parallel_size, layout.together) == (2, 4, 1)
    assert layout.micro_batch_size * layout.gradient_accumulation_steps == 2
    with pytest.raises(UserError, match=r"parallel\.expert=4 does not divide 6 processes") as caught:
        batch_layout(recipe(batch={"global_batch_size": 24}, parallel={"expert": 4}), 6)
    assert caught.value.change == "set parallel.expert=2 or 3, or start 4 or 8 processes"


@pytest.mark.parametrize(("world", "sequence"), [(3, 2), (1, 4), (6, 4)])
def test_processes_that_do_not_divide_into_shared_rows_name_those_that_do(world: int, sequence: int) -> None:
    with pytest.raises(UserError, match=f"parallel.sequence={sequence} does not divide {world} process") as caught:
        batch_layout(recipe(batch={"global_batch_size": 8}, parallel={"sequence": sequence}), world)
    for numbers in re.findall(r"start (\d+(?: or \d+)*)", caught.value.change):
        for number in map(int, numbers.split(" or ")):
            assert number % sequence == 0
    for numbers in re.findall(r"parallel.sequence=(\d+(?: or \d+)*)", caught.value.change):
        for number in map(int, numbers.split(" or ")):
            assert world % number == 0


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
            for fewer in re.findall(r"start (\d+) process", error.change):
                assert batch_layout(recipe(batch=batch), int(fewer)).global_batch_size == total
            continue
        assert layout.micro_batch_size * layout.gradient_accumulation_steps * world == layout.global_batch_size == total
        assert micro in (None, layout.micro_batch_size)
    assert refused > 50


def test_named_numbers_are_the_nearest() -> None:
    with pytest.raises(UserError, match="a global batch of 10 sequences does not divide into 4 processes") as caught:
        batch_layout(recipe(batch={"global_batch_size": 10}), 4)
    assert caught.value.change == "set batch.global_batch_size=8 or 12, or start 2 processes"
    with pytest.raises(UserError, match="1 process x batch") as caught:
        batch_layout(recipe(batch={"global_batch_size": 16, "micro_batch_size": 5}), 1)
    assert caught.value.change == "set batch.global_batch_size=15 or 20, or batch.micro_batch_size=4 or 8"
    with pytest.raises(UserError) as caught:
        batch_layout(recipe(batch={"tokens_per_step": 1280, "seq_len": 128}), 4)
    assert caught.value.change == "set batch.tokens_per_step=1024 or 1536, or start 2 processes"


@pytest.mark.parametrize(
    ("precision", "method", "dtype", "expected"),
    [
        # load, compute, what is trained, autocast, export
        ("fp32", "full", "auto", ("float32", "float32", "float32", None, "float32")),
        ("bf16", "full", "auto", ("float32", "bfloat16", "float32", "bfloat16", "bfloat16")),
        ("fp16", "full", "auto", ("float32", "float16", "float32", "float16", "float16")),
        ("pure_bf16", "full", "auto", ("bfloat16", "bfloat16", "bfloat16", None, "bfloat16")),
        ("pure_bf16", "full", "bf16", ("bfloat16", "bfloat16", "bfloat16", None, "bfloat16")),
        ("fp8", "full", "auto", ("float32", "bfloat16", "float32", "bfloat16", "bfloat16")),
        ("pure_fp8", "full", "auto", ("bfloat16", "bfloat16", "bfloat16", None, "bfloat16")),
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
    ("strategy", "precision", "expected"),
    [
        # between steps, autocast, summed in, masters
        ({"name": "zero2"}, "bf16", ("bfloat16", None, "float32", "float32")),
        ({"name": "zero3"}, "fp16", ("float16", None, "float32", "float32")),
        ({"name": "zero1"}, "pure_bf16", ("bfloat16", None, "bfloat16", "bfloat16")),
        ({"name": "zero1"}, "pure_fp8", ("bfloat16", None, "bfloat16", "bfloat16")),
        ({"name": "fsdp"}, "pure_fp8", ("bfloat16", None, "bfloat16", "bfloat16")),
        ({"name": "zero2", "reduce_dtype": "bf16"}, "bf16", ("bfloat16", None, "bfloat16", "float32")),
        ({"name": "fsdp"}, "bf16", ("float32", None, "float32", "float32")),
        ({"name": "fsdp", "reduce_dtype": "fp32"}, "pure_bf16", ("bfloat16", None, "float32", "bfloat16")),
        ({"name": "ddp"}, "bf16", ("float32", "bfloat16", "float32", "float32")),
    ],
)
def test_dtypes_of_engines(strategy: dict[str, str], precision: str, expected: tuple[str | None, ...]) -> None:
    types = dtypes(recipe(strategy=strategy, precision=precision))
    assert (types.local, types.autocast, types.reduce, types.master) == expected
    # Fully trained weights are read as they lie between steps, frozen ones as they are computed with.
    assert types.load == types.local
    frozen = dtypes(recipe(strategy=strategy, precision=precision, method={"name": "lora"}))
    assert frozen.load == frozen.compute == types.export


@pytest.mark.parametrize(
    ("strategy", "quantization", "on_device", "on_first"),
    [
        ("ddp", "none", True, False),
        ("ddp", "nf4", True, False),
        ("zero2", "none", True, False),
        ("zero3", "none", False, False),
        ("zero3", "nf4", False, False),
        ("fsdp", "none", False, True),
        ("fsdp", "nf4", True, False),
    ],
)
def test_who_reads_the_weights_and_where_to(strategy: str, quantization: str, on_device: bool, on_first: bool) -> None:
    method = {"name": "lora", "quantization": quantization}
    made = recipe(strategy={"name": strategy}, method=method)
    assert (loads_on_device(made), loads_on_first_process(made)) == (on_device, on_first)
    # GGUF files are taken apart on the host, and quantized to the device.
    for model in ({"path": "m.gguf"}, {"path": "m", "gguf_file": "w.gguf"}):
        of_gguf = loads_on_device(recipe(strategy={"name": strategy}, method=method, model=model))
        assert of_gguf == (on_device and quantization != "none")
    every = {"name": strategy, "cpu_ram_efficient_loading": False}
    assert strategy != "fsdp" or not loads_on_first_process(recipe(strategy=every, method=method))


def test_gathered_weights_are_released_as_the_recipe_says_or_else_by_the_sharding() -> None:
    for sharding, usual in (("full_shard", True), ("hybrid_shard", True), ("shard_grad_op", False)):
        for stated, expected in ((None, usual), (True, True), (False, False)):
            made = recipe(strategy={"name": "fsdp", "sharding": sharding, "reshard_after_forward": stated})
            assert reshards_after_forward(made) is expected


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
        # Products that floating point makes a little more than they are.
        ({"schedule": {"num_epochs": 1.1}}, 800, (55, 0, None)),
        ({"schedule": {"max_steps": 100, "warmup_ratio": 0.07}}, 160, (100, 7, None)),
        ({"checkpoint": {"save_epochs": 1.1}}, 800, (50, 0, 55)),
    ],
)
def test_run_length(sections: dict[str, Any], rows: int | None, expected: tuple[int, int, int | None]) -> None:
    made = recipe(**sections)
    length = run_length(made, rows, batch_layout(made, 1))
    assert (length.total_steps, length.warmup_steps, length.save_steps) == expected
    assert length.steps_per_epoch == (rows / 16 if rows else None)


@pytest.mark.parametrize(
    ("batch", "world_size", "expected"),
    [
        # A share of 16 sequences at up to 16,384 tokens, and shares that others divide.
        ({"seq_len": 1024}, 1, [1, 2, 4, 8, 16]),
        ({"seq_len": 2048}, 1, [1, 2, 4, 8]),
        ({"seq_len": 65536}, 1, [1]),
        ({"seq_len": 1024, "micro_batch_tokens": 4095}, 1, [1, 2]),
        ({"global_batch_size": 12, "seq_len": 512}, 1, [1, 2, 3, 4, 6, 12]),
        ({"global_batch_size": 12, "seq_len": 512}, 2, [1, 2, 3, 6]),
        ({"global_batch_size": 2, "seq_len": 512}, 4, [1]),
    ],
)
def test_micro_batches_to_choose_from(batch: dict[str, int], world_size: int, expected: list[int]) -> None:
    assert micro_batch_sizes(recipe(batch=batch), world_size) == expected


def test_short_rows_allow_larger_micro_batches() -> None:
    made = recipe(batch={"seq_len": 2048, "global_batch_size": 64, "micro_batch_tokens": 1600})
    assert (micro_batch_sizes(made, 2), micro_batch_sizes(made, 2, row_tokens=100.0)) == ([1], [1, 2, 4, 8, 16])


def test_plain_launches_are_accepted() -> None:
    for variables in ({}, {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}):
        for precision in ("fp32", "fp16", "bf16", "pure_bf16", "fp8", "pure_fp8"):
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


def test_training_arguments_where_the_recipe_says_nothing() -> None:
    """Whatever the Trainer would do by itself beside the recipe is switched off."""
    made = recipe(precision="bf16")
    layout = batch_layout(made, 1)
    assert training_arguments(made, layout, run_length(made, 160, layout)) == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "learning_rate": 2e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {},
        "warmup_steps": 0,
        "bf16": True,
        "fp16": False,
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": None,
        "average_tokens_across_devices": True,
        "ddp_find_unused_parameters": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "save_steps": 0,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "seed": 42,
        "data_seed": 42,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "accelerator_config": {"dispatch_batches": False},
        "disable_tqdm": True,
        "push_to_hub": False,
        "log_level": "error",
        "ddp_timeout": 86_400,
    }


@pytest.mark.parametrize(
    ("strategy", "precision", "expected"),
    [
        ({"name": "ddp"}, "pure_bf16", (False, None, None, {"dispatch_batches": False})),
        ({"name": "zero1"}, "pure_bf16", (True, 1, None, {"dispatch_batches": False})),
        ({"name": "ddp"}, "pure_fp8", (False, None, None, {"dispatch_batches": False})),
        ({"name": "zero1"}, "pure_fp8", (True, 1, None, {"dispatch_batches": False})),
        ({"name": "ddp"}, "fp8", (True, None, None, {"dispatch_batches": False})),
        ({"name": "zero3"}, "fp32", (False, 3, None, {"dispatch_batches": False})),
        ({"name": "fsdp"}, "bf16", (True, None, True, {"dispatch_batches": False})),
        (
            {"name": "fsdp", "sync_each_batch": True},
            "fp32",
            (False, None, True, {"dispatch_batches": False, "gradient_accumulation_kwargs": {"sync_each_batch": True}}),
        ),
    ],
)
def test_training_arguments_name_one_engine(strategy: dict[str, Any], precision: str, expected: Any) -> None:
    made = recipe(strategy=strategy, precision=precision, extra={"training_arguments": {"neftune_noise_alpha": 5}})
    layout = batch_layout(made, 2)
    given = training_arguments(made, layout, run_length(made, 160, layout))
    stage = given["deepspeed"]["zero_optimization"]["stage"] if "deepspeed" in given else None
    assert (given["bf16"], stage, given.get("fsdp"), given["accelerator_config"]) == expected
    assert ("fsdp_config" in given) == (strategy["name"] == "fsdp")
    assert given["neftune_noise_alpha"] == 5


def test_workers_have_the_micro_batches_of_a_step_ready() -> None:
    for workers, ahead in ((0, None), (1, 8), (2, 4), (8, 2)):
        made = recipe(data={"sources": ["x"], "num_workers": workers}, batch={"micro_batch_size": 2})
        layout = batch_layout(made, 1)
        given = training_arguments(made, layout, run_length(made, 160, layout))
        assert (given["dataloader_num_workers"], given.get("dataloader_prefetch_factor")) == (workers, ahead)


@pytest.mark.parametrize(
    ("checkpointing", "expected"),
    [
        ({"mode": "full"}, {}),
        ({"mode": "full", "every_n_layers": 2}, {"every_n_layers": 2}),
        ({"mode": "selective"}, {"selective": True}),
        ({"mode": "offload"}, {"offload": True}),
    ],
)
def test_how_activations_are_checkpointed(checkpointing: dict[str, Any], expected: dict[str, Any]) -> None:
    section = recipe(activation_checkpointing=checkpointing).activation_checkpointing
    assert checkpointing_kwargs(section) == {"use_reentrant": False, **expected}


def stated(world_size: int, **sections: Any) -> dict[str, Any]:
    """What must hold in a run of a recipe, without what was not said."""
    made = recipe(batch={"global_batch_size": 8, "micro_batch_size": 2}, **sections)
    state = expected_state(made, batch_layout(made, world_size), "AdamW", "sdpa")
    return {key: value for key, value in state.model_dump().items() if value is not None}


PLAIN = {
    **{"engine": "none", "world_size": 1, "sequence": 1, "context": 1, "tensor": 1, "expert": 1, "pipeline": 1},
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    **{
        "max_grad_norm": 1.0,
        "optimizer": "AdamW",
        "attention": "sdpa",
        "activation_checkpointing": "none",
        "mlp_tiles": 1,
    },
    **{"parameters": "whole", "gradients": "whole", "optimizer_state": "whole", "trained_dtype": "float32"},
    "quantization": "none",
    **{
        "not_updated": 0,
        "autocast": "bfloat16",
        "fp8_products": "none",
        "master_dtype": "float32",
        "moments_dtype": "float32",
    },
    "num_workers": 0,
}
ON_TWO = {"world_size": 2, "gradient_accumulation_steps": 2}
ZERO = {
    **{"engine": "deepspeed", "autocast": "none", "trained_dtype": "bfloat16", "reduce_dtype": "float32"},
    **{"offload_optimizer": "none", "offload_param": "none", "sharded_over": 1},
}
ZERO_ON_TWO = {**ZERO, **ON_TWO, "sharded_over": 2}
SHARDED = {"parameters": "sharded", "gradients": "sharded", "optimizer_state": "sharded"}


@pytest.mark.parametrize(
    ("world_size", "sections", "differs"),
    [
        (1, {}, {}),
        (1, {"tf32": False}, {"tf32": False}),
        (1, {"activation_checkpointing": {"mode": "full"}}, {"activation_checkpointing": "model"}),
        (1, {"activation_checkpointing": {"mode": "elementwise"}}, {"activation_checkpointing": "graphs"}),
        (1, {"activation_checkpointing": {"mlp_tiles": 4}}, {"mlp_tiles": 4}),
        (1, {"precision": "fp32"}, {"autocast": "none"}),
        (1, {"precision": "fp8"}, {"fp8_products": "tensorwise"}),
        *(
            (
                2,
                {"objective": "distillation", "strategy": {"name": "zero3"}, "distillation": {"teacher": teacher}},
                {**ZERO_ON_TWO, **SHARDED, "zero_stage": 3, "teacher_trained": 0, **stored},
            )
            for teacher, stored in (
                ({"path": "a/c"}, {"teacher_dtype": "bfloat16", "teacher_quantization": "none"}),
                ({"path": "a/c", "dtype": "fp32"}, {"teacher_dtype": "float32", "teacher_quantization": "none"}),
                ({"path": "a/c", "quantization": "nf4"}, {"teacher_dtype": "bfloat16", "teacher_quantization": "nf4"}),
            )
        ),
        (1, {"precision": "fp8_rowwise"}, {"fp8_products": "rowwise"}),
        (
            1,
            {"precision": "pure_fp8"},
            {
                **{"fp8_products": "tensorwise", "autocast": "none"},
                **dict.fromkeys(("trained_dtype", "master_dtype", "moments_dtype"), "bfloat16"),
            },
        ),
        (1, {"optimizer": {"name": "adamw_8bit"}}, {"moments_dtype": None}),
        (1, {"optimizer": {"name": "adafactor"}}, {"moments_dtype": None}),
        (
            1,
            {"optimizer": {"name": "galore_adamw_layerwise", "max_grad_norm": 0}},
            {"moments_dtype": None, "max_grad_norm": 0.0},
        ),
        (2, {}, {"engine": "ddp", **ON_TWO}),
        (1, {"strategy": {"name": "zero3"}}, {**ZERO, "zero_stage": 3}),
        (2, {"strategy": {"name": "zero1"}}, {**ZERO_ON_TWO, "zero_stage": 1, "optimizer_state": "sharded"}),
        (
            2,
            {"strategy": {"name": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"}},
            {**ZERO_ON_TWO, **SHARDED, "zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        ),
        (
            2,
            {"strategy": {"name": "fsdp", "sharding": "shard_grad_op", "sync_each_batch": True}},
            {
                **{"engine": "fsdp2", **ON_TWO, **SHARDED, "autocast": "none", "compute_dtype": "bfloat16"},
                **{"reduce_dtype": "float32", "offload_param": "none", "reshard_after_forward": False},
                "sync_each_batch": True,
            },
        ),
    ],
)
def test_the_state_that_a_recipe_asks_for(world_size: int, sections: dict[str, Any], differs: dict[str, Any]) -> None:
    wanted = {key: value for key, value in (PLAIN | differs).items() if value is not None}
    assert stated(world_size, **{"precision": "bf16", **sections}) == wanted


@pytest.mark.parametrize("mode", ["none", "elementwise", "full", "selective", "offload"])
def test_training_arguments_are_accepted_by_transformers(mode: str) -> None:
    from transformers import TrainingArguments

    made = recipe(precision="fp32", schedule={"max_steps": 2}, activation_checkpointing={"mode": mode})
    layout = batch_layout(made, 1)
    arguments = training_arguments(made, layout, run_length(made, 8, layout))
    built = TrainingArguments(use_cpu=True, output_dir="unset", **arguments)
    assert built.activation_checkpointing == (mode not in ("none", "elementwise"))


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
    pure, mixed, pure_fp8, fp8 = (
        deepspeed_config(recipe(strategy={"name": "zero2"}, precision=precision))
        for precision in ("pure_bf16", "bf16", "pure_fp8", "fp8")
    )
    assert (pure_fp8, fp8) == (pure, mixed)
    assert pure["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert pure["fp16"] == {"enabled": False} and "bf16_optimizer_states" not in mixed.get("bf16", {})
