"""Whether beginnings that documents have in common are computed once, as `data.shared_prefixes` lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.recipe import model_configs
from toolkit.recipe.heads import HEADED
from toolkit.recipe.preference import PAIRED
from toolkit.recipe.schema import Recipe

SHARING = ("sft", *(objective for objective in PAIRED if objective not in HEADED))
"""Objectives whose rows are laid out so."""


def are_shared(recipe: Recipe, config: Mapping[str, Any], backend: str) -> bool:
    """Whether it changes nothing of what is learnt, and the attention can do it.

    What is computed once is dropped out, or has noise added, once for all who share it, where each had its own; and
    experts are balanced by how many tokens choose them.

    Args:
        config: The model's.
        backend: Attention, resolved.
    """
    parallel, method = recipe.parallel, recipe.method
    laid_out = backend == "torch_varlen" and recipe.objective in SHARING and not recipe.data.streaming
    # Code of a model's own need not hand on whose keys are whose.
    apart = parallel.sharing > 1 or parallel.pipeline > 1 or recipe.model.trust_remote_code
    drops = (method.name == "lora" and method.lora_dropout > 0) or _drops_out(model_configs.text_config(config))
    noise = recipe.extra.training_arguments.get("neftune_noise_alpha")
    mixed = model_configs.experts(config)[0] > 1
    return recipe.batch.share_prefixes and laid_out and not (apart or drops or noise or mixed)


def _drops_out(config: Mapping[str, Any]) -> bool:
    rates = (value for key, value in config.items() if "drop" in key)
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
