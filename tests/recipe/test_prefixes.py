"""Where beginnings that documents have in common are computed once: only where nothing changes by it."""

from __future__ import annotations

from typing import Any

import pytest

from recipes import recipe_of
from toolkit.recipe.prefixes import are_shared

LLAMA = {"model_type": "llama", "attention_dropout": 0.0}


def test_conversations_share_what_they_begin_with() -> None:
    for method in ("full", "lora"):
        assert are_shared(recipe_of(f"method.name={method}"), LLAMA, "torch_varlen")
    for other in ("data.packing=true", "objective=dpo", "objective=orpo"):
        assert are_shared(recipe_of(other), LLAMA, "torch_varlen")


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex", "flash_attention_2"])
def test_attention_that_is_not_told_whose_keys_are_whose_shares_nothing(backend: str) -> None:
    assert not are_shared(recipe_of(), LLAMA, backend)


@pytest.mark.parametrize(
    "override",
    [
        "batch.share_prefixes=false",
        "method.name=lora method.lora_dropout=0.05",
        "objective=kto",
        "objective=grpo",
        "objective=distillation",
        "objective=language_modelling",
        "data.streaming=true",
        "model.trust_remote_code=true",
        "extra.training_arguments='{neftune_noise_alpha: 5}'",
        "parallel.sequence=2",
        "parallel.context=2",
        "parallel.pipeline=2",
    ],
)
def test_what_would_be_another_training_shares_nothing(override: str) -> None:
    assert not are_shared(recipe_of(override), LLAMA, "torch_varlen")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "resid_pdrop": 0.1},
        {"model_type": "phi3", "embd_pdrop": 0.0, "resid_pdrop": 0.1},
        {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
        {"model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 6},
        {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}},
        {"model_type": "hunyuan_v1_moe", "num_experts": [1, 64], "moe_topk": [1, 8]},
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", "attention_dropout": 0.1}},
    ],
)
def test_models_that_drop_out_or_balance_experts_share_nothing(config: dict[str, Any]) -> None:
    assert not are_shared(recipe_of(), config, "torch_varlen")
