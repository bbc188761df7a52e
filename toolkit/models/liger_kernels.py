"""Liger's Triton kernels in place of a model's own norms, gated MLPs and rotary positions.

Uncompiled, each of these is several launches that read and write hidden states. Liger knows architectures by name;
whether its kernels compute what the installed Transformers does is tried on a tiny copy, on the device itself. Output
head and loss stay ours.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from typing import Any

import torch

from toolkit.models.tiny import tiny_model

ARCHITECTURES = frozenset(
    (
        *("gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"),
        "smollm3",
    )
)
"""Model types for which `tests/models/test_liger_kernels.py` finds equal losses and gradients."""
_OURS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
_TOLERANCE = 1e-5
"""Of logits and gradients in fp32, relative to the largest: equal kernels differ by a tenth of it."""


def missing() -> str:
    """Why Liger's kernels cannot run in this process; empty if nothing stands against it."""
    lacks = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacks)} not installed" if lacks else ""


def use_liger(model: Any, device: torch.device | str) -> str:
    """Has a model's norms, gated MLPs and rotary positions computed by Liger's kernels, if the results are equal.

    Args:
        model: A causal language model without adapters or engines around it, on any device; changed in place.
        device: Where it will be trained, and the tiny copy is compared.

    Returns:
        Why its own code computes them; empty if Liger's kernels do.
    """
    kind, place = model.config.model_type, type(model).__module__
    if kind not in ARCHITECTURES:
        return f"they have not been tried with {kind}"
    if not place.startswith("transformers.models."):
        return "the model has code of its own"
    # Liger also replaces names in the module of the architecture's code, such as its function of rotary positions.
    code = vars(sys.modules[place])
    own = dict(code)
    try:
        if reason := _differs(model.config, device):
            code.update(own)
            return reason
        _apply(model)
    except Exception as error:  # Triton's compiler and versions that do not fit raise anything.
        code.update(own)
        return f"they fail with {type(error).__name__}: {error}"
    return ""


def modules_with(model: Any) -> int:
    """How many modules compute by Liger's code."""
    forwards = (getattr(each.forward, "__func__", each.forward) for each in model.modules())
    return sum(getattr(each, "__module__", "").startswith("liger_kernel.") for each in forwards)


def _apply(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, **_OURS)


def _differs(config: Any, device: torch.device | str) -> str:
    """How a tiny copy with Liger's kernels differs from one without, in fp32; empty if it does not."""
    model: Any = tiny_model(copy.deepcopy(config), "sft")
    model = model.to(device=device, dtype=torch.float32).eval()
    known = model.get_input_embeddings().num_embeddings
    ids = torch.randint(known, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        wanted = _logits_and_gradients(model, ids)
        _apply(model)
        got = _logits_and_gradients(model, ids)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    for name, value in wanted.items():
        distance = ((got[name] - value).abs().max() / value.abs().max().clamp_min(1e-3)).item()
        if not distance <= _TOLERANCE:
            return f"{name} of a tiny copy differs by {distance:.2g}"
    return ""


def _logits_and_gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.enable_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"the result": logits.detach(), **{f"the gradient of {name}": each for name, each in gradients.items()}}
