"""Layers and vocabulary that two processes divide, against the whole model; in whole trainings see
whole/test_tensor_parallel.py."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from toolkit.common import UserError
from toolkit.models.output_heads.output_head import HeadChoice, OutputHead
from toolkit.models.parallel import layer_sums, tensor_parallel

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "pad_token_id": 0, "attention_bias": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {"tie_word_embeddings": True, "final_logit_softcapping": 5.0},
    "mistral": {"vocab_size": 51},
    "phi3": {},
    "phi": {"qk_layernorm": True},
    "cohere": {"use_qk_norm": True},
    "apertus": {},
}
"""Architectures with what is special in each: biases, tied embeddings, norms of single heads, embeddings with a scale,
a vocabulary that two processes do not divide, projections that are several in one; and what plans leave out: norms of
single heads with one weight for all or one for each, and an activation function that is trained."""


def model_of(kind: str, adapters: bool) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.partition("-")[0], **(SIZES | KINDS[kind]))
    model = AutoModelForCausalLM.from_config(config).double()
    for parameter in model.parameters():  # Also biases and norms, which begin as zeros and ones.
        parameter.data += 0.1 * torch.randn_like(parameter)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model = model.double()
    return model


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and gradients of what is trained."""
    ids = torch.arange(60).view(3, 20) * 7 % SIZES["vocab_size"]
    logits = model(input_ids=ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits, {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def in_a_group(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layer_sums.divide_processes(2)


def compare(rank: int, store: str, adapters: bool) -> None:
    in_a_group(rank, store)
    for kind in KINDS:
        compare_kind(rank, kind, adapters)
    dist.destroy_process_group()


def compare_kind(rank: int, kind: str, adapters: bool) -> None:
    """Logits and all gradients of the divided model are those of the whole one, in 64 bits."""
    expected, gradients = step(model_of(kind, adapters))
    model = model_of(kind, adapters)
    tensor_parallel.divide_layers(model, 2, rank)
    logits, parts = step(model)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    parameters = dict(model.named_parameters())
    for name, part in parts.items():
        whole = tensor_parallel.whole_of(parameters[name], part)
        # Norms compute in 32 bits, whatever they are given.
        rounded = 1e-6 if "_norm" in name else 1e-10
        assert (whole - gradients[name]).norm() <= rounded * gradients[name].norm() + 1e-12, (kind, name)
        assert torch.equal(tensor_parallel.part_of(parameters[name], whole), part)
    base = model.get_base_model() if adapters else model
    divided = tensor_parallel.is_part(base.get_input_embeddings().weight)
    assert divided == tensor_parallel.is_part(base.get_output_embeddings().weight) == (kind != "mistral")


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_parts_compute_what_the_whole_does(adapters: bool, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(compare, (str(tmp_path / "store"), adapters), nprocs=2)


def score(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of labels by the fused head, and gradients."""
    add_fused_lm_head(model)
    OutputHead(model, HeadChoice())
    ids = torch.arange(60).view(3, 20) * 7 % SIZES["vocab_size"]
    labels = ids.masked_fill(ids % 3 == 0, -100)
    trained = labels.roll(-1).flatten().ne(-100).nonzero()[:, 0]
    scored = model(input_ids=ids, labels=labels, label_positions=trained, fused_lm_head=True).log_probs
    (-scored.sum() / 40).backward()
    return scored, {name: each.grad for name, each in model.named_parameters()}


def compare_heads(rank: int, store: str) -> None:
    in_a_group(rank, store)
    for kind in ("llama", "gemma3_text"):
        for compute in (torch.float32, torch.bfloat16):
            compare_head(rank, kind, compute)
    dist.destroy_process_group()


def compare_head(rank: int, kind: str, compute: torch.dtype) -> None:
    models = [model_of(kind, False).float() for _ in range(2)]
    tensor_parallel.divide_layers(models[1], 2, rank)
    gathered: list[int] = []
    gathers = dist.all_gather
    dist.all_gather = lambda parts, part, **kwargs: gathered.append(part.numel()) or gathers(parts, part, **kwargs)
    with torch.autocast("cpu", compute, enabled=compute != torch.float32):
        (expected, gradients), (scored, parts) = (score(model) for model in models)
    dist.all_gather = gathers
    assert not gathered, "all logits were gathered"
    exact = compute == torch.float32
    torch.testing.assert_close(scored, expected, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 5e-2)
    largest = max(each.norm() for each in gradients.values())
    for name, parameter in models[1].named_parameters():
        whole = tensor_parallel.whole_of(parameter, parts[name])
        # The biases of keys have none but for rounding.
        difference = (whole - gradients[name]).norm() / max(gradients[name].norm(), 1e-2 * largest)
        assert difference < (1e-5 if exact else 3e-2), (name, difference)


@pytest.mark.slow
def test_labels_are_scored_without_gathering_logits(tmp_path: Path) -> None:
    """Also where embeddings are tied and logits capped, and under autocast."""
    torch.multiprocessing.spawn(compare_heads, (str(tmp_path / "store"),), nprocs=2)


def test_what_cannot_be_divided_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"intermediate_size": 47})))
    with pytest.raises(UserError, match=r"does not divide the 47 columns of layers\.0\.mlp\.gate_proj"):
        tensor_parallel.divide_layers(model, 2, 0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"num_key_value_heads": 1})))
    with pytest.raises(UserError, match=r"does not divide the 1 head of layers\.0\.self_attn\.k_proj"):
        tensor_parallel.divide_layers(model, 2, 0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1))
    with pytest.raises(UserError, match=r"drops out 0\.1 of its attention"):
        tensor_parallel.divide_layers(model, 2, 0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2))
    with pytest.raises(UserError, match="no plan to divide a gpt2"):
        tensor_parallel.divide_layers(model, 2, 0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.model.layers[0].mlp.register_parameter("scale", torch.nn.Parameter(torch.ones(48)))
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.scale lies beside layers that are divided"):
        tensor_parallel.divide_layers(model, 2, 0)
    sizes = SIZES | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 50, "layer_types": ["full_attention"] * 2}
    for sparsity, refused in ((0.5, True), (0.0, False)):
        config = AutoConfig.for_model("gemma3n_text", **sizes, activation_sparsity_pattern=[0.0, sparsity])
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(UserError, match="largest of the inner activations") if refused else nullcontext():
            tensor_parallel.divide_layers(model, 2, 0)
