"""Cases of FSDP2, see `engine_failures.py`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
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
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def fsdp_optimizer(name: str) -> float:
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


def fsdp_saved(name: str) -> bool:
    """Saves an optimizer that was made before its parameters were exchanged for sharded ones, as Accelerate does."""
    module = model()
    optimizer = build(name, module.parameters())
    names = {id(parameter): key for key, parameter in module.named_parameters()}
    whole = list(module.parameters())  # Kept, so that no other object takes one's id.
    for layer in (module[0], module[2], module):
        fully_shard(layer)
    for group in optimizer.param_groups:
        group["params"] = [module.get_parameter(names[id(parameter)]) for parameter in group["params"]]
    module(batches()[0]).square().mean().backward()
    optimizer.step()
    get_optimizer_state_dict(module, optimizer)
    return bool(whole)


def fsdp_reduce_fp16() -> bool:
    """Whether large gradients, summed in fp16, are still numbers."""
    module = fully_shard(
        model(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    )
    (module(batches()[0]).float().sum() * 1e6).backward()
    gradients = [parameter.grad.to_local() for parameter in module.parameters()]
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def fsdp_fp16_skips_everywhere() -> list[bool]:
    """Whether each rank skips the step when only the second has seen an overflow in its own shard."""
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


def fsdp_encoder_decoder() -> str:
    """Accelerate's own wrapping of a model whose encoder, decoder and head share one embedding."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import BlenderbotConfig, BlenderbotForConditionalGeneration

    size = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64}
    module = BlenderbotForConditionalGeneration(BlenderbotConfig(**size, **heads))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["BlenderbotEncoderLayer", "BlenderbotDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=True,
        device=torch.device("cpu"),
    )
    module = fsdp2_prepare_model(accelerator, module)
    ids = torch.ones(1, 4, dtype=torch.long)
    return str(module(input_ids=ids, labels=ids).loss)


CASES: dict[str, Callable[[], Any]] = {
    f"optimizer {name}": lambda name=name: fsdp_optimizer(name)  # type: ignore[misc]
    for name in OPTIMIZERS
    # torchao's kernels for sharded tensors are compiled, which on a CPU works for some shapes only.
    if name != "adamw_torch_8bit"
}
CASES |= {
    "saved adagrad": lambda: fsdp_saved("adagrad"),
    "saved rmsprop": lambda: fsdp_saved("rmsprop"),
    "reduce fp16": fsdp_reduce_fp16,
    "fp16 overflow": fsdp_fp16_skips_everywhere,
    "encoder-decoder": fsdp_encoder_decoder,
    "int8": lambda: fsdp_quantized("int8", None, torch.float32),
    "fp8": lambda: fsdp_quantized("fp8", None, torch.float32),
    "int4": lambda: fsdp_quantized("int4", None, torch.float32),
    "nf4 stored as computed": lambda: fsdp_quantized("nf4", torch.float32, torch.float32),
    "nf4 stored otherwise": lambda: fsdp_quantized("nf4", torch.bfloat16, torch.float32),
}
