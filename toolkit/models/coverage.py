"""What share of a model is really quantized, and what share its adapters reach: counted on the loaded parameters.

Libraries quantize and adapt the kinds of modules they know and leave the others as they are, without a word: the fused
experts of a mixture are 97% of Qwen3-30B-A3B, and no linear layers. Counting takes milliseconds; the alternative, the
libraries' own lists of modules, says what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from toolkit.common import UserError
from toolkit.models.parallel.parts import whole_shape
from toolkit.models.quantization.stored import Stored, StoredLinear
from toolkit.recipe import Recipe, model_configs

_TOKEN_ROWS = "trainable_tokens_delta"
"""In PEFT's names of trained rows of embeddings, which are copies."""


def parameter_counts(model: torch.nn.Module) -> dict[str, int]:
    """Number of parameters in `total`, `base`, `trainable`, `tied`, `quantized` and `reached`.

    The base is what there is beside adapters and trained copies; tied parameters are those that a second name stands
    for; reached ones are those of the base that are trained or have an adapter. 4-bit weights count as the parameters
    they stand for.
    """
    counts = dict.fromkeys(("total", "base", "trainable", "tied", "quantized", "reached"), 0)
    seen = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        count = _numel(parameter)
        if parameter in seen:
            counts["tied"] += count
            continue
        seen.add(parameter)
        counts["total"] += count
        counts["trainable"] += count if parameter.requires_grad else 0
        counts["quantized"] += count if is_quantized(parameter) else 0
    if hasattr(model, "peft_config"):
        adapted = {id(each): each for each in _adapted(model)}.values()
        rows = sum(_numel(each) for name, each in model.named_parameters() if _TOKEN_ROWS in name)
        itself = sum(_numel(each) for each in adapted if each.requires_grad)
        base = counts["total"] - counts["trainable"] + itself
        return counts | {"base": base, "reached": sum(map(_numel, adapted)) + rows}
    return counts | {"base": counts["total"], "reached": counts["trainable"]}


def require_quantized(model: Any, recipe: Recipe) -> None:
    """Stops a run most of whose layers are still as they were, although the recipe asks for quantization.

    Raises:
        UserError: With the share that is quantized.
    """
    method = recipe.method
    if method.quantization == "none":
        return
    outside = {id(each) for module in _outside(model) for each in module.parameters(recurse=False)}
    inside = [each for each in model.parameters() if id(each) not in outside]
    total = sum(map(_numel, inside))
    quantized = sum(_numel(each) for each in inside if is_quantized(each))
    if quantized < model_configs.QUANTIZED_SHARE * total:
        raise UserError(
            f"method.quantization={method.quantization} reaches {quantized / total:.0%} of the parameters in the "
            f"layers of this {model.config.model_type}; the others are no linear layers, or its code reads their "
            "weights, and they stay in 16 bits",
            "set method.quantization=none, and strategy.name=zero3 or fsdp where one device is too small",
        )


def _outside(model: Any) -> Iterator[torch.nn.Module]:
    """Embeddings of tokens and positions, and the output head, which bitsandbytes leaves as they are."""
    yield from (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    if (head := model.get_output_embeddings()) is not None:
        yield head


def _adapted(model: torch.nn.Module) -> Iterable[Any]:
    """Parameters of the base that have an adapter or a trained copy, or are trained themselves, as biases may be."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from peft.utils import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ParamWrapper):
            yield module.get_param()
        elif isinstance(module, LoraLayer):
            yield module.get_base_layer().weight
        elif isinstance(module, ModulesToSaveWrapper):
            yield from module.original_module.parameters()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in ("lora_", ".modules_to_save.", _TOKEN_ROWS)):
            yield parameter


def is_quantized(parameter: Any) -> bool:
    """Whether a tensor is stored in nf4, fp8 or int4, which have a `quant_state`, or in bitsandbytes' int8."""
    return getattr(parameter, "quant_state", None) is not None or hasattr(parameter, "SCB")


def stored_form(model: torch.nn.Module) -> str:
    """In which form a model keeps weights in fewer bits, as `method.quantization` calls it; several joined by `+`.

    Read from its modules: bytes are alike in all forms, and engines take what parameters had beside them.
    """
    forms = set()
    for module in model.modules():
        state = getattr(module, "quant_state", None) or getattr(getattr(module, "weight", None), "quant_state", None)
        if isinstance(module, StoredLinear):
            forms.add(module.form)
        elif type(module).__name__ == "Linear8bitLt":
            forms.add("int8")
        elif state:
            forms.add(state.form if isinstance(state, Stored) else state.quant_type)
    return "+".join(sorted(forms)) or "none"


def _numel(parameter: Any) -> int:
    state = getattr(parameter, "quant_state", None)
    # ZeRO-3 leaves empty tensors behind.
    return (state.shape if state is not None else getattr(parameter, "ds_shape", whole_shape(parameter))).numel()
