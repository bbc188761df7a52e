"""Which layers of a model get adapters, and that those that were asked for have them."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from toolkit.common import UserError
from toolkit.models.heads import belongs_to_head
from toolkit.models.weight_reads import LINEAR, Reads, is_one_of
from toolkit.recipe.module_names import adapter_patterns, matches, meant
from toolkit.recipe.sections import Method


def linear_modules(model: PreTrainedModel, others: Iterable[str]) -> list[str]:
    """Last names of the linear layers but the output head: PEFT picks layers among named modules only.

    Args:
        others: Names of those that get no adapter.
    """
    head = model.get_output_embeddings()
    linear = {name for name, each in model.named_modules() if isinstance(each, LINEAR)} - {*others}
    return sorted({name.rpartition(".")[2] for name in linear if model.get_submodule(name) is not head})


def unadaptable(model: PreTrainedModel, reads: Reads) -> dict[str, str]:
    """Names of linear layers that get no adapter, and why not: of some classes that compute something else as well or
    instead, such as routers that return what they chose, and of those that are not called."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    found, settings = {}, LoraConfig()
    for name, each in model.named_modules():
        if isinstance(each, torch.nn.Linear):
            try:
                _check_lora_target_modules_mamba(settings, model, name.rpartition(".")[2])
            except ValueError:
                found[name] = f"PEFT adds none to this layer of a {model.config.model_type}"
            if is_one_of(name, reads.uncalled):
                found[name] = f"{model.config.model_type} reads its weight without calling it, or kernels do"
            if is_one_of(name, reads.renamed):
                found[name] = "PEFT would read its adapter back under another name"
            if not _maps_rows(each):
                found[name] = "it returns something else than a matrix product"
    return found


def linear_in(model: PreTrainedModel, heads: list[str]) -> dict[str, str]:
    """Names of the linear layers of a head, which is trained as it is."""
    linear = (name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear))
    return {name: "it belongs to the head, which is trained in full" for name in linear if belongs_to_head(name, heads)}


def _maps_rows(layer: torch.nn.Linear) -> bool:
    known = ("torch.", "bitsandbytes.", "toolkit.models.quantization.stored")
    if type(layer).forward is torch.nn.Linear.forward or type(layer).__module__.startswith(known):
        return True
    twin = copy.copy(layer)
    # Under ZeRO-3 a parameter itself is empty.
    shapes = {name: getattr(each, "ds_shape", getattr(each, "shape", None)) for name, each in layer._parameters.items()}
    twin._parameters = {
        name: shape if shape is None else torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        for name, shape in shapes.items()
    }
    try:
        with _disable_current_modes():
            outputs = twin(torch.empty(2, 3, layer.in_features, device="meta"))
    except Exception:  # Its own code may raise anything.
        return False
    return isinstance(outputs, torch.Tensor) and outputs.shape == (2, 3, layer.out_features)


def wrapped(model: PreTrainedModel, adapter: Any, others: list[str], outside: Sequence[str]) -> Any:
    """PEFT's model, in which `all-linear` is without those that are not; its settings as if these were none.

    Args:
        outside: Names of parts that get no adapters, of which the settings tell those who load them.
    """
    from peft import get_peft_model

    asked, excluded = adapter.target_modules, adapter.exclude_modules
    given = [excluded] if isinstance(excluded, str) else [rf"(.*\.)?{re.escape(each)}" for each in excluded or []]
    modules = dict(model.named_modules())
    hidden = [rf"{re.escape(part)}(\..*)?" for part in outside if part in modules and _has_target(modules[part], asked)]
    beside = [*map(re.escape, others)] if asked == "all-linear" else []
    if hidden or beside:
        adapter.exclude_modules = _any_of([*given, *hidden, *beside])
    if adapter.use_rslora:
        _scale_fused(adapter, model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="You have passed exclude_modules")
        adapted = get_peft_model(model, adapter)
    if asked == "all-linear" and (hidden or beside):
        names = [*_adapted_names(adapted)]
        adapter.target_modules = {
            each
            for each in adapter.target_modules
            if any(matches(name, [each]) for name in names) and not any(matches(other, [each]) for other in others)
        }
    adapter.exclude_modules = _any_of([*given, *hidden]) if hidden else excluded
    return adapted


def _scale_fused(adapter: Any, model: PreTrainedModel) -> None:
    """Keeps rsLoRA's scale, alpha / sqrt(r), for projections of experts that Transformers fuses: PEFT multiplies their
    rank and alpha by the number of those that are fused, which keeps alpha / r."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    given = dict(adapter.alpha_pattern)
    convert_peft_config_for_transformers(adapter, model, None)
    for name in adapter.alpha_pattern.keys() - given.keys():
        fused = adapter.rank_pattern[name] / adapter.r
        adapter.alpha_pattern[name] = adapter.lora_alpha * math.sqrt(fused)


def _any_of(patterns: list[str]) -> str:
    return "|".join(f"({each})" for each in patterns)


def _has_target(part: torch.nn.Module, asked: str | list[str]) -> bool:
    """Whether adapters would be added to a part of a model: PEFT refuses to exclude what is none."""
    linear = (name for name, each in part.named_modules() if isinstance(each, LINEAR))
    return any(asked == "all-linear" or matches(name, asked) for name in linear)


def check_adapted(adapted: Any, method: Method) -> None:
    """Refuses what PEFT passed over: patterns, parameters and layers that have no adapter."""
    names = sorted(_adapted_names(adapted))
    layers = (("layers_to_transform", str(index), rf"\D*\.{index}\..*") for index in method.layers_to_transform)
    for key, given, pattern in (*adapter_patterns(method), *layers):
        if not any(re.fullmatch(pattern, name) for name in names):
            raise UserError(
                f"method.{key}: {given!r} matches nothing that has an adapter",
                f"{meant(given, names)}adapters are on parameters and modules named like {names[0]}, {names[-1]}",
            )


def _adapted_names(adapted: Any) -> Iterator[str]:
    """Names, in the base, of the modules and parameters that have adapters."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, ParamWrapper):
            # The wrappers of several parameters of a module lie in each other.
            yield f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        elif isinstance(module, BaseTunerLayer):
            yield name


def saved_names(model: Any) -> dict[str, str]:
    """Names of trained parameters to those under which PEFT saves them; empty without adapters."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft import get_peft_model_state_dict

    # Also what is shared, by every name of it.
    trained = {name: each for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    saved = get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)
    names = {id(each): name for name, each in saved.items()}
    return {name: names[id(each)] for name, each in trained.items() if id(each) in names}
