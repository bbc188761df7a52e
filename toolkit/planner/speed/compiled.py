"""What compiled layers move: element-wise work in fewer kernels, and the thin products of adapters."""

from __future__ import annotations

from toolkit.planner.trace.types import Trace

FUSED = {"value": 0.29, "low": 0.25, "high": 0.4}
"""What is left of the bytes that element-wise operations of a layer move, once it is compiled.

Inductor's code for a layer of Llama moves 0.27 of them, in full and with LoRA (`tests/support/gpu_code.py` makes that
code without a GPU). Measured on one H100 with rows of 4,096 tokens and torch 2.11, on a model of 1.2B parameters: steps
took 0.71 (LoRA with checkpointing), 0.72 (LoRA without) and 0.80 (full) of their time, which shares of 0.46, 0.45 and
0.31 explain; 0.19 of LoRA's are what its products move. Kernels that are no longer launched are not counted: calling a
compiled layer takes about as long."""
FUSED_ON_CPU = {"value": 0.6, "low": 0.3, "high": 0.9}
"""The same on a CPU, measured on one core with AVX2 in fp32, on layers of SmolLM2-135M: steps took 0.90 to 0.94 (LoRA)
and 0.95 to 0.98 (full) of their time, with rows of 80 and 512 tokens. What adapters move is a part of it."""


def of_adapters(trace: Trace, tokens: float, width: int, times: int) -> float:
    """Bytes that the products of adapters within layers move.

    Forward, A reads what goes into a layer, and B writes as much as comes out of it; its `r` numbers a token are next
    to nothing. Backward, both of that is read again for their own gradients; the gradient of what came out is read, and
    one of what went in written. A matrices that share their rows (`models.grouped_adapters`) are counted one by one,
    which is a fifth too much.

    Args:
        tokens: That go through a layer.
        width: Bytes of a number.
        times: Once forward, twice backward, and once more where layers are recomputed.
    """
    adapters = [each for each in trace.tensors if each.kind == "adapter" and each.place == "layer"]
    return times * tokens * width * sum(max(each.shape) * each.count for each in adapters if len(each.shape) == 2)
