"""What `extra` passes to the libraries, and what it says of the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import BASE, recipe_of, write
from toolkit.recipe import Problem, Recipe, RecipeError
from toolkit.recipe.rules import check, load_checked
from toolkit.recipe.rules.extra import extra_problems, own_key
from toolkit.recipe.show import with_origins

LORA, ZERO2, ZERO3 = "method.name=lora", "strategy.name=zero2", "strategy.name=zero3"
ARGUMENTS, OF_LORA, ENGINE = "extra.training_arguments", "extra.lora", "extra.deepspeed"
ZERO = f"{ENGINE}.zero_optimization"

REFUSED = [
    # Misspelt.
    ([f"{ARGUMENTS}.neftune_alpha=5"], ["unknown key", "did you mean `neftune_noise_alpha`"]),
    ([LORA, f"{OF_LORA}.bais=all"], ["unknown key", "did you mean `bias`"]),
    ([ZERO2, f"{ZERO}.parameter_alignmet=true"], ["did you mean `zero_optimization.parameter_alignment`"]),
    ([LORA, f"{OF_LORA}.neftune_noise_alpha=5"], ["did you mean `extra.training_arguments.neftune_noise_alpha`"]),
    # The recipe's own.
    ([f"{ARGUMENTS}.output_dir=x"], ["set output.dir"]),
    ([f"{ARGUMENTS}.per_device_train_batch_size=4"], ["set batch.micro_batch_size"]),
    ([f"{ARGUMENTS}.bf16=true"], ["set precision"]),
    ([f"{ARGUMENTS}.seed=1"], ["set seed"]),
    ([LORA, f"{OF_LORA}.r=4"], ["set method.r"]),
    ([LORA, f"{OF_LORA}.init_lora_weights=pissa"], ["set method.init_lora_weights"]),
    ([LORA, f"{OF_LORA}.eva_config={{tau: 0.9}}"], ["not computed by PEFT"]),
    ([ZERO2, f"{ZERO}.stage=3"], ["set strategy.name"]),
    ([ZERO3, f"{ZERO}.stage3_prefetch_bucket_size=4"], ["set strategy.prefetch_bucket_size"]),
    ([ZERO2, f"{ENGINE}.optimizer.params.lr=1"], ["set optimizer.name"]),
    ([ZERO2, f"{ENGINE}.train_batch_size=1"], ["set batch.global_batch_size"]),
    # What the toolkit's promises rest on.
    ([f"{ARGUMENTS}.remove_unused_columns=true"], ["before the Trainer sees them"]),
    ([f"{ARGUMENTS}.accelerator_config={{split_batches: true}}"], ["follows from the seed"]),
    ([f"{ARGUMENTS}.save_only_model=true"], ["all that a run needs to go on"]),
    ([LORA, f"{OF_LORA}.trainable_token_indices=[1]"], ["set model.new_tokens"]),
    ([ZERO2, f"{ZERO}.contiguous_gradients=false"], ["rest on"]),
    ([ZERO3, f"{ZERO}.stage3_module_granularity_threshold=9"], ["loses gradients", "leaf_module.classes names"]),
    ([ZERO2, f"{ZERO}.round_robin_gradients=true"], ["cannot be passed on", "as that of another"]),
    ([ZERO2, f"{ENGINE}.compile.deepcompile=true"], ["rest on"]),
    # Without effect.
    ([f"{OF_LORA}.bias=all"], ["would be ignored", "method.name=lora"]),
    ([f"{ENGINE}.wall_clock_breakdown=true"], ["would be ignored", "zero1, zero2 or zero3"]),
    ([ZERO2, f"{ENGINE}.fp16.loss_scale_window=9"], ["would be ignored", "precision=fp16"]),
    ([ZERO2, f"{ZERO}.offload_optimizer.buffer_count=9"], ["would be ignored", "zero2_offload"]),
    ([ZERO2, f"{ARGUMENTS}.ddp_bucket_cap_mb=9"], ["would be ignored", "strategy.name=ddp"]),
    ([f"{ARGUMENTS}.dataloader_prefetch_factor=9"], ["would be ignored", "data.num_workers=1"]),
    # Values.
    ([f"{ARGUMENTS}.neftune_noise_alpha=much"], ["a number or null"]),
    ([f"{ARGUMENTS}.ddp_bucket_cap_mb=true"], ["a whole number"]),
    ([LORA, f"{OF_LORA}.bias=lora"], ["none, all, lora_only", "did you mean `lora_only`"]),
    ([ZERO2, f"{ZERO}.parameter_alignment=1"], ["true or false"]),
    ([ZERO2, f"{ENGINE}.aio=1"], ["must be a section"]),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=lambda case: str(case[-1]).partition("=")[0][6:])
def test_what_cannot_be_passed_on_is_one_problem(mine: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_checked("mine", overrides)
    (problem,) = caught.value.problems
    assert overrides[-1].startswith(problem.path) and problem.where == "command line" and problem.hint
    text = " ".join(str(problem).split())
    assert all(word in text for word in words), text
    assert bool(problem.allowed) == (problem.what in ("unknown key", "is not valid"))


VALUES: list[tuple[str, str, str, list[Any], list[Any]]] = [
    # Part, key, what is allowed, values that fit, and values that do not.
    ("training_arguments", "ddp_timeout", "a whole number", [5], [5.5, "5", True, None, [5]]),
    ("training_arguments", "neftune_noise_alpha", "a number or null", [5, 0.5, None], ["5", True, {"a": 5}]),
    ("training_arguments", "logging_first_step", "true or false", [True, False], [1, 0, "yes", None]),
    ("training_arguments", "full_determinism", "true or false", [True], [1]),
    ("lora", "bias", "none, all, lora_only", ["none", "all", "lora_only"], ["lora", True, None]),
    ("lora", "exclude_modules", "a list or text or null", ["a", ["a"], None], [5, True, {"a": "b"}]),
    ("deepspeed", "wall_clock_breakdown", "true or false", [True], [1, "true"]),
]


@pytest.mark.parametrize(("part", "key", "allowed", "fitting", "wrong"), VALUES, ids=[row[1] for row in VALUES])
def test_a_value_is_of_the_type_that_its_library_takes(
    part: str, key: str, allowed: str, fitting: list[Any], wrong: list[Any]
) -> None:
    def problems(value: Any) -> list[Problem]:
        made = recipe_of("method.name=lora strategy.name=zero2")
        return list(extra_problems(made.with_values({f"extra.{part}": {key: value}}), {}))

    assert [value for value in fitting if problems(value)] == []
    for value in wrong:
        (problem,) = problems(value)
        assert problem.what == "is not valid" and sorted(problem.allowed.split(" or ")) == sorted(allowed.split(" or "))
        assert ("without quotes" in problem.hint) == ((isinstance(value, str) and part != "lora") or value == "none")


FROM_0, FROM_1 = ("a number from 0 on", [-5, -1e-9]), ("a whole number from 1 on", [0, -3])
INFINITE: list[Any] = [math.inf, math.nan]


@pytest.mark.parametrize(
    ("setting", "allowed", "fitting", "wrong"),
    [
        ("training_arguments.neftune_noise_alpha", FROM_0[0], [0, 5, 0.5, None], [*FROM_0[1], *INFINITE]),
        ("training_arguments.router_aux_loss_coef", FROM_0[0], [0, 0.01], [*FROM_0[1], *INFINITE]),
        ("training_arguments.ddp_timeout", FROM_1[0], [60], FROM_1[1]),
        ("training_arguments.ddp_bucket_cap_mb", FROM_1[0], [25, None], FROM_1[1]),
        ("training_arguments.torch_empty_cache_steps", FROM_1[0], [10, None], FROM_1[1]),
        ("training_arguments.dataloader_prefetch_factor", FROM_1[0], [2, None], FROM_1[1]),
        ("deepspeed.fp16.loss_scale", FROM_0[0], [0, 128.0], [-1, *INFINITE]),
        ("deepspeed.fp16.initial_scale_power", "a whole number from 0 to 64", [0, 16], [-1, 65]),
        ("deepspeed.fp16.loss_scale_window", FROM_1[0], [100], FROM_1[1]),
        ("deepspeed.fp16.hysteresis", FROM_1[0], [1, 2], FROM_1[1]),
        ("deepspeed.fp16.min_loss_scale", FROM_1[0], [1], FROM_1[1]),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(
    setting: str, allowed: str, fitting: list[Any], wrong: list[Any]
) -> None:
    part, _, key = setting.partition(".")
    engine = "strategy.name=zero2 precision=fp16" if part == "deepspeed" else "strategy.name=ddp data.num_workers=1"

    def problems(value: Any) -> list[Problem]:
        extra = {"fp16": {key.removeprefix("fp16."): value}} if part == "deepspeed" else {key: value}
        return list(extra_problems(recipe_of(engine).with_values({f"extra.{part}": extra}), {}))

    assert [value for value in fitting if problems(value)] == []
    for value in wrong:
        (problem,) = problems(value)
        assert (problem.path, problem.what, problem.allowed) == (f"extra.{setting}", "is not valid", allowed)


OWN_KEYS = {
    "training_arguments": """
        precision: bf16 fp16 bf16_full_eval fp16_full_eval
        activation_checkpointing.mode: activation_checkpointing_kwargs activation_offloading
        strategy.sharding: fsdp_config parallelism_config
        compile: torch_compile torch_compile_backend torch_compile_mode
        seed: data_seed
        logging.every_steps: logging_strategy
        evaluation.at_start: eval_on_start
        evaluation.every_steps: eval_delay
        evaluation.max_new_tokens: generation_max_length
        data.packing: eval_packing
        data.over_long: truncation_mode
        data.shuffle: shuffle_dataset
        batch.micro_batch_size: per_device_train_batch_size
        schedule.warmup_steps: warmup_steps
    """,
    "lora": """
        model.path: base_model_name_or_path
        objective: task_type
        model.new_tokens: trainable_token_indices
        method.r: r
        method.lora_alpha: lora_alpha
    """,
    "deepspeed": """
        batch.global_batch_size: train_batch_size gradient_accumulation_steps
        batch.micro_batch_size: train_micro_batch_size_per_gpu
        optimizer.max_grad_norm: gradient_clipping
        optimizer.name: optimizer optimizer.type optimizer.params.lr
        schedule.name: scheduler scheduler.type
        logging.every_steps: steps_per_print
        activation_checkpointing.mode: activation_checkpointing activation_checkpointing.partition_activations
        precision: bfloat16 fp16.enabled fp16.fp16_master_weights_and_grads bf16.enabled
        precision: bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
        logging.trackers: tensorboard wandb comet csv_monitor tensorboard.enabled
        strategy.reduce_dtype: communication_data_type data_types.grad_accum_dtype
        strategy.name: zero_optimization.stage
        strategy.offload_optimizer: zero_optimization.offload_optimizer.device
        strategy.offload_param: zero_optimization.offload_param.device
        strategy.nvme_path: zero_optimization.offload_param.nvme_path
        strategy.reduce_bucket_size: zero_optimization.reduce_bucket_size
        strategy.prefetch_bucket_size: zero_optimization.stage3_prefetch_bucket_size
    """,
}


@pytest.mark.parametrize("part", OWN_KEYS)
def test_a_setting_with_a_key_of_its_own_leads_to_it(part: str) -> None:
    for line in OWN_KEYS[part].strip().splitlines():
        ours, _, names = line.strip().partition(": ")
        assert {name: own_key(part, name) for name in names.split()} == dict.fromkeys(names.split(), ours)
    assert own_key("deepspeed", "seed") == own_key(part, "wall_clock_breakdown") == ""


@pytest.mark.parametrize(
    ("overrides", "cost"),
    [
        ([LORA, f"{OF_LORA}.bias=all", f"{OF_LORA}.exclude_modules=[lm_head]"], ""),
        ([f"{ARGUMENTS}.neftune_noise_alpha=5", f"{ARGUMENTS}.ddp_timeout=60"], ""),
        ([f"{ARGUMENTS}.dataloader_pin_memory=false"], "memory and time"),
        ([ZERO2, f"{ZERO}.use_multi_rank_bucket_allreduce=false"], "time"),
        (["strategy=zero2_offload", f"{ZERO}.offload_optimizer.buffer_count=9"], "memory"),
        ([ZERO2, "precision=fp16", f"{ENGINE}.fp16.loss_scale_window=9"], ""),
        ([ZERO3, f"{ZERO}.leaf_module.classes=[Block]"], "memory and time"),
    ],
)
def test_what_is_passed_on_says_what_the_plan_leaves_out(mine: Path, overrides: list[str], cost: str) -> None:
    warnings = [each.what for each in load_checked("mine", overrides).warnings if each.path.startswith("extra")]
    assert warnings == ([f"changes {cost}, which the plan does not count"] if cost else [])


# What is passed on, the setting under which nothing reads it, the one under which something does, and its key.
READ_BY: list[tuple[str, str, Any, dict[str, Any], dict[str, Any], str]] = [
    ("lora", "bias", "all", {}, {"method": {"name": "lora"}}, "method.name"),
    (
        *("lora", "layers_pattern", "layers", {"method": {"name": "lora"}}),
        *({"method": {"name": "lora", "layers_to_transform": [0]}}, "method.layers_to_transform"),
    ),
    ("deepspeed", "dump_state", True, {}, {"strategy": {"name": "zero1"}}, "strategy.name"),
    (
        *("deepspeed", "fp16.hysteresis", 2, {"strategy": {"name": "zero1"}, "precision": "bf16"}),
        *({"strategy": {"name": "zero1"}, "precision": "fp16"}, "precision"),
    ),
    (
        *("deepspeed", "bf16.immediate_grad_update", True, {"strategy": {"name": "zero1"}, "precision": "fp16"}),
        *({"strategy": {"name": "zero1"}, "precision": "bf16"}, "strategy.name=zero1 and precision=bf16"),
    ),
    (
        *("deepspeed", "bf16.immediate_grad_update", True, {"strategy": {"name": "zero2"}, "precision": "bf16"}),
        *({"strategy": {"name": "zero1"}, "precision": "bf16"}, "strategy.name=zero1"),
    ),
    *(
        ("deepspeed", f"zero_optimization.{key}", True, unread, {"strategy": {"name": "zero2"}}, "strategy.name=zero2")
        for key in ("parameter_alignment", "use_multi_rank_bucket_allreduce")
        for unread in ({"strategy": {"name": "zero3"}}, {"strategy": {"name": "zero1"}, "precision": "bf16"})
    ),
    *(
        (
            "deepspeed",
            f"zero_optimization.{key}",
            value,
            {"strategy": {"name": "zero2"}},
            {"strategy": {"name": "zero3"}},
            "strategy.name=zero3",
        )
        for key, value in (
            ("stage3_allgather_sequential", True),
            ("sub_group_size", 9),
            ("leaf_module.classes", ["Block"]),
            ("zero_hpz_partition_size", 2),
        )
    ),
    (
        *("deepspeed", "zero_optimization.offload_optimizer.buffer_count", 9, {"strategy": {"name": "zero2"}}),
        *({"strategy": {"name": "zero2", "offload_optimizer": "cpu"}}, "strategy=zero2_offload"),
    ),
    (
        *("deepspeed", "zero_optimization.offload_param.buffer_count", 9, {"strategy": {"name": "zero3"}}),
        *({"strategy": {"name": "zero3", "offload_param": "cpu"}}, "strategy=zero3_offload"),
    ),
    *(
        (
            *("deepspeed", "aio.block_size", 4096, {"strategy": {"name": "zero3", part: "cpu"}}),
            *({"strategy": {"name": "zero3", part: "nvme", "nvme_path": "/scratch"}}, "strategy=zero3_nvme"),
        )
        for part in ("offload_optimizer", "offload_param")
    ),
    (
        *("training_arguments", "ddp_find_unused_parameters", True, {"strategy": {"name": "fsdp"}}),
        *({"strategy": {"name": "single"}}, "strategy.name=ddp"),
    ),
    (
        *("training_arguments", "project", "mine", {"logging": {"trackers": ["wandb"]}}),
        *({"logging": {"trackers": ["trackio"]}}, "logging.trackers=[trackio]"),
    ),
    (
        *("training_arguments", "router_aux_loss_coef", 0.1, {"objective": "seq2seq"}),
        *({"objective": "language_modelling"}, "objective=sft"),
    ),
]


@pytest.mark.parametrize(("part", "key", "value", "unread", "read", "needs"), READ_BY, ids=[row[1] for row in READ_BY])
def test_what_nothing_reads_is_refused_and_passed_on_where_it_is_read(
    part: str, key: str, value: Any, unread: dict[str, Any], read: dict[str, Any], needs: str
) -> None:
    content: dict[str, Any] = {}
    *parents, name = key.split(".")
    section = content
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = value

    def problems(sections: dict[str, Any]) -> list[Any]:
        base = {"model": {"path": "a/b"}, "data": {"sources": ["rows.jsonl"]}, "extra": {part: content}}
        return list(extra_problems(Recipe.model_validate(base | sections), {}))

    (problem,) = problems(unread)
    assert (problem.path, problem.what) == (f"extra.{part}.{key}", "would be ignored")
    assert f"or set {needs}" in problem.hint
    assert problems(read) == []


def test_auto_keeps_to_the_strategies_that_read_what_is_passed_on(mine: Path) -> None:
    recipe = load_checked("mine", ["strategy.name=auto", f"{ENGINE}.dump_state=true"]).recipe
    assert check(recipe.with_values({"strategy.name": "ddp"})) and not check(
        recipe.with_values({"strategy.name": "zero1"})
    )


def test_values_are_shown_with_their_origin_and_those_of_the_environment_as_written(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_VARIABLE", "hunter2hunter2")
    variable = "${oc.env:MY_VARIABLE}"
    content: dict[str, Any] = {"training_arguments": {"project": variable, "neftune_noise_alpha": 5}}
    write("mine", f"{BASE}logging: {{trackers: [trackio]}}\nextra: {yaml.safe_dump(content, default_flow_style=True)}")
    loaded = load_checked("mine")
    assert loaded.recipe.extra.training_arguments["project"] == "hunter2hunter2"
    key = "training_arguments.project"
    assert loaded.extra == {key: variable, "training_arguments.neftune_noise_alpha": 5}
    text = with_origins(loaded)
    assert (
        "hunter2" not in text and yaml.safe_load(text)["extra"]["training_arguments"] == content["training_arguments"]
    )
    assert any("neftune_noise_alpha" in line and line.endswith("mine.yaml:3") for line in text.splitlines())
    with pytest.raises(RecipeError) as caught:
        load_checked("mine", [f"{ARGUMENTS}.neftune_noise_alpha='{variable}'"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("neftune_noise_alpha: 5", "write extra: {training_arguments: {neftune_noise_alpha: 5}}"),
        ("method: {bias: all}", "write extra: {lora: {bias: all}}"),
        ("wall_clock_breakdown: true", "write extra: {deepspeed: {wall_clock_breakdown: true}}"),
    ],
)
def test_a_setting_in_another_place_points_to_extra(mine: Path, line: str, change: str) -> None:
    write("mine", f"{BASE}{line}\n")
    with pytest.raises(RecipeError) as caught:
        load_checked("mine")
    assert change in caught.value.problems[0].hint
