"""Names that Transformers, TRL, Axolotl and LLaMA-Factory use for our keys, and the values they use for ours."""

from __future__ import annotations

from toolkit.recipe.other_advice import ENGINE

SAME = {
    "batch.micro_batch_size": (
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu"),
        *("micro_batch", "local_batch_size"),
    ),
    "batch.global_batch_size": ("train_batch_size",),
    "parallel.sequence": (
        *("sequence_parallel_size", "sequence_parallel_degree", "ulysses_sequence_parallel_size", "sp_size"),
        "ulysses_degree",
    ),
    "parallel.context": ("context_parallel_size", "cp_size", "context_parallel_degree", "ring_attn_size"),
    "parallel.tensor": (
        *("tensor_parallel_size", "tensor_parallel_degree", "tensor_model_parallel_size", "tp_size", "tp"),
        "tensor_parallel",
    ),
    "parallel.expert": (
        *("expert_parallel_size", "expert_parallel_degree", "expert_model_parallel_size", "ep_size", "ep"),
        "moe_expert_parallel_size",
    ),
    "parallel.pipeline": (
        *("pipeline_parallel_size", "pipeline_parallel_degree", "pipeline_model_parallel_size", "pp_size", "pp"),
        "pipeline_parallel",
    ),
    "distillation.on_policy": ("lmbda",),
    "rollout.max_completion_tokens": ("max_completion_length",),
    "rollout.server": ("vllm_server_base_url",),
    "policy.importance": ("importance_sampling_level",),
    "policy.server_cap": ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    "evaluation.max_new_tokens": ("eval_max_new_tokens", "val_max_target_length"),
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
            "sequence_length",
            *("max_len", "context_length"),
        ),
        "max_source_length",
    ),
    "preference.beta": ("dpo_beta", "pref_beta", "rl_beta"),
    "preference.loss": ("pref_loss", "loss_type", "dpo_loss_type"),
    "preference.label_smoothing": ("dpo_label_smoothing",),
    "preference.sft_weight": ("rpo_alpha", "pref_ftx", "cpo_alpha"),
    "preference.margin": ("simpo_gamma",),
    "preference.desirable_weight": ("kto_desirable_weight", "kto_chosen_weight"),
    "preference.undesirable_weight": ("kto_undesirable_weight", "kto_rejected_weight"),
    "preference.center_rewards": ("center_rewards_coefficient",),
    "schedule.num_epochs": ("num_train_epochs", "epochs", "n_epochs", "max_epochs"),
    "schedule.max_steps": ("max_train_steps", "num_train_steps", "train_steps"),
    "schedule.warmup_steps": ("num_warmup_steps",),
    "schedule.warmup_ratio": ("warmup_fraction",),
    "schedule.name": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "schedule.args": ("lr_scheduler_kwargs",),
    "optimizer.name": ("optim", "optimizer_name"),
    "optimizer.args": ("optim_args",),
    "optimizer.beta1": ("adam_beta1",),
    "optimizer.beta2": ("adam_beta2",),
    "optimizer.eps": ("adam_epsilon", "adam_eps"),
    "optimizer.max_grad_norm": ("gradient_clipping", "gradient_clip_val", "grad_clip", "clip_grad_norm"),
    "method.r": ("lora_r", "lora_rank", "rank"),
    "method.lora_alpha": ("alpha",),
    "method.lora_dropout": ("lora_dropout_rate", "dropout"),
    "method.target_modules": ("lora_target_modules", "lora_target", "target"),
    "method.layers_to_transform": ("peft_layers_to_transform",),
    "method.init_lora_weights": ("peft_init_lora_weights",),
    "method.double_quantization": ("bnb_4bit_use_double_quant", "use_bnb_nested_quant"),
    "method.modules_to_save": ("lora_modules_to_save", "additional_target"),
    "method.use_dora": ("peft_use_dora", "lora_use_dora"),
    "method.use_rslora": ("peft_use_rslora", "lora_use_rslora"),
    "model.path": ("model_name_or_path", "base_model", "model_name", "pretrained_model_name_or_path", "model_id"),
    "model.revision": ("model_revision", "revision_of_model"),
    "model.tokenizer": ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_config"),
    "model.chat_template": ("template", "chat_template_jinja", "chat_template_path"),
    "model.adapter": ("lora_model_dir", "adapter_name_or_path"),
    "model.new_tokens": (
        *("new_special_tokens", "additional_special_tokens", "add_special_tokens", "add_tokens", "tokens"),
    ),
    "model.attention": ("attn_implementation", "flash_attn", "attn_impl"),
    "model.dtype": ("torch_dtype",),
    "data.sources": (
        "datasets",
        "dataset",
        "dataset_name",
        "train_file",
        "dataset_path",
        "train_data",
        "training_file",
    ),
    "data.eval_sources": ("test_datasets", "eval_dataset", "val_dataset", "validation_file"),
    "data.eval_split": ("val_set_size", "val_size", "validation_split", "split_dataset_ratio", "test_size"),
    "data.packing": ("sample_packing", "padding_free", "neat_packing"),
    "data.over_long": ("excess_length_strategy", "truncation_strategy"),
    "data.train_on": ("roles_to_train",),
    "data.deduplicate": ("dataset_exact_deduplication",),
    "data.max_samples": ("max_train_samples",),
    "data.eval_max_samples": ("max_eval_samples",),
    "data.num_workers": ("dataloader_num_workers", "num_dataloader_workers"),
    "data.num_proc": ("dataset_num_proc", "preprocessing_num_workers", "dataset_processes"),
    "checkpoint.save_steps": ("save_interval", "ckpt_every_steps"),
    "checkpoint.keep_best": ("metric_for_best_model",),
    "schedule.early_stopping_patience": ("early_stopping_steps",),
    "schedule.early_stopping_min_delta": ("early_stopping_threshold",),
    "checkpoint.resume": ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
    "evaluation.every_steps": ("eval_steps", "eval_interval", "val_every_steps"),
    "evaluation.at_start": ("eval_on_start",),
    "evaluation.num_beams": ("generation_num_beams", "eval_num_beams"),
    "evaluation.generation_metrics": ("predict_with_generate",),
    "logging.every_steps": ("logging_steps", "log_interval", "log_every_n_steps"),
    "logging.trackers": ("report_to", "log_with"),
    "output.dir": ("output_dir",),
    "output.name": ("run_name", "wandb_name", "experiment_name"),
    "seed": ("data_seed", "random_seed", "random_state"),
    "activation_checkpointing.mode": ("gradient_checkpointing_mode",),
    "activation_checkpointing.mlp_tiles": ("tiled_mlp_num_shards",),
}
"""A key of ours to those that mean the same and take the same value."""

LISTS = (
    "logging.trackers",
    "model.new_tokens",
    "data.sources",
    "data.eval_sources",
    "data.train_on",
    "method.modules_to_save",
    "method.target_modules",
)
_OWN_TEMPLATE = "remove it: the tokenizer's own template is taken; model.chat_template names a file, or `chatml`"
_NO_REWARDS = "remove it: training with a model of rewards (PPO) is not supported yet"
_STEPS = "set {place} to a number of steps: a share of them is not taken"
_METHODS = ("qlora", "dora", "rslora", "lora_int8", "lora_int4", "lora_fp8")
_STRATEGIES = ("zero2_offload", "zero3_offload", "zero3_nvme", "fsdp_offload", "fsdp_hybrid", "fsdp_grad_op")
"""Options that are a name with other keys."""
VALUES: dict[str, dict[str, str]] = {
    "model.attention": {
        **dict.fromkeys(("true", "fa2", "flash_attn_2", "flash-attn"), "flash_attention_2"),
        **dict.fromkeys(("flash_attn", "flash_attention"), "flash_attention_2"),
        **dict.fromkeys(("kernels-community/flash-attn", "kernels-community/flash-attn2"), "flash_attention_2"),
        **dict.fromkeys(("fa3", "flash_attn_3", "kernels-community/flash-attn3"), "flash_attention_3"),
        **{"kernels-community/vllm-flash-attn3": "flash_attention_3", "flex_attention": "flex"},
        **{"disabled": "eager", "false": "auto"},
    },
    "model.dtype": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"},
    "model.chat_template": {"tokenizer_default": _OWN_TEMPLATE},
    "model.new_tokens": dict.fromkeys(("true", "false"), "remove it: templates and formats add what belongs there"),
    "method.name": {name: f"write method: {name}" for name in _METHODS},
    "strategy.name": {name: f"write strategy: {name}" for name in _STRATEGIES},
    "method.target_modules": {"all": "all-linear"},
    "preference.loss": {name: f"write policy.loss: {name}" for name in ("grpo", "dapo", "dr_grpo")},
    "data.over_long": {"raise": "error", "delete": "drop", "right": "truncate"},
    "data.train_on": {"gpt": "[assistant]", "all": "all"},
    "data.eval_split": dict.fromkeys(("0", "0.0"), "remove it: nothing is held out by default"),
    "schedule.name": {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"},
    "schedule.num_epochs": dict.fromkeys(("-1", "0"), "remove it: schedule.max_steps counts where it is set"),
    "schedule.max_steps": dict.fromkeys(("-1", "0"), "remove it: epochs count where it is not set"),
    "optimizer.name": {
        **dict.fromkeys(("adam", "adamw_hf", "adamw_torch_xla", "adamw_torch_npu_fused"), "adamw"),
        **{"adamw_apex_fused": "adamw_torch_fused", "paged_adamw": "paged_adamw_32bit", "lion_pytorch": "lion"},
        **{"ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit"},
    },
    "checkpoint.resume": {"true": "auto", "false": "never"},
    "checkpoint.staging": {"true": "auto", "false": "none", "null": "none", "memory": "/dev/shm"},
    "checkpoint.keep_best": {
        **dict.fromkeys(("true", "loss", "best"), "eval_loss"),
        **{name: f"eval_{name}" for name in ("accuracy", "bleu", "chrf", "exact_match")},
        "false": "null",
    },
    "evaluation.every_steps": {"0": "remove it: rows are evaluated at the end in any case"},
    "logging.trackers": {
        **dict.fromkeys(("none", "false"), "[]"),
        **dict.fromkeys(("all", "true"), "set logging.trackers to those that you use, e.g. [tensorboard]"),
    },
}
"""A key of ours to other tools' values for it, and what stands for them; a sentence is said as it is."""

REFUSED = {
    "data.eval_split": "set data.eval_split to a fraction of the rows, e.g. 0.05",
    "data.sources": "set data.sources to a list of files, folders or hub ids",
    **dict.fromkeys(("evaluation.every_steps", "checkpoint.save_steps", "logging.every_steps"), _STEPS),
    "schedule.warmup_steps": "set {place} to a number of steps, or schedule.warmup_ratio to a share of them",
    "preference.loss": "set preference.loss for pairs of answers, policy.loss for rewarded ones",
    "model.chat_template": _OWN_TEMPLATE,
}
"""A key of ours to what is said of values that it does not take."""

_QLORA, _INT8 = (f"method: {{name: lora, quantization: {kind}}}" for kind in ("nf4", "int8"))
_NOT_QUANTIZED = "remove it, or write method.quantization: none if {} is false too"
_LORA = {
    "true": "method.name: lora",
    "lora": "method.name: lora",
    "false": "method.name: full",
    "full": "method.name: full",
}
_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "bf16-mixed"), "precision: bf16"),
    **dict.fromkeys(("fp16", "float16", "torch.float16", "half", "16", "16-mixed"), "precision: fp16"),
    **dict.fromkeys(("fp32", "float32", "torch.float32", "no", "none", "32", "32-true"), "precision: fp32"),
    "bf16-true": "precision: pure_bf16",
    **dict.fromkeys(("fp8", "float8"), "precision: fp8"),
}
_OBJECTIVES = {
    "sft": "objective: sft",
    **dict.fromkeys(("pt", "clm", "causal_lm", "pretrain"), "objective: language_modelling"),
    **{name: f"objective: {name}" for name in ("dpo", "cpo", "orpo", "simpo", "kto", "grpo", "rloo")},
    **dict.fromkeys(("gkd", "kd"), "objective: distillation"),
    "rm": "objective: reward",
    "ppo": _NO_REWARDS,
}
_STAGES = {"0": "strategy.name: ddp", **{str(stage): f"strategy.name: zero{stage}" for stage in (1, 2, 3)}}
_CHECKPOINTING = {
    **{"true": "activation_checkpointing.mode: full", "false": "activation_checkpointing.mode: none"},
    **dict.fromkeys(("offload", "unsloth"), "activation_checkpointing.mode: offload"),
}
BY_VALUE: dict[str, dict[str, str]] = {
    "load_in_4bit": {"true": _QLORA, "false": _NOT_QUANTIZED.format("load_in_8bit")},
    "load_in_8bit": {"true": _INT8, "false": _NOT_QUANTIZED.format("load_in_4bit")},
    **{key: {"4": _QLORA, "8": _INT8} for key in ("quantization_bit", "quant_bits")},
    "bnb_4bit_quant_type": {"nf4": "method.quantization: nf4"},
    "bnb_4bit_compute_dtype": _PRECISIONS,
    "adapter": {"lora": "method: {name: lora}", "qlora": _QLORA},
    **dict.fromkeys(("use_peft", "peft", "lora", "use_lora", "train_type", "tuner_type"), _LORA),
    "finetuning_type": {
        **_LORA,
        "freeze": "set method.name: full, and method.freeze to patterns of the parameters that stay as they are",
    },
    "full_finetuning": {"true": "method.name: full", "false": "method.name: lora"},
    **dict.fromkeys(("stage", "rl", "rlhf_type"), _OBJECTIVES),
    **dict.fromkeys(
        ("gradient_checkpointing", "use_gradient_checkpointing", "enable_activation_checkpointing"), _CHECKPOINTING
    ),
    "tiled_mlp": {"true": "activation_checkpointing: {mlp_tiles: 8}", "false": "remove it: 1 tile is the default"},
    "bf16": {
        **{"true": "precision: bf16", "auto": "precision: auto", "full": "precision: pure_bf16"},
        "false": "remove it, or write precision: fp32 if fp16 is false too",
    },
    "fp16": {"true": "precision: fp16", "false": "remove it, or write precision: fp32 if bf16 is false too"},
    **{key: {"true": "precision: pure_bf16"} for key in ("bfloat16", "pure_bf16")},
    "float16": {"true": "precision: fp16"},
    "mixed_precision": _PRECISIONS,
    "train_on_inputs": {"true": "data.train_on: all", "false": "data.train_on: auto"},
    "train_on_prompt": {"true": "data.train_on: all", "false": "data.train_on: auto"},
    "assistant_only_loss": {"true": "data.train_on: assistant", "false": "data.train_on: all"},
    "completion_only_loss": {"true": "data.train_on: completion", "false": "data.train_on: all"},
    "train_on_responses_only": {"true": "data.train_on: auto", "false": "data.train_on: all"},
    "loss_scale": {
        **{"last_round": "data.train_on: last_assistant", "default": "data.train_on: assistant"},
        "all": "data.train_on: all",
    },
    "enable_thinking": {word: f"data.chat_template_kwargs: {{enable_thinking: {word}}}" for word in ("true", "false")},
    "mask_history": {"true": "data.train_on: last_assistant", "false": "data.train_on: assistant"},
    "torch_compile": {"true": "compile: layers", "false": "compile: 'off'", "auto": "compile: auto"},
    "flash_attention": {"true": "model.attention: flash_attention_2", "false": "model.attention: auto"},
    "xformers_attention": {"true": "model.attention: sdpa"},
    "sdp_attention": {"true": "model.attention: sdpa"},
    "flex_attention": {"true": "model.attention: flex"},
    "lora_target_linear": {"true": "method.target_modules: all-linear"},
    "zero_stage": _STAGES,
    **{f"use_{name}": {"true": f"logging.trackers: [{name}]"} for name in ("wandb", "tensorboard", "mlflow")},
    "pissa_init": {"true": "method.init_lora_weights: pissa"},
    "disable_gradient_checkpointing": {"true": _CHECKPOINTING["false"], "false": _CHECKPOINTING["true"]},
    "use_galore": {"true": "optimizer.name: galore_adamw"},
    "use_apollo": {"true": "optimizer.name: apollo_adamw"},
    "load_best_model_at_end": {"true": "checkpoint.keep_best: eval_loss", "false": "checkpoint.keep_best: null"},
    "logging_strategy": {"steps": "logging.every_steps: 10"},
    "save_strategy": {
        **{"steps": "checkpoint.save_steps: 500", "epoch": "checkpoint.save_epochs: 1"},
        **{"best": "checkpoint.keep_best: eval_loss", "no": "remove it: none is saved unless the recipe says when"},
    },
    "auto_find_batch_size": {"true": "batch.micro_batch_size: auto"},
}
"""Keys whose values have other names in a recipe. Of values that are not listed only the places are told; `false` that
is not listed is what a recipe does without the key."""

OF_HARDWARE = ("co2_g_kwh", "ram_gib", "network_gbit_s", "power_w", "memory_gib", "tflops", "bandwidth_gb_s")
_GATHERS = "set parallel.context to the number of devices that share a row and gather its keys and values"
_NO_EVALUATION = "set data.eval_split: null and evaluation.num_prompts: 0, and leave out its other keys"
HABITS: dict[str, dict[str, str]] = {
    "activation_checkpointing": _CHECKPOINTING,
    "activation_checkpointing.mode": _CHECKPOINTING,
    "method.quantization": {
        **dict.fromkeys(("4bit", "4", "fp4"), "method.quantization: nf4"),
        **dict.fromkeys(("8bit", "8"), "method.quantization: int8"),
    },
    "compile": {"true": "compile: layers", "none": "compile: 'off'", "inductor": "compile: layers"},
    "strategy": {
        **_STAGES,
        **{"deepspeed": "strategy.name: zero2", "dp": "strategy.name: ddp", "fsdp2": "strategy.name: fsdp"},
        **dict.fromkeys(("none", "no", "false"), "strategy.name: ddp"),
        **dict.fromkeys(
            ("tp", "tensor_parallel", "megatron"), "set parallel.tensor to the devices that divide a layer"
        ),
        **dict.fromkeys(("ep", "expert_parallel"), "set parallel.expert to the devices that divide the experts"),
        **dict.fromkeys(
            ("pp", "pipeline", "pipeline_parallel"), "set parallel.pipeline to the devices that have layers each"
        ),
        **dict.fromkeys(("sp", "ulysses"), "set parallel.sequence to the number of devices that share a row"),
        **dict.fromkeys(("cp", "ring_attention", "ring"), _GATHERS),
    },
    "evaluation": {
        **dict.fromkeys(("false", "none", "null"), _NO_EVALUATION),
        "#": "evaluation.every_steps: {given}",
    },
    "schedule": {"#": "schedule.num_epochs: {given}"},
    "checkpoint": {"#": "checkpoint.save_steps: {given}", "auto": "checkpoint.resume: auto"},
    "logging": {
        **{name: f"logging.trackers: [{name}]" for name in ("wandb", "tensorboard", "mlflow", "trackio")},
        **dict.fromkeys(("none", "false"), "logging.trackers: []"),
        "#": "logging.every_steps: {given}",
    },
    "method": {"peft": "method.name: lora", "sft": "method.name: full", "none": "method.name: full"},
    "precision": _PRECISIONS,
    "objective": _OBJECTIVES,
    "extra.deepspeed": {"*": f"{ENGINE}; here stand only settings that a recipe has no key for"},
    "data.eval_split": {"#": "data: {{eval_split: 0.05, eval_max_samples: {given}}}"},
}
"""A key or section of ours to values that other tools have for it; `#` stands for whole numbers above 0, `*`
for any other text."""

TYPES = {"chat_template": "messages", "completion": "text", "input_output": "segments"}
TRUTH = {"on": "true", "yes": "true", "off": "false", "no": "false"}
PLACES = {other: ours for ours, others in SAME.items() for other in others}
