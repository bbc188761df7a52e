"""Encoder-decoder training against a plain loop: targets weigh by their tokens, whatever the accumulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from harness import losses, metrics
from ranks import Ranks
from small import LORA, NF4, SEQ2SEQ, place_with
from transformers import AutoModelForSeq2SeqLM

from toolkit.data.prepare import prepare
from toolkit.models.load import ModelSource
from toolkit.recipe import load
from toolkit.train.main import main

STEPS, LEARNING_RATE = 6, 1e-2


place = place_with("blenderbot")


@pytest.fixture(scope="module", autouse=True)
def without_dropout(place: Path) -> None:
    _without_dropout(place / "blenderbot")


ARGUMENTS = [*SEQ2SEQ, f"schedule.max_steps={STEPS}", "schedule.name=constant", "data.eval_split=0.2"]


def _without_dropout(folder: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    for name in ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"):
        setattr(model.config, name, 0.0)
    model.save_pretrained(folder)


def plain_loop() -> list[float]:
    """Rows one by one, summed loss over all target tokens of the global batch, AdamW with clipping."""
    recipe = load("small", ARGUMENTS).recipe
    source = ModelSource.open(recipe)
    tokenizer = source.tokenizer()
    rows = prepare(recipe, tokenizer, source.stop_tokens(tokenizer)).train
    model = AutoModelForSeq2SeqLM.from_pretrained("blenderbot", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    order = np.concatenate([np.random.default_rng([42, epoch]).permutation(len(rows)) for epoch in range(3)])
    curve = []
    for step in range(STEPS):
        chosen = [rows[int(row)] for row in order[4 * step : 4 * step + 4]]
        tokens = sum(len(row["labels"]) for row in chosen)
        loss = torch.zeros(())
        for row in chosen:
            labels = torch.tensor(row["labels"])
            logits = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels[None]).logits[0]
            loss = loss + torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def test_loss_equals_a_plain_loop_with_any_accumulation_and_two_processes(ranks: Ranks) -> None:
    expected = plain_loop()
    generate = ["evaluation.generation_metrics=true", "evaluation.batch_size=3"]
    for name, micro in (("whole", 4), ("accumulated", 1)):
        assert main(["recipe=small", *ARGUMENTS, *generate, f"micro_batch_size={micro}", f"output.name={name}"]) == 0
        assert losses(Path("runs") / name) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    done = ranks.run(
        Path(), "recipe=small", *ARGUMENTS, *generate, "micro_batch_size=1", "output.name=two", processes=2
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(Path("runs/two")) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    one, two = (
        [
            {key: value for key, value in row.items() if key.startswith("eval_")}
            for row in metrics(Path("runs") / name)
            if "eval_loss" in row
        ]
        for name in ("whole", "two")
    )
    assert len(one) == len(two) == 2
    for first, second in zip(one, two, strict=True):
        assert first.keys() >= {"eval_bleu", "eval_chrf", "eval_exact_match"}
        assert second == pytest.approx(first, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("method", [LORA, [*LORA, "method.use_dora=true"], NF4], ids=["lora", "dora", "nf4"])
def test_adapters_train(method: list[str]) -> None:
    name = f"adapters{len(method)}"
    assert main(["recipe=small", *ARGUMENTS, *method, "schedule.max_steps=12", f"output.name={name}"]) == 0
    curve = losses(Path("runs") / name)
    assert np.mean(curve[-3:]) < np.mean(curve[:3]) - 0.1
