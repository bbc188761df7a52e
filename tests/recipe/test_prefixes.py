"""Where beginnings that documents have in common are computed once: only where nothing changes by it."""

from __future__ import annotations

from typing import Any

import pytest

from recipes import recipe_of
from toolkit.recipe.prefixes import are_shared

LLAMA = {"model_type": "llama", "attention_dropout": 0.0, "id2label": {0: "LABEL_0", 1: "LABEL_1"}}


def test_conversations_share_what_they_begin_with() -> None:
    for method in ("full", "lora"):
        assert are_shared(recipe_of(f"method.name={method}"), LLAMA, "torch_varlen")
    objectives = ("dpo", "orpo", "kto", "grpo", "rloo", "distillation")
    for other in ("data.packing=true", "data.streaming=true", *(f"objective={each}" for each in objectives)):
        assert are_shared(recipe_of(other), LLAMA, "torch_varlen")


def test_answers_share_their_question_though_adapters_drop_out_elsewhere() -> None:
    """Trainings on whole answers switch that off."""
    drops = "method.name=lora method.lora_dropout=0.05"
    for objective in ("dpo", "kto", "grpo"):
        assert are_shared(recipe_of(f"objective={objective} {drops}"), LLAMA, "torch_varlen")
    assert not are_shared(recipe_of(f"objective=distillation {drops}"), LLAMA, "torch_varlen")


def test_experts_are_no_hindrance() -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
    assert are_shared(recipe_of(), config, "torch_varlen")


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex", "flash_attention_2"])
def test_attention_that_is_not_told_whose_keys_are_whose_shares_nothing(backend: str) -> None:
    assert not are_shared(recipe_of(), LLAMA, backend)


@pytest.mark.parametrize(
    "override",
    [
        "batch.share_prefixes=false",
        "method.name=lora method.lora_dropout=0.05",
        "objective=reward",
        "objective=seq2seq",
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
        {"model_type": "phimoe", "input_jitter_noise": 0.01, "num_local_experts": 8},
        {"model_type": "dbrx", "ffn_config": {"moe_jitter_eps": 0.01}, "resid_pdrop": 0.0},
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", "attention_dropout": 0.1}},
    ],
)
def test_models_with_dropout_or_noise_share_nothing(config: dict[str, Any]) -> None:
    assert not are_shared(recipe_of(), config, "torch_varlen")
