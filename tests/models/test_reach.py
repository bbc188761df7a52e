"""What text gives a gradient, what is left alone elsewhere, and what is trained on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models_doc
import pytest
import torch
from harness import losses, write_jsonl, write_recipe
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from ranks import Ranks
from safetensors.torch import load_file
from small import RECIPE
from tiny import chat_rows, tiny_kind
from transformers import AutoModelForCausalLM

from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import BatchLayout
from toolkit.models import reach
from toolkit.models.adapters import add_method
from toolkit.models.reach import Reach, reach_of
from toolkit.models.tiny import tiny_model
from toolkit.planner.trace.fit import trace
from toolkit.planner.trace.setting import setting_of
from toolkit.recipe import Recipe
from toolkit.train.main import main

TOWER = ("model.vision_tower", "model.multi_modal_projector")


@pytest.mark.parametrize(
    ("kind", "objective", "reach"),
    [
        ("llama", "sft", Reach(inside=True)),
        ("qwen3_moe", "sft", Reach(inside=True)),
        ("t5", "seq2seq", Reach(inside=True)),
        ("gemma3", "sft", Reach(inside=True, outside=TOWER)),
        # Attention to an encoder.
        ("bart", "sft", Reach(inside=False)),
        # Biases of routers, which balance them by other means than gradients.
        (
            "ernie4_5_moe",
            "sft",
            Reach(inside=True, fixed=(r"model\.layers\.\d+\.mlp\.gate\.moe_statics\.e_score_correction_bias",)),
        ),
    ],
)
def test_what_a_loss_reaches_is_asked_of_a_tiny_copy(kind: str, objective: str, reach: Reach) -> None:
    assert reach_of(models_doc.stated(kind, objective), objective) == reach


def test_experts_that_are_modules_are_not_reached_by_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(models_doc.stated("llama", "sft"), "sft")
    monkeypatch.setattr(reach, "tiny_model", lambda *args: model)
    assert reach_of(None, "sft").inside
    model.zero_grad()
    mlp = model.model.layers[0].mlp
    mlp.experts = torch.nn.ModuleList([mlp.down_proj])
    assert not reach_of(None, "sft").inside


def folder_with(kind: str, place: Path) -> Path:
    write_jsonl(place / "chat.jsonl", chat_rows(20))
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


@pytest.mark.parametrize("method", [{}, {"name": "lora"}, {"name": "lora", "target_modules": ["q_proj", "up_proj"]}])
def test_a_plan_trains_what_a_run_trains(method: dict[str, Any]) -> None:
    config = models_doc.stated("gemma3", "sft")
    values = {"model": {"path": "unread"}, "data": {"sources": ["unread"]}, "method": method, "precision": "fp32"}
    recipe = Recipe.model_validate(values)
    planned = trace(setting_of(recipe, config.to_dict(), "cpu", "sdpa", BatchLayout(2, 2, 1, 1, 64)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        trained = add_method(model, recipe, dtypes(recipe), reach=reach_of(config, "sft"))
    names = [name for name, each in trained.named_parameters() if each.requires_grad]
    assert names and not any(part in name for name in names for part in TOWER)
    assert planned.elements() == sum(each.numel() for each in trained.parameters())
    assert planned.elements(trained=True) == sum(each.numel() for each in trained.parameters() if each.requires_grad)


def test_a_tower_for_images_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """ZeRO would take missing gradients for zeros, and decay what has none."""
    monkeypatch.chdir(tmp_path)
    model = folder_with("gemma3", tmp_path)
    asked = [f"model.path={model}", "optimizer.weight_decay=0.5", "optimizer.learning_rate=0.1"]
    assert main(["recipe=small", "output.name=alone", *asked]) == 0
    assert "No text reaches model.multi_modal_projector, model.vision_tower" in capfd.readouterr().out
    done = ranks.run(
        tmp_path, "recipe=small", "output.name=two", "strategy.name=zero2", *asked, processes=2, entry="cpu_engines"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before = load_file(model / "model.safetensors")
    for run in (tmp_path / "runs" / "alone", tmp_path / "runs" / "two"):
        after = load_file(run / "final" / "model.safetensors")
        changed = {name for name, each in after.items() if not torch.equal(each, before[name])}
        of_tower = {name for name in before if "vision_tower" in name or "multi_modal_projector" in name}
        assert of_tower and not of_tower & changed and len(changed) + len(of_tower) == len(before)


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,up_proj]"])
def test_adapters_are_added_where_text_comes(targets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = folder_with("gemma3", tmp_path)
    asked = ["recipe=small", f"model.path={model}", "method.name=lora"]
    assert main([*asked, "output.name=first", f"method.target_modules={targets}"]) == 0
    run = tmp_path / "runs" / "first"
    weights = load_file(run / "final" / "adapter_model.safetensors")
    assert weights and all(".language_model." in name for name in weights)
    # Whoever loads it adds none elsewhere, either.
    base = AutoModelForCausalLM.from_pretrained(model)
    loaded = PeftModel.from_pretrained(base, run / "final")
    assert {*get_peft_model_state_dict(loaded)} == {*weights}
    assert main([*asked, "output.name=second", f"model.adapter={run / 'final'}"]) == 0
    assert {*load_file(tmp_path / "runs" / "second" / "final" / "adapter_model.safetensors")} == {*weights}


def test_an_adapter_that_has_layers_elsewhere_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = folder_with("gemma3", tmp_path)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(tmp_path / "other")
    before = load_file(tmp_path / "other" / "adapter_model.safetensors")
    assert main(["recipe=small", f"model.path={model}", "output.name=on", "model.adapter=other"]) == 0
    after = load_file(tmp_path / "runs" / "on" / "final" / "adapter_model.safetensors")
    assert {*after} == {*before}
    for name, each in after.items():
        assert torch.equal(each, before[name]) == ("vision_tower" in name), name
