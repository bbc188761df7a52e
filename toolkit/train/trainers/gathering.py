"""What engines that divide a model's parameters are told about weights that are read past their own module, and about
which are gathered together."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import accelerate.accelerator
import torch
from accelerate.utils import fsdp_utils
from torch.distributed.fsdp import FSDPModule

from toolkit.common import UserError
from toolkit.models.blockwise import blocks
from toolkit.models.reach import MANY


def gather_head_with_model(model: Any) -> None:
    """ZeRO-3 gathers a weight while its own module is called. TRL's loss reads the head's weight without calling the
    head, and although it gathers it for that, training a head that is not tied fails in the backward pass."""
    import deepspeed

    head = model.get_output_embeddings()
    for parameter in (head.weight, head.bias):
        if parameter is not None:
            deepspeed.zero.register_external_parameter(model, parameter)


def take_choices_together(model: Any) -> None:
    """Which experts a process calls depends on its tokens, where these are modules or some stand for none, and so does
    how often Qwen 4's attention calls what chooses its blocks. ZeRO-3, whose processes gather and reduce in the same
    order, gathers all of these at once, and takes gradients of all."""
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    text = model.config.get_text_config()
    none_at_all = bool(getattr(text, "zero_expert_num", 0))
    for name, module in model.named_modules():
        experts = name.endswith("experts") and (none_at_all or isinstance(module, MANY))
        if experts or (name.endswith("indexer") and text.model_type.startswith("qwen4_exp")):
            set_z3_leaf_module(module, True)


@functools.cache
def decide_releases_anew() -> None:
    """ZeRO-3 records in which order modules are called, and a new order whenever the old one no longer holds. What it
    releases at a step it decides once, in an `lru_cache` that DeepSpeed 0.19 does not empty with the order: after
    forward passes alone before step 1 nothing would stay for the backward pass, and every layer be gathered twice."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    invalidate = Coordinator._invalidate_trace
    # DeepSpeed's profiling decorator stands around the cache and does not show it as `__wrapped__`.
    decided = inspect.getclosurevars(Coordinator._PartitionedParameterCoordinator__params_to_release).nonlocals["func"]

    def invalidate_with_decisions(self: Any) -> None:
        decided.cache_clear()
        invalidate(self)

    Coordinator._invalidate_trace = invalidate_with_decisions


def gather_for_dora(model: Any) -> None:
    """DoRA's layer of magnitudes measures the weights of its neighbours, which ZeRO-3 has released by then."""
    import deepspeed

    for module in model.modules():
        for name, magnitude in getattr(module, "lora_magnitude_vector", {}).items():
            for neighbour in (module.base_layer, module.lora_A[name], module.lora_B[name]):
                for parameter in neighbour.parameters():
                    deepspeed.zero.register_external_parameter(magnitude, parameter)


def name_units(plugin: Any, model: Any) -> None:
    """Names the modules that are gathered each by itself, unless the recipe does.

    Accelerate 1.15 takes all that the model's class says are not to be split, and fails where one is not there, as
    layers for images in a model of text (Qwen3.5), or where the embeddings of tokens lie in one, of which it makes a
    unit of its own (encoders). Where the class says nothing, as Blenderbot's, the model would be one unit.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    embeddings, there = base.get_input_embeddings(), [*base.modules()]
    if len(_holders(base)) > 1:
        raise UserError(
            f"strategy.name: torch does not shard a {base.config.model_type}, whose output head has its weights in "
            "common with several modules",
            "set strategy.name=zero2 or zero3",
        )
    around = {type(each).__name__ for each in there if any(part is embeddings for part in each.children())}
    names = {type(each).__name__ for each in there} - around
    layers = {type(block.module).__name__ for block in blocks(base)[1:] if _is_own(block.module)}
    units = [name for name in base._no_split_modules or sorted(layers) if name in names]
    if plugin.transformer_cls_names_to_wrap is None and units:
        plugin.transformer_cls_names_to_wrap = units


def _holders(base: Any) -> list[torch.nn.Module]:
    """Modules beside the embeddings that have a parameter of the output head, too, as one of BERT's has its bias."""
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    # Of one that PEFT has wrapped it has none itself.
    own = {id(each) for each in head._parameters.values() if each is not None} if head is not None else set()
    others = (each for each in base.modules() if each is not head and each is not embeddings)
    return [each for each in others if own.intersection(map(id, each._parameters.values()))]


def _is_own(layer: torch.nn.Module) -> bool:
    """Whether a layer is of the model's own code and has parameters."""
    return not type(layer).__module__.startswith("torch.") and any(True for _ in layer.parameters())


@functools.cache
def share_buffers() -> None:
    """Where one process reads the model, accelerate 1.15 sends its parameters to the others, and fails over buffers
    that are saved with them, such as those that balance a router's experts. It keeps those that are not saved: so these
    are sent here, and count among them until the model is sharded.

    Nor can it shard a head with a parameter that another module has, too, unless both are one unit: that module takes
    the place of the last norm, beside the head.
    """
    prepare, last_norm = accelerate.accelerator.fsdp2_prepare_model, fsdp_utils._find_final_norm

    def with_buffers(accelerator: Any, model: Any) -> Any:
        saved = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        for module, name in saved:
            module._buffers[name] = module._buffers[name].to(accelerator.device)
            torch.distributed.broadcast(module._buffers[name], 0)
            module._non_persistent_buffers_set.add(name)
        beside = _holders(model.get_base_model() if hasattr(model, "get_base_model") else model)
        fsdp_utils._find_final_norm = (lambda model: beside[0]) if beside else last_norm
        model = prepare(accelerator, model)
        for module, name in saved:
            module._non_persistent_buffers_set.discard(name)
        return model

    accelerate.accelerator.fsdp2_prepare_model = with_buffers


def unshard_head(model: Any) -> None:
    """FSDP gathers the weights of a unit when one of its modules is called. Beside adapters, and in models whose last
    norm accelerate does not find, the head is a unit by itself, which TRL's loss reads without calling it: it would
    gather the weight, but not sum its gradient over the processes."""
    alone: list[bool] = []

    def unshard(module: Any, inputs: Any) -> None:
        head = model.get_output_embeddings()
        alone[:] = alone or [_is_read_alone(model, head)]
        if alone[0]:
            head.unshard()

    model.register_forward_pre_hook(unshard)


def _is_read_alone(model: Any, head: Any) -> bool:
    # Of a divided head the loss takes this process's part, where TRL would gather all of a sharded one.
    read = any(each.requires_grad for each in head.parameters()) or hasattr(head, "vocabulary_part")
    sharded = read and isinstance(head, FSDPModule)
    return sharded and not any(_unit(each) is _unit(head) for each in model.modules() if each is not head)


def _unit(module: Any) -> Any:
    """The state that modules share which FSDP gathers together; each other module is its own."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else module
