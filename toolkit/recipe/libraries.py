"""The libraries' own settings that `extra` in a recipe may pass on, and what is known of each.

The libraries take ten seconds to import, so their fields lie in `library_fields.json`, which
`scripts/library_fields.py` writes. What is passed on is listed: a new version's field would else reach the library with
nobody having asked what it does to losses, checkpoints and plans. The rest is judged by `rules/extra.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from toolkit.recipe.arguments import Argument, count, number

_TIME, _MEMORY, _BOTH = "time", "memory", "memory and time"

PASSED: dict[str, dict[str, str]] = {
    "training_arguments": {
        **dict.fromkeys(("neftune_noise_alpha", "logging_first_step", "ddp_timeout"), ""),
        **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), ""),
        **dict.fromkeys(("torch_empty_cache_steps", "full_determinism", "debug"), _TIME),
        **dict.fromkeys(("ddp_broadcast_buffers", "ddp_find_unused_parameters"), _TIME),
        **dict.fromkeys(("ddp_bucket_cap_mb", "dataloader_prefetch_factor", "dataloader_persistent_workers"), _BOTH),
        **dict.fromkeys(("dataloader_pin_memory", "router_aux_loss_coef"), _BOTH),
    },
    # Traced with the model, so that plans count them.
    "lora": dict.fromkeys(("bias", "exclude_modules", "layers_pattern"), ""),
    "deepspeed": {
        **dict.fromkeys(("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"), ""),
        **dict.fromkeys(("fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale", "dump_state"), ""),
        "bf16.immediate_grad_update": _MEMORY,
        **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown"), _TIME),
        **dict.fromkeys(("aio.*", "comms_logger.*", "flops_profiler.*"), _TIME),
        "zero_optimization.sub_group_size": _BOTH,
        "zero_optimization.zero_hpz_partition_size": _BOTH,
        "zero_optimization.use_multi_rank_bucket_allreduce": _TIME,
        "zero_optimization.stage3_model_persistence_threshold": _BOTH,
        "zero_optimization.stage3_use_all_reduce_for_fetch_params": _TIME,
        "zero_optimization.stage3_allgather_sequential": _TIME,
        "zero_optimization.parameter_alignment": _MEMORY,
        "zero_optimization.leaf_module.*": _BOTH,
        "zero_optimization.offload_*.buffer_count": _MEMORY,
        "zero_optimization.offload_param.buffer_size": _MEMORY,
        "zero_optimization.offload_param.max_in_cpu": _MEMORY,
        "zero_optimization.offload_optimizer.pipeline_*": _BOTH,
        "zero_optimization.offload_optimizer.fast_init": "",
    },
}
"""Part of `extra` to the settings that are passed on (patterns of dotted keys), with what they change that plans do not
count. A DeepSpeed file that a launcher names may state the same."""

_COUNT = count(1)
BOUNDS: dict[str, dict[str, Argument]] = {
    "training_arguments": {
        **dict.fromkeys(("neftune_noise_alpha", "router_aux_loss_coef"), number(0)),
        **dict.fromkeys(("ddp_timeout", "ddp_bucket_cap_mb", "torch_empty_cache_steps"), _COUNT),
        "dataloader_prefetch_factor": _COUNT,
    },
    "lora": {},
    "deepspeed": {
        # A scale below 1 keeps nothing from overflowing that fp32 would hold; no hysteresis at all is never used up.
        **{"fp16.loss_scale": number(0), "fp16.initial_scale_power": count(0, 64)},
        **dict.fromkeys(("fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale"), _COUNT),
    },
}
"""Settings that are passed on to the numbers that make sense of them, where their libraries take others too and fail
later, or train something else."""


@functools.cache
def fields() -> dict[str, dict[str, dict[str, Any]]]:
    """Part of `extra` to all settings of its library by dotted key, each with the JSON Schema of its values."""
    content: dict[str, dict[str, dict[str, Any]]] = json.loads(
        Path(__file__).with_name("library_fields.json").read_text(encoding="utf-8")
    )
    return content


def uncounted(part: str, key: str) -> str | None:
    """What a setting changes that plans do not count, possibly nothing; None for one that is not passed on."""
    return next((cost for pattern, cost in PASSED[part].items() if fnmatchcase(key, pattern)), None)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return result
