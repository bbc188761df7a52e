"""Models that are published in few bits, as gpt-oss and those in fp8 are: read in the type that a run asks for.

Left to itself, Transformers keeps the few bits wherever the device has kernels for them, which compute no gradients.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from toolkit.common import UserError
from toolkit.models.adapters import kept_in_fp32
from toolkit.recipe import Recipe
from toolkit.recipe.model_configs import RESTORED_FORMS, stored_form


def form_of(config: Any) -> str:
    """The one of `RESTORED_FORMS` that a model's files are in; else empty.

    Args:
        config: The model's configuration object.
    """
    stored = getattr(config, "quantization_config", None)
    form = stored_form({"quantization_config": stored})
    return form if form in RESTORED_FORMS else ""


def restore_on_reading(config: Any) -> None:
    """Has Transformers restore what the files hold, on every device."""
    if form_of(config):
        config.quantization_config["dequantize"] = True


def restored(config: Any) -> Any:
    """The configuration of the model once it is restored."""
    config = copy.deepcopy(config)
    if form_of(config):
        del config.quantization_config
    return config


def check_not_stored_again(recipe: Recipe, config: Any) -> None:
    """
    Raises:
        UserError: If weights that are to be restored are to be stored in other few bits at once.
    """
    if form_of(config):
        raise UserError(
            f"method.quantization={recipe.method.quantization} needs full weights, {recipe.model.path} has them in "
            f"{form_of(config)}",
            "set method.quantization=none, or model.path to the model in 16 bits",
        )


def finish_restoring(model: Any, dtype: torch.dtype) -> None:
    """Makes a model that was restored like one whose files are in full.

    Transformers 5.23 leaves what lay there in full in its own type, and remembers to write the model in few bits again,
    without a config that says so.
    """
    kept = kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        if not kept(name):
            parameter.data = parameter.data.to(dtype)
    # Without it, it is saved under the names that its architecture has.
    del model._weight_conversions
