"""Whether shared beginnings of documents are computed once, as `data.batching.shared_prefixes` lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.recipe import model_configs
from toolkit.recipe.schema import Recipe


def are_shared(recipe: Recipe, config: Mapping[str, Any], backend: str) -> bool:
    """Whether it changes nothing of what is learnt, and the attention can do it.

    What is computed once is dropped out, or has noise added, once for all who share it, where each had its own.

    Args:
        config: The model's.
        backend: Attention, resolved.
    """
    parallel, method = recipe.parallel, recipe.method
    # Code of a model's own need not hand on whose keys are whose.
    apart = parallel.sharing > 1 or parallel.pipeline > 1 or recipe.model.trust_remote_code
    # Trainings on whole answers switch the dropout of adapters off.
    drops = method.name == "lora" and method.lora_dropout > 0 and not (recipe.prefers or recipe.reinforces)
    noise = recipe.extra.training_arguments.get("neftune_noise_alpha")
    alike = not (apart or drops or noise or _is_random(model_configs.text_config(config)))
    return recipe.batch.share_prefixes and backend == "torch_varlen" and may_begin_alike(recipe) and alike


def may_begin_alike(recipe: Recipe) -> bool:
    """Whether its documents are read by a decoder and trained in part, so that there is a beginning to share."""
    return not recipe.headed and recipe.objective != "seq2seq"


def _is_random(config: Mapping[str, Any]) -> bool:
    if any(_is_random(value) for value in config.values() if isinstance(value, Mapping)):
        return True
    # Names of classes stand by their numbers.
    rates = (value for key, value in config.items() if "drop" in str(key) or "jitter" in str(key))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
