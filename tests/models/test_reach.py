"""Whether all parameters get gradients from text, and what is trained on two processes where some do not."""

from __future__ import annotations

import json
from pathlib import Path

import models_doc
import pytest
import torch
from harness import losses, write_recipe
from ranks import Ranks
from small import RECIPE
from tiny import chat_rows, tiny_kind

from toolkit.models import reach
from toolkit.models.reach import reaches_all
from toolkit.models.tiny import tiny_model
from toolkit.train.main import main


@pytest.mark.parametrize(
    ("kind", "objective", "reached"),
    [
        ("llama", "sft", True),
        ("qwen3_moe", "sft", True),
        ("t5", "seq2seq", True),
        # A tower for images; attention to an encoder; biases of routers.
        ("gemma3", "sft", False),
        ("bart", "sft", False),
        ("ernie4_5_moe", "sft", False),
    ],
)
def test_what_a_loss_reaches_is_asked_of_a_tiny_copy(kind: str, objective: str, reached: bool) -> None:
    assert reaches_all(models_doc.stated(kind, objective), objective) is reached


def test_experts_that_are_modules_are_not_reached_by_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(models_doc.stated("llama", "sft"), "sft")
    monkeypatch.setattr(reach, "tiny_model", lambda *args: model)
    assert reaches_all(None, "sft")
    model.zero_grad()
    mlp = model.model.layers[0].mlp
    mlp.experts = torch.nn.ModuleList([mlp.down_proj])
    assert not reaches_all(None, "sft")


def folder_with(kind: str, place: Path) -> Path:
    (place / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(20)), encoding="utf-8")
    write_recipe(place, "small", RECIPE)
    return tiny_kind(models_doc.stated(kind, "sft"), place / kind)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("gemma3", "ddp"), ("ernie4_5_moe", "ddp"), ("gemma3", "fsdp"), ("mixtral", "zero3")],
)
def test_what_gets_no_gradient_is_waited_for_by_nobody(
    kind: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """And layers for images, which a model of text may lack, need not be there for FSDP; of a mixture's layer, all of
    whose gradients ZeRO-3 takes at once, it takes none while documents are looked at."""
    monkeypatch.chdir(tmp_path)
    model = folder_with(kind, tmp_path)
    asked = [f"model.path={model}", "optimizer.eps=1.0e-4"]
    assert main(["recipe=small", "output.name=alone", *asked]) == 0
    asked += ["output.name=two", "batch.micro_batch_size=1", f"strategy.name={engine}"]
    done = ranks.run(tmp_path, "recipe=small", *asked, processes=2, entry="cpu_engines")
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "runs" / "two") == pytest.approx(losses(tmp_path / "runs" / "alone"), rel=1e-4)
