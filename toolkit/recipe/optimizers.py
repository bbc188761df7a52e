"""The recipe: every key a user may write, its type, its default and what it means.

This module and `strategy` are the only places where a default is stated. The text beneath a field is its documentation
and goes into the JSON Schema that editors read.
"""

from __future__ import annotations

OPTIMIZERS = (
    # Short names of the field first, then what Transformers' Trainer offers under its own names.
    *("adamw", "lion"),
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_4bit", "adamw_torch_8bit", "adamw_anyprecision"),
    *("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_8bit", "adamw_bnb_8bit"),
    *("paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit"),
    *("paged_ademamix_8bit", "sgd", "adagrad", "adafactor", "lion_32bit", "lion_8bit", "paged_lion_32bit"),
    *("paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
    *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"),
    *("lomo", "adalomo", "grokadamw", "stable_adamw"),
    *("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
)
