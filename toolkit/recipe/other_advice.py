"""Advice on keys of other tools that have no counterpart here."""

from __future__ import annotations

ENGINE = "set strategy.name: zero1, zero2 or zero3, with its offload_optimizer and offload_param"
_OPTION = "remove it: `toolkit launch` takes {}, and so do other launchers by names of their own"
_OPTIONS = {
    "--gpus N": ("num_processes", "nproc_per_node", "num_gpus", "n_gpu"),
    "--nodes N": ("num_machines", "nnodes", "num_nodes"),
    "--rank R": ("machine_rank", "node_rank"),
    "--head HOST": ("main_process_ip", "master_addr"),
    "--port P": ("main_process_port", "master_port"),
}
_UPLOAD = "remove it; `toolkit push RUN OWNER/NAME` uploads a finished run"
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
    "device_map": "remove it: processes are the launcher's, and strategy.name says what is sharded over them",
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
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "evals_per_epoch"), _EVALUATION),
    **dict.fromkeys(("relora_steps", "relora", "use_badam"), "remove it: it is not supported"),
    **dict.fromkeys(("processor_type", "image_max_pixels"), "remove it: models of images are trained on text alone"),
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
    "pretraining_dataset": "set data.sources to it, and objective: language_modelling",
    "validation_split_percentage": "set data.eval_split: {given} / 100",
    "galore_rank": "set optimizer.args: {{rank: {given}}}",
    "rope_scaling": "set model.path to a copy of the model whose config states it",
    "min_lr": "set schedule: {{name: cosine_with_min_lr, args: {{min_lr: {given}}}}}",
    "cosine_min_lr_ratio": "set schedule: {{name: cosine_with_min_lr, args: {{min_lr_rate: {given}}}}}",
    "noisy_embedding_alpha": "set extra: {{training_arguments: {{neftune_noise_alpha: {given}}}}}",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "grad_accum_steps"),
        "set batch.global_batch_size = micro-batch x {given} x number of processes",
    ),
    "batch_size": "set batch.global_batch_size to the rows of a step, or batch.micro_batch_size to those at once",
    "betas": "set optimizer.beta1 and optimizer.beta2 to its two values",
    **dict.fromkeys(
        ("top_k", "min_p", "repetition_penalty"),
        "remove it: rollout.temperature and rollout.top_p say how answers are drawn",
    ),
    **dict.fromkeys(
        ("system", "default_system", "system_prompt"),
        "put it into the first message of the rows; rollout.system is for answers that are rewarded",
    ),
    **dict.fromkeys(("eos_token", "pad_token"), "remove it: the tokenizer and its template know it"),
    "dataset_mixer": "set data.sources to its data sets, with max_samples where only some rows are meant",
    "dataset_splits": "set the `split` of each entry of data.sources, and data.eval_split for held-out rows",
    "deepspeed": ENGINE,
    "fsdp": "set strategy.name: fsdp, and strategy.sharding for what is sharded",
    "fsdp_config": "set strategy.name: fsdp, and strategy.sharding for what is sharded",
    "saves_per_epoch": "set checkpoint.save_epochs: 1 / {given}",
    "do_eval": "set data.eval_split for held-out rows",
    "do_train": "remove it: a recipe always trains",
    "group_by_length": "remove it: rows of like length share a micro-batch anyway",
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
"""Key to what to do; `{given}` stands for its value."""
