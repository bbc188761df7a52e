"""What `extra` may pass to the libraries: every key is passed on, or refused with the reason.

A setting that a recipe has a key for is refused with that key, since two places for one value would differ some day.
Values are never shown: they may come from the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from toolkit.recipe.errors import origin_of
from toolkit.recipe.libraries import BOUNDS, PASSED, fields, flat, uncounted
from toolkit.recipe.other_tools import translated_keys
from toolkit.recipe.problem import UNKNOWN_KEY, Problem
from toolkit.recipe.schema import Recipe, leaf_paths
from toolkit.recipe.spelling import did_you_mean

_CHECKPOINTING = "activation_checkpointing.mode"
_OWN = {
    "training_arguments": {
        **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), "precision"),
        **dict.fromkeys(("activation_checkpointing", "activation_checkpointing_kwargs"), _CHECKPOINTING),
        **dict.fromkeys(("gradient_checkpointing_kwargs", "activation_offloading"), _CHECKPOINTING),
        **dict.fromkeys(("fsdp_config", "parallelism_config"), "strategy.sharding"),
        **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "compile"),
        **{"data_seed": "seed", "logging_strategy": "logging.every_steps", "eval_on_start": "evaluation.at_start"},
        **{"eval_delay": "evaluation.every_steps", "generation_max_length": "evaluation.max_new_tokens"},
        **{"eval_packing": "data.packing", "truncation_mode": "data.over_long", "shuffle_dataset": "data.shuffle"},
    },
    "lora": {
        **{"base_model_name_or_path": "model.path", "task_type": "objective"},
        "trainable_token_indices": "model.new_tokens",
    },
    "deepspeed": {
        **dict.fromkeys(("train_batch_size", "gradient_accumulation_steps"), "batch.global_batch_size"),
        **{"train_micro_batch_size_per_gpu": "batch.micro_batch_size", "gradient_clipping": "optimizer.max_grad_norm"},
        **{"optimizer": "optimizer.name", "scheduler": "schedule.name", "steps_per_print": "logging.every_steps"},
        **{"activation_checkpointing": _CHECKPOINTING, "bfloat16": "precision"},
        **dict.fromkeys(("tensorboard", "wandb", "comet", "csv_monitor"), "logging.trackers"),
        **dict.fromkeys(("fp16.enabled", "fp16.fp16_master_weights_and_grads", "bf16.enabled"), "precision"),
        **dict.fromkeys(("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"), "precision"),
        **dict.fromkeys(("communication_data_type", "data_types.grad_accum_dtype"), "strategy.reduce_dtype"),
        "zero_optimization.stage": "strategy.name",
        "zero_optimization.offload_optimizer.device": "strategy.offload_optimizer",
        "zero_optimization.offload_param.device": "strategy.offload_param",
    },
}
"""Settings whose own key has another name, beside those that other tools have too."""

_REASONS: dict[str, dict[str, tuple[str, ...]]] = {
    "training_arguments": {
        "which rows make a batch follows from the seed alone, so that every launch trains the same": (
            *("accelerator_config", "dataloader_drop_last", "dataloader_in_order", "train_sampling_strategy"),
            *("length_column_name", "sortish_sampler", "auto_find_batch_size", "ignore_data_skip"),
        ),
        "rows are tokenised, packed and padded before the Trainer sees them": (
            *("remove_unused_columns", "label_names", "dataset_kwargs", "packing_strategy", "padding_free"),
            *("pad_to_multiple_of", "eos_token", "pad_token"),
        ),
        "the loss is a mean over the tokens of the whole batch, the same on every engine": (
            *("average_tokens_across_devices", "label_smoothing_factor", "loss_type"),
        ),
        "model and kernels are chosen, and compared with the model's own forward, before the Trainer sees them": (
            *("model_init_kwargs", "use_cache", "use_liger_kernel", "liger_kernel_config", "optim_target_modules"),
        ),
        "evaluation is not the Trainer's; the section evaluation says when and how": (
            *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
            *("include_for_metrics", "batch_eval_metrics", "load_best_model_at_end", "metric_for_best_model"),
            *("greater_is_better", "generation_config", "do_predict"),
        ),
        "a checkpoint must hold all that a run needs to go on, once": (
            *("save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
            "restore_callback_states_from_checkpoint",
        ),
        "nothing is uploaded while training; upload the folder `final` of the run": (
            *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
            "hub_revision",
        ),
        "metrics and progress are not the Trainer's; the section logging says how often": (
            *("disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "logging_nan_inf_filter"),
            *("include_num_input_tokens_seen", "skip_memory_metrics"),
        ),
        "gradients are accumulated, and the model evaluated before step 1, which torch's static graph does not allow": (
            "ddp_static_graph",
        ),
        "launcher and machine decide it": (
            *("local_rank", "use_cpu", "ddp_backend", "dataloader_multiprocessing_context", "do_train"),
        ),
    },
    "lora": {
        "it follows from the model": (
            *("peft_type", "auto_mapping", "peft_version", "inference_mode", "ensure_weight_tying", "fan_in_fan_out"),
        ),
        "method.init_lora_weights=eva and loftq are not computed by PEFT": ("loftq_config", "eva_config"),
        "it belongs to a beginning that method.init_lora_weights does not offer": ("corda_config", "lora_ga_config"),
        "such an adapter cannot be merged into layers without a bias": ("lora_bias",),
        "it makes another kind of adapter or model, which is not what is planned, checked and merged": (
            *("layer_replication", "alora_invocation_tokens", "use_qalora", "qalora_group_size", "velora_config"),
            *("monteclora_config", "use_bdlora", "arrow_config", "kasa_config", "megatron_config", "megatron_core"),
            "runtime_config",
        ),
    },
    "deepspeed": {
        "DeepSpeed then gives out what it holds of a parameter as that of another, and adapters would be saved so": (
            "zero_optimization.round_robin_gradients",
        ),
        "DeepSpeed then loses gradients, and does not read back its checkpoints; leaf_module.classes names modules": (
            "zero_optimization.stage3_module_granularity_threshold",
        ),
        "losses, checkpoints and plans rest on what the toolkit says there": ("*",),
    },
}
"""Why all other settings are refused."""


_ARGUMENTS = "training_arguments"
_WORKERS = ("dataloader_prefetch_factor", "dataloader_persistent_workers")
_OF_STAGE_3 = ("*.stage3_*", "*.leaf_module.*", "*.zero_hpz_partition_size", "*.sub_group_size")
_OF_STAGES_1_AND_2 = ("*.parameter_alignment", "*.use_multi_rank_bucket_allreduce")


def _has_engine_of_bf16(recipe: Recipe) -> bool:
    """Whether DeepSpeed's stage 1 is the one that it has for weights in bf16 whose gradients are summed in fp32."""
    strategy = recipe.strategy
    on_device = strategy.zero_stage == 1 and strategy.offload_optimizer == "none"
    return on_device and recipe.engine_precision == "bf16" and strategy.reduce_dtype in ("auto", "fp32")


_READ_BY: tuple[tuple[str, tuple[str, ...], Callable[[Recipe], object], str], ...] = (
    ("lora", ("*",), lambda r: r.method.name == "lora", "method.name=lora"),
    ("lora", ("layers_pattern",), lambda r: r.method.layers_to_transform, "method.layers_to_transform=[0]"),
    ("deepspeed", ("*",), lambda r: r.strategy.zero_stage, "strategy.name=zero1, zero2 or zero3"),
    ("deepspeed", ("fp16.*",), lambda r: r.precision == "fp16", "precision=fp16"),
    ("deepspeed", ("bf16.*",), _has_engine_of_bf16, "strategy.name=zero1 and precision=bf16"),
    ("deepspeed", _OF_STAGE_3, lambda r: r.strategy.zero_stage == 3, "strategy.name=zero3"),
    (
        "deepspeed",
        _OF_STAGES_1_AND_2,
        lambda r: r.strategy.zero_stage in (1, 2) and not _has_engine_of_bf16(r),
        "strategy.name=zero2",
    ),
    (
        "deepspeed",
        ("*.offload_optimizer.*",),
        lambda r: r.strategy.offload_optimizer != "none",
        "strategy=zero2_offload",
    ),
    ("deepspeed", ("*.offload_param.*",), lambda r: r.strategy.offload_param != "none", "strategy=zero3_offload"),
    ("deepspeed", ("aio.*",), lambda r: r.strategy.uses_nvme, "strategy=zero3_nvme"),
    (_ARGUMENTS, ("ddp_[!t]*",), lambda r: r.strategy.name in ("single", "ddp"), "strategy.name=ddp"),
    (_ARGUMENTS, ("trackio_*", "project"), lambda r: "trackio" in r.logging.trackers, "logging.trackers=[trackio]"),
    (_ARGUMENTS, ("router_aux_loss_coef",), lambda r: r.objective != "seq2seq", "objective=sft"),
    (_ARGUMENTS, _WORKERS, lambda r: r.data.decided_workers, "data.num_workers=1"),
)
"""Part, patterns of keys, whether anything reads them, and the setting under which something does."""

_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "string": (str, "text"),
    "boolean": (bool, "true or false"),
    "array": (list, "a list"),
    "object": (dict, "a mapping"),
    "null": (type(None), "null"),
}


def extra_problems(recipe: Recipe, origins: Mapping[str, str]) -> Iterator[Problem]:
    """What cannot be passed to the libraries as the recipe says."""
    for part, key, value in _given(recipe):
        path = f"extra.{part}.{key}"

        def problem(what: str, hint: str, allowed: str = "", path: str = path) -> Problem:
            return Problem(path, what, origin_of(path, origins), allowed=allowed, hint=hint)

        known = fields()[part]
        if uncounted(part, key) is not None and key in known:
            if needs := _needed(recipe, part, key):
                yield problem("would be ignored", f"remove it, or set {needs}")
            elif not _fits(value, known[key]):
                yield problem("is not valid", _change(value, known[key]), _allowed(known[key]))
            elif (bounds := BOUNDS[part].get(key)) and value is not None and not bounds.fits(value):
                yield problem("is not valid", "write what is allowed, or remove it", bounds.allowed)
        elif own := own_key(part, key):
            yield problem("has a key of its own in a recipe", f"set {own} instead")
        elif key in known or key.partition(".")[0] in known:
            yield problem(f"cannot be passed on: {refusal(part, key)}", "remove it")
        elif any(field.startswith(f"{key}.") for field in known):
            yield problem("must be a section", f"write keys below {path}, or remove it")
        else:
            elsewhere = next((other for other in PASSED if key in fields()[other]), "")
            close = f"extra.{elsewhere}.{key}" if elsewhere else did_you_mean(key, known)
            hint = f"did you mean `{close}`?" if close else "remove it"
            yield problem(UNKNOWN_KEY, hint, ", ".join(PASSED[part]))


def extra_warnings(recipe: Recipe, origins: Mapping[str, str]) -> Iterator[Problem]:
    """What is passed on and makes the plan inexact."""
    for part, key, _ in _given(recipe):
        if cost := uncounted(part, key):
            path = f"extra.{part}.{key}"
            what = f"changes {cost}, which the plan does not count"
            yield Problem(path, what, origin_of(path, origins), hint="compare with a short run: schedule.max_steps=20")


def own_key(part: str, key: str) -> str:
    """The recipe's key for a setting; empty where it has none."""
    last = key.rpartition(".")[2].removeprefix("stage3_")
    if stated := _OWN[part].get(key) or _OWN[part].get(key.partition(".")[0]):
        return stated
    if places := leaf_paths().get(last):
        return places[0]
    if part != "deepspeed" and (others := translated_keys().get(last)):
        return others[0]
    return last if last in Recipe.model_fields and part != "deepspeed" else ""


def refusal(part: str, key: str) -> str:
    """Why a setting without a key of its own is not passed on; empty for one that nobody has judged yet."""
    reasons = _REASONS[part].items()
    return next((why for why, keys in reasons if _matches(key, keys)), "")


def _given(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    for part in PASSED:
        values = getattr(recipe.extra, part)
        for key, value in (flat(values) if part == "deepspeed" else values).items():
            yield part, key, value


def _needed(recipe: Recipe, part: str, key: str) -> str:
    """The setting that a key which nothing reads would need; empty for one that is read."""
    for other, patterns, reads, needs in _READ_BY:
        if part == other and _matches(key, patterns) and not reads(recipe):
            return needs
    return ""


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if "type" not in schema:
        return True
    kind, _ = _TYPES[schema["type"]]
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _allowed(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    return _TYPES[schema["type"]][1]


def _change(value: Any, schema: Mapping[str, Any]) -> str:
    if close := did_you_mean(str(value), schema.get("enum", ())):
        return f"did you mean `{close}`?"
    if isinstance(value, str) and "enum" not in schema:
        return "write what is allowed, without quotes; ${oc.decode:${oc.env:NAME}} reads a variable as more than text"
    return "write what is allowed"
