"""TRL's Triton kernels as the fused head calls them on a GPU, under Triton's interpreter on a CPU.

Run as a process of its own: prints as JSON, of each case, the largest distances of log-probabilities and gradients from
those of plain logits.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import interpreter
import torch
from torch.nn import functional as F
from trl.kernels import chunked_logprob

from toolkit.models.output_heads import fused_head
from toolkit.models.output_heads.fused_head import _LogProbs, _Rest

TOKENS, WORDS, WIDTH = 37, 1500, 16
CASES = {
    "fp32": (torch.float32, None, 1.0, 1.0),
    "bf16": (torch.bfloat16, None, 1.0, 1.0),
    "capped": (torch.float32, 3.0, 0.5, 2.0),
}
"""Type of the logits, cap, scale and temperature."""


def outcome(compute: torch.dtype, softcap: float | None, scale: float, temperature: float) -> dict[str, float]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(TOKENS, WIDTH), torch.randn(WORDS, WIDTH), torch.randn(WORDS)
    hidden, weight, bias = (each.to(compute).requires_grad_() for each in (hidden, weight, bias))
    labels, trained = torch.randint(0, WORDS, (TOKENS,)), torch.rand(TOKENS) < 0.7

    def plain() -> torch.Tensor:
        logits = F.linear(hidden, weight, bias).float() * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return (logits / temperature).log_softmax(-1).gather(1, labels[:, None])[:, 0]

    rest = _Rest(labels, trained, softcap, scale, temperature, None, compute, None)
    found = _LogProbs.apply(hidden, weight, bias, rest, [True] * 3, True)
    distances = {"log_probs": (found - plain()).abs().max().item()}
    made = torch.autograd.grad((found * trained).sum() / 7, (hidden, weight, bias))
    wanted = torch.autograd.grad((plain() * trained).sum() / 7, (hidden, weight, bias))
    for name, own, other in zip(("hidden", "weight", "bias"), made, wanted, strict=True):
        distances[name] = ((own.float() - other.float()).norm() / other.float().norm()).item()
    return distances


if __name__ == "__main__":
    interpreter.complete()
    fused_head._is_cpu = lambda place: False
    chunked_logprob._use_triton = lambda device: True
    print(json.dumps({name: outcome(*case) for name, case in CASES.items()}))
