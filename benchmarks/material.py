"""What benchmarks train on without a hub: random weights in the shapes of real models, documents of real lengths.

`python benchmarks/material.py llama_1b FOLDER` saves a model.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
LLAMA_1B, LLAMA_8B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tiny": (
        LLAMA_1B,
        {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "blenderbot_tiny": (
        "facebook/blenderbot-400M-distill",
        {"d_model": 512, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
        | {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "vocab_size": 8192}
        | {"max_position_embeddings": 512},
    ),
    "llama_160m": (
        LLAMA_1B,
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 32768}
        | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64},
    ),
    "llama_1b": (LLAMA_1B, {}),
    "llama_8b": (LLAMA_8B, {}),
    "qwen3_0_6b": ("Qwen/Qwen3-0.6B", {}),
    "gemma_3_1b": ("google/gemma-3-1b-it", {}),
}
"""Name to the model whose config it takes, and what differs."""
_STOP, _PAD = "<|end|>", "<|pad|>"
_MEDIAN_TOKENS, _SPREAD = 450, 0.95
"""Of the lognormal lengths: a mean of about 700 tokens (median x exp(spread^2 / 2))."""


def model(name: str, folder: Path) -> Path:
    """Saves a model with random bf16 weights, and a tokenizer, once.

    Args:
        name: One of `SHAPES`.
        folder: Where it is saved, in a folder of its name.

    Returns:
        That folder, usable as `model.path`.
    """
    path = folder / name
    if (path / "complete").is_file():
        return path

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    from toolkit.recipe import model_configs

    logging.disable_progress_bar()
    origin, changes = SHAPES[name]
    tokens = _tokenizer()
    special = {"bos_token_id": None, "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    config = AutoConfig.for_model(**{**model_configs.bundled()[origin].config, **changes, **special})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        made = kind.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(path)
    tokens.save_pretrained(path)
    (path / "complete").touch()
    return path


def documents(tokens: int, file: Path, seed: int = 0) -> Path:
    """Writes documents of lognormal length, one per line, with about so many tokens in all."""
    words, order = _words(), random.Random(seed)
    written = 0
    with file.open("w", encoding="utf-8") as stream:
        while written < tokens:
            length = min(4000, max(16, int(order.lognormvariate(0, _SPREAD) * _MEDIAN_TOKENS)))
            stream.write(json.dumps({"text": " ".join(order.choices(words, k=length))}) + "\n")
            written += length
    return file


def pairs(tokens: int, file: Path, seed: int = 0) -> Path:
    """Writes rows of a prompt and an answer, of about so many tokens in all; lengths are lognormal, a fifth of those of
    documents."""
    words, order = _words(), random.Random(seed)
    written = 0
    with file.open("w", encoding="utf-8") as stream:
        while written < tokens:
            lengths = [min(250, max(4, int(order.lognormvariate(0, _SPREAD) * _MEDIAN_TOKENS / 5))) for _ in range(2)]
            prompt, answer = (" ".join(order.choices(words, k=length)) for length in lengths)
            stream.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
            written += sum(lengths)
    return file


def _tokenizer() -> Any:
    """One token for each word of the documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([_PAD, _STOP, *_words()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_STOP, pad_token=_PAD)


def _words() -> list[str]:
    """Words of Python's own documentation."""
    return sorted({word for text in _texts() for word in re.findall(r"[a-z]{3,}", text)})[:4000]


def _texts() -> Iterator[str]:
    for kind in (str, list, dict, set, bytes, Path, random.Random, argparse.ArgumentParser):
        for _, member in inspect.getmembers(kind):
            yield inspect.getdoc(member) or ""


if __name__ == "__main__":
    model(sys.argv[1], Path(sys.argv[2]))
