"""Compiles FlashAttention 4 for a GPU that is not here, called as trainings call it.

Run as a process of its own, with `environment(capability)` and, as JSON, lists of heads, shared heads, their size and a
window; prints as JSON the shapes of results and gradients of each. Tensors are fake, and nothing is computed.
"""

from __future__ import annotations

import json
import os
import sys

import interpreter
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

PINNED = (
    *("flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl-libs-base==4.8.1"),
    *("nvidia-cutlass-dsl-libs-core==4.8.1", "nvidia-cutlass-dsl-libs-cu12==4.8.1", "apache-tvm-ffi==0.1.15.post2"),
    *("torch-c-dlpack-ext==0.1.5", "quack-kernels==0.6.5", "einops==0.8.1", "cuda-python==13.4.4"),
    *("cuda-bindings==13.5.0", "cuda-core==1.2.2", "cuda-pathfinder==1.9.1"),
)


def environment(capability: str) -> dict[str, str]:
    """Variables of the process, with the packages, and with the names that they call the GPU by."""
    folder = interpreter.installed(*PINNED)
    # A file of the folder would say so, if it were one of an environment.
    places = [interpreter.paths(), str(folder), str(folder / "nvidia_cutlass_dsl" / "dsl_packages")]
    architecture = f"sm_{capability.replace('.', '')}"
    return {
        "PYTHONPATH": os.pathsep.join(places), "FLASH_ATTENTION_ARCH": architecture,
        "CUTE_DSL_ARCH": f"{architecture}a", "FLASH_ATTENTION_NUM_SMS": "132", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def shapes(heads: int, shared: int, size: int, window: int) -> list[list[int]]:
    """Of results, sums and gradients."""
    from toolkit.models.attention import varlen

    with FakeTensorMode():
        query, key, value = (
            torch.empty(2048, count, size, dtype=torch.bfloat16, device="cuda") for count in (heads, shared, shared)
        )
        ends = torch.empty(5, dtype=torch.int32, device="cuda")
        others = (ends, ends, 640, 640, size**-0.5, window, "FlashAttention 4")
        out, sums = varlen.flash_attention._init_fn(query, key, value, *others)
        found = varlen._backward._init_fn(torch.empty_like(out), query, key, value, out, sums, *others)
    return [list(each.shape) for each in (out, sums, *found)]


if __name__ == "__main__":
    print(json.dumps([shapes(*each) for each in json.loads(sys.argv[1])]))
