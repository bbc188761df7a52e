"""Liger's kernels under Triton's interpreter on a CPU.

Run as a process of its own: prints as JSON what came of each architecture. With arguments it is `toolkit/run.py`, for a
training that takes the machine for one with CUDA where it asks whether to use the kernels.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import interpreter
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from toolkit.models import liger_kernels


def model_of(kind: str) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads)).float().eval()


def outcome(kind: str) -> dict[str, Any]:
    model, ids = model_of(kind), torch.randint(5, 60, (2, 4))
    wanted = liger_kernels._logits_and_gradients(model, ids)
    reason = liger_kernels.use_liger(model, "cpu")
    got = liger_kernels._logits_and_gradients(model, ids)
    distance = max(((got[each] - wanted[each]).abs().max() / wanted[each].abs().max()).item() for each in wanted)
    return {"reason": reason, "distance": distance, "replaced": liger_kernels.modules_with(model)}


def wrong() -> dict[str, Any]:
    """The same where a kernel of Liger's computes something else."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    own = LigerRMSNorm.forward
    LigerRMSNorm.forward = lambda self, x: own(self, x) * 1.01
    try:
        return outcome("llama")
    finally:
        LigerRMSNorm.forward = own


class OwnCode(LlamaForCausalLM):
    """As remote code has it: another forward pass under a known name."""


def under_zero3() -> str:
    """The reason where ZeRO-3 would divide what Transformers makes."""
    model = model_of("llama")
    _alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": 1})
    reason = liger_kernels.use_liger(model, "cpu")
    assert is_deepspeed_zero3_enabled(), "the engine's settings are as before"
    return reason


def every_architecture() -> dict[str, Any]:
    # First, before anything is replaced.
    answer: dict[str, Any] = {"wrong": wrong(), "opt": outcome("opt")}
    for each in sorted(liger_kernels.ARCHITECTURES):
        try:
            answer[each] = outcome(each)
        except Exception as error:
            answer[each] = {"reason": repr(error), "distance": -1.0, "replaced": 0}
    answer["own code"] = liger_kernels.use_liger(OwnCode(model_of("llama").config), "cpu")
    answer["under ZeRO-3"] = under_zero3()
    return answer


def train(arguments: list[str]) -> int:
    from toolkit.train import decide, main

    decide.device = SimpleNamespace(kind=lambda: "cuda")
    return main.main(arguments)


if __name__ == "__main__":
    interpreter.complete()
    if sys.argv[1:]:
        sys.exit(train(sys.argv[1:]))
    print(json.dumps(every_architecture()))
