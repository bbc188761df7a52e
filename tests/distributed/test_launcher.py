"""What a launcher says against what the recipe says, with environments that accelerate itself makes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from harness import ROOT, RUN
from harness import environment as shell
from ranks import Ranks
from small import RECIPE

from toolkit.common import UserError
from toolkit.distributed.config_files import render
from toolkit.distributed.environment import environment
from toolkit.distributed.launcher import Launch, check_launch
from toolkit.distributed.layout import World
from toolkit.recipe import Recipe, shipped_recipes

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
STRATEGIES = {
    file.stem: file for file in sorted((shipped_recipes() / "strategy").glob("*.yaml")) if file.stem != "auto"
}
# Launchers that say less than the recipe; what they leave out is the recipe's to say. Those without an engine say
# nothing about it.
LESS = {
    *((plain, name) for plain in ("single", "ddp") for name in STRATEGIES),
    ("fsdp", "fsdp_hybrid"),
    ("fsdp_hybrid", "fsdp"),
}


def recipe(strategy: str | dict[str, Any] = "ddp", **sections: Any) -> Recipe:
    if isinstance(strategy, str):
        strategy = yaml.safe_load(STRATEGIES[strategy].read_text().replace("???", "/scratch"))
    base = {"model": {"path": "m"}, "data": {"sources": ["d.jsonl"]}, "strategy": strategy}
    return Recipe.model_validate({**base, **sections})


def launched(*flags: str) -> dict[str, str]:
    """The environment that `accelerate launch FLAGS` gives to the first of its processes."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    with warnings.catch_warnings(), patch.dict(os.environ):
        warnings.simplefilter("ignore")
        args = launch.launch_command_parser().parse_args([*flags, "--main_process_port", "0", "script.py"])
        args, defaults, precision = launch._validate_launch_command(args)
        if args.use_deepspeed:
            fields = list(defaults.deepspeed_config) if defaults else []
            args.deepspeed_fields_from_accelerate_config = ",".join(fields + ["mixed_precision"] * precision)
            made = prepare.prepare_deepspeed_cmd_env(args)[1]
        elif args.use_fsdp or args.multi_gpu or args.use_megatron_lm:
            made = prepare.prepare_multi_gpu_env(args)
        else:
            made = prepare.prepare_simple_launcher_cmd_env(args)[1]
    return {key: value for key, value in made.items() if os.environ.get(key) != value}


def refused(made: Recipe, variables: dict[str, str], world: World | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        check_launch(made, world or World(), variables)
    return caught.value


@pytest.fixture(scope="module")
def every_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all rendered files."""
    folder = tmp_path_factory.mktemp("rendered")
    for path, text in render([shipped_recipes()]).items():
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def rendered(every_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the current folder."""
    monkeypatch.chdir(every_file)
    return every_file


@pytest.mark.parametrize("config", STRATEGIES)
def test_rendered_config_agrees_with_its_strategy_and_no_other(config: str, rendered: Path) -> None:
    processes = [] if config == "single" else ["--num_processes", "2"]
    variables = launched("--config_file", f"accelerate_configs/{config}.yaml", *processes)
    for name in STRATEGIES:
        world = World(0, 0, 2, 1) if name == "fsdp_hybrid" else World()
        if name == config or (config, name) in LESS:
            check_launch(recipe(name), world, variables)
        else:
            error = refused(recipe(name), variables, world)
            assert "the recipe says" in str(error) and "the launcher says" in str(error)


@pytest.mark.parametrize(
    ("config", "strategy", "change"),
    [
        ("zero3", "zero2", "set strategy.name=zero3, or"),
        ("zero2", "zero3", "set strategy.name=zero2, or"),
        ("zero2", "zero2_offload", "set strategy.offload_optimizer=none, or"),
        ("fsdp", "fsdp_grad_op", "set strategy.sharding=full_shard, or"),
        ("fsdp_grad_op", "fsdp", "set strategy.sharding=shard_grad_op, or"),
    ],
)
def test_file_of_another_strategy_is_one_difference(config: str, strategy: str, change: str, rendered: Path) -> None:
    error = refused(
        recipe(strategy), launched("--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", "2")
    )
    assert str(error).count("the launcher says") == 1
    assert error.change.startswith(change)


@pytest.mark.parametrize("config", ["zero2", "zero3_offload", "fsdp", "fsdp_grad_op", "ddp"])
def test_what_a_strategy_does_not_decide_is_left_to_the_recipe(config: str, rendered: Path) -> None:
    variables = launched("--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", "2")
    for sections in (
        {"precision": "pure_bf16"},
        {"precision": "pure_fp8"},
        {"precision": "fp16"},
        {"activation_checkpointing": {"mode": "full"}},
        {"activation_checkpointing": {"mode": "offload"}},
        {"optimizer": {"max_grad_norm": 0.3}},
        {"batch": {"global_batch_size": 64, "micro_batch_size": 2}},
        {"method": {"name": "lora", "quantization": "nf4"}},
    ):
        check_launch(recipe(config, **sections), World(), variables)


@pytest.mark.parametrize(
    ("flags", "made", "words"),
    [
        # Unsaid values of DeepSpeed are not exported, so they are the recipe's.
        (["--use_deepspeed"], recipe("zero1"), []),
        (["--use_deepspeed"], recipe("zero3_offload"), []),
        (["--use_deepspeed", "--zero_stage", "3", "--zero3_init_flag", "true"], recipe("zero3"), []),
        (["--use_deepspeed", "--zero_stage", "2", "--gradient_clipping", "1.0"], recipe("zero2"), []),
        (["--use_deepspeed"], recipe("fsdp"), ["strategy.name=fsdp", "DeepSpeed"]),
        (
            ["--use_deepspeed", "--zero_stage", "2"],
            recipe("zero3"),
            ["strategy.name=zero3", "--zero_stage 2", "set strategy.name=zero2"],
        ),
        (
            ["--use_deepspeed", "--offload_optimizer_device", "cpu", "--gradient_clipping", "0.5"],
            recipe("zero2"),
            [
                "differ in 2 settings",
                "strategy.offload_optimizer=none, the launcher says --offload_optimizer_device cpu",
                "optimizer.max_grad_norm=1.0, the launcher says --gradient_clipping 0.5",
                "set strategy.offload_optimizer=cpu optimizer.max_grad_norm=0.5",
            ],
        ),
        (
            ["--use_deepspeed", "--gradient_accumulation_steps", "4"],
            recipe("zero2", batch={"global_batch_size": 8, "micro_batch_size": 1}),
            ["gradient_accumulation_steps=8", "--gradient_accumulation_steps 4"],
        ),
        # FSDP's are exported with their defaults. Version 1 is one, so it is named as such.
        (["--use_fsdp"], recipe("fsdp"), ["FSDP2", "--fsdp_version 1 (accelerate's default)"]),
        (["--use_fsdp", "--fsdp_version", "2"], recipe("fsdp"), []),
        (["--use_fsdp", "--fsdp_version", "2"], recipe("zero2"), ["strategy.name=zero2", "FSDP2"]),
        (
            ["--use_fsdp", "--fsdp_version", "2", "--fsdp_offload_params", "true"],
            recipe("fsdp"),
            ["strategy.offload_param=none", "--fsdp_offload_params true", "set strategy.offload_param=cpu"],
        ),
        (
            ["--use_fsdp", "--fsdp_version", "2"],
            recipe("fsdp_grad_op"),
            ["strategy.reshard_after_forward=false", "--fsdp_reshard_after_forward true (accelerate's default)"],
        ),
        (
            ["--use_fsdp", "--fsdp_version", "2", "--fsdp_sharding_strategy", "SHARD_GRAD_OP"],
            recipe("fsdp"),
            ["strategy.sharding=full_shard", "set strategy.sharding=shard_grad_op"],
        ),
        (
            ["--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", "--parallelism_config_cp_size", "2"],
            recipe("fsdp"),
            ["parallel.context=1", "--parallelism_config_cp_size 2"],
        ),
        (["--use_megatron_lm"], recipe(), ["Megatron-LM"]),
        (["--mixed_precision", "bf16"], recipe(precision="fp16"), ["precision=fp16", "set precision=bf16"]),
        (["--dynamo_backend", "inductor"], recipe(), ["--dynamo_backend inductor"]),
    ],
)
def test_flags_of_accelerate_launch(flags: list[str], made: Recipe, words: list[str]) -> None:
    variables = launched("--num_processes", "1", "--num_machines", "1", *flags)
    if not words:
        check_launch(made, World(), variables)
        return
    message = str(refused(made, variables))
    assert [word for word in words if word not in message] == [], message
    assert "toolkit launch" in message


def launch_of(made: Recipe, *flags: str) -> Launch:
    return check_launch(made, World(), launched("--num_processes", "1", "--num_machines", "1", *flags))


@pytest.mark.parametrize(
    ("flags", "strategy", "ignored"),
    [
        (["--zero3_save_16bit_model", "false"], "zero3", ["--zero3_save_16bit_model false"]),
        (["--zero3_init_flag", "false"], "zero3", ["--zero3_init_flag false"]),
        (["--zero3_init_flag", "true"], "zero2", []),
        (["--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"], "fsdp", ["--fsdp_auto_wrap_policy SIZE_BASED_WRAP"]),
        (
            ["--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer"],
            "fsdp",
            ["--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer"],
        ),
        (
            ["--fsdp_state_dict_type", "FULL_STATE_DICT", "--fsdp_activation_checkpointing", "true"],
            "fsdp",
            ["--fsdp_state_dict_type FULL_STATE_DICT", "--fsdp_activation_checkpointing true"],
        ),
        (
            ["--fsdp_backward_prefetch", "BACKWARD_PRE", "--fsdp_use_orig_params", "false"],
            "fsdp",
            ["--fsdp_backward_prefetch BACKWARD_PRE", "--fsdp_use_orig_params false"],
        ),
    ],
)
def test_flags_that_train_the_same_are_ignored_in_one_line(flags: list[str], strategy: str, ignored: list[str]) -> None:
    engine = ["--use_fsdp", "--fsdp_version", "2"] if strategy == "fsdp" else ["--use_deepspeed"]
    launch = launch_of(recipe(strategy), *engine, *flags)
    assert launch.ignored == tuple(ignored)
    assert launch.lines() == [f"ignored, the recipe decides: {', '.join(ignored)}"] * bool(ignored)


def test_classes_of_experts_are_taken_over_where_they_mean_something() -> None:
    flags = ["--use_deepspeed", "--deepspeed_moe_layer_cls_names", "Block,Other"]
    taken_over = {"zero_optimization.leaf_module.classes": ["Block", "Other"]}
    assert launch_of(recipe("zero3"), *flags).taken_over == taken_over
    assert launch_of(recipe("zero2"), *flags).taken_over == {}


def test_parallelism_config_is_compared_with_the_layout_of_the_processes() -> None:
    flags = ["--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", "--parallelism_config_dp_shard_size", "4"]
    variables = launched("--num_processes", "8", "--parallelism_config_dp_replicate_size", "2", *flags)
    check_launch(recipe("fsdp_hybrid"), World(0, 0, 8, 4), variables)
    assert "dp_replicate_size=4" in str(refused(recipe("fsdp_hybrid"), variables, World(0, 0, 8, 2)))
    assert "dp_replicate_size=1" in str(refused(recipe("fsdp"), variables, World(0, 0, 8, 4)))


@pytest.mark.parametrize(("size", "way"), [("tp_size", "tensor"), ("cp_size", "context"), ("sp_size", "sequence")])
def test_parallelism_config_may_say_what_the_recipe_divides(size: str, way: str) -> None:
    def variables(shards: int) -> dict[str, str]:
        flags = ["--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", f"--parallelism_config_{size}", "2"]
        return launched("--num_processes", "8", *flags, "--parallelism_config_dp_shard_size", str(shards))

    alone, world = recipe("fsdp"), World(0, 0, 8, 8)
    check_launch(alone.with_values({f"parallel.{way}": 2}), world, variables(4))
    error = refused(alone.with_values({f"parallel.{way}": 4}), variables(2), world)
    assert f"parallel.{way}=4, the launcher says --parallelism_config_{size} 2" in str(error)
    # Of a recipe that divides nothing the launcher would have each row or layer on two processes.
    assert f"set parallel.{way}=2" in refused(alone, variables(8), world).change


def test_deepspeed_file_that_is_not_there() -> None:
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "no/such.json"}
    assert "no/such.json cannot be read" in str(refused(recipe("zero2"), variables))


def test_following_the_launcher_is_offered_only_where_it_suffices() -> None:
    flags = ["--num_processes", "1", "--use_fsdp", "--fsdp_version", "2", "--fsdp_reshard_after_forward", "true"]
    offloads = launched(*flags, "--fsdp_offload_params", "true")
    assert "set strategy.offload_param=cpu, or" in refused(recipe("fsdp"), offloads).change
    compiles = launched(*flags, "--fsdp_offload_params", "true", "--dynamo_backend", "inductor")
    assert "set " not in refused(recipe("fsdp"), compiles).change


def test_places_where_a_launcher_gets_its_settings_from_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    config = tmp_path / "cache" / "accelerate" / "default_config.yaml"
    for file in (config, tmp_path / ".deepspeed_env", tmp_path / "home" / ".deepspeed_env"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    said = {"ACCELERATE_MIXED_PRECISION": "fp16", "HF_HOME": str(tmp_path / "cache")}
    change = refused(recipe(precision="bf16"), said).change
    flags = "the flags and --config_file of accelerate launch"
    assert change.endswith(f"leave it out of {flags}, {config}, .deepspeed_env, {tmp_path / 'home' / '.deepspeed_env'}")
    config.unlink()
    moved = {**said, "XDG_CACHE_HOME": str(tmp_path)}
    del moved["HF_HOME"]
    elsewhere = tmp_path / "huggingface" / "accelerate" / "default_config.yaml"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.touch()
    assert f"{flags}, {elsewhere}, " in refused(recipe(precision="bf16"), moved).change


def test_flags_and_file_are_told_together(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_accumulation_steps": 99, "steps_per_print": 5}')
    said = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file), "ACCELERATE_GRADIENT_CLIPPING": "0.5"}
    what = refused(recipe("zero2"), said).what
    assert what.startswith("recipe and launcher differ in 2 settings\n")
    assert "--gradient_clipping 0.5" in what and f"gradient_accumulation_steps=99 ({file})" in what
    assert check_launch(recipe("ddp"), World(), {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) == Launch(
        (), {}, str(file)
    )


def test_processes_that_do_not_divide_into_groups_of_parameters_are_refused(tmp_path: Path) -> None:
    """DeepSpeed asserts it only when the model is loaded; a group of more processes than there are is one of all."""
    file = tmp_path / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}')
    by_file = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    by_recipe = recipe("zero3", extra={"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 4}}})
    for processes, made, variables in itertools.product((2, 4, 6, 8), (by_recipe, recipe("zero3")), ({}, by_file)):
        made, world = made.with_values({"batch.global_batch_size": 24}), World(0, 0, processes, processes)
        if processes == 6 and (made.extra.deepspeed or variables):
            error = refused(made, variables, world)
            assert "6 processes do not divide into groups of 4" in str(error) and "1, 2, 3, 6" in str(error.change)
        else:
            check_launch(made, world, variables)


def test_variables_left_in_a_shell_are_named_to_be_unset() -> None:
    error = refused(recipe("fsdp"), {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_VERSION": "1"})
    assert "unset FSDP_OFFLOAD_PARAMS FSDP_VERSION" in error.change
    assert "unset ACCELERATE_USE_FSDP" in refused(recipe("ddp"), {"ACCELERATE_USE_FSDP": "true"}).change
    # They mean nothing without an engine, and are taken away.
    check_launch(recipe("ddp"), World(), {"FSDP_OFFLOAD_PARAMS": "true"})
    assert environment(recipe("ddp"), World(), {"FSDP_OFFLOAD_PARAMS": "true"})["FSDP_OFFLOAD_PARAMS"] is None


@pytest.mark.parametrize("config", ["zero3", "fsdp_offload", "ddp"])
def test_only_the_recipe_is_left_in_the_environment(config: str, rendered: Path) -> None:
    before = launched("--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", "2")
    changes = environment(recipe(config), World(), before)
    after = {key: value for key, value in (before | changes).items() if value is not None}
    prefixes = ("ACCELERATE_USE", "ACCELERATE_DEEPSPEED", "ACCELERATE_CONFIG", "FSDP", "PARALLELISM")
    engine = {key: value for key, value in after.items() if key.startswith(prefixes)}
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }
    assert engine == (expected if config == "fsdp_offload" else {})


def test_launches_that_cannot_work_are_refused() -> None:
    # accelerate's launcher for one process, which announces a rendezvous to those it does not start.
    single = launched("--num_processes", "2", "--num_machines", "1", "--cpu")
    assert "asked for several processes and started one" in refused(recipe(), single).what
    check_launch(recipe(), World(), launched("--num_processes", "1", "--num_machines", "1", "--cpu"))
    assert "without MASTER_ADDR" in refused(recipe(), {"WORLD_SIZE": "2", "RANK": "0"}, World(0, 0, 2, 2)).what
    assert "does not divide into 7 processes" in refused(recipe(), {}, World(0, 0, 7, 7)).what
    assert "hybrid_shard" in refused(recipe("fsdp_hybrid"), {}, World(0, 0, 2, 2)).what


SLURM = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[03-05,9],login"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            World(5, 1, 8, 4, "gpu03", 23456),
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"},
            World(2, 0, 4, 2, "gpu03", 23456),
        ),
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_LOCALID": "0",
                "SLURM_NTASKS": "2",
                "SLURM_TASKS_PER_NODE": "1,1",
                "SLURM_STEP_NODELIST": "rack[1-2]n[07,9]",
            },
            World(1, 0, 2, 1, "rack1n07", 23456),
        ),
        # Of one node Slurm need not say how many each has, nor of an old one who is the first.
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NTASKS": "4"}, World(2, 2, 4, 4, "gpu03", 23456)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "7"}, World(0, 0, 1, 1, "gpu03", 23463)),
        # The launcher that srun started has set its own.
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}
            | {"LOCAL_WORLD_SIZE": "8"},
            World(9, 1, 16, 8),
        ),
        # A batch script and an interactive shell: the job's variables, but no task of its own.
        ({"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, World()),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
            World(0, 0, 1, 1, "gpu03", 23456),
        ),
    ],
)
def test_world_of_srun(variables: dict[str, str], expected: World) -> None:
    assert World.from_environment(SLURM | variables) == expected


def test_shell_inside_an_allocation_is_no_rank() -> None:
    shell = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0"}
    assert World.from_environment(shell) == World()


def test_tasks_of_srun_get_what_torch_reads() -> None:
    tasks = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    world = World.from_environment(SLURM | tasks)
    made = environment(recipe(), world, SLURM | tasks)
    ranks = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert made.items() >= (ranks | {"MASTER_ADDR": "gpu03", "MASTER_PORT": "23456"}).items()
    after = SLURM | tasks | {key: value for key, value in made.items() if value is not None}
    assert World.from_environment(after) == World(5, 1, 8, 4)
    with pytest.raises(UserError, match="unequal numbers of processes per node: 3, 2"):
        World.from_environment(SLURM | tasks | {"SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2"})


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"RANK": "0"}, "RANK is set without LOCAL_RANK and WORLD_SIZE"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set without RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "RANK and WORLD_SIZE are set without LOCAL_RANK"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "contradict each other"),
        ({"RANK": "a", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "cannot be read"),
    ],
)
def test_stale_ranks_are_refused(variables: dict[str, str], word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        World.from_environment(variables)
    assert "unset" in caught.value.change


def test_platform_that_announces_one_process_is_understood() -> None:
    assert World.from_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0"}) == World()


def test_offloaded_optimizer_gets_the_cores_that_launchers_withhold() -> None:
    cores = len(os.sched_getaffinity(0))
    torchrun = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
    for world in (World(0, 0, 1, 1), World(0, 0, 2, 2)):
        made = environment(recipe("zero2_offload"), world, torchrun)
        assert made["OMP_NUM_THREADS"] == str(max(1, cores // world.local_world_size))
    # Said by the user: nothing but a launcher says 1 unasked.
    for said in ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"}, {"OMP_NUM_THREADS": "1"}):
        assert "OMP_NUM_THREADS" not in environment(recipe("zero2_offload"), World(), said)


def test_users_own_values_stay_and_a_left_over_rendezvous_does_not() -> None:
    mine = {"TOKENIZERS_PARALLELISM": "true", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    made = environment(recipe("zero2"), World(), mine)
    assert made["TOKENIZERS_PARALLELISM"] == "true"
    assert made["MASTER_ADDR"] == "127.0.0.1" and made["MASTER_PORT"] != "1" and made["RANK"] == "0"
    assert environment(recipe("ddp"), World(), {"ACCELERATE_USE_CPU": "True"})["CUDA_VISIBLE_DEVICES"] == ""


VERDICT = """
import os
import sys
from pathlib import Path
import yaml
from toolkit.common import UserError
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import World
from toolkit.recipe import Recipe
world = World.from_environment()
for name in sys.argv[1:]:
    strategy = yaml.safe_load(Path(f"recipes/strategy/{name}.yaml").read_text())
    recipe = Recipe.model_validate({"model": {"path": "m"}, "data": {"sources": ["d"]}, "strategy": strategy})
    try:
        check_launch(recipe, world, os.environ)
        verdict = "agrees"
    except UserError as error:
        verdict = f"refused: {error.what}"
    if world.rank == 0:
        print(f"VERDICT {name} on {world.world_size}: {verdict}")
assert not {"torch", "transformers", "deepspeed"} & set(sys.modules)
"""


@pytest.mark.parametrize("config", ["ddp", "zero2", "fsdp"])
def test_committed_configs_under_a_real_launcher(config: str, tmp_path: Path, ranks: Ranks) -> None:
    script = tmp_path / "verdict.py"
    script.write_text(VERDICT)
    names = ["zero2", "zero3", "fsdp", "fsdp_grad_op"]
    said = ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", "2", "--main_process_port", "0"]
    done = ranks.run(ROOT, *said, str(script), *names, entry="accelerate_launch")
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("VERDICT")]
    assert len(verdicts) == len(names), done.stderr[-2000:]
    for name, line in zip(names, verdicts, strict=True):
        assert ("agrees" in line) == (config in ("ddp", name)), line
        assert f"{name} on 2" in line


DIVIDED = """
import os
from toolkit.common import UserError
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import World
from toolkit.recipe import load
world = World.from_environment()
for size in (2, 1):
    try:
        check_launch(load("mine", [f"parallel.tensor={size}", "micro_batch_size=1"]).recipe, world, os.environ)
        said = "agrees"
    except UserError as error:
        said = error.what
    if world.rank == 0:
        print("VERDICT", size, said)
"""


def test_the_config_of_a_recipe_that_divides_layers_under_a_real_launcher(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "recipes").mkdir()
    divided = RECIPE + "strategy: fsdp\nparallel: {tensor: 2}\n"
    (tmp_path / "recipes" / "mine.yaml").write_text(divided)
    (tmp_path / "recipes" / "broken.yaml").write_text("model: [")
    subprocess.run([sys.executable, "-m", "toolkit", "render"], cwd=tmp_path, capture_output=True, check=True)
    script = tmp_path / "verdict.py"
    script.write_text(DIVIDED)
    said = ["--config_file", "accelerate_configs/mine.yaml", "--num_processes", "4", "--main_process_port", "0"]
    done = ranks.run(tmp_path, *said, str(script), entry="accelerate_launch")
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("VERDICT")]
    assert len(verdicts) == 2, done.stderr[-2000:]
    agrees, refused = verdicts
    assert agrees == "VERDICT 2 agrees"
    assert "parallel.tensor=1, the launcher says --parallelism_config_tp_size 2" in refused


def test_default_config_that_says_something_else_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "home" / "accelerate" / "default_config.yaml"
    config.parent.mkdir(parents=True)
    said = {"distributed_type": "FSDP", "mixed_precision": "fp16", "num_processes": 1, "fsdp_config": {}}
    config.write_text(yaml.safe_dump(said))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "small.yaml").write_text(RECIPE)
    env = shell() | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*ACCELERATE, "--main_process_port", "0", str(RUN), "recipe=small"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "precision=fp32, the launcher says --mixed_precision fp16" in done.stderr
    assert "strategy.name=ddp, the launcher says FSDP1" in done.stderr
    assert str(config) in done.stderr
    assert not (tmp_path / "runs").exists()
