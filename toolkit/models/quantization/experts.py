"""Mixtures of experts, whose experts are one tensor for a layer and no linear layers: autocast and 4 bits reach them.

torch's autocast does not know `grouped_mm`, and Transformers casts the rows to the type of the weights. Over fp32
masters the experts, which are nearly all of a mixture, would compute in fp32 without a word. Casting their weights
costs a 16-bit copy of one layer's experts at a time, as autocast itself does for other layers.

bitsandbytes replaces linear layers only. Its `Params4bit` can hold any tensor, which a parametrization restores when
the layer reads it; the restored experts are what the backward pass needs, so they are kept for it unless the layer is
recomputed. The alternative, quantizing after loading, would need room for the whole model in 16 bits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize
from transformers.integrations import moe
from transformers.quantizers import auto
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from toolkit.common import UserError
from toolkit.models.quantization.stored import Restored, Stored, StoredLinear

_MOST = 2**31 - 1
"""Elements of a tensor that bitsandbytes' kernels count in 32 bits."""


def autocast_grouped_products() -> None:
    """Has Transformers' grouped products of experts follow autocast, where it is on."""
    products = inspect.unwrap(moe._grouped_mm)

    @functools.wraps(products)
    def cast(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Rows (S, K) sorted by expert, weights (E, K, N), and the end of each expert's rows (E,); returns (S, N)."""
        where = input.device.type
        if torch.is_autocast_enabled(where):
            dtype = torch.get_autocast_dtype(where)
            input, weight = input.to(dtype), weight.to(dtype)
        return products(input, weight, offs)

    moe._grouped_mm = cast


def quantize_fused() -> None:
    """Has Transformers and PEFT store fused experts in 4 bits where linear layers are, and adapt them."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTuner

    if auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] is not _Quantizer:
        auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = _Quantizer
        for owner, name, changed in (
            (BaseTuner, "_inject_parameters", _as_stored),
            (ParamWrapper, "get_param", _shape_of),
            (ParamWrapper, "_activate_lora", _on_restored),
        ):
            setattr(owner, name, changed(getattr(owner, name)))


def fused(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and parameter of the matrices of a module that lie behind each other in one tensor."""
    if not isinstance(module, torch.nn.modules.conv._ConvNd):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and min(parameter.shape) > 1:
                yield name, parameter


def restore_on_use(model: torch.nn.Module) -> None:
    """Has modules beside linear layers read what is quantized of them as plain tensors, each once in a forward pass."""
    from bitsandbytes.nn import parametrize as bnb

    for module in _parametrized(model):
        module.register_forward_pre_hook(bnb._enable_parametrization_cache)
        module.register_forward_hook(bnb._disable_parametrization_cache, always_call=True)


def _parametrized(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Parametrizes the modules beside linear layers that have something quantized, and returns them."""
    from bitsandbytes.nn import Linear4bit
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization

    found = []
    for module in list(model.modules()):
        named: Any = module.named_parameters(recurse=False)
        names = [name for name, each in named if getattr(each, "quant_state", None) is not None]
        if names and not isinstance(module, Linear4bit | StoredLinear | parametrize.ParametrizationList):
            found.append(module)
            for name in names:
                state = getattr(module, name).quant_state
                restored = (Restored if isinstance(state, Stored) else Bnb4bitParametrization)(state)
                parametrize.register_parametrization(module, name, restored, unsafe=True)
    return found


class _Quantizer(Bnb4BitHfQuantizer):
    """bitsandbytes' 4 bits, for fused experts as for linear layers, one after the other while they are loaded."""

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        from bitsandbytes.nn import Params4bit

        module, name = get_module_from_name(model, param_name)
        return isinstance(getattr(module, name, None), Params4bit)

    def _process_model_before_weight_loading(self, model: Any, device_map: Any = None, **kwargs: Any) -> None:
        from bitsandbytes.nn import Params4bit

        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        config = self.quantization_config
        for path, module in model.named_modules():
            if not should_convert_module(path, self.modules_to_not_convert):
                continue
            for name, parameter in list(fused(module)):
                if parameter.numel() > _MOST:
                    raise UserError(
                        f"method.quantization=nf4: {path}.{name} has {parameter.numel():,} elements, and bitsandbytes "
                        f"counts up to {_MOST:,}",
                        "set method.quantization=int4",
                    )
                module.source_cls = type(module)
                module._parameters[name] = Params4bit(
                    parameter.data,
                    requires_grad=False,
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                    quant_storage=config.bnb_4bit_quant_storage,
                )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        restore_on_use(model)
        return super()._process_model_after_weight_loading(model, **kwargs)


def _stored(module: torch.nn.Module, name: str) -> Any:
    """The parametrizations that restore a parameter; None where it is not quantized."""
    chain = module.parametrizations[name] if parametrize.is_parametrized(module, name) else [None]  # type: ignore
    return chain if hasattr(chain[0], "quant_state") else None


def _as_stored(inject: Any) -> Any:
    @functools.wraps(inject)
    def injected(self: Any, peft_config: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Adapts what is quantized as it is stored: of parametrized modules PEFT adapts parameters in another order.

        The order is part of the names of adapters, which would then fit no base that is not quantized.
        """
        for module in list(model.modules()):
            for name in list(getattr(module, "parametrizations", ())):
                if _stored(module, name):
                    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        try:
            return inject(self, peft_config, model, *args, **kwargs)
        finally:
            _parametrized(model)

    return injected


def _shape_of(get_param: Any) -> Any:
    @functools.wraps(get_param)
    def shaped(self: Any) -> torch.Tensor:
        """The parameter; of a quantized one, which PEFT asks for shape, type and place, an empty tensor with these."""
        module, name = self.get_base_layer(), self.parameter_name
        chain = _stored(module, name)
        original = chain.original if chain else getattr(module, name)
        state = chain[0].quant_state if chain else getattr(original, "quant_state", None)
        if state is None:
            return get_param(self)
        return torch.empty((), dtype=state.dtype, device=original.device).expand(state.shape)

    return shaped


def _on_restored(activate: Any) -> Any:
    @functools.wraps(activate)
    @contextmanager
    def activated(self: Any, adapters: list[str]) -> Iterator[None]:
        """Adds adapters to what is restored. PEFT's own way restores it three times, and removes nothing afterwards."""
        chain = _stored(self.get_base_layer(), self.parameter_name)
        if chain is None:
            with activate(self, adapters):
                yield
            return
        from peft.tuners.lora.layer import _LoraFactorsProxy

        before = len(chain)
        chain.extend(_LoraFactorsProxy(*self.get_delta_factors(each)) for each in adapters if each in self.lora_A)
        try:
            with parametrize.cached():
                yield
        finally:
            del chain[before:]

    return activated
