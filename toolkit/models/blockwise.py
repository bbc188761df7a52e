"""A model that may be larger than memory: its weights stay in their files and are read layer by layer, as used.

The layers of its stacks have weights only while they compute; embeddings, norms and heads, which models also read from
outside, have theirs while the whole model does. Each pass reads all files once. Accelerate's disk offload, which opens
them here, does the same for models as they are; it neither quantizes nor merges what it reads, and states no bound.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.common import UserError
from toolkit.models.adapters import keep_unpacked, kept_in_fp32
from toolkit.models.coverage import is_quantized
from toolkit.models.quantization.stored import Stored


@dataclass
class Weights:
    """The weights of a model in its files, by their names in the model.

    Args:
        files: Reads one of them, in the type that the model is loaded in.
        plain: The model without weights.
        quantizer: Transformers' one that training loads the model with, if it does.
    """

    files: Mapping[str, torch.Tensor]
    plain: Any
    quantizer: Any = None

    def model(self, as_trained: bool = False) -> Any:
        """A copy of the model without weights.

        Args:
            as_trained: Whether it has quantized layers where training has them.
        """
        model = copy.deepcopy(self.plain)
        if as_trained and self.quantizer:
            self.quantizer.preprocess_model(model, device_map=None)
            self.quantizer.postprocess_model(model)
            keep_unpacked(model)
        return model

    def adapted(self, adapters: Mapping[Path, float], as_trained: bool = False) -> Any:
        """The same with saved adapters added up, whose own weights are in memory.

        Args:
            adapters: The folder of each, and how much of it is added.
            as_trained: As for `model`.
        """
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import load_peft_weights

        adapted: Any = None
        weights = {f"adapter{number}" if number else "default": each for number, each in enumerate(adapters.values())}
        for name, folder in zip(weights, adapters, strict=True):
            config = LoraConfig.from_pretrained(str(folder))
            config.inference_mode = True
            if adapted is None:
                adapted = get_peft_model(self.model(), config, low_cpu_mem_usage=True)
            else:
                adapted.add_adapter(name, config, low_cpu_mem_usage=True)
            layers: list[Any] = [each for each in adapted.modules() if isinstance(each, BaseTunerLayer)]
            for layer in layers:
                # Which would move it to where the base is: nowhere.
                layer._move_adapter_to_device_of_base_layer = lambda *_, **__: None
            saved = load_peft_weights(str(folder), device="cpu")
            found: Any = set_peft_model_state_dict(adapted, saved, name, low_cpu_mem_usage=True)
            if lacking := [
                each
                for each in found.missing_keys
                if "lora_" in each and each.endswith((f".{name}", f".{name}.weight"))
            ]:
                raise UserError(
                    f"{folder} lacks {len(lacking)} weights of its adapters, or has them under other names, such as "
                    f"{lacking[0]}",
                    "read it with the versions of PEFT and Transformers that saved it (manifest.json names them)",
                )
        adapted.base_model.set_adapter(list(weights), inference_mode=True)
        for layer in layers:
            for name, scale in getattr(layer, "scaling", {}).items():  # Trained rows of tokens have none.
                layer.scaling[name] = weights[name] * scale
        base = adapted.get_base_model()
        for name, layer in self.model(as_trained).named_modules():
            if _is_replaced(layer):
                plain: Any = base.get_submodule(name)
                before = plain.get_base_layer() if isinstance(plain, BaseTunerLayer) else plain
                # Trained biases came with the adapter.
                there = {key: each for key, each in before.named_parameters(recurse=False) if not each.is_meta}
                layer._parameters.update(there)
                if isinstance(plain, BaseTunerLayer):
                    plain.base_layer, plain.fan_in_fan_out = layer, False  # type: ignore[attr-defined]
                else:
                    base.set_submodule(name, layer)
        return adapted.eval()

    @cached_property
    def _layers(self) -> Any:
        return self.model(as_trained=True)

    def read(self, name: str, place: torch.device) -> torch.Tensor:
        """A weight as adapters are trained on it: quantized, or in the type that the model is loaded in."""
        tied = getattr(self.plain, "all_tied_weights_keys", None) or {}
        if name not in self.files and name not in tied:
            # Of a head that was drawn for training: what counts is the trained one beside it.
            return torch.zeros(self.plain.get_parameter(name).shape, dtype=self.plain.dtype, device=place)
        weight = self.files[name if name in self.files else tied[name]].to(place)
        if weight.ndim and (new := len(self.plain.get_parameter(name)) - len(weight)):
            # Rows of new tokens, which adapters have.
            weight = torch.cat([weight, weight.new_zeros(new, *weight.shape[1:])])
        if not self.quantizer or not self.quantizer.param_needs_quantization(self._layers, name):
            return weight
        quantized = self.quantizer.get_quantize_ops().convert({name: [weight]}, model=self._layers)[name]
        # Experts are restored whenever they are used.
        return quantized.requires_grad_(False) if _is_replaced(self._layer(name)) else _restored(quantized)

    def restored(self, name: str, place: torch.device) -> torch.Tensor:
        """The same in fp32, restored from its quantized form."""
        weight = self.read(name, place)
        if not is_quantized(weight):
            return weight.float()
        plain = _restored(weight)
        return (plain.T.contiguous() if issubclass(self._layer(name).source_cls, Conv1D) else plain).float()

    def _layer(self, name: str) -> Any:
        return self._layers.get_submodule(name.rpartition(".")[0])


def _is_replaced(layer: nn.Module) -> bool:
    """Whether it is a library's quantized layer, in the place of a plain one."""
    return isinstance(layer, nn.Linear) and hasattr(layer, "source_cls")


def _restored(weight: Any) -> torch.Tensor:
    from bitsandbytes import functional

    state = getattr(weight, "quant_state", None)
    if isinstance(state, Stored):
        return state.restored(weight, state.dtype)
    if state is not None:
        return functional.dequantize_4bit(weight.data, state)
    return functional.int8_vectorwise_dequant(weight.data, weight.SCB)


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters that are there together, each as its name in the plain model, its module, and its key there."""

    module: nn.Module
    parameters: list[tuple[str, Any, str]]

    @property
    def sizes(self) -> list[int]:
        """How many numbers each of them has; tied ones count once."""
        return [each.numel() for each in {part._parameters[key] for _, part, key in self.parameters}]

    @property
    def adapted(self) -> list[Any]:
        """The modules with adapters of which each merges into some of them."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        holders = {id(part) for _, part, _ in self.parameters}
        layers = (layer for layer in self.module.modules() if isinstance(layer, BaseTunerLayer))
        return [layer for layer in layers if id(layer.get_base_layer()) in holders]


def blocks(model: nn.Module) -> list[Block]:
    """What is outside of a model's stacks, and each of their layers."""
    layers: dict[str, Block] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not path.startswith(tuple(f"{each}." for each in layers)):
            for name, layer in module.named_children():
                at = f"{path}.{name}"
                parts = layer.named_modules(prefix=at)
                layers[at] = Block(layer, [each for inside, part in parts for each in _parameters(part, inside)])
    within = {id(part) for block in layers.values() for part in block.module.modules()}
    parts = model.named_modules()
    rest = [each for path, part in parts if id(part) not in within for each in _parameters(part, path)]
    return [Block(model, rest), *layers.values()]


class Blockwise:
    """A model without weights, plain or with adapters, which reads those of each layer when it comes to it.

    Args:
        model: Its parameters on `meta` are read by name; others, such as those of adapters, are lent to the device.
        weights: Where they are read from.
        place: The device that computes.
        as_trained: Whether weights are left as adapters were trained on them, not restored in fp32.

    Attributes:
        merging: Whether adapters are merged into the weights.
        rounded: The type that these are then rounded to, but for those that Transformers keeps in fp32.
    """

    merging = False
    rounded = torch.float32

    def __init__(self, model: Any, weights: Weights, place: torch.device, as_trained: bool = False) -> None:
        self.model, self.weights, self.place, self.as_trained = model, weights, place, as_trained
        self.blocks = blocks(model)
        self._away: dict[Block, list[nn.Parameter]] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                # What PEFT keeps of embeddings to undo a merge was never read.
                module._buffers[key] = buffer if buffer is None or buffer.is_meta else buffer.to(place)
        for block in self.blocks:
            block.module.register_forward_pre_hook(lambda *_, block=block: self.fill(block))
            block.module.register_forward_hook(lambda *_, block=block: self.free(block))

    def fill(self, block: Block) -> None:
        """Reads the weights of a block and, when `merging`, merges its adapters into them and rounds the result.

        Raises:
            ValueError: If what is merged is not finite.
        """
        away = [part._parameters[key] for _, part, key in block.parameters]
        present: dict[nn.Parameter, nn.Parameter] = {}
        for (name, part, key), parameter in zip(block.parameters, away, strict=True):
            if parameter not in present:
                present[parameter] = self._present(name, parameter)
            part._parameters[key] = present[parameter]
        self._away[block] = away
        if not self.merging:
            return
        for layer in block.adapted:
            layer.merge(safe_merge=True)
        kept = kept_in_fp32(self.model.get_base_model(), self.rounded)
        for name, part, key in block.parameters:
            if not kept(name):
                # Not in place: those of adapters are there all the time.
                value = part._parameters[key].to(self.rounded).float()
                part._parameters[key] = nn.Parameter(value, requires_grad=False)

    def free(self, block: Block) -> None:
        """Gives the weights of a block back."""
        for (_, part, key), parameter in zip(block.parameters, self._away.pop(block), strict=True):
            part._parameters[key] = parameter
            if hasattr(part, "init_8bit_state"):
                part.state.CB = part.state.SCB = None
        for layer in block.adapted:
            layer.merged_adapters.clear()

    def _present(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta:
            value = parameter.to(self.place) if self.as_trained else parameter.to(self.place, torch.float32)
        else:
            value = (self.weights.read if self.as_trained else self.weights.restored)(name, self.place)
        return value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)


class Merged(Mapping[str, torch.Tensor]):
    """The weights of a model with its adapters merged into them, by name; best asked for in the order of the model.

    Args:
        adapted: The model with adapters.
        dtype: What they are given in, on the host, but for those that Transformers keeps in fp32.
    """

    def __init__(self, adapted: Blockwise, dtype: torch.dtype) -> None:
        from peft.utils import ModulesToSaveWrapper

        self._adapted, self._dtype = adapted, dtype
        self._kept = kept_in_fp32(adapted.model.get_base_model(), dtype)
        self._holders = {name: (block, part, key) for block in adapted.blocks for name, part, key in block.parameters}
        self._trained = {
            f"{_plain(path)}.{name}": parameter
            for path, module in adapted.model.named_modules()
            if isinstance(module, ModulesToSaveWrapper)
            for name, parameter in module.modules_to_save["default"].named_parameters()
        }
        self._block: Block | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype = torch.float32 if self._kept(name) else self._dtype
        if name in self._trained:
            return self._trained[name].detach().to("cpu", dtype)
        block, part, key = self._holders[name]
        if block is not self._block:
            self.close()
            self._adapted.fill(block)
            self._block = block
        return part._parameters[key].detach().to("cpu", dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)

    def close(self) -> None:
        """Gives back the block that was read last."""
        if self._block is not None:
            self._adapted.free(self._block)
            self._block = None


def _parameters(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, str]]:
    at = _plain(path)
    return ((f"{at}.{key}" if at else key, module, key) for key, each in module._parameters.items() if each is not None)


def _plain(path: str) -> str:
    """The path that a module has before PEFT wraps the model."""
    return re.sub(r"\.(base_layer|original_module|token_adapter)\b", "", path).removeprefix("base_model.model.")
