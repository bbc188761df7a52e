"""Models that are published in few bits, as gpt-oss and those in fp8 are: restored weight by weight as they are read.

Left to itself, Transformers keeps the few bits wherever the device has kernels for them, which compute no gradients.
What is restored can be stored in other few bits at once, as `method.quantization` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers import core_model_loading, modeling_utils
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AutoHfQuantizer

from toolkit.models.adapters import kept_in_fp32
from toolkit.recipe.model_configs import RESTORED_FORMS


def take_form(config: Any) -> Mapping[str, Any] | None:
    """Takes out of a model's configuration in what few bits its files are; None where they are in full, or are read as
    they are."""
    for part in (config, config.get_text_config(decoder=True)):
        form = getattr(part, "quantization_config", None)
        if isinstance(form, Mapping) and form.get("quant_method") in RESTORED_FORMS:
            del part.quantization_config
            return {**form, "dequantize": True}
    return None


@contextlib.contextmanager
def restoring(form: Mapping[str, Any] | None) -> Iterator[None]:
    """In it, Transformers restores what it reads.

    Args:
        form: See `take_form`.
    """
    if form is None:
        yield
        return
    quantizer = AutoHfQuantizer.from_config(dict(form), pre_quantized=True)
    quantizer.validate_environment(device_map=None)
    mapping, read = modeling_utils.get_model_conversion_mapping, core_model_loading.spawn_materialize

    def restored(model: Any, key_mapping: Any = None, stored_as: Any = None) -> Any:
        return mapping(model, key_mapping, quantizer)

    def as_it_lies(pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **cut: Any) -> Any:
        """Codes and their scales mean something in their own types only."""
        return read(pool, tensor, device, None, **cut)

    with (
        patch.object(modeling_utils, "get_model_conversion_mapping", restored),
        patch.object(core_model_loading, "spawn_materialize", as_it_lies),
        patch.object(Fp8Dequantize, "_dequantize_one", _of_whole_blocks(form)),
    ):
        yield


def _of_whole_blocks(form: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Restores weights in fp8 whose last blocks are cut off, too, as of DeepSeek-V3's 576 rows. Transformers 5.23 takes
    blocks to be equal shares of a weight, and fails."""
    restore = Fp8Dequantize._dequantize_one

    def restored(self: Any, codes: torch.Tensor, scales: torch.Tensor, output_dtype: Any = None) -> torch.Tensor:
        blocks = form.get("weight_block_size")
        if not blocks or codes.dtype != torch.float8_e4m3fn or scales.ndim < 2:
            return restore(self, codes, scales, output_dtype)
        whole = [count * size for count, size in zip(scales.shape[-2:], blocks, strict=True)]
        rows, columns = codes.shape[-2:]
        if not (whole[0] - blocks[0] < rows < whole[0] or whole[1] - blocks[1] < columns < whole[1]):
            return restore(self, codes, scales, output_dtype)
        padded = functional.pad(codes.float(), (0, whole[1] - columns, 0, whole[0] - rows))
        return restore(self, padded, scales, output_dtype)[..., :rows, :columns].contiguous()

    return restored


def finish_restoring(model: Any, dtype: torch.dtype) -> None:
    """Makes a model that was restored like one whose files are in full: in one type, and saved so."""
    kept = kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not kept(name):
            parameter.data = parameter.data.to(dtype)
    # Transformers 5.23 would write few bits again, and no config that says so.
    model._weight_conversions = None
