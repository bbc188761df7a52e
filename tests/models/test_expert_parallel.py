"""Experts on two processes against all on one: results and gradients of several architectures' own layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.models.parallel import expert_parallel, parts
from toolkit.models.parallel.expert_parallel import divide_experts, part_of_experts
from toolkit.train.evaluation.evaluate import answer

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8},
    # Experts that all tokens meet beside those that are chosen.
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 24},
    # Scores that are balanced by biases, in groups; the first layer is dense.
    "deepseek_v3": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    # Biases, and matrices that are stored the other way round.
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 16},
    "granitemoe": {"num_local_experts": 8},
}  # fmt: skip


def mixture(kind: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **_SIZES | _ARCHITECTURES[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "bias" in name or parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def idle(model: Any) -> Any:
    """All tokens choose the first experts of as many, which are those of one process: nothing is sent to the other."""
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.mlp.gate.weight)
    return model


def recomputed(model: Any) -> Any:
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.log_softmax(-1).square().mean()


def compare(rank: int, size: int, store: str) -> None:
    """Each process takes a row of its own; the mean of their gradients is that of both rows on one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    expert_parallel.divide_processes(size)
    rows = torch.randint(1, 64, (size, 11), generator=torch.Generator().manual_seed(1))
    for kind in _ARCHITECTURES:
        for change in (lambda model: model, adapted, *((idle, recomputed) if kind == "qwen3_moe" else ())):
            whole = change(mixture(kind))
            part = copy.deepcopy(whole)
            divide_experts(part, size, rank)
            assert expert_parallel.divides(part) == size
            torch.stack([loss(whole, row[None]) for row in rows]).mean().backward()
            mine = loss(part, rows[rank : rank + 1])
            torch.testing.assert_close(mine, loss(whole, rows[rank : rank + 1]), rtol=1e-5, atol=0)
            mine.backward()
            wanted = dict(whole.named_parameters())
            for name, parameter in part.named_parameters():
                assert parts.whole_shape(parameter) == wanted[name].shape, (kind, name)
                torch.testing.assert_close(parts.whole_of(parameter, parameter.detach()), wanted[name].detach())
                if not parameter.requires_grad or wanted[name].grad is None:
                    continue
                gradient = parameter.grad / size
                if not part_of_experts(parameter):
                    dist.all_reduce(gradient)
                expected = parts.part_of(parameter, wanted[name].grad)
                error = (gradient - expected).norm() / expected.norm().clamp(min=1e-12)
                assert error < 1e-5, (kind, name, error)
    dist.destroy_process_group()


def generate(rank: int, size: int, store: str) -> None:
    """Each answers a prompt of its own, in as many tokens as its rank says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    expert_parallel.divide_processes(size)
    tokenizer = tiny_tokenizer()
    torch.manual_seed(3)
    config = AutoConfig.for_model("qwen3_moe", **_SIZES | {"vocab_size": len(tokenizer), "num_experts": 8})
    whole = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    part = copy.deepcopy(whole)
    divide_experts(part, size, rank)
    prompt, tokens = [[7 + rank, 8, 9]], 2 + 4 * rank
    given = answer(part, tokenizer, prompt, tokens, frozenset())
    ids = whole.generate(torch.tensor(prompt), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    assert given == [tokenizer.decode(ids[0, 3:], skip_special_tokens=True).strip()]
    dist.destroy_process_group()


def test_processes_answer_prompts_of_their_own(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(generate, (2, f"{tmp_path}/store"), nprocs=2, start_method="fork")


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(compare, (2, f"{tmp_path}/store"), nprocs=2, start_method="fork")


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match="no plan to divide the experts of a llama"):
        divide_experts(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_SIZES)), 2, 0)
    with pytest.raises(UserError, match=r"parallel\.expert=3 does not divide the 8 experts of layers\.0\.mlp\.experts"):
        divide_experts(mixture("qwen3_moe"), 3, 0)
    config = AutoConfig.for_model("qwen3_moe", **_SIZES, num_experts=8, mlp_only_layers=[0, 1])
    with pytest.raises(UserError, match="this qwen3_moe has no layer with experts"):
        divide_experts(AutoModelForCausalLM.from_config(config), 2, 0)


def test_where_experts_are_is_read_from_the_model() -> None:
    assert expert_parallel.divides(mixture("qwen3_moe")) == 1
    model = mixture("qwen3_moe")
    divide_experts(model, 4, 1)
    assert expert_parallel.divides(model) == 4
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert first.gate_up_proj.shape[0] == first.num_experts == 2
    whole = mixture("qwen3_moe").model.layers[1].mlp.experts
    assert torch.equal(second.down_proj, whole.down_proj[2:4]), "the second process has the third and fourth"
    first.gate_up_proj.experts = second.down_proj.experts = expert_parallel.ExpertPart(
        torch.Size((8, 1)), torch.Size((8, 1)), 0, 2
    )
    assert expert_parallel.divides(model) == 0, "parts of other sizes than tokens are sent by"
    sending = mixture("qwen3_moe")
    divide_experts(sending, 4, 1)
    for layer in sending.model.layers:
        del layer.mlp.experts.forward
    assert expert_parallel.divides(sending) == 0, "nothing is sent"
