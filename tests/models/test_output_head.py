"""Which output head scores the labels of an architecture, and that a tiny copy tells."""

from __future__ import annotations

import models_doc
import pytest
import torch
from transformers import CONFIG_MAPPING

from toolkit.models.output_heads.head_choice import choose
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.models.tiny import tiny_model

KNOWN = {
    **dict.fromkeys(("llama", "gpt2", "gemma3_text", "mixtral", "falcon_mamba"), "fused"),
    **dict.fromkeys(("modernbert-decoder", "roberta", "recurrent_gemma", "llama4_text", "phimoe", "granitemoe"), "own"),
    "xlnet": "refused",
}


@pytest.mark.parametrize("kind", KNOWN)
def test_loss_and_gradients_are_those_of_a_plain_loop(kind: str) -> None:
    assert models_doc.look(kind).trains == KNOWN[kind]


@pytest.mark.parametrize(("kind", "expected"), [("bamba", "traced"), ("longcat_flash", "formulas")])
def test_plans_follow_the_code_where_it_runs_without_numbers(kind: str, expected: str) -> None:
    assert models_doc.plans(kind) == expected


@pytest.mark.matrix
def test_every_architecture_trains_like_a_plain_loop_or_is_refused_as_the_page_says() -> None:
    found = map(models_doc.survey, models_doc.CAUSAL)
    pairs = (models_doc.survey(kind, "seq2seq") for kind in models_doc.ENCODER_DECODERS)
    assert models_doc.page(found, pairs) == models_doc.PAGE.read_text(encoding="utf-8")


def test_what_the_page_says_of_llama_is_found() -> None:
    found = models_doc.survey("llama")
    packs = "yes" if found.packs else "no"
    row = f"| llama | {found.trains} | {packs} | yes | {found.plans} | {found.lora} | {found.quantises} |"
    assert row in models_doc.PAGE.read_text(encoding="utf-8")


def config(kind: str) -> object:
    built = CONFIG_MAPPING[kind]()
    if getattr(built, "is_decoder", None) is False:
        built.is_decoder = True
    return built


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "cohere", "granite", "mixtral", "qwen3_moe", "opt"])
def test_the_fused_head_is_that_of_usual_decoders(kind: str) -> None:
    # OPT calls the decoder inside its backbone, so trained positions cannot be picked between the two.
    assert choose(config(kind)) == HeadChoice(selects=kind != "opt")


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
