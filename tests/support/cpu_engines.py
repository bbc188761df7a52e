"""Runs the toolkit with DeepSpeed or FSDP2 on CPU processes, which accelerate itself offers on GPUs only.

`torchrun … tests/support/cpu_engines.py recipe=NAME key=value …` is `toolkit/run.py` with two of accelerate's methods
replaced: the process group is gloo, and the device is the CPU. 16-bit types pass as supported, which torch computes
with slowly. Nothing else differs from a run on GPUs, but that nothing is traced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import compile_no_inference, untraced

sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def use_cpu_processes() -> None:
    """Lets accelerate choose its distributed engines for processes on CPUs."""
    import torch
    import transformers.training_args
    from accelerate.state import DistributedType, PartialState
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from toolkit.train import preflight

    compile_no_inference()
    prepare, place = PartialState._prepare_backend, PartialState.set_device

    def _prepare_backend(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        if "LOCAL_RANK" in os.environ and not cpu:
            return "gloo", DistributedType.MULTI_GPU
        return prepare(self, cpu, *args, **kwargs)

    def set_device(self: Any) -> None:
        if self.distributed_type == DistributedType.MULTI_GPU:
            self.device = torch.device("cpu")
        place(self)

    PartialState._prepare_backend, PartialState.set_device = _prepare_backend, set_device
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    CPU_Accelerator.is_fp16_supported = lambda self: True
    CPU_Accelerator.supported_dtypes = lambda self: [torch.float32, torch.float16, torch.bfloat16]
    preflight.check_engine = lambda *of_a_cpu: None


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, as `toolkit.run` does."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    use_cpu_processes()
    from toolkit.planner.trace import fit
    from toolkit.train.main import main as train

    fit.trace = untraced
    return train(arguments)


if __name__ == "__main__":
    from toolkit.train.process import leave

    leave(main)
