"""What Transformers, TRL, Axolotl and LLaMA-Factory call keys of ours, and what they write there."""

from __future__ import annotations

SAME = {
    "batch.micro_batch_size": (
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu"),
        "micro_batch",
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
        ),
        "max_source_length",
    ),
    "preference.beta": ("dpo_beta", "pref_beta", "rl_beta"),
    "preference.loss": ("pref_loss", "loss_type", "dpo_loss_type"),
    "preference.label_smoothing": ("dpo_label_smoothing",),
    "preference.sft_weight": ("rpo_alpha", "pref_ftx", "cpo_alpha"),
    "preference.margin": ("simpo_gamma",),
    "preference.center_rewards": ("center_rewards_coefficient",),
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
    "data.sources": ("datasets", "dataset", "dataset_name", "train_file", "dataset_path", "train_data"),
    "data.eval_sources": ("test_datasets", "eval_dataset", "validation_file"),
    "data.eval_split": ("val_set_size", "val_size", "validation_split", "test_size"),
    "data.packing": ("sample_packing", "padding_free", "neat_packing"),
    "data.over_long": ("excess_length_strategy",),
    "data.train_on": ("roles_to_train",),
    "data.deduplicate": ("dataset_exact_deduplication",),
    "data.max_samples": ("max_train_samples",),
    "data.eval_max_samples": ("max_eval_samples",),
    "data.num_workers": ("dataloader_num_workers", "num_dataloader_workers"),
    "data.num_proc": ("dataset_num_proc", "preprocessing_num_workers", "dataset_processes"),
    "checkpoint.save_steps": ("save_interval",),
    "checkpoint.keep_best": ("metric_for_best_model",),
    "schedule.early_stopping_patience": ("early_stopping_steps",),
    "schedule.early_stopping_min_delta": ("early_stopping_threshold",),
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
VALUES: dict[str, dict[str, str]] = {
    "model.attention": {
        **dict.fromkeys(("true", "fa2", "flash_attn_2", "flash-attn"), "flash_attention_2"),
        **dict.fromkeys(("kernels-community/flash-attn", "kernels-community/flash-attn2"), "flash_attention_2"),
        **dict.fromkeys(("fa3", "flash_attn_3", "kernels-community/flash-attn3"), "flash_attention_3"),
        **{"kernels-community/vllm-flash-attn3": "flash_attention_3", "flex_attention": "flex"},
        **{"disabled": "eager", "false": "auto"},
    },
    "model.dtype": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"},
    "model.chat_template": {"tokenizer_default": _OWN_TEMPLATE},
    "model.new_tokens": dict.fromkeys(("true", "false"), "remove it: templates and formats add what belongs there"),
    "method.target_modules": {"all": "all-linear"},
    "data.over_long": {"raise": "error"},
    "data.train_on": {"gpt": "[assistant]", "all": "all"},
    "data.eval_split": dict.fromkeys(("0", "0.0"), "remove it: nothing is held out by default"),
    "schedule.name": {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"},
    "schedule.num_epochs": dict.fromkeys(("-1", "0"), "remove it: schedule.max_steps counts where it is set"),
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
    "model.chat_template": _OWN_TEMPLATE,
}
"""A key of ours to what is said of values that it does not take."""

_QLORA, _INT8 = (f"method: {{name: lora, quantization: {kind}}}" for kind in ("nf4", "int8"))
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
    "load_in_4bit": {"true": _QLORA, "false": "method.quantization: none"},
    "load_in_8bit": {"true": _INT8, "false": "method.quantization: none"},
    "quantization_bit": {"4": _QLORA, "8": _INT8},
    "bnb_4bit_quant_type": {"nf4": "method.quantization: nf4"},
    "bnb_4bit_compute_dtype": _PRECISIONS,
    "adapter": {"lora": "method: {name: lora}", "qlora": _QLORA},
    **dict.fromkeys(("finetuning_type", "use_peft", "peft"), _LORA),
    **dict.fromkeys(("stage", "rl"), _OBJECTIVES),
    "gradient_checkpointing": _CHECKPOINTING,
    "tiled_mlp": {"true": "activation_checkpointing: {mlp_tiles: 8}", "false": "remove it: 1 tile is the default"},
    "bf16": {
        **{"true": "precision: bf16", "auto": "precision: auto", "full": "precision: pure_bf16"},
        "false": "remove it, or write precision: fp32 if fp16 is false too",
    },
    "fp16": {"true": "precision: fp16", "false": "remove it, or write precision: fp32 if bf16 is false too"},
    "bfloat16": {"true": "precision: pure_bf16"},
    "float16": {"true": "precision: fp16"},
    "mixed_precision": _PRECISIONS,
    "train_on_inputs": {"true": "data.train_on: all", "false": "data.train_on: auto"},
    "train_on_prompt": {"true": "data.train_on: all", "false": "data.train_on: auto"},
    "assistant_only_loss": {"true": "data.train_on: assistant", "false": "data.train_on: all"},
    "completion_only_loss": {"true": "data.train_on: completion", "false": "data.train_on: all"},
    "mask_history": {"true": "data.train_on: last_assistant", "false": "data.train_on: assistant"},
    "torch_compile": {"true": "compile: layers", "false": "compile: 'off'", "auto": "compile: auto"},
    "flash_attention": {"true": "model.attention: flash_attention_2", "false": "model.attention: auto"},
    "xformers_attention": {"true": "model.attention: sdpa"},
    "sdp_attention": {"true": "model.attention: sdpa"},
    "flex_attention": {"true": "model.attention: flex"},
    "lora_target_linear": {"true": "method.target_modules: all-linear"},
    "zero_stage": _STAGES,
    "group_by_length": {"true": "data.packing: true"},
    **{f"use_{name}": {"true": f"logging.trackers: [{name}]"} for name in ("wandb", "tensorboard", "mlflow")},
    "pissa_init": {"true": "method.init_lora_weights: pissa"},
    "disable_gradient_checkpointing": {"true": _CHECKPOINTING["false"], "false": _CHECKPOINTING["true"]},
    "use_galore": {"true": "optimizer.name: galore_adamw"},
    "use_apollo": {"true": "optimizer.name: apollo_adamw"},
    "load_best_model_at_end": {"true": "checkpoint.keep_best: eval_loss", "false": "checkpoint.keep_best: null"},
    "logging_strategy": {"steps": "logging.every_steps: 10"},
}
"""Keys whose values have other names in a recipe. Of values that are not listed only the places are told; `false` that
is not listed is what a recipe does without the key."""

_ENGINE = "set strategy.name: zero1, zero2 or zero3, with its offload_optimizer and offload_param"
_LAUNCH = "remove it: processes are the launcher's, and strategy.name says what is sharded over them"
_OPTION = "remove it: `toolkit launch` takes {}, and so do other launchers by names of their own"
_OPTIONS = {
    "--gpus N": ("num_processes", "nproc_per_node", "num_gpus", "n_gpu"),
    "--nodes N": ("num_machines", "nnodes", "num_nodes"),
    "--rank R": ("machine_rank", "node_rank"),
    "--head HOST": ("main_process_ip", "master_addr"),
    "--port P": ("main_process_port", "master_port"),
}
_UPLOAD = "remove it; upload the folder `final` of the run with `hf upload`"
_EVALUATION = "set evaluation.every_steps, and data.eval_split for held-out rows"
ADVICE = {
    "use_vllm": "set rollout.server to the address of a vLLM server; without one the processes that train answer",
    **dict.fromkeys(
        ("teacher_model_name_or_path", "teacher_model"),
        "set objective: distillation, and the path of distillation.teacher to it",
    ),
    "reward_funcs": "name rewards instead, e.g. rewards.numeric=true, or a Python file of your own in rewards.file",
    "max_prompt_length": "remove it: batch.seq_len bounds prompt and answer together",
    **dict.fromkeys(
        ("precompute_ref_log_probs", "dpo_use_logits_to_keep"),
        "remove it: the reference is always scored once, before the first step",
    ),
    **dict.fromkeys(
        ("ref_model", "ref_model_name_or_path", "dpo_ref_model", "ref_model_adapters"),
        "remove it: the reference is the model as it is before the first step",
    ),
    **dict.fromkeys(("pipeline_parallel_size", "expert_parallel_size", "device_map"), _LAUNCH),
    **{name: _OPTION.format(option) for option, names in _OPTIONS.items() for name in names},
    "config_file": "remove it: `toolkit launch` needs none, and `accelerate launch` takes one",
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"), _UPLOAD),
    **dict.fromkeys(
        ("swa", "use_swa", "swa_lrs", "stochastic_weight_avg"),
        "set checkpoint.average_last: 5, and checkpoint.save_steps to the steps between the models of the mean",
    ),
    **dict.fromkeys(
        ("ema", "use_ema", "ema_decay"),
        "remove it: no moving average is kept; checkpoint.average_last: 5 publishes the mean of the last checkpoints",
    ),
    "greater_is_better": "remove it: it is known of each metric that checkpoint.keep_best takes",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), _EVALUATION),
    **dict.fromkeys(("relora_steps", "relora", "use_badam"), "remove it: it is not supported"),
    **dict.fromkeys(("processor_type", "image_max_pixels"), "remove it: models of images are not supported"),
    **dict.fromkeys(("token", "hub_token", "hf_token"), "remove it: log in with `hf auth login`, or export HF_TOKEN"),
    **dict.fromkeys(
        ("use_liger_kernel", "enable_liger_kernel"),
        "remove it: compile=auto takes Liger's kernels where layers are not compiled and liger-kernel is installed",
    ),
    "cut_cross_entropy": "remove it: scores are fused where that is exact",
    **dict.fromkeys(("use_unsloth", "use_unsloth_gc"), "remove it; compile: layers fuses the work of a layer"),
    **dict.fromkeys(("interleave_probs", "mix_strategy"), "set the `weight` of each entry of data.sources"),
    "packing_strategy": "remove it: data.packing: true packs whole rows",
    "peft_config": "set method: {{name: lora}}, with r, lora_alpha and target_modules beside the name",
    "quantization_config": "set method: {{name: lora, quantization: nf4}}, or int8",
    "dataset_config": "set the `name` of an entry of data.sources: {given}",
    "dataset_config_name": "set the `name` of an entry of data.sources: {given}",
    "dataset_train_split": "set the `split` of an entry of data.sources: {given}",
    "dataset_test_split": "set data.eval_split: {given}",
    "dataset_prepared_path": "remove it: prepared data are kept in the toolkit's cache",
    **dict.fromkeys(
        ("async_save", "async_checkpointing", "enable_async_checkpointing", "dist_ckpt_async"),
        "remove it: training goes on while checkpoints are written; where the disk is slow see checkpoint.staging",
    ),
    **dict.fromkeys(
        ("use_node_local_storage", "local_checkpoint_dir"), "set checkpoint.staging: a folder of each node"
    ),
    "save_safetensors": "remove it: weights are always saved as safetensors",
    "strict": "remove it: unknown keys are always refused",
    "type": "set the `format` of the entry: messages, alpaca, sharegpt, text, segments or another of data.format",
    **dict.fromkeys(
        ("unfrozen_parameters", "freeze_trainable_layers"),
        "set method.freeze: the parameters that stay as they are, by patterns of their names",
    ),
    "special_tokens": "set model.new_tokens to those that the tokenizer lacks; the others it has by itself",
    "enable_thinking": "set data.chat_template_kwargs: {{enable_thinking: {given}}}",
    "pretraining_dataset": "set data.sources to it, and objective: language_modelling",
    "validation_split_percentage": "set data.eval_split: {given} / 100",
    "galore_rank": "set optimizer.args: {{rank: {given}}}",
    "rope_scaling": "set model.path to a copy of the model whose config states it",
    "cosine_min_lr_ratio": "set schedule: {{name: cosine_with_min_lr, args: {{min_lr_rate: {given}}}}}",
    "noisy_embedding_alpha": "set extra: {{training_arguments: {{neftune_noise_alpha: {given}}}}}",
    "gradient_accumulation_steps": "set batch.global_batch_size = micro-batch x {given} x number of processes",
    "deepspeed": _ENGINE,
    "fsdp": "set strategy.name: fsdp, and strategy.sharding for what is sharded",
    "fsdp_config": "set strategy.name: fsdp, and strategy.sharding for what is sharded",
    "save_strategy": "set checkpoint.save_steps or checkpoint.save_epochs",
    "saves_per_epoch": "set checkpoint.save_epochs: 1 / {given}",
    "evals_per_epoch": "set evaluation.every_steps",
    "do_eval": "set data.eval_split for held-out rows",
    "do_train": "remove it: a recipe always trains",
    "pad_to_sequence_len": "remove it: rows are padded to the longest of their micro-batch",
    "remove_unused_columns": "remove it: columns that no format has are not read",
    **{
        f"wandb_{key}": f"set logging.trackers: [wandb], and the environment variable WANDB_{key.upper()}={{given}}"
        for key in ("project", "entity", "watch", "log_model")
    },
    "overwrite_output_dir": "set checkpoint.resume: never for a new run folder",
    "dataset_text_field": "set data.columns: {{text: {given}}}",
    "dataset_dir": "set data.sources to its files",
    "label_smoothing_factor": "remove it: label smoothing is not supported",
    "use_cache": "remove it: caches are for generating, and are off while training",
}
"""Keys that have no counterpart of their own."""

OF_HARDWARE = ("co2_g_kwh", "ram_gib", "network_gbit_s", "power_w", "memory_gib", "tflops", "bandwidth_gb_s")
_GATHERS = "set parallel.context to the number of devices that share a row and gather its keys and values"
_NO_STAGES = "set strategy.name to zero3 or fsdp: stages of a model are not split over devices"
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
        "pp": _NO_STAGES,
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
    "extra.deepspeed": {"*": f"{_ENGINE}; here stand only settings that a recipe has no key for"},
    "data.eval_split": {"#": "data: {{eval_split: 0.05, eval_max_samples: {given}}}"},
}
"""A key or section of ours to values that other tools have for it; `#` stands for whole numbers above 0, `*`
for any other text."""

TYPES = {"chat_template": "messages", "completion": "text", "input_output": "segments"}
TRUTH = {"on": "true", "yes": "true", "off": "false", "no": "false"}
PLACES = {other: ours for ours, others in SAME.items() for other in others}
