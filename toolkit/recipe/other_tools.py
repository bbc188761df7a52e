"""What the keys of other tools are called in a recipe: those of Transformers, TRL, Axolotl and LLaMA-Factory.

Nearest spelling finds none of them. A table costs nothing where no key is wrong, and a converter of whole files would
have to know what those tools do with each.
"""

from __future__ import annotations

import re
from typing import Any

from toolkit.recipe.libraries import PASSED

_SAME = {
    "batch.micro_batch_size": (
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu"),
        "micro_batch",
    ),
    "batch.global_batch_size": ("train_batch_size",),
    "evaluation.batch_size": ("per_device_eval_batch_size", "eval_batch_size"),
    "batch.seq_len": (
        *(
            "sequence_len",
            "max_seq_length",
            "max_seq_len",
            "max_length",
            "cutoff_len",
            "model_max_length",
            "block_size",
        ),
        "max_source_length",
    ),
    "schedule.num_epochs": ("num_train_epochs", "epochs", "n_epochs", "max_epochs"),
    "schedule.name": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "schedule.args": ("lr_scheduler_kwargs",),
    "optimizer.name": ("optim", "optimizer_name"),
    "optimizer.args": ("optim_args",),
    "optimizer.beta1": ("adam_beta1",),
    "optimizer.beta2": ("adam_beta2",),
    "optimizer.eps": ("adam_epsilon", "adam_eps"),
    "optimizer.max_grad_norm": ("gradient_clipping", "gradient_clip_val", "grad_clip", "clip_grad_norm"),
    "method.r": ("lora_r", "lora_rank", "rank"),
    "method.lora_dropout": ("lora_dropout_rate",),
    "method.target_modules": ("lora_target_modules", "lora_target"),
    "method.modules_to_save": ("lora_modules_to_save", "additional_target"),
    "method.use_dora": ("peft_use_dora", "lora_use_dora"),
    "method.use_rslora": ("peft_use_rslora", "lora_use_rslora"),
    "model.path": ("model_name_or_path", "base_model", "model_name", "pretrained_model_name_or_path", "model_id"),
    "model.revision": ("model_revision", "revision_of_model"),
    "model.tokenizer": ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_config"),
    "model.chat_template": ("template", "chat_template_jinja", "chat_template_path"),
    "model.new_tokens": ("new_special_tokens", "additional_special_tokens", "add_special_tokens", "tokens"),
    "model.attention": ("attn_implementation", "flash_attn", "attn_impl"),
    "model.dtype": ("torch_dtype",),
    "data.sources": ("datasets", "dataset", "dataset_name", "train_file", "dataset_path", "train_data"),
    "data.eval_sources": ("test_datasets", "eval_dataset", "validation_file"),
    "data.eval_split": ("val_set_size", "val_size", "validation_split", "test_size"),
    "data.packing": ("sample_packing",),
    "data.deduplicate": ("dataset_exact_deduplication",),
    "data.max_samples": ("max_train_samples",),
    "data.eval_max_samples": ("max_eval_samples",),
    "data.num_workers": ("dataloader_num_workers", "num_dataloader_workers"),
    "data.num_proc": ("dataset_num_proc", "preprocessing_num_workers", "dataset_processes"),
    "checkpoint.save_steps": ("save_interval",),
    "checkpoint.resume": ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
    "evaluation.every_steps": ("eval_steps", "eval_interval"),
    "evaluation.num_beams": ("generation_num_beams", "eval_num_beams"),
    "evaluation.generation_metrics": ("predict_with_generate",),
    "logging.every_steps": ("logging_steps", "log_interval"),
    "logging.trackers": ("report_to", "log_with"),
    "output.dir": ("output_dir",),
    "output.name": ("run_name", "wandb_name", "experiment_name"),
    "seed": ("data_seed", "random_seed"),
    "activation_checkpointing.mode": ("gradient_checkpointing_mode",),
}
"""A key of ours to those that mean the same and take the same value."""

_LISTS = (
    "logging.trackers",
    "model.new_tokens",
    "data.sources",
    "data.eval_sources",
    "method.modules_to_save",
    "method.target_modules",
)
_VALUES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "flex_attention": "flex", "all": "all-linear"}
_OTHERWISE: dict[str, dict[Any, str]] = {
    "load_in_4bit": {True: "method: {name: lora, quantization: nf4}", False: "method.quantization: none"},
    "load_in_8bit": {True: "method: {name: lora, quantization: int8}", False: "method.quantization: none"},
    "quantization_bit": {4: "method: {name: lora, quantization: nf4}", 8: "method: {name: lora, quantization: int8}"},
    "bnb_4bit_quant_type": {"nf4": "method.quantization: nf4"},
    "bnb_4bit_use_double_quant": {True: "method.double_quantization: true", False: "method.double_quantization: false"},
    "adapter": {"lora": "method: {name: lora}", "qlora": "method: {name: lora, quantization: nf4}"},
    "finetuning_type": {"lora": "method.name: lora", "full": "method.name: full"},
    "use_peft": {True: "method.name: lora", False: "method.name: full"},
    "peft": {True: "method.name: lora", False: "method.name: full"},
    "stage": {"sft": "objective: sft", "pt": "objective: language_modelling"},
    "gradient_checkpointing": {
        **{True: "activation_checkpointing.mode: full", False: "activation_checkpointing.mode: none"},
        "offload": "activation_checkpointing.mode: offload",
    },
    "bf16": {True: "precision: bf16", False: "precision: fp32", "auto": "precision: bf16"},
    "fp16": {True: "precision: fp16", False: "precision: fp32"},
    "mixed_precision": {"bf16": "precision: bf16", "fp16": "precision: fp16", "no": "precision: fp32"},
    "train_on_inputs": {True: "data.train_on: all", False: "data.train_on: auto"},
    "train_on_prompt": {True: "data.train_on: all", False: "data.train_on: auto"},
    "assistant_only_loss": {True: "data.train_on: assistant", False: "data.train_on: all"},
    "completion_only_loss": {True: "data.train_on: completion", False: "data.train_on: all"},
    "mask_history": {True: "data.train_on: last_assistant", False: "data.train_on: assistant"},
    "torch_compile": {True: "compile: layers", False: "compile: 'off'"},
    "flash_attention": {True: "model.attention: flash_attention_2", False: "model.attention: auto"},
    "xformers_attention": {True: "model.attention: sdpa"},
    "sdp_attention": {True: "model.attention: sdpa"},
}
"""Keys whose values have other names in a recipe. Values that are not listed are only told the place."""

_ADVICE = {
    "gradient_accumulation_steps": "set batch.global_batch_size = micro-batch x {given} x number of processes",
    "deepspeed": "set strategy.name: zero1, zero2 or zero3, with its offload_optimizer and offload_param",
    "zero_stage": "set strategy.name: zero{given}",
    "fsdp": "set strategy.name: fsdp, and strategy.sharding for what is sharded",
    "fsdp_config": "set strategy.name: fsdp, and strategy.sharding for what is sharded",
    "early_stopping_patience": "remove it: there is no early stopping",
    "save_strategy": "set checkpoint.save_steps or checkpoint.save_epochs",
    "saves_per_epoch": "set checkpoint.save_epochs: 1 / {given}",
    "evals_per_epoch": "set evaluation.every_steps",
    "eval_strategy": "set evaluation.every_steps, and data.eval_split for held-out rows",
    "evaluation_strategy": "set evaluation.every_steps, and data.eval_split for held-out rows",
    "do_eval": "set data.eval_split for held-out rows",
    "do_train": "remove it: a recipe always trains",
    "group_by_length": "set data.packing: true, which leaves less padding",
    "pad_to_sequence_len": "remove it: rows are padded to the longest of their micro-batch",
    "remove_unused_columns": "remove it: columns that no format has are not read",
    "wandb_project": "set logging.trackers: [wandb], and the environment variable WANDB_PROJECT={given}",
    "use_wandb": "set logging.trackers: [wandb]",
    "overwrite_output_dir": "set checkpoint.resume: never for a new run folder",
    "lora_target_linear": "set method.target_modules: all-linear",
    "dataset_text_field": "set data.columns: {{text: {given}}}",
    "dataset_dir": "write the folder into data.sources",
    "label_smoothing_factor": "remove it: label smoothing is not supported",
    "push_to_hub": "remove it; upload the folder `final` of the run with `huggingface-cli upload`",
    "use_cache": "remove it: caches are for generating, and are off while training",
}
"""Keys that have no counterpart of their own."""

_OF_HARDWARE = ("co2_g_kwh", "ram_gib", "network_gbit_s", "power_w", "memory_gib", "tflops", "bandwidth_gb_s")

_PLACES = {other: ours for ours, others in _SAME.items() for other in others}


def translation(key: str, given: Any, text: str) -> str:
    """What to write instead of another tool's key; empty for a key that none of them has.

    Args:
        key: Its last part.
        given: Its value.
        text: The value as it was written.
    """
    if key in _OF_HARDWARE:
        return f"write {key} of a device or its node into recipes/_hardware.yaml, see docs/hardware.md"
    if key in _ADVICE:
        return _ADVICE[key].format(given=text)
    if key in _PLACES:
        place, text = _PLACES[key], _VALUES.get(text, text)
        return f"write {place}: " + (
            f"[{text}]" if place in _LISTS and isinstance(given, str) and "all" not in text else text
        )
    if key in _OTHERWISE:
        values = _OTHERWISE[key]
        plain = given if isinstance(given, bool | int | str) else None
        if plain in values:
            return f"write {values[plain]}"
        return f"write {' or '.join(dict.fromkeys(values.values()))}"
    part = next((part for part, keys in PASSED.items() if key in keys), "")
    return f"write extra: {{{part}: {{{key}: {text}}}}}" if part else ""


def translated_keys() -> dict[str, list[str]]:
    """Every key of another tool to the keys of ours that its texts name."""
    texts = {
        key: _ADVICE.get(key) or _PLACES.get(key) or " ".join(_OTHERWISE[key].values())
        for key in (*_ADVICE, *_PLACES, *_OTHERWISE)
    }
    return {key: re.findall(r"\b[a-z_]+\.[a-z_0-9]+(?=[ :,;]|$)", text) for key, text in texts.items()}
