"""Every key of the schema with a wrong type, an empty value, a variable and a control character: one clear problem."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from recipes import write
from toolkit.recipe import Problem, Recipe, RecipeError, load
from toolkit.recipe.other_tools import translated_keys, translation
from toolkit.recipe.schema import Source, leaf_paths, sections

SECRET = "hunter2hunter2"
VARIABLE = "${oc.env:MY_VARIABLE}"


def _keys() -> Iterator[tuple[str, Any]]:
    for name, field in Recipe.model_fields.items():
        inner = sections()[name].model_fields if name in sections() else {}
        yield from ((f"{name}.{key}", each) for key, each in inner.items() if key != "sources")
        if not inner:
            yield name, field
    yield from ((f"data.sources.0.{key}", field) for key, field in Source.model_fields.items())


def _takes(annotation: Any) -> set[type | str]:
    """What fits an annotation: types, and `choice` for one of several words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _takes(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return set().union(*map(_takes, get_args(annotation)))
    return {"choice"} if origin is Literal else {origin or annotation}


KEYS = {key: _takes(field.annotation) for key, field in _keys()}
"""Dotted key of every value to what it takes."""


def problems(values: dict[str, Any], place: str = "") -> dict[str, Problem]:
    """The problems of a recipe with these values at their keys, by key; one for each."""
    content: dict[str, Any] = {}
    for path, value in values.items():
        section, _, key = path.partition(".")
        if path.startswith("data.sources.0."):
            source = content.setdefault("data", {}).setdefault("sources", [{"path": "rows.jsonl"}])[0]
            source[path.rpartition(".")[2]] = value
        elif key:
            content.setdefault(section, {})[key] = value
        else:
            content[section] = value
    content.setdefault("model", {}).setdefault("path", "a/b")
    content.setdefault("data", {}).setdefault("sources", ["rows.jsonl"])
    write("mine", "".join(f"{name}: {json.dumps(part)}\n" for name, part in content.items()))
    with pytest.raises(RecipeError) as caught:
        load("mine")
    result: dict[str, Problem] = {}
    for problem in caught.value.problems:
        key = next(key for key in values if f"{problem.path}.".startswith(f"{key}."))
        assert key not in result, f"two problems: {result.get(key)}\n{problem}"
        assert problem.where.startswith("recipes/mine.yaml:") and problem.what and problem.hint, problem
        assert all(isinstance(part, str) for part in vars(problem).values()), problem
        assert SECRET not in str(problem) and "\x07" not in str(problem)
        result[key] = problem
    return result


@pytest.mark.parametrize("value", [[[1]], {"a b": {"c": 1}}, VARIABLE], ids=["list", "mapping", "variable"])
def test_a_wrong_type_is_one_problem(mine: Path, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", SECRET)
    keys = [key for key, takes in KEYS.items() if value != VARIABLE or str not in takes]
    found = problems(dict.fromkeys(keys, value))
    assert sorted(found) == sorted(keys)


def test_an_empty_value_is_one_problem(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "")
    keys = [key for key in KEYS if key != "description"]
    for empty in ("", VARIABLE):
        assert sorted(problems(dict.fromkeys(keys, empty))) == sorted(keys)
    required = [key for key, takes in KEYS.items() if types.NoneType not in takes]
    assert sorted(problems(dict.fromkeys(required, None))) == sorted(required)
    inside: dict[type | str, Callable[[], Any]] = {list: lambda: [""], dict: lambda: {"a": ""}}
    holders = {key: make() for kind, make in inside.items() for key, takes in KEYS.items() if kind in takes}
    assert sorted(problems(holders)) == sorted(holders)


def test_a_control_character_is_one_problem(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "a\x07b")
    for value in ("a\x07b", VARIABLE):
        assert sorted(problems(dict.fromkeys(KEYS, value))) == sorted(KEYS)
    lines = [key for key, takes in KEYS.items() if str in takes and key != "description"]
    assert sorted(problems(dict.fromkeys(lines, "two\nlines"))) == sorted(lines)
    write("mine", "model: gpt2\ndata: alpaca\n'k\x07ey': 1\n")
    with pytest.raises(RecipeError, match=r"mine.yaml:3") as caught:
        load("mine")
    assert "\x07" not in str(caught.value)


PATHS = [
    "output.dir",
    "strategy.nvme_path",
    "checkpoint.resume",
    "model.tokenizer",
    "model.path",
    "data.sources.0.path",
]


@pytest.mark.parametrize("key", PATHS)
def test_a_variable_of_the_shell_in_a_path_is_refused_and_the_home_filled_in(mine: Path, key: str) -> None:
    assert problems({key: "$HOME/x"})[key].hint == f"write {key}: ${{oc.env:HOME}}/x"
    changes = {"data.sources.0.path": "data=~/x"}
    recipe = load("smollm2_135m_lora_demo", [changes.get(key, f"{key}=~/x")]).recipe
    value = recipe.data.sources[0].path if key.startswith("data") else attrgetter(key)(recipe)
    assert value == str(Path.home() / "x")


def test_a_number_is_shown_as_it_was_written(mine: Path) -> None:
    for text in ("83e4012", "0x1f", "1_000", "off"):
        write("mine", f"model:\n  path: a/b\n  revision: {text}\ndata: [rows.jsonl]\n")
        with pytest.raises(RecipeError) as caught:
            load("mine")
        (problem,) = caught.value.problems
        assert problem.given.startswith(text) and problem.hint == f"quote it: model.revision: '{text}'"
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", ["model.revision=83e4012"])
    (problem,) = caught.value.problems
    assert (problem.where, problem.hint) == ("command line", """quote it: model.revision='"83e4012"'""")


def test_every_key_of_another_tool_leads_to_one_of_ours() -> None:
    names = {key for paths in leaf_paths().values() for key in paths} | set(Recipe.model_fields)
    assert len(translated_keys()) > 100
    for key, ours in translated_keys().items():
        assert set(ours) <= names, key
        assert key not in Recipe.model_fields
        assert translation(key, 4, "4")


# The keys of their own example files and reference pages.
AXOLOTL = """
    base_model revision_of_model tokenizer_config chat_template_jinja adapter load_in_4bit load_in_8bit lora_r
    lora_alpha lora_dropout lora_target_modules lora_target_linear lora_modules_to_save peft_use_dora peft_use_rslora
    datasets test_datasets val_set_size dataset_processes dataset_exact_deduplication sequence_len sample_packing
    pad_to_sequence_len train_on_inputs group_by_length micro_batch_size eval_batch_size gradient_accumulation_steps
    num_epochs max_steps learning_rate lr_scheduler lr_scheduler_kwargs warmup_steps warmup_ratio optimizer optim_args
    adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm bf16 fp16 tf32 gradient_checkpointing flash_attention
    xformers_attention sdp_attention torch_compile evals_per_epoch saves_per_epoch eval_strategy save_strategy
    save_steps save_total_limit resume_from_checkpoint auto_resume_from_checkpoints early_stopping_patience
    logging_steps wandb_project wandb_name use_wandb output_dir deepspeed fsdp fsdp_config seed
"""
LLAMA_FACTORY = """
    model_name_or_path template flash_attn quantization_bit stage do_train do_eval finetuning_type lora_rank lora_alpha
    lora_dropout lora_target additional_target use_dora use_rslora dataset dataset_dir eval_dataset cutoff_len val_size
    max_samples packing mask_history train_on_prompt overwrite_output_dir preprocessing_num_workers output_dir run_name
    logging_steps save_steps report_to per_device_train_batch_size per_device_eval_batch_size predict_with_generate
    gradient_accumulation_steps learning_rate num_train_epochs lr_scheduler_type warmup_ratio bf16 eval_steps
"""
TRANSFORMERS = """
    model_name_or_path model_revision tokenizer_name torch_dtype attn_implementation dataset_name train_file
    validation_file block_size max_source_length max_seq_length max_length max_train_samples max_eval_samples
    preprocessing_num_workers dataset_text_field dataset_num_proc assistant_only_loss completion_only_loss use_peft
    lora_task_type bnb_4bit_quant_type bnb_4bit_use_double_quant optim data_seed evaluation_strategy push_to_hub
    remove_unused_columns label_smoothing_factor generation_num_beams neftune_noise_alpha use_cache
"""


@pytest.mark.parametrize("keys", [AXOLOTL, LLAMA_FACTORY, TRANSFORMERS], ids=["Axolotl", "LLaMA-Factory", "TRL"])
def test_every_key_of_the_examples_of_other_tools_is_ours_or_answered(keys: str) -> None:
    silent = {"lora_task_type"}  # Follows from the model.
    unknown = {key for key in keys.split() if key not in leaf_paths() and not translation(key, "x", "x")}
    assert unknown - set(Recipe.model_fields) - set(sections()) <= silent


OURS = """
    batch.micro_batch_size: per_gpu_train_batch_size train_micro_batch_size_per_gpu micro_batch
    batch.global_batch_size: train_batch_size
    batch.seq_len: max_seq_len model_max_length
    schedule.num_epochs: epochs n_epochs max_epochs
    schedule.name: scheduler
    optimizer.name: optimizer_name
    optimizer.eps: adam_eps
    optimizer.max_grad_norm: gradient_clipping gradient_clip_val grad_clip clip_grad_norm
    method.r: rank
    method.lora_dropout: lora_dropout_rate
    method.use_dora: lora_use_dora
    method.use_rslora: lora_use_rslora
    model.path: model_name pretrained_model_name_or_path model_id
    model.tokenizer: tokenizer_name_or_path
    model.chat_template: chat_template_path
    data.eval_split: validation_split test_size
    checkpoint.save_steps: save_interval
    evaluation.every_steps: eval_interval
    evaluation.num_beams: eval_num_beams
    logging.every_steps: log_interval
    output.name: experiment_name
    seed: random_seed
    activation_checkpointing.mode: gradient_checkpointing_mode
"""
LISTS = """
    model.new_tokens: new_special_tokens additional_special_tokens add_special_tokens tokens
    data.sources: dataset_path train_data
    logging.trackers: log_with
"""


@pytest.mark.parametrize(
    ("line", "value"),
    [(line, value) for lines, value in ((OURS, "4"), (LISTS, "[4]")) for line in lines.strip().splitlines()],
)
def test_names_that_people_type_have_one_here(line: str, value: str) -> None:
    ours, _, names = line.strip().partition(": ")
    for name in names.split():
        assert translation(name, "4", "4") == f"write {ours}: {value}", name
        assert translated_keys()[name] == [ours] * ("." in ours), name


def test_keys_that_several_values_stand_for_lead_to_all_of_them() -> None:
    keys = {"load_in_4bit": ["method.quantization"], "stage": [], "adapter": []}
    keys |= {
        "bnb_4bit_use_double_quant": ["method.double_quantization"] * 2,
        "fsdp": ["strategy.name", "strategy.sharding"],
    }
    assert {key: translated_keys()[key] for key in keys} == keys


LORA = "write method: {name: lora, quantization: "
ANSWERS: list[tuple[str, Any, str]] = [
    *(("load_in_4bit", True, LORA + "nf4}"), ("load_in_4bit", False, "write method.quantization: none")),
    *(("load_in_8bit", True, LORA + "int8}"), ("load_in_8bit", False, "write method.quantization: none")),
    *(("quantization_bit", 4, LORA + "nf4}"), ("quantization_bit", 8, LORA + "int8}")),
    ("bnb_4bit_quant_type", "nf4", "write method.quantization: nf4"),
    *(("adapter", "lora", "write method: {name: lora}"), ("adapter", "qlora", LORA + "nf4}")),
    *(("finetuning_type", "lora", "write method.name: lora"), ("finetuning_type", "full", "write method.name: full")),
    *(("use_peft", True, "write method.name: lora"), ("peft", False, "write method.name: full")),
    *(("stage", "sft", "write objective: sft"), ("stage", "pt", "write objective: language_modelling")),
    ("stage", "dpo", "write objective: sft or objective: language_modelling"),
    ("gradient_checkpointing", True, "write activation_checkpointing.mode: full"),
    ("gradient_checkpointing", False, "write activation_checkpointing.mode: none"),
    ("gradient_checkpointing", "offload", "write activation_checkpointing.mode: offload"),
    *(("bf16", True, "write precision: bf16"), ("bf16", "auto", "write precision: bf16")),
    *(("bf16", False, "write precision: fp32"), ("fp16", True, "write precision: fp16")),
    *(("fp16", False, "write precision: fp32"), ("mixed_precision", "no", "write precision: fp32")),
    *(("mixed_precision", "bf16", "write precision: bf16"), ("mixed_precision", "fp16", "write precision: fp16")),
    *(("train_on_inputs", True, "write data.train_on: all"), ("train_on_inputs", False, "write data.train_on: auto")),
    *(("train_on_prompt", True, "write data.train_on: all"), ("train_on_prompt", False, "write data.train_on: auto")),
    ("assistant_only_loss", True, "write data.train_on: assistant"),
    *(
        ("assistant_only_loss", False, "write data.train_on: all"),
        ("sdp_attention", True, "write model.attention: sdpa"),
    ),
    ("completion_only_loss", True, "write data.train_on: completion"),
    ("completion_only_loss", False, "write data.train_on: all"),
    ("mask_history", True, "write data.train_on: last_assistant"),
    ("mask_history", False, "write data.train_on: assistant"),
    ("flash_attention", True, "write model.attention: flash_attention_2"),
    ("flash_attention", False, "write model.attention: auto"),
    ("xformers_attention", True, "write model.attention: sdpa"),
    *(
        ("bnb_4bit_use_double_quant", on, f"write method.double_quantization: {str(on).lower()}")
        for on in (True, False)
    ),
    *(
        ("lora_target", "all", "write method.target_modules: all-linear"),
        ("torch_dtype", "float16", "write model.dtype: fp16"),
    ),
    *(
        ("lora_target", "q_proj", "write method.target_modules: [q_proj]"),
        ("log_with", "x", "write logging.trackers: [x]"),
    ),
    *(
        ("torch_dtype", "float32", "write model.dtype: fp32"),
        ("attn_impl", "flex_attention", "write model.attention: flex"),
    ),
    *(("torch_compile", True, "write compile: layers"), ("torch_compile", False, "write compile: 'off'")),
    ("neftune_noise_alpha", 5, "write extra: {training_arguments: {neftune_noise_alpha: 5}}"),
    ("zero_stage", 3, "set strategy.name: zero3"),
    ("deepspeed", "a", "set strategy.name: zero1, zero2 or zero3, with its offload_optimizer and offload_param"),
    ("dataset_text_field", "body", "set data.columns: {text: body}"),
    (
        *("co2_g_kwh", 380),
        "write co2_g_kwh of a device or its node into recipes/_hardware.yaml, see docs/hardware.md",
    ),
]


@pytest.mark.parametrize(("key", "given", "answer"), ANSWERS, ids=str)
def test_a_value_of_another_tool_has_its_name_here(key: str, given: Any, answer: str) -> None:
    assert translation(key, given, str(given)) == answer


def test_every_answer_names_a_key_that_takes_what_it_says() -> None:
    places = KEYS | {"data.sources": {list}}
    for key in translated_keys():
        answer = translation(key, "x", "x")
        is_written = answer.startswith("write ") and ":" in answer
        for change in answer.removeprefix("write ").split(" or ") if is_written else ():
            ((ours, value),) = yaml.safe_load(change).items()
            if isinstance(value, dict):  # A section with several keys.
                assert set(value) <= set(sections()[ours].model_fields), answer
                Recipe.model_validate({"model": {"path": "a"}, "data": {"sources": [{"path": "b"}]}, ours: value})
                continue
            assert ours in places, f"{key}: {answer}"
            assert list in places[ours] if isinstance(value, list) else places[ours] != {list}, answer


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("load_in_4bit: true", "write method: {name: lora, quantization: nf4}"),
        ("per_device_train_batch_size: 4", "write batch.micro_batch_size: 4"),
        ("gradient_accumulation_steps: 8", "batch.global_batch_size = micro-batch x 8"),
        ("sequence_len: 4096", "write batch.seq_len: 4096"),
        ("num_train_epochs: 3", "write schedule.num_epochs: 3"),
        ("lora_r: 8", "write method.r: 8"),
        ("report_to: wandb", "write logging.trackers: [wandb]"),
        ("torch_dtype: bfloat16", "write model.dtype: bf16"),
        ("adapter: qlora", "write method: {name: lora, quantization: nf4}"),
        ("optimizer: {adam_beta2: 0.95}", "write optimizer.beta2: 0.95"),
    ],
)
def test_a_key_of_another_tool(mine: Path, line: str, change: str) -> None:
    write("mine", f"model: a/b\ndata: [rows.jsonl]\n{line}\n")
    with pytest.raises(RecipeError) as caught:
        load("mine")
    (problem,) = caught.value.problems
    assert problem.what == "unknown key" and change in problem.hint
