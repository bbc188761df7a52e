"""Training on from an adapter, stage after stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from small import LORA, place_with, set_up
from transformers import AutoModelForCausalLM

from toolkit.recipe import RecipeError
from toolkit.recipe.rules import load_checked
from toolkit.train.finished.merge import merge
from toolkit.train.main import main

place = place_with("llama")


def stage(name: str, *overrides: str) -> tuple[Path, list[float]]:
    """A run, and its held-out losses."""
    assert main(["recipe=small", "data.eval_split=0.2", f"output.name={name}", *overrides]) == 0
    lines = [json.loads(line) for line in (Path("runs") / name / "metrics.jsonl").read_text().splitlines()]
    return Path("runs") / name, [line["eval_loss"] for line in lines if "eval_loss" in line]


def adapter_config(run: Path) -> dict[str, Any]:
    return json.loads((run / "final" / "adapter_config.json").read_text(encoding="utf-8"))


def test_each_stage_begins_where_the_last_one_ended() -> None:
    keys = ["method.r=4", "method.target_modules=[q_proj, down_proj]", "method.rank_pattern.q_proj=2"]
    first, losses = stage("first", *LORA, *keys, "method.use_rslora=true")
    second, next_losses = stage("second", "model.adapter=runs/first/final")
    third, last_losses = stage("third", "model.adapter=runs/second/final", "seed=7")
    assert next_losses[0] == pytest.approx(losses[-1], abs=1e-6) != losses[0]
    assert last_losses[-1] < next_losses[0]
    kept = ("r", "lora_alpha", "rank_pattern", "use_rslora", "base_model_name_or_path")
    assert all(adapter_config(first)[key] == adapter_config(third)[key] for key in kept)
    manifest = json.loads((third / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["started_from"] == ["runs/first/final", "runs/second/final"]
    assert "runs/first/final, then runs/second/final" in (third / "final" / "README.md").read_text(encoding="utf-8")
    # The last adapter holds all stages, and stands on the base itself.
    merge([second], second / "merged")


@pytest.mark.parametrize("form", ["none", "nf4", "int8", "fp8"])
def test_a_stage_begins_with_the_adapter_to_the_last_bit(form: str) -> None:
    """TRL rounds adapters on a base of nf4 or int8 to bf16."""
    base = AutoModelForCausalLM.from_pretrained("llama")
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, config).save_pretrained("random")
    given = load_file("random/adapter_model.safetensors")
    keys = ["model.adapter=random", f"method.quantization={form}", "precision=bf16", f"output.name=random_{form}"]
    begun = get_peft_model_state_dict(set_up(*keys).trainer.model)
    assert {*begun} == {*given} and all(torch.equal(each, begun[name]) for name, each in given.items())


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens", "lm_head"]], ids=",".join)
def test_an_adapter_that_has_parted_tied_embeddings_is_refused(
    saved: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT parts them by default. As one weight the model would begin as another one than the adapter's."""
    model = AutoModelForCausalLM.from_pretrained("llama")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    adapted: Any = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        adapted.get_output_embeddings().weight.mul_(1.1)
    adapted.save_pretrained("parted")
    assert main(["recipe=small", "model.adapter=parted", *LORA, f"output.name=parted_{len(saved)}"]) != 0
    assert "parted has trained embeddings apart from the output head" in capsys.readouterr().err


def test_rank_and_targets_are_the_adapters_and_what_is_stated_must_agree() -> None:
    stage("narrow", *LORA, "method.r=4", "method.target_modules=[q_proj, v_proj]")
    start = "model.adapter=runs/narrow/final"
    loaded = load_checked("small", [start])
    assert loaded.recipe.method.name == "lora" and loaded.recipe.method.r == 4
    assert loaded.recipe.method.target_modules == ["q_proj", "v_proj"]
    assert loaded.origins["method.r"].endswith("adapter_config.json")
    assert load_checked("small", [start, "method.r=4", "method.target_modules=[v_proj, q_proj]"]).recipe.method.r == 4
    for overrides, words in (
        ([start, "method.r=8"], ["method.r", "has 4"]),
        ([start, "method.target_modules=[q_proj]"], ["method.target_modules", "v_proj"]),
        ([start, "method.name=full"], ["method.name", "has lora"]),
        (["model.adapter=runs/narrow"], ["set model.adapter=runs/narrow/final"]),
        ([start, "model.path=Qwen/Qwen3-8B"], ["was trained on llama"]),
    ):
        with pytest.raises(RecipeError) as caught:
            load_checked("small", overrides)
        assert all(word in str(caught.value) for word in words), caught.value
