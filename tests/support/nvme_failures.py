"""The case of ZeRO-3 on a drive, see `engine_failures.py`; it compiles DeepSpeed's async_io, which takes minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from zero_failures import zero_engine


def zero_nf4_nvme() -> str:
    """A 4-bit weight whose part is large enough for DeepSpeed to move it to the drive."""
    from bitsandbytes.nn import Linear4bit

    base = Linear4bit(2048, 2048, bias=False, quant_type="nf4").to("cpu")
    base.support_avx512bf16_for_cpu = False
    base.weight.requires_grad_(False)
    return on_drive(base)


def on_drive(base: nn.Module) -> str:
    """Computes with a frozen layer whose weight ZeRO-3 keeps on a drive."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise ModuleNotFoundError(name="libaio")
    module = nn.Sequential(base, nn.Linear(2048, 4))
    with tempfile.TemporaryDirectory() as folder:
        offload = {"offload_param": {"device": "nvme", "nvme_path": folder}}
        zero_engine(module, 3, zero_optimization=offload)(torch.ones(2, 2048))
    return "computes"


def zero_stored_nvme(form: str) -> str:
    """The same for a weight in fp8 or int4."""
    from toolkit.models.quantization.stored import StoredLinear, stored_as

    plain = nn.Linear(2048, 2048, bias=False)
    base = StoredLinear(plain, form)
    base.weight = stored_as(form, plain.weight.detach())
    return on_drive(base)


CASES: dict[str, Callable[[], Any]] = {
    "nf4 nvme": zero_nf4_nvme,
    "fp8 nvme": partial(zero_stored_nvme, "fp8"),
    "int4 nvme": partial(zero_stored_nvme, "int4"),
}
