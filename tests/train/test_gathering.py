"""What FSDP gathers together, and heads whose weights a loss reads past their own module."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import models_doc
import pytest
import torch
from harness import losses, write_jsonl, write_recipe
from ranks import Ranks
from small import RECIPE
from tiny import chat_rows, tiny_kind
from transformers import AutoModelForCausalLM

from toolkit.train.main import main
from toolkit.train.trainers.gathering import name_units


def named(kind: str) -> list[str] | None:
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=None)
    with torch.device("meta"):
        name_units(plugin, AutoModelForCausalLM.from_config(models_doc.stated(kind, "sft")))
    return plugin.transformer_cls_names_to_wrap


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        ("llama", ["LlamaDecoderLayer"]),
        # Their classes name none.
        ("blenderbot", ["BlenderbotDecoderLayer"]),
        ("ctrl", ["EncoderLayer"]),
        ("xlnet", ["XLNetLayer"]),
    ],
)
def test_every_layer_is_a_unit(kind: str, units: list[str]) -> None:
    assert named(kind) == units


@pytest.mark.parametrize(
    ("kind", "precision"), [("git", "fp32"), ("ctrl", "fp32"), ("bert", "fp32"), ("minimax", "bf16")]
)
def test_fsdp_trains_as_one_process(
    kind: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """GIT's head is a unit by itself, as accelerate finds no last norm in it; CTRL's layers are none by its class; the
    bias of BERT's head is that of another module, too; MiniMax multiplies by buffers."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "chat.jsonl", chat_rows(20))
    write_recipe(tmp_path, "small", RECIPE)
    config = models_doc.stated(kind, "sft")
    for key in [key for key in vars(config) if "drop" in key]:
        setattr(config, key, 0.0)
    model = tiny_kind(config, tmp_path / kind)
    asked = [f"model.path={model}", "optimizer.name=sgd", "optimizer.learning_rate=0.1", "batch.micro_batch_size=1"]
    asked.append(f"precision={precision}")
    assert main(["recipe=small", "output.name=alone", *asked]) == 0
    done = ranks.run(
        tmp_path, "recipe=small", "output.name=two", "strategy.name=fsdp", *asked, processes=2, entry="cpu_engines"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    near = {"fp32": 2e-6, "bf16": 2e-3}[precision]
    assert losses(tmp_path / "runs" / "two") == pytest.approx(losses(tmp_path / "runs" / "alone"), rel=near)
