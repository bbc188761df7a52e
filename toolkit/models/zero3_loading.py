"""How Transformers loads into parameters that ZeRO-3 has divided, where it does otherwise than elsewhere."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, core_model_loading
from transformers.integrations import is_deepspeed_zero3_enabled

from toolkit.models.heads import belongs_to_head, from_config, head_modules
from toolkit.models.tiny import by_itself

_UNUSED = "of_another_head"


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """In it, weights are found and drawn under ZeRO-3 as without it.

    Transformers 5.23 renames a tensor there even where the new name is none of the model's and the old one is (DeepSeek
    V4), and has modules draw weights that were loaded, of which they may ask the shapes (xLSTM, BLT, RWKV).
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    renamed, draw = core_model_loading.rename_source_key, PreTrainedModel._initialize_weights

    def rename(name: str, renamings: Any, converters: Any, *args: Any, **kwargs: Any) -> tuple[str, str | None]:
        found = renamed(name, renamings, converters, *args, **kwargs)
        known = kwargs.get("meta_state_dict") or {}
        if found[0] not in known and name in known and not found[0].startswith(_UNUSED):
            found = renamed(name, [], [], *args, **kwargs)
        return found

    def draw_missing(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [*module.parameters()]
        if parameters and all(getattr(each, "_is_hf_initialized", False) for each in parameters):
            module._is_hf_initialized = True
        else:
            draw(self, module, *args, **kwargs)

    core_model_loading.rename_source_key = rename  # type: ignore[assignment]
    PreTrainedModel._initialize_weights = draw_missing  # type: ignore[method-assign]
    try:
        yield
    finally:
        core_model_loading.rename_source_key = renamed
        PreTrainedModel._initialize_weights = draw  # type: ignore[method-assign]


def other_heads(config: Any, objective: str, trust_remote_code: bool, files: Iterable[Path]) -> dict[str, str]:
    """Names that no model has, by the pattern of each tensor's of a head in the files that has another size: over these
    Transformers fails there, where it draws them elsewhere."""
    if not is_deepspeed_zero3_enabled():
        return {}
    with by_itself(), torch.device("meta"):
        model = from_config(objective, config, trust_remote_code)
    heads, sizes, found = head_modules(model), {name: each.shape for name, each in model.named_parameters()}, {}
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    known = belongs_to_head(name, heads) and name in sizes
                    if known and [*sizes[name]] != tensors.get_slice(name).get_shape():
                        found[f"^{re.escape(name)}$"] = f"{_UNUSED}.{name}"
    return found


def forget_unused_names(model: Any) -> None:
    """Transformers keeps all conversions of names that it knows under ZeRO-3, not those that the files have asked for,
    and would save under names that these never had."""
    if is_deepspeed_zero3_enabled():
        model._weight_conversions = [each for each in model._weight_conversions or () if each.was_used()]
