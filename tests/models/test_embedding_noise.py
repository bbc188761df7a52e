"""NEFTune's noise is as large as the paper says for each document, whatever lies beside it and in any layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small import place_with, set_up
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from toolkit.data.batching.collate import Collator
from toolkit.data.rows import IGNORE
from toolkit.models.embedding_noise import add_noise

place = place_with("llama")
ALPHA, LENGTHS = 5.0, (40, 7, 19)


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(3, 3 + n)), "labels": [IGNORE, *range(4, 3 + n)]} for n in lengths]


def packed(*lengths: int) -> dict[str, Any]:
    row = {key: [n for each in rows(*lengths) for n in each[key]] for key in ("input_ids", "labels")}
    return {**row, "seq_lengths": list(lengths)}


def noise_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """What is added to the embeddings, (batch, seq, d): the largest of many passes, which comes near its bound."""
    reader = model.get_encoder() if model.config.is_encoder_decoder else model
    embeddings, most = reader.get_input_embeddings(), []
    for _ in range(40):
        found: list[torch.Tensor] = []
        handle = embeddings.register_forward_hook(
            lambda module, args, output, found=found: found.append(output - module.weight[args[0]])
        )
        model(**{key: value for key, value in batch.items() if key != "label_positions"})
        handle.remove()
        most.append(found[0].detach().abs())
    return torch.stack(most).amax(0)


def expected(*lengths: int, size: int) -> list[float]:
    return [ALPHA / math.sqrt(length * size) for length in lengths]


@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_noise_is_of_each_documents_own_length(layout: Any) -> None:
    model = llama().train()
    add_noise(model, ALPHA)
    collator, size = Collator(0, layout, 8), model.config.hidden_size
    batch = collator([packed(*LENGTHS), *rows(30)] if layout == "packed" else rows(*LENGTHS))
    noise = noise_of(model, batch).amax(2)
    if layout == "padded":
        spans = [noise[row, :length] for row, length in enumerate(LENGTHS)]
    else:
        spans = list(noise[0, : sum(LENGTHS)].split(list(LENGTHS)))
    if layout == "packed":
        spans.append(noise[1, :30])
    bounds = expected(*LENGTHS, *([30] if layout == "packed" else []), size=size)
    for span, bound in zip(spans, bounds, strict=True):
        assert 0.9 * bound < span.min() and span.max() <= bound * (1 + 1e-5)


def test_sources_of_pairs_have_their_own_length() -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model: Any = T5ForConditionalGeneration(config).train()
    add_noise(model, ALPHA)
    pairs = [
        {"input_ids": list(range(3, 3 + source)), "labels": list(range(4, 4 + target))}
        for source, target in ((30, 9), (12, 21))
    ]
    noise = noise_of(model, Collator(0, "pairs", 8)(pairs)).amax(2)
    for row, bound in enumerate(expected(30, 12, size=model.config.d_model)):
        span = noise[row, : (30, 12)[row]]
        assert 0.9 * bound < span.min() and span.max() <= bound * (1 + 1e-5)


def test_there_is_none_outside_of_training() -> None:
    model = llama().eval()
    add_noise(model, ALPHA)
    assert not noise_of(model, Collator(0, "flat", 8)(rows(*LENGTHS))).any()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_training_adds_it_once(place: Path, method: str) -> None:
    trainer = set_up(
        f"method.name={method}", "extra.training_arguments={neftune_noise_alpha: 5}", "max_steps=1"
    ).trainer
    base = trainer.accelerator.unwrap_model(trainer.model)
    base = base.get_base_model() if method == "lora" else base
    found: list[torch.Tensor] = []
    batches = iter(trainer.get_train_dataloader())
    first = next(batches)
    trainer.train()
    embeddings = base.get_input_embeddings().train()
    embeddings.register_forward_hook(lambda module, args, output: found.append(output - module.weight[args[0]]))
    for _ in range(40):
        trainer.model.train()(**{key: first[key] for key in first if key != "label_positions"})
    noise = torch.stack(found).abs().amax((0, 3))[first["labels"] != IGNORE]
    shortest = min(len(row["input_ids"]) for row in trainer.train_dataset)
    assert 0 < noise.max() <= ALPHA / math.sqrt(shortest * base.config.hidden_size) * (1 + 1e-5)
