"""Which output head scores the labels of an architecture, and that a tiny copy tells."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from toolkit.models.output_head import HeadChoice, choose
from toolkit.models.tiny import tiny_model


def config(kind: str) -> object:
    built = CONFIG_MAPPING[kind]()
    if getattr(built, "is_decoder", None) is False:
        built.is_decoder = True
    return built


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "cohere", "granite", "mixtral", "qwen3_moe", "opt"])
def test_the_fused_head_is_that_of_usual_decoders(kind: str) -> None:
    assert choose(config(kind)) == HeadChoice()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("modernbert-decoder", "log-probabilities differ"),
        ("roberta", "log-probabilities differ"),
        ("recurrent_gemma", "log-probabilities differ"),
        ("xlstm", "log-probabilities differ"),
        ("phimoe", "num_experts"),
        ("granitemoe", "num_experts"),
        ("llama4_text", "last_hidden_state"),
    ],
)
def test_other_heads_are_told_from_it(kind: str, reason: str) -> None:
    choice = choose(config(kind))
    assert not choice.fused and reason in choice.reason


def test_a_loss_that_a_model_does_not_compute_is_not_added_for_its_coefficient() -> None:
    assert not choose(config("llama4_text")).balances
    assert choose(config("granitemoe")).balances


def test_a_tiny_copy_leaves_the_configuration_and_the_random_numbers_alone() -> None:
    built = CONFIG_MAPPING["qwen3_moe"]()
    before, state = built.to_json_string(), torch.get_rng_state()
    assert sum(parameter.numel() for parameter in tiny_model(built, "sft").parameters()) < 1e6
    assert built.to_json_string() == before and torch.equal(torch.get_rng_state(), state)
