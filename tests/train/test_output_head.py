"""Where TRL's fused output head is not what a model computes, its own forward scores the labels, on every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from accelerate.utils import send_to_device
from harness import losses
from head_products import HeadProducts
from ranks import ON_CPU, Ranks
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from toolkit.data.rows import IGNORE
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.train.main import main
from toolkit.train.trainers import objectives

UNAWARE = """
import cpu_engines
import toolkit.train.trainers.objectives as objectives
from toolkit.models.output_heads.output_head import HeadChoice

def main(arguments):
    objectives.choose = lambda config, trust_remote_code, objective: HeadChoice()
    return cpu_engines.main(arguments)
"""
"""An entry that finds out only from the weights."""
MODERNBERT = "model.path=modernbert"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a ModernBERT decoder, which has a dense layer and a norm before its logits, and a
    RecurrentGemma, whose soft cap has a name of its own."""
    small.populate(tmp_path, "llama")
    sizes = {"num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    tiny_model({"model_type": "modernbert-decoder", **sizes}, tmp_path / "modernbert")
    capped = {"head_dim": 32, "lru_width": 128, "attention_window_size": 64, "logits_soft_cap": 0.5}
    tiny_model({"model_type": "recurrent_gemma", **sizes, **capped}, tmp_path / "recurrent")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def effective(place: Path, name: str = "small") -> dict[str, Any]:
    return json.loads((place / "runs" / name / "manifest.json").read_text())["effective"]


def test_loss_and_gradients_are_those_of_the_models_own_forward(place: Path) -> None:
    training = small.set_up(MODERNBERT, "model.attention=sdpa")
    loss, gradients = small.loss_and_gradients(training)
    batch = training.trainer.data_collator([training.prepared.train[row] for row in range(4)])
    model = AutoModelForCausalLM.from_pretrained("modernbert", dtype=torch.float32)
    labels = batch.pop("labels")[:, 1:].flatten()
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels)
    expected.backward()

    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_which_head_runs_is_planned_said_and_kept(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=small", MODERNBERT, "max_steps=1"]) == 0
    assert "own forward scores the labels" in capsys.readouterr().err
    assert effective(place)["output_head"] == "own"
    assert main(["recipe=small", "max_steps=1", "output.name=llama"]) == 0
    assert "own forward" not in capsys.readouterr().err
    assert effective(place, "llama")["output_head"] == "fused"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_are_scored_by_the_fused_head(
    place: Path, attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["data.packing=true", f"model.attention={attention}", "batch.micro_batch_size=2"]
    assert main(["recipe=small", *layout, "max_steps=1"]) == 0
    assert "own forward" not in capsys.readouterr().err
    assert effective(place)["output_head"] == "fused"


@pytest.mark.parametrize(("model", "products"), [("llama", 1), ("modernbert", 1)])
def test_only_trained_positions_reach_the_head(place: Path, model: str, products: int) -> None:
    trainer = small.set_up(f"model.path={model}").trainer
    vocabulary = trainer.model.config.vocab_size
    row = torch.randint(5, vocabulary, (40,)).tolist()
    labels = [IGNORE] * 30 + row[30:]
    batch = trainer.data_collator(
        [{"input_ids": row, "labels": labels}, {"input_ids": row[:35], "labels": labels[:35]}]
    )

    with HeadProducts(vocabulary) as seen:
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(15))
        loss.backward()
    assert seen.rows == [16] * products, "15 trained tokens, a multiple of 16, once"
    with torch.no_grad(), HeadProducts(vocabulary) as seen:
        total, count, _ = trainer.score(trainer.model, dict(batch))
    assert seen.rows == [16] and count == 15
    assert total.item() == pytest.approx(15 * loss.item(), rel=1e-5)


def test_a_micro_batch_without_trained_tokens_adds_nothing(place: Path) -> None:
    trainer = small.set_up().trainer
    batch = trainer.data_collator([{"input_ids": [5, 6, 7], "labels": [IGNORE] * 3}])
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9))
    loss.backward()
    assert loss == 0 and all((each.grad == 0).all() for each in trainer.model.parameters() if each.grad is not None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts waits for a GPU")
@pytest.mark.parametrize("model", ["llama", "modernbert"])
def test_a_micro_batch_does_not_wait_for_the_device(place: Path, model: str) -> None:
    trainer = small.set_up(f"model.path={model}").trainer
    assert trainer.args.dataloader_pin_memory and trainer.accelerator.non_blocking
    network = trainer.model.to("cuda")
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [IGNORE, IGNORE, 7, 8]}]
    batch, items = send_to_device(trainer.data_collator(rows), "cuda"), torch.tensor(2, device="cuda")
    trainer.compute_loss(network, dict(batch), num_items_in_batch=items).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.compute_loss(network, dict(batch), num_items_in_batch=items).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_engines_ask_a_tiny_copy_first(place: Path, ranks: Ranks) -> None:
    overrides = ["recipe=small", MODERNBERT, "max_steps=1"]
    assert main([*overrides, "output.name=alone"]) == 0
    engine = ["strategy=zero3", "batch.micro_batch_size=1"]
    done = ranks.run(place, *overrides, *engine, processes=2, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("is not what a modernbert-decoder computes") == 1
    assert effective(place)["output_head"] == "own"
    assert losses(place / "runs" / "small") == pytest.approx(losses(place / "runs" / "alone"), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_weights_are_asked_before_the_first_step(
    place: Path, precision: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(objectives, "choose", lambda config, trust_remote_code, objective: HeadChoice())
    for model, head in (("modernbert", "own"), ("llama", "fused")):
        overrides = [f"model.path={model}", "max_steps=1", f"precision={precision}", f"output.name={model}"]
        assert main(["recipe=small", *overrides]) == 0
        assert effective(place, model)["output_head"] == head
        assert ("log-probabilities differ" in capsys.readouterr().err) == (head == "own")


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        pytest.param("ddp", "recurrent", marks=pytest.mark.matrix),
        pytest.param("zero2", "modernbert", marks=pytest.mark.matrix),
        pytest.param("zero3", "modernbert", marks=pytest.mark.slow),
        pytest.param("fsdp", "recurrent", marks=pytest.mark.slow),
    ],
)
def test_all_processes_of_an_engine_find_the_same(place: Path, engine: str, model: str, ranks: Ranks) -> None:
    overrides = ["recipe=small", f"model.path={model}", "max_steps=1"]
    assert main([*overrides, "output.name=alone"]) == 0
    (place / "unaware.py").write_text(UNAWARE, encoding="utf-8")
    overrides += [f"strategy={engine}", "batch.micro_batch_size=1"]
    done = ranks.run(place, *overrides, processes=2, entry="unaware")
    assert done.returncode == 0, done.stderr[-3000:]
    assert effective(place)["output_head"] == "own"
    runs = place / "runs"
    assert losses(runs / "small") == pytest.approx(losses(runs / "alone"), rel=1e-5)
