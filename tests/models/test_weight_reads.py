"""Layers whose weights a model's code reads are not stored in fewer bits, nor given adapters that never learn."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import models_doc
import pytest
import torch
from harness import write_jsonl, write_recipe
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from small import RECIPE, dequantized, logits_of
from tiny import chat_rows, tiny_kind

from toolkit.common import UserError
from toolkit.distributed.engines import dtypes
from toolkit.models.adapters import add_method
from toolkit.models.coverage import is_quantized
from toolkit.models.load import ModelSource
from toolkit.models.weight_reads import Reads, _ask, _source, kept_whole, reads_of
from toolkit.recipe import Recipe
from toolkit.recipe.rules import load_checked

INDEXER = (r"model\.layers\.\d+\.self_attn\.indexer\.weights_proj",)
STEP = (r"model\.layers\.\d+\.mamba\.dt_proj",)
KERNELS = (r"model\.layers\.\d+\.mamba\.out_proj",)
MIXER = tuple(rf"backbone\.layers\.\d+\.mixer\.{each}_proj" for each in ("dt", "out", "x"))
SHARED = tuple(rf"model\.layers\.\d+\.mlp\.shared_experts\.{each}_proj" for each in ("down", "gate", "up"))
COEFFICIENTS = tuple(rf"model\.layers\.\d+\.altup\.{each}_coefs" for each in ("correction", "prediction"))


@pytest.mark.parametrize(
    ("kind", "objective", "reads"),
    [
        ("llama", "sft", Reads()),
        ("t5gemma", "seq2seq", Reads()),
        # It casts what comes before the layer to the type of its weight.
        ("deepseek_v32", "sft", Reads(INDEXER)),
        # It multiplies by the weight.
        ("jamba", "sft", Reads(STEP, STEP)),
        # It changes weights in training.
        ("gemma3n_text", "sft", Reads(COEFFICIENTS)),
        # It hands the weight to a kernel, where there is one.
        ("bamba", "sft", Reads(KERNELS, KERNELS)),
        ("mamba", "sft", Reads((*MIXER, "lm_head"), MIXER)),
        # Of `mlp.shared_experts` PEFT reads `mlp.shared_expertss`.
        ("laguna", "sft", Reads(renamed=SHARED)),
    ],
)
def test_reads_are_asked_of_a_tiny_copy(kind: str, objective: str, reads: Reads) -> None:
    assert reads_of(models_doc.stated(kind, objective), objective) == reads


def test_the_code_of_many_layers_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture encoder's as well, which has 32 layers."""
    read = []

    def noted(kind: Any, original: Any = inspect.getsource) -> str:
        read.append(kind)
        return str(original(kind))

    monkeypatch.setattr(inspect, "getsource", noted)
    _ask.cache_clear()
    _source.cache_clear()
    reads_of(models_doc.stated("qwen2_5_vl", "sft"), "sft")
    ours = [kind for kind in read if isinstance(kind, type) and kind.__module__.endswith("modeling_qwen2_5_vl")]
    assert ours and len(ours) == len(set(ours))


@pytest.mark.parametrize(("kind", "objective"), [("blenderbot", "seq2seq"), ("gpt2", "sft"), ("qwen3_moe", "sft")])
def test_what_is_drawn_next_does_not_depend_on_who_asked_before(kind: str, objective: str) -> None:
    _ask.cache_clear()
    state = torch.get_rng_state()
    reads_of(models_doc.stated(kind, objective), objective)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_that_are_read_stay_beside_the_head() -> None:
    config = models_doc.stated("longt5", "seq2seq")
    kept = kept_whole(config, "seq2seq", trust_remote_code=False)
    layers = config.num_layers + config.num_decoder_layers
    assert len([name for name in kept if name.endswith(".wo")]) == layers and "lm_head" in kept
    assert kept_whole(models_doc.stated("llama", "sft"), "sft", trust_remote_code=False) == []


def test_routers_stay_whole() -> None:
    kept = kept_whole(models_doc.stated("afmoe", "sft"), "sft", trust_remote_code=False)
    assert any(name.endswith(".mlp.router.gate") for name in kept) and "lm_head" in kept
    # As many outputs as there are experts have its shared expert and keys, too.
    assert kept_whole(models_doc.stated("qwen3_next", "sft"), "sft", trust_remote_code=False) == []


def test_what_peft_would_read_under_another_name_gets_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, model = loaded("laguna", "none", tmp_path, monkeypatch)
    adapted = add_method(model, recipe, dtypes(recipe))
    written = get_peft_model_state_dict(adapted)
    found: Any = set_peft_model_state_dict(adapted, written)
    assert written and not [name for name in found.missing_keys if "lora_" in name]


def test_a_model_without_embeddings_of_tokens_gets_no_adapters() -> None:
    from transformers import CanineConfig, CanineForSequenceClassification

    with torch.device("meta"):
        model = CanineForSequenceClassification(CanineConfig(num_hidden_layers=1))
    values = {"model": {"path": "unread"}, "data": {"sources": ["unread"]}, "method": {"name": "lora"}}
    recipe = Recipe.model_validate(values | {"objective": "reward"})
    with pytest.raises(UserError, match="PEFT asks for embeddings of tokens, which a canine has none of"):
        add_method(model, recipe, dtypes(recipe))


def loaded(kind: str, form: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A recipe and its model in a form of fewer bits."""
    monkeypatch.chdir(place)
    write_jsonl(place / "chat.jsonl", chat_rows(20))
    write_recipe(place, "small", RECIPE)
    folder = tiny_kind(models_doc.stated(kind, "sft"), place / kind)
    keys = [f"model.path={folder}", "method.name=lora", f"method.quantization={form}", "method.lora_dropout=0"]
    recipe = load_checked("small", keys).recipe
    model = ModelSource.open(recipe).load(dtypes(recipe), "eager")
    model.config.use_cache = False
    return recipe, model


@pytest.mark.parametrize("form", ["nf4", "fp8"])
@pytest.mark.parametrize("kind", ["deepseek_v32", "jamba", "gemma3n_text"])
def test_a_quantized_model_computes_what_its_weights_stand_for(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = loaded(kind, form, tmp_path, monkeypatch)
    row = {"input_ids": [5, 9, 12, 7, 20, 33, 41, 8]}
    found = logits_of(model.train(), row)
    assert any(is_quantized(each) for each in model.parameters())
    torch.testing.assert_close(found, logits_of(dequantized(model), row), rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_not_called_gets_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, model = loaded("jamba", "none", tmp_path, monkeypatch)
    adapted = add_method(model, recipe, dtypes(recipe))
    names = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
    assert names and not any("dt_proj" in name for name in names)
    adapted(input_ids=torch.arange(5, 13)[None]).logits.sum().backward()
    assert all(each.grad is not None for name, each in adapted.named_parameters() if "lora_B" in name)
