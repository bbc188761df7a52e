"""What DeepSpeed and FSDP2 do with combinations that the rules refuse, and with those beside them that are allowed.

`torchrun --nproc-per-node 2 tests/engine_failures.py zero|fsdp FILE` runs every case of one engine on two gloo ranks
and writes what came of it: name to a value, or to the error's text.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

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


def quantized(kind: str, **adapter: Any) -> Any:
    """A tiny quantized Llama with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    storage = adapter.pop("storage", None)
    settings = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": storage},
        "int8": {"load_in_8bit": True},
    }
    base = AutoModelForCausalLM.from_pretrained(
        os.environ["TINY_LLAMA"], quantization_config=BitsAndBytesConfig(**settings[kind]), dtype=torch.float32
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


def zero_nf4_nvme() -> str:
    """A 4-bit weight whose part is large enough for DeepSpeed to move it to the drive."""
    from bitsandbytes.nn import Linear4bit
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise ModuleNotFoundError(name="libaio")
    base = Linear4bit(2048, 2048, bias=False, quant_type="nf4").to("cpu")
    base.support_avx512bf16_for_cpu = False
    base.weight.requires_grad_(False)
    module = nn.Sequential(base, nn.Linear(2048, 4))
    with tempfile.TemporaryDirectory() as folder:
        offload = {"offload_param": {"device": "nvme", "nvme_path": folder}}
        zero_engine(module, 3, zero_optimization=offload)(torch.ones(2, 2048))
    return "computes"


def zero_trl_selective() -> str:
    """TRL's trainer, given adapters, ZeRO-3 and selective checkpointing."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        deepspeed={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"},
        use_cpu=True,
        bf16=False,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"selective": True},
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to="none",
    )
    base = AutoModelForCausalLM.from_pretrained(os.environ["TINY_LLAMA"])
    adapted = get_peft_model(base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    SFTTrainer(model=adapted, args=arguments, train_dataset=Dataset.from_list([{"input_ids": [1, 2]}]))
    return "trains"


def fsdp_optimizer(name: str) -> float:
    from torch.distributed.fsdp import fully_shard

    module = model()
    for layer in (module[0], module[2], module):
        fully_shard(layer)
    optimizer = build(name, module.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    losses = []
    for batch in batches():
        loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return difference(losses, alone(name))


def fsdp_reduce_fp16() -> bool:
    """Whether large gradients, summed in fp16, are still numbers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = fully_shard(
        model(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    )
    (module(batches()[0]).float().sum() * 1e6).backward()
    gradients = [parameter.grad.to_local() for parameter in module.parameters()]
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def fsdp_fp16_skips_everywhere() -> list[bool]:
    """Whether each rank skips the step when only the second has seen an overflow in its own shard."""
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(module(batches()[0]).square().mean()).backward()
    if distributed.get_rank() == 1:
        module[0].weight.grad.to_local().fill_(float("inf"))
    before = module[2].weight.to_local().clone()
    scaler.step(optimizer)
    skipped = torch.equal(before, module[2].weight.to_local())
    found: list[Any] = [None, None]
    distributed.all_gather_object(found, skipped)
    return found


def fsdp_quantized(kind: str, storage: torch.dtype | None, compute: torch.dtype) -> list[float]:
    """Difference of the losses from one process, and the share of a base weight's bytes that this process holds."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    wanted = adapters_alone(quantized(kind))
    module = quantized(kind, storage=storage)
    policy = MixedPrecisionPolicy(param_dtype=compute, output_dtype=torch.float32)
    name = next(name for name, _ in module.named_parameters() if name.endswith("q_proj.base_layer.weight"))
    whole = module.get_parameter(name).numel()
    for layer in (*module.get_base_model().model.layers, module):
        fully_shard(layer, mp_policy=policy)
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=0.01)

    def step(loss: Any) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return [difference(adapter_losses(module, step), wanted), module.get_parameter(name).to_local().numel() / whole]


def cases(engine: str) -> dict[str, Callable[[], Any]]:
    if engine == "fsdp":
        found: dict[str, Callable[[], Any]] = {
            f"optimizer {name}": lambda name=name: fsdp_optimizer(name)  # type: ignore[misc]
            for name in OPTIMIZERS
            if name != "adamw_torch_8bit"
        }
        return found | {
            "reduce fp16": fsdp_reduce_fp16,
            "fp16 overflow": fsdp_fp16_skips_everywhere,
            "int8": lambda: fsdp_quantized("int8", None, torch.float32),
            "nf4 in bytes": lambda: fsdp_quantized("nf4", None, torch.float32),
            "nf4 stored as computed": lambda: fsdp_quantized("nf4", torch.float32, torch.float32),
            "nf4 stored otherwise": lambda: fsdp_quantized("nf4", torch.bfloat16, torch.float32),
        }
    found = {
        f"optimizer {name} zero{stage}": lambda name=name, stage=stage: zero_optimizer(name, stage)  # type: ignore[misc]
        for name in OPTIMIZERS
        for stage in (2, 3)
    }
    return found | {
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
        "nf4 nvme": zero_nf4_nvme,
        "nf4 dora": lambda: zero_quantized("nf4", use_dora=True),
        "int8": lambda: zero_quantized("int8"),
        "selective": zero_trl_selective,
    }


def main(engine: str, file: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    if engine == "zero":
        import deepspeed

        deepspeed.init_distributed("gloo", dist_init_required=False)
    results = {}
    for name, case in cases(engine).items():
        try:
            results[name] = case()
        except ModuleNotFoundError as error:
            results[name] = f"not installed: {error.name}"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    if distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(results, indent=1), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
