"""What DeepSpeed and FSDP2 do with combinations that the rules refuse, and with those beside them that are allowed.

Given `zero|nvme|fsdp FILE`, `main` runs every case of `zero_failures.py`, `nvme_failures.py` or `fsdp_failures.py` on
two gloo ranks and writes what came of it: name to a value, or to the error's text.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

STEPS = 4
OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("torch.optim", "AdamW", {"fused": True}),
    "adamw_torch": ("torch.optim", "AdamW", {}),
    "sgd": ("torch.optim", "SGD", {"momentum": 0.9}),
    "rmsprop": ("torch.optim", "RMSprop", {}),
    "adagrad": ("torch.optim", "Adagrad", {}),
    "adafactor": ("transformers.optimization", "Adafactor", {"scale_parameter": False, "relative_step": False}),
    "lion": ("bitsandbytes.optim", "Lion", {}),
    "ademamix": ("bitsandbytes.optim", "AdEMAMix", {}),
    "rmsprop_bnb": ("bitsandbytes.optim", "RMSprop", {}),
    "muon": ("toolkit.train.muon", "Muon", {}),
    "adamw_8bit": ("bitsandbytes.optim", "AdamW8bit", {"min_8bit_size": 64}),
    # These are tried where their packages are installed.
    "adamw_torch_8bit": ("torchao.optim", "AdamW8bit", {}),
    "schedule_free_adamw": ("schedulefree", "AdamWScheduleFree", {}),
    "stable_adamw": ("optimi", "StableAdamW", {}),
    "grokadamw": ("grokadamw", "GrokAdamW", {}),
}
"""The recipe's name to module, class and arguments."""


def build(name: str, parameters: Any) -> Any:
    """The optimizer with two groups, as the Trainer makes them: matrices, and all that is not decayed."""
    module, kind, arguments = OPTIMIZERS[name]
    parameters = list(parameters)
    if name == "muon":
        arguments = {"matrices": {each for each in parameters if each.ndim == 2}}
    groups = [[each for each in parameters if (each.ndim > 1) == matrices] for matrices in (True, False)]
    return getattr(importlib.import_module(module), kind)(
        [{"params": group} for group in groups if group], **{"lr": 0.01, **arguments}
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8))


def batches() -> list[torch.Tensor]:
    """(steps, 4, 32) the same on every rank, so that a mean over ranks changes nothing."""
    return list(torch.randn(STEPS, 4, 32, generator=torch.Generator().manual_seed(1)))


def alone(name: str) -> list[float]:
    """Losses without an engine."""
    whole = model()
    optimizer = build(name, whole.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    losses = []
    for batch in batches():
        loss = whole(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def difference(found: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def quantized(kind: str, **adapter: Any) -> Any:
    """A tiny quantized Llama with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from toolkit.models.quantization.stored_loading import StoredConfig

    storage = adapter.pop("storage", None)
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": storage}
    settings = {
        "nf4": lambda: BitsAndBytesConfig(**nf4),
        "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
        "fp8": lambda: StoredConfig("fp8"),
        "int4": lambda: StoredConfig("int4"),
    }
    base = AutoModelForCausalLM.from_pretrained(
        os.environ["TINY_LLAMA"], quantization_config=settings[kind](), dtype=torch.float32
    )
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **adapter)
    return get_peft_model(base, config)


def adapter_losses(forward: Callable[..., Any], step: Callable[[Any], None]) -> list[float]:
    losses = []
    for number in range(3):
        rows = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(number))
        loss = forward(input_ids=rows, labels=rows).loss
        step(loss)
        losses.append(loss.item())
    return losses


def adapters_alone(adapted: Any) -> list[float]:
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=0.01)

    def step(loss: Any) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return adapter_losses(adapted, step)


def main(arguments: Sequence[str]) -> int:
    """Writes the results of an engine's cases to a file."""
    engine, file = arguments
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    if engine != "fsdp":
        import deepspeed

        deepspeed.init_distributed("gloo", dist_init_required=False)
    results = {}
    for name, case in importlib.import_module(f"{engine}_failures").CASES.items():
        try:
            results[name] = case()
        except ModuleNotFoundError as error:
            results[name] = f"not installed: {error.name}"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    if distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(results, indent=1), encoding="utf-8")
    distributed.destroy_process_group()
    return 0
