"""Processes that hold parts of one model and write answers of their own, of which only some find what all must do."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

POSITIONS = 16
PROMPTS = ([5, 6, 7], [*range(5, 17)])
"""Of the first process and of the second, which leaves its answer fewer positions."""


def model() -> Any:
    """A tiny GPT-2 with few positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": POSITIONS}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).eval()


def written(model: Any, prompt: list[int], once: bool) -> list[int]:
    """Tokens that a model answers, as many as there are positions left."""
    from tiny import tiny_tokenizer

    from toolkit.train.evaluation.evaluate import generate

    found: list[int] = generate(model, tiny_tokenizer(), [prompt], POSITIONS, frozenset(), once=once)[0].tolist()
    return found


def main(arguments: Sequence[str]) -> int:
    """Given a recipe, trains as `cpu_engines` does, but only the first process finds that prompts may be read once.
    Given a file, writes into it what each process answers its prompt, reading it at once and apart."""
    if "recipe=matrix" in arguments:
        import cpu_engines

        setup: Any = importlib.import_module("toolkit.train.setup")
        known = setup.reads_once
        setup.reads_once = lambda *given: known(*given) and os.environ["RANK"] == "0"
        return cpu_engines.main(arguments)
    from accelerate import PartialState
    from torch.distributed.fsdp import fully_shard

    (file,) = arguments
    PartialState(cpu=True)
    divided = model()
    for layer in (*divided.transformer.h, divided):
        fully_shard(layer)
    divided._is_fsdp_managed_module = True
    prompt = PROMPTS[distributed.get_rank()]
    found: list[Any] = [None, None]
    distributed.all_gather_object(found, [written(divided, prompt, once) for once in (False, True)])
    if distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()
    return 0
