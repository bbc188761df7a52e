"""Answers of models that think first, with the special tokens that each kind of them has."""

from __future__ import annotations

import pytest
from tiny import tiny_tokenizer

from toolkit.data.thoughts import begun, spoken, text_of

SPECIAL = {
    "qwen": [],
    "magistral": ["[THINK]", "[/THINK]"],
    "command-a": ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
    "gemma4": ["<|channel>", "<channel|>"],
    "gpt-oss": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
    "phi": ["<|assistant|>", "<|end|>"],
}
SAYS = [
    ("qwen", "<think>\n2 + 4\n</think>\n\n6", "6"),
    ("qwen", "2 + 4</think> 6", "6"),
    ("qwen", "<think>2 +", ""),
    ("qwen", "6", "6"),
    ("magistral", "[THINK]2 + 4[/THINK]6", "6"),
    ("magistral", "[THINK]2 +", ""),
    ("command-a", "<|START_THINKING|>2 + 4<|END_THINKING|><|START_RESPONSE|>6<|END_RESPONSE|>", "6"),
    ("command-a", "<|START_RESPONSE|>6<|END_RESPONSE|>", "6"),
    ("gemma4", "<|channel>thought\n2 + 4\n<channel|>6", "6"),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>2 + 4<|end|><|start|>assistant<|channel|>final<|message|>6<|return|>",
        "6",
    ),
    ("gpt-oss", "<|channel|>final<|message|>6<|return|>", "6"),
    ("gpt-oss", "<|channel|>analysis<|message|>2 +", ""),
    ("phi", "6<|end|>", "6"),
]


@pytest.mark.parametrize(("model", "written", "says"), SAYS)
def test_what_an_answer_says_is_what_follows_its_thoughts(model: str, written: str, says: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL[model]})
    text = text_of(tokenizer, tokenizer(written, add_special_tokens=False)["input_ids"])
    assert spoken(text).strip() == says
    assert says in text and not any(each in text for each in ("RESPONSE", "<|return|>", "6<|end|>"))


@pytest.mark.parametrize(
    ("prompt", "mark"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|START_OF_TURN_TOKEN|><|START_THINKING|>", "<|START_THINKING|>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("Write thoughts in <think>…</think>, begun by <think>.\n<|im_start|>assistant\n", ""),
    ],
)
def test_thoughts_may_begin_with_the_end_of_a_prompt(prompt: str, mark: str) -> None:
    assert begun(prompt) == mark
