"""A tiny real tokenizer and small data files for the tests of `toolkit.data`."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from toolkit.recipe import Recipe

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- if message.get('tool_calls') %}{% for call in message['tool_calls'] %}
<tool_call>{{ call['function'] | tojson }}</tool_call>
{%- endfor %}{% endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "What does this function return? It returns the sum of two numbers.",
    "user assistant system tool: hello, how are you today?",
]


@cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer.to_str()


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without a chat template: `<|endoftext|>` 0, `<|im_start|>` 1, `<|im_end|>` 2, `<pad>` 3."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        eos_token="<|endoftext|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """The same tokenizer with a ChatML template; `<|im_end|>` ends a turn and is the end-of-sequence token."""
    tokenizer = plain_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHATML
    return tokenizer


def chat_row(user: str, assistant: str) -> dict[str, Any]:
    """A row with one user and one assistant turn."""
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


STOP = frozenset({2})


def recipe(*paths: Any, seq_len: int = 256, objective: str = "sft", **data: Any) -> Recipe:
    given = [path if isinstance(path, dict) else str(path) for path in paths]
    return Recipe.model_validate(
        {
            "model": {"path": "x"},
            "data": {"sources": given, **data},
            "batch": {"seq_len": seq_len},
            "objective": objective,
        }
    )
