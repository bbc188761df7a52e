"""What Transformers loads into divided parameters is what it loads elsewhere."""

from __future__ import annotations

from pathlib import Path

import models_doc
import pytest
import torch
from harness import losses, write_jsonl, write_recipe
from ranks import Ranks
from safetensors.torch import load_file
from small import RECIPE
from tiny import chat_rows, tiny_kind
from transformers import AutoModelForSequenceClassification

from toolkit.train.main import main


def test_a_head_of_another_size_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"this is row {number}", "label": ("good", "bad", "fair")[number % 3]} for number in range(18)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    write_recipe(tmp_path, "small", RECIPE)
    model = tiny_kind(models_doc.stated("llama", "sft"), tmp_path / "llama")
    scoring = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=0)
    scoring.save_pretrained(model)
    asked = [f"model.path={model}", "objective=classification", "data.sources=[rows.jsonl]", "batch.micro_batch_size=1"]
    assert main(["recipe=small", "output.name=alone", *asked]) == 0
    asked += ["output.name=two", "strategy.name=zero3"]
    done = ranks.run(tmp_path, "recipe=small", *asked, processes=2, entry="cpu_engines")
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "runs" / "two") == pytest.approx(losses(tmp_path / "runs" / "alone"), rel=2e-6)


@pytest.mark.parametrize("kind", ["rwkv", "deepseek_v4"])
def test_zero3_trains_and_publishes_what_one_process_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """RWKV asks for the shapes of weights that were loaded; a renaming of DeepSeek V4 fits a name that stays."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "chat.jsonl", chat_rows(20))
    write_recipe(tmp_path, "small", RECIPE)
    model = tiny_kind(models_doc.stated(kind, "sft"), tmp_path / kind)
    asked = [f"model.path={model}", "optimizer.name=sgd", "optimizer.learning_rate=0.1", "batch.micro_batch_size=1"]
    assert main(["recipe=small", "output.name=alone", *asked]) == 0
    asked += ["output.name=two", "strategy.name=zero3"]
    done = ranks.run(tmp_path, "recipe=small", *asked, processes=2, entry="cpu_engines")
    assert done.returncode == 0, done.stderr[-3000:]
    alone, two = tmp_path / "runs" / "alone", tmp_path / "runs" / "two"
    assert losses(two) == pytest.approx(losses(alone), rel=2e-6)
    files = [load_file(run / "final" / "model.safetensors") for run in (alone, two)]
    assert {*files[0]} == {*files[1]}
    for name, each in files[0].items():
        torch.testing.assert_close(files[1][name], each, rtol=1e-5, atol=1e-6)
