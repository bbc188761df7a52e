"""What surrounds Transformers' `generate`: prompts that are read once, and answers that leave when they have ended."""

from __future__ import annotations

import json
import logging
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import written_apart
from ranks import Ranks
from tiny import tiny_tokenizer
from transformers import CONFIG_MAPPING, LogitsProcessorList

from toolkit.models.tiny import tiny_model
from toolkit.train.evaluation.evaluate import generate
from toolkit.train.evaluation.generation import reads_once
from toolkit.train.trainers.rollouts import Drawn, uniform

MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}}
LONG = {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}}
PROMPTS = [[*range(5, 30)], [40, 41, 42], [50]]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *[(kind, {}) for kind in ("llama", "gpt2", "gemma3_text", "bloom", "mixtral", "qwen3_next", "lfm2")],
        ("qwen2_5_vl", MROPE),
        ("roberta", {"is_decoder": True}),
    ],
)
def test_answers_of_decoders_are_the_same_from_prompts_that_are_read_once(kind: str, settings: dict[str, Any]) -> None:
    """And after others have ended: also with windows, positions from biases, experts, recurrent states, states of
    convolutions and positions in three directions."""
    config = CONFIG_MAPPING[kind](**settings)
    assert reads_once(config, "grpo")
    model, prompts = tiny_model(config, "grpo"), [PROMPTS[place] for place in (0, 1, 0, 2, 1, 1, 0, 2)]

    numbers = torch.from_numpy(uniform(1, 2, 3, len(prompts), 20))

    def sample(rows: torch.Tensor, written: int) -> dict[str, Any]:
        return {"do_sample": False, "logits_processor": LogitsProcessorList([Drawn(numbers[rows, written:], 1.0, 1.0)])}

    def written(stops: frozenset[int], once: bool = False) -> list[list[int]]:
        found = generate(model, tiny_tokenizer(), prompts, 20, stops, None, sample, once=once)
        return [[*takewhile(lambda token: token not in stops, each)] for each in found.tolist()]

    stops = frozenset(range(4, 24))
    found = written(stops)
    assert written(stops, once=True) == found and len({len(each) for each in found}) > 3


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("paligemma", {}), ("roberta", {}), ("mamba", {}), ("openai-gpt", {}), ("t5", {}), ("phi3", LONG)],
)
def test_prompts_that_look_ahead_or_are_kept_otherwise_are_read_with_each_answer(
    kind: str, settings: dict[str, Any]
) -> None:
    """Tokens of a prompt that attend to all others would not see its last one; other states are not copied; and angles
    that go by the longest row would change when that has ended."""
    assert not reads_once(CONFIG_MAPPING[kind](**settings), "grpo")


def test_a_prompt_of_one_token_is_read_beside_longer_ones_without_its_padding(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By layers with states, of which a read of one token has no padding; and Transformers warns of none on the
    right."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = tiny_model(CONFIG_MAPPING["qwen3_next"](), "grpo")
    alone, beside = (
        generate(model, tiny_tokenizer(), prompts, 4, frozenset(), once=True) for prompts in ([[40]], [[40], [30, 31]])
    )
    assert torch.equal(alone[0], beside[0])
    assert "right-padding" not in caplog.text


def test_processes_that_write_together_end_where_the_first_of_them_has_no_positions_left(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Those that have ended go on computing for the others, and would run out of positions."""
    file = tmp_path / "answers.json"
    done = ranks.run(tmp_path, str(file), processes=2, entry="written_apart", timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    left = written_apart.POSITIONS - len(written_apart.PROMPTS[1])
    for prompt, answers in zip(written_apart.PROMPTS, json.loads(file.read_text(encoding="utf-8")), strict=True):
        alone = written_apart.written(written_apart.model(), prompt, once=False)
        assert len(alone) == written_apart.POSITIONS - len(prompt)
        assert answers == [alone[:left]] * 2
