"""Keys and values of other tools: each is answered with what can be written here."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import write
from toolkit.recipe import Recipe, RecipeError, load
from toolkit.recipe.dotted import inline, typed
from toolkit.recipe.files import options, shipped_recipes
from toolkit.recipe.other_tools import habit, translated_keys, translation
from toolkit.recipe.rules import load_checked
from toolkit.recipe.schema import leaf_paths, sections


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
    logging_steps wandb_project wandb_name use_wandb output_dir deepspeed fsdp fsdp_config seed special_tokens
    pretraining_dataset use_mlflow use_tensorboard eval_max_new_tokens cut_cross_entropy
"""
LLAMA_FACTORY = """
    model_name_or_path template flash_attn quantization_bit stage do_train do_eval finetuning_type lora_rank lora_alpha
    lora_dropout lora_target additional_target use_dora use_rslora dataset dataset_dir eval_dataset cutoff_len val_size
    max_samples packing mask_history train_on_prompt overwrite_output_dir preprocessing_num_workers output_dir run_name
    logging_steps save_steps report_to per_device_train_batch_size per_device_eval_batch_size predict_with_generate
    gradient_accumulation_steps learning_rate num_train_epochs lr_scheduler_type warmup_ratio bf16 eval_steps
    pissa_init disable_gradient_checkpointing enable_thinking freeze_trainable_layers galore_rank rope_scaling
"""
TRANSFORMERS = """
    model_name_or_path model_revision tokenizer_name torch_dtype attn_implementation dataset_name train_file
    validation_file block_size max_source_length max_seq_length max_length max_train_samples max_eval_samples
    preprocessing_num_workers dataset_text_field dataset_num_proc assistant_only_loss completion_only_loss use_peft
    lora_task_type bnb_4bit_quant_type bnb_4bit_use_double_quant optim data_seed evaluation_strategy push_to_hub
    remove_unused_columns label_smoothing_factor generation_num_beams neftune_noise_alpha use_cache
    validation_split_percentage val_max_target_length
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


@pytest.mark.parametrize("line", [*OURS.strip().splitlines(), *LISTS.strip().splitlines()])
def test_names_that_people_type_have_one_here(line: str) -> None:
    ours, _, names = line.strip().partition(": ")
    for name in names.split():
        answers = [translation(name, given, inline(given)) for given in _typical(name)]
        assert any(answer.startswith(f"write {ours}: ") for answer in answers), name
        assert translated_keys()[name] == [ours] * ("." in ours), name


def test_keys_that_several_values_stand_for_lead_to_all_of_them() -> None:
    keys = {"load_in_4bit": ["method.quantization"], "stage": [], "adapter": []}
    keys |= {
        "bnb_4bit_use_double_quant": ["method.double_quantization"],
        "fsdp": ["strategy.name", "strategy.sharding"],
    }
    assert {key: translated_keys()[key] for key in keys} == keys


OBJECTIVES = (
    "sft",
    "language_modelling",
    "dpo",
    "cpo",
    "orpo",
    "simpo",
    "kto",
    "grpo",
    "rloo",
    "distillation",
    "reward",
)
LORA = "write method: {name: lora, quantization: "
ANSWERS: list[tuple[str, Any, str]] = [
    *(("load_in_4bit", True, LORA + "nf4}"), ("load_in_8bit", True, LORA + "int8}")),
    # Axolotl's files state both, of which one is true.
    ("load_in_4bit", False, "remove it, or write method.quantization: none if load_in_8bit is false too"),
    ("load_in_8bit", False, "remove it, or write method.quantization: none if load_in_4bit is false too"),
    ("enable_thinking", False, "write data.chat_template_kwargs: {enable_thinking: false}"),
    ("kto_desirable_weight", 0.2, "write preference.desirable_weight: 0.2"),
    *(("save_strategy", "epoch", "write checkpoint.save_epochs: 1"), ("eval_strategy", "no", "remove it")),
    ("save_strategy", "no", "remove it: none is saved unless the recipe says when"),
    *(("loss_type", "dapo", "write policy.loss: dapo"), ("random_state", 3407, "write seed: 3407")),
    *(("debug", None, "remove it: it is empty"), ("_target_", "torch.optim.Adam", "")),
    ("lora", {"r": 8, "alpha": 16}, "write method.r: 8; write method.lora_alpha: 16"),
    (
        *("trainer", {"type": "x", "lr": 1e-4, "optimizer": "paged_adamw_8bit", "seed": 1}),
        "write optimizer.learning_rate: 0.0001; write optimizer.name: paged_adamw_8bit; write seed: 1; leave out type",
    ),
    ("distributed", {"strategy": "fsdp2", "path": "x"}, "write strategy.name: fsdp; leave out path"),
    *(("quantization_bit", 4, LORA + "nf4}"), ("quantization_bit", 8, LORA + "int8}")),
    ("bnb_4bit_quant_type", "nf4", "write method.quantization: nf4"),
    *(("adapter", "lora", "write method: {name: lora}"), ("adapter", "qlora", LORA + "nf4}")),
    *(("finetuning_type", "lora", "write method.name: lora"), ("finetuning_type", "full", "write method.name: full")),
    *(("use_peft", True, "write method.name: lora"), ("peft", False, "write method.name: full")),
    *(("stage", "sft", "write objective: sft"), ("stage", "pt", "write objective: language_modelling")),
    ("stage", "x", "write " + " or ".join(f"objective: {each}" for each in OBJECTIVES)),
    ("gradient_checkpointing", True, "write activation_checkpointing.mode: full"),
    ("gradient_checkpointing", False, "write activation_checkpointing.mode: none"),
    ("gradient_checkpointing", "offload", "write activation_checkpointing.mode: offload"),
    *(("bf16", True, "write precision: bf16"), ("bf16", "auto", "write precision: auto")),
    *(
        ("bf16", False, "remove it, or write precision: fp32 if fp16 is false too"),
        ("fp16", True, "write precision: fp16"),
    ),
    *(
        ("fp16", False, "remove it, or write precision: fp32 if bf16 is false too"),
        ("mixed_precision", "no", "write precision: fp32"),
    ),
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
        ("log_with", "mlflow", "write logging.trackers: [mlflow]"),
    ),
    *(
        ("torch_dtype", "float32", "write model.dtype: fp32"),
        ("attn_impl", "flex_attention", "write model.attention: flex"),
    ),
    *(("torch_compile", True, "write compile: layers"), ("torch_compile", False, "write compile: 'off'")),
    ("neftune_noise_alpha", 5, "write extra: {training_arguments: {neftune_noise_alpha: 5}}"),
    ("zero_stage", 3, "write strategy.name: zero3"),
    ("deepspeed", "a", "set strategy.name: zero1, zero2 or zero3, with its offload_optimizer and offload_param"),
    ("dataset_text_field", "body", "set data.columns: {text: body}"),
    (
        *("co2_g_kwh", 380),
        "write co2_g_kwh of a device or its node into recipes/_hardware.yaml, see docs/hardware.md",
    ),
]


@pytest.mark.parametrize(("key", "given", "answer"), ANSWERS, ids=str)
def test_a_value_of_another_tool_has_its_name_here(key: str, given: Any, answer: str) -> None:
    assert translation(key, given, given if isinstance(given, str) else inline(given)) == answer


# What their own pages and example files say, by our key, and by theirs where it has none of ours.
TYPICAL: dict[str, list[Any]] = {
    "batch": [4, "auto"],
    "schedule.num_epochs": [3, 0.5, -1],
    "schedule.name": ["cosine", "constant_with_warmup", "one_cycle", "rex", "WarmupLR", "reduce_lr_on_plateau"],
    "schedule.args": [{"num_cycles": 0.5}, "num_cycles=0.5"],
    "optimizer": [0.9, 1e-8, 1, 0],
    "optimizer.name": ["adamw_hf", "adamw_torch", "adamw_8bit", "ao_adamw_4bit", "came_pytorch", "muon", "adafactor"],
    "optimizer.args": ["rank=64"],
    "method": [16, 0.05, 0],
    "method.target_modules": ["all", "all-linear", "q_proj,v_proj", ["q_proj"]],
    "method.modules_to_save": [["embed_tokens"], "embed_tokens,lm_head"],
    "model.path": ["openai-community/gpt2"],
    "model.revision": ["main"],
    "model.tokenizer": ["openai-community/gpt2"],
    "model.adapter": ["runs/first/final"],
    "model.chat_template": ["llama3", "qwen", "chatml", "tokenizer_default", "{{ messages }}", "mine.jinja"],
    "model.new_tokens": [["<a>"], "<a>,<b>", 4],
    "model.attention": [
        *("fa2", "fa3", "disabled", "auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "paged|sdpa"),
        *("kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3"),
    ],
    "model.dtype": ["bfloat16", "float16", "float32", "auto", "half", "torch.bfloat16"],
    "data": [100],
    "data.sources": [
        "a/b",
        "alpaca_en_demo,identity",
        ["a/b"],
        [{"path": "a/b", "type": "alpaca"}, {"path": "c.jsonl", "type": "chat_template", "field_messages": "m"}],
        [{"path": "a/b", "type": {"field_instruction": "q"}, "split": "train", "ds_type": "json"}],
        [{"path": "a/b", "type": "completion", "name": "en"}, {"path": "a/b", "type": "chat_template.default"}],
    ],
    "data.eval_split": [0.05, 200, 0, 0.0, "validation", 1.5],
    "data.over_long": ["drop", "truncate", "raise"],
    "data.train_on": [["assistant"], ["gpt", "human"], "assistant", "gpt", "all"],
    "checkpoint.save_steps": [500, 0.1],
    "checkpoint.resume": ["runs/first/checkpoints/step-3"],
    "evaluation": [100, 0.1, 0],
    "logging.every_steps": [10, 0.1],
    "logging.trackers": ["none", "all", "wandb", ["wandb", "tensorboard"], "swanlab", "wandb,tensorboard"],
    "output": ["runs/mine"],
    "output.name": ["first"],
    "data_seed": [0, 3407],
    "random_seed": [0, 3407],
    "activation_checkpointing.mode": ["full", "offload", "unsloth"],
    "method.quantization": ["int4", "4bit", "8bit"],
    "stage": ["sft", "pt", "dpo", "kto", "rm", "ppo"],
    "adapter": ["lora", "qlora", "llama-adapter"],
    "finetuning_type": ["lora", "full", "freeze", "oft"],
    "mixed_precision": ["bf16", "fp16", "no", "fp8"],
    "bnb_4bit_compute_dtype": ["bfloat16", "torch.float16", "float32"],
    "bnb_4bit_quant_type": ["nf4", "fp4"],
    "quantization_bit": [4, 8, 2],
    "bf16": ["auto", "full"],
    "gradient_checkpointing": ["offload", "unsloth"],
    "zero_stage": [0, 1, 2, 3],
    "saves_per_epoch": [1, 4, 0],
    "deepspeed": ["deepspeed_configs/zero3.json"],
    "fsdp": ["full_shard auto_wrap", ["full_shard"], {"reshard_after_forward": True}],
}
SEQ2SEQ = ["objective=seq2seq", "model=blenderbot_400m", "seq_len=64"]
CONTEXT = {
    "method": ["method=lora"],
    "method.double_quantization": ["method=qlora"],
    "method.quantization": ["method=lora", "model=a/b"],
    "precision: fp8": ["method=full"],
    "model.revision": ["model=qwen3_0_6b"],
    "checkpoint.keep_best": ["data.eval_split=0.1", "evaluation.every_steps=5"],
    "schedule.early_stopping_patience": ["data.eval_split=0.1", "evaluation.every_steps=5"],
    "evaluation.num_beams": [
        "evaluation.generation_metrics=true",
        "objective=seq2seq",
        "model=blenderbot_400m",
        "seq_len=64",
    ],
    "evaluation.generation_metrics": ["objective=seq2seq", "model=blenderbot_400m", "seq_len=64"],
    "model.attention": ["precision=bf16"],
    "model.dtype": ["precision=bf16"],
    "model.dtype: fp16": ["precision=fp16"],
}
"""Section or key of ours to what it is written beside."""


def _typical(key: str) -> list[Any]:
    ours = dict.fromkeys([key, *translated_keys()[key][:1]])
    found = [TYPICAL.get(name, TYPICAL.get(name.partition(".")[0], [])) for name in ours]
    return [True, False, *(value for values in found for value in values)]


@pytest.mark.parametrize("key", translated_keys())
def test_what_is_said_to_be_written_can_be(mine: Path, key: str) -> None:
    """Every answer with one change, in a file and typed."""
    Path("runs/first/checkpoints/step-3").mkdir(parents=True)
    Path("runs/first/final").mkdir()
    Path("mine.jinja").write_text("{{ messages }}")
    Path("runs/first/final/adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}'
    )
    for given in _typical(key):
        answer = translation(key, given, given if isinstance(given, str) else inline(given))
        assert answer
        if answer.startswith("write ") and " or " not in answer:
            _applied(answer)


def _applied(answer: str) -> None:
    ((path, value),) = yaml.safe_load(answer.removeprefix("write ")).items()
    places = (f"{path}: {value}", path, path.partition(".")[0])
    context = next((CONTEXT[place] for place in places if place in CONTEXT), [])
    said = typed(answer).removeprefix("write ")
    (override,) = shlex.split(said)
    assert override.startswith(f"{path}="), said
    by_word = load_checked("smollm2_135m_lora_demo", [*context, override]).recipe
    section, _, key = path.partition(".")
    write("mine", f"defaults: smollm2_135m_lora_demo\n{inline({section: {key: value} if key else value})[1:-1]}\n")
    assert load_checked("mine", context).recipe == by_word, answer


@pytest.mark.parametrize(
    ("key", "given", "answer"),
    [
        ("pipeline_parallel_size", 2, "write parallel.pipeline: 2"),
        ("expert_parallel_size", 4, "write parallel.expert: 4"),
        ("group_by_length", True, "remove it: rows of like length share a micro-batch anyway"),
        ("group_by_length", False, "remove it"),
    ],
)
def test_what_exists_here_is_not_denied(key: str, given: Any, answer: str) -> None:
    assert translation(key, given, str(given)) == answer
    assert "parallel.pipeline" in habit("strategy", "pp")


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("lora_target=*_proj", "method.target_modules=['*_proj']"),
        ('lora_target="@a, *b"', "method.target_modules=['@a', '*b']"),
        ("val_dataset=@x", "data.eval_sources=['@x']"),
        ("neftune_noise_alpha=*x", "extra={training_arguments: {neftune_noise_alpha: '*x'}}"),
        ("batch.path=@x", ""),
    ],
)
def test_what_is_typed_without_being_yaml_is_quoted(mine: Path, argument: str, written: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_checked("mine", [argument])
    (problem,) = caught.value.problems
    assert written in " ".join(shlex.split(problem.hint)), problem.hint


def test_an_empty_value_says_nothing() -> None:
    for key in translated_keys():
        for empty in (None, "", [], {}):
            assert translation(key, empty, "") == "remove it: it is empty"


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
        # Ours, with values that ours do not take.
        ("max_steps: -1", "remove it: epochs count where it is not set"),
        ("warmup_steps: 0.03", "schedule.warmup_ratio to a share of them"),
        ("save_steps: 0.25", "a share of them is not taken"),
        ("chat_template: llama3", "remove it: the tokenizer's own template is taken"),
        ("target_modules: 'q_proj,v_proj'", "write method.target_modules: [q_proj, v_proj]"),
        ("dtype:", "remove it: it is empty"),
    ],
)
def test_a_key_of_another_tool(mine: Path, line: str, change: str) -> None:
    write("mine", f"model: a/b\ndata: [rows.jsonl]\n{line}\n")
    with pytest.raises(RecipeError) as caught:
        load("mine")
    (problem,) = caught.value.problems
    assert problem.what == "unknown key" and change in problem.hint


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("warmup_steps=0.03", "schedule.warmup_ratio to a share of them"),
        ("save_steps=0.5", "a share of them is not taken"),
        ("max_steps=-1", "remove it: epochs count where it is not set"),
    ],
)
def test_a_value_of_another_tool_for_a_key_of_ours(override: str, change: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", [override])
    assert change in caught.value.problems[0].hint


@pytest.mark.parametrize("group", ["method", "strategy"])
def test_an_option_that_is_taken_for_a_name_is_written_one_level_up(mine: Path, group: str) -> None:
    hinted = 0
    for option in options(group, [shipped_recipes()]):
        try:
            load("smollm2_135m_lora_demo", [f"{group}.name={option}"])
        except RecipeError as error:
            hinted += 1
            assert error.problems[0].hint == f"write {group}={option}"
    assert hinted >= 6
