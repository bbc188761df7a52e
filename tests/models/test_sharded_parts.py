"""Parts of layers that FSDP2 shards: four processes, of which two divide each layer; in whole trainings see
whole/test_tensor_parallel.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.models.parallel import layer_sums, sharded_parts, tensor_parallel

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "pad_token_id": 0,
}  # fmt: skip


def model_of(kind: str, adapters: bool) -> Any:
    torch.manual_seed(0)
    tied = kind == "llama"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=tied))
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.double()


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.arange(60).view(3, 20) * 7 % SIZES["vocab_size"]
    logits = model(input_ids=ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits, {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def compare(rank: int, store: str) -> None:
    """Logits, gradients and whole parameters are those of the model that nobody divides, in 64 bits."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    layer_sums.divide_processes(2)
    for kind, adapters in (("llama", False), ("qwen3", False), ("qwen3", True)):
        expected, gradients = step(whole := model_of(kind, adapters))
        model = model_of(kind, adapters)
        tensor_parallel.divide_layers(model, 2, rank % 2)
        mesh = sharded_parts.mesh_of_parts(torch.device("cpu"))
        base = model.get_base_model() if adapters else model
        with sharded_parts.sharding_parts(mesh):
            for number, unit in enumerate((*base.model.layers, model)):
                # What has not come to be sharded is as it was read: on a GPU, still in the host's memory.
                plain = sum(not isinstance(each, DTensor) for each in base.model.layers.parameters())
                assert plain * len(base.model.layers) == len([*base.model.layers.parameters()]) * max(0, 2 - number)
                torch.distributed.fsdp.fully_shard(unit, mesh=mesh[("replicas",)])
        sharded_parts.hand_out_parts(model)
        logits, shards = step(model)
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
        assert sharded_parts.divides(model) == 2
        for name, shard in shards.items():
            # Norms compute in 32 bits, whatever they are given.
            rounded = 1e-6 if "_norm" in name else 1e-10
            difference = (shard.full_tensor() - gradients[name]).norm()
            assert difference <= rounded * gradients[name].norm() + 1e-12, (kind, adapters, name)
        for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(parameter.full_tensor(), other), name
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_parts_compute_what_the_whole_does(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(compare, (str(tmp_path / "store"),), nprocs=4)


def test_projections_that_are_several_in_one_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    parameter.divided = tensor_parallel.Share(0, 2, 0, (4, 4))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"strategy\.name=fsdp does not shard parts of projections"):
        sharded_parts._placement(parameter)
