"""Has Transformers store linear layers and fused experts in fewer bits as it reads them from their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from toolkit.models.quantization.experts import fused, restore_on_use
from toolkit.models.quantization.stored import StoredLinear, StoredWeight, stored_as

_METHOD = "frozen_base"
"""Under which Transformers finds the quantizer."""


@register_quantization_config(_METHOD)
class StoredConfig(QuantizationConfigMixin):
    """Asks Transformers to store a model's layers in one of `stored.FORMS` while it is loaded.

    Args:
        whole: Names of modules that stay as they are; if none, those that Transformers knows do.
    """

    def __init__(self, form: str, whole: Sequence[str] = (), **kwargs: Any) -> None:
        self.form, self.whole = form, [*whole]
        self.quant_method = _METHOD  # type: ignore[assignment]


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):
    """Stores linear layers and fused experts in fewer bits, one after the other; embeddings and output head stay."""

    quantization_config: StoredConfig

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return isinstance(getattr(module, name, None), StoredWeight)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        form = self.quantization_config.form
        kept = self.get_modules_to_not_convert(
            model, self.quantization_config.whole or None, model._keep_in_fp32_modules
        )
        for path, module in list(model.named_modules()):
            if not should_convert_module(path, kept):
                continue
            if isinstance(module, Conv1D) or type(module) is nn.Linear:
                model.set_submodule(path, StoredLinear(module, form))
                continue
            for name, parameter in list(fused(module)):
                module.source_cls = type(module)
                module._parameters[name] = StoredWeight(parameter.data, form=form)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        restore_on_use(model)
        return model

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self.quantization_config.form)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    def __init__(self, form: str) -> None:
        self._form = form

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: Sequence[str] = (),
        target_patterns: Sequence[str] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Names of weights to them, or to lists of one; returns them stored."""
        stored = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            module, _ = get_module_from_name(kwargs["model"], name)
            if isinstance(module, StoredLinear) and issubclass(module.source_cls, Conv1D):
                weight = weight.T.contiguous()
            stored[name] = stored_as(self._form, weight)
        return stored
