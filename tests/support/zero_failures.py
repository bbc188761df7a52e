"""Cases of DeepSpeed's ZeRO, see `engine_failures.py`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_failures import (
    OPTIMIZERS,
    adapter_losses,
    adapters_alone,
    alone,
    batches,
    build,
    difference,
    model,
    quantized,
)
from torch import nn


def zero_engine(module: nn.Module, stage: int, optimizer: Any = None, **config: Any) -> Any:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **config,
    }
    settings["zero_optimization"] = {
        "stage": stage, "stage3_param_persistence_threshold": 0, **config.get("zero_optimization", {})
    }  # fmt: skip
    trained = [each for each in module.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer or build("adamw", trained), config=settings, dist_init_required=False
    )
    return engine


def zero_losses(engine: Any) -> list[float]:
    losses = []
    for batch in batches():
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def zero_optimizer(name: str, stage: int) -> float:
    module = model()
    optimizer = build(name, module.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    return difference(zero_losses(zero_engine(module, stage, optimizer)), alone(name))


def zero_8bit_state() -> list[str]:
    torch.manual_seed(0)
    module = nn.Linear(128, 128)
    optimizer = build("adamw_8bit", module.parameters())
    engine = zero_engine(module, 2, optimizer)
    engine.backward(engine(torch.ones(4, 128)).square().mean())
    engine.step()
    return sorted({str(state["state1"].dtype) for state in optimizer.state.values()})


def zero_schedule_free() -> list[float]:
    """By how much the model changes between training and evaluation: alone, and under ZeRO-2."""
    moved = []
    for engine_stage in (None, 2):
        module = model()
        optimizer = build("schedule_free_adamw", module.parameters())
        optimizer.train()
        if engine_stage:
            zero_losses(zero_engine(module, engine_stage, optimizer))
        else:
            for batch in batches():
                module(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        before = module[0].weight.detach().clone()
        optimizer.eval()
        moved.append((module[0].weight - before).abs().max().item())
    return moved


def zero_nvme_stage2() -> list[Any]:
    """Whether ZeRO-2 took `nvme` for host memory, and how many files it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        offload = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
        engine = zero_engine(model(), 2, zero_optimization=offload)
        zero_losses(engine)
        return [engine.optimizer.cpu_offload, sum(1 for file in Path(folder).rglob("*") if file.is_file())]


def zero_pure_offload() -> str:
    pure = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    zero_engine(model(), 2, bf16=pure, zero_optimization={"offload_optimizer": {"device": "cpu"}})
    return "trains"


def zero_pure_reduce(stage: int) -> list[str]:
    """The masters of a pure bf16 run whose gradients are summed in fp32."""
    pure = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    types = {"grad_accum_dtype": "fp32"}
    engine = zero_engine(model(), stage, bf16=pure, communication_data_type="fp32", data_types=types)
    groups = engine.optimizer.optimizer.param_groups
    return sorted({str(each.dtype) for group in groups for each in group["params"]})


def zero_stored() -> list[str]:
    """What fp32 weights are stored in once DeepSpeed computes in bf16."""
    engine = zero_engine(model(), 2, bf16={"enabled": True})
    return sorted({str(parameter.dtype) for parameter in engine.module.parameters()})


def zero_reduce_fp16() -> bool:
    """Whether the norm of large gradients, summed in fp16, is still a number."""
    engine = zero_engine(model(), 2, bf16={"enabled": True}, communication_data_type="fp16")
    engine.backward(engine(batches()[0].bfloat16()).float().sum() * 1e6)
    engine.step()
    return bool(torch.isfinite(torch.as_tensor(engine.get_global_grad_norm())))


def zero_gather(gather: bool) -> list[str]:
    """The weights that ZeRO-3 writes for others to read."""
    setting = {"stage3_gather_16bit_weights_on_model_save": gather}
    engine = zero_engine(model(), 3, zero_optimization=setting)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_16bit_model(folder, "weights.bin")
        return sorted(file.name for file in Path(folder).iterdir())


def zero_quantized(kind: str, **adapter: Any) -> list[float]:
    """Difference of the losses from one process, and the share of a base weight's bytes that this process holds."""
    wanted = adapters_alone(quantized(kind, **adapter))
    module = quantized(kind, **adapter)
    layer = next(each for name, each in module.named_modules() if name.endswith("q_proj.base_layer"))
    whole = layer.weight.numel()
    engine = zero_engine(module, 3)

    def step(loss: Any) -> None:
        engine.backward(loss)
        engine.step()

    losses = adapter_losses(engine, step)
    kept = layer.state.CB if kind == "int8" else None
    return [difference(losses, wanted), (layer.weight.ds_tensor.numel() if kept is None else kept.numel()) / whole]


def zero_selective() -> str:
    """Selective checkpointing, after an evaluation."""
    from transformers import AutoModelForCausalLM
    from trl.models import enable_selective_activation_checkpointing

    module = AutoModelForCausalLM.from_pretrained(os.environ["TINY_LLAMA"])
    enable_selective_activation_checkpointing(module)
    module.gradient_checkpointing_enable()
    engine = zero_engine(module, 3)
    ids = torch.arange(8)[None]
    engine.eval()
    with torch.no_grad():
        for _ in range(2):
            engine(input_ids=ids, labels=ids)
    engine.train()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    return "trains"


def clipping_left_out() -> float:
    """At which norm accelerate lets DeepSpeed clip when nothing is said about it."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from cpu_engines import use_cpu_processes

    use_cpu_processes()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    module = model()
    engine, _ = accelerator.prepare(module, build("adamw", module.parameters()))
    return float(engine.gradient_clipping())


CASES: dict[str, Callable[[], Any]] = {
    f"optimizer {name} zero{stage}": lambda name=name, stage=stage: zero_optimizer(name, stage)  # type: ignore[misc]
    for name in OPTIMIZERS
    for stage in (2, 3)
}
CASES |= {
    "8-bit state": zero_8bit_state,
    "schedule-free": zero_schedule_free,
    "nvme zero2": zero_nvme_stage2,
    "pure offload": zero_pure_offload,
    "pure reduce zero1": lambda: zero_pure_reduce(1),
    "pure reduce zero2": lambda: zero_pure_reduce(2),
    "stored": zero_stored,
    "reduce fp16": zero_reduce_fp16,
    "gather": lambda: zero_gather(True),
    "no gather": lambda: zero_gather(False),
    "nf4": lambda: zero_quantized("nf4"),
    "nf4 dora": lambda: zero_quantized("nf4", use_dora=True),
    "int8": lambda: zero_quantized("int8"),
    "fp8": lambda: zero_quantized("fp8"),
    "int4": lambda: zero_quantized("int4"),
    "selective": zero_selective,
    # Last: it starts accelerate.
    "clipping left out": clipping_left_out,
}
