"""What surrounds Transformers' `generate`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from toolkit.train.generation import reads_once

MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *[(kind, {}) for kind in ("llama", "gpt2", "gemma2", "gemma3_text", "bloom", "mixtral", "qwen3_next")],
        ("qwen2_5_vl", MROPE),
        ("roberta", {"is_decoder": True}),
    ],
)
def test_prompts_of_decoders_are_read_once_for_all_answers(kind: str, settings: dict[str, Any]) -> None:
    """Also with windows, positions from biases, experts, recurrent states and positions in three directions."""
    assert reads_once(CONFIG_MAPPING[kind](**settings), "grpo")


@pytest.mark.parametrize("kind", ["paligemma", "roberta", "mamba", "openai-gpt"])
def test_prompts_that_look_ahead_or_are_kept_otherwise_are_read_with_each_answer(kind: str) -> None:
    """Tokens of a prompt that attend to all others would not see its last one; other states are not copied."""
    assert not reads_once(CONFIG_MAPPING[kind](), "grpo")
