"""Heads of models: what belongs to them, how they begin, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_encoder, tiny_gguf, tiny_model
from transformers import AutoTokenizer

from toolkit.common import UserError
from toolkit.distributed.engines import dtypes
from toolkit.models.adapters import add_method
from toolkit.models.heads import head_modules
from toolkit.models.load import ModelSource
from toolkit.recipe import Recipe

LABELS = ["a", "b", "c"]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with tiny models that have no head for texts."""
    folder = tmp_path_factory.mktemp("heads")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    tiny_gguf(folder / "llama", folder / "llama.gguf")
    for kind in ("bert", "roberta", "distilbert", "modernbert"):
        tiny_encoder(kind, folder / kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def source_of(path: str, objective: str = "classification", **sections: Any) -> ModelSource:
    content = {"model": {"path": path}, "data": {"sources": ["x"]}, "objective": objective, "precision": "fp32"}
    source = ModelSource.open(Recipe.model_validate(content | sections))
    return source.labelled([] if objective == "reward" else LABELS, source.tokenizer())


def load(path: str, objective: str = "classification", **sections: Any) -> Any:
    source = source_of(path, objective, **sections)
    return source.load(dtypes(source.recipe), "eager")


@pytest.mark.parametrize(
    ("path", "objective", "modules"),
    [
        ("llama", "reward", ["score"]),
        ("llama.gguf", "classification", ["score"]),
        ("llama", "token_classification", ["score"]),
        ("bert", "classification", ["bert.pooler", "classifier"]),
        ("bert", "token_classification", ["classifier"]),
        ("roberta", "classification", ["classifier"]),
        ("distilbert", "classification", ["pre_classifier", "classifier"]),
        ("modernbert", "classification", ["head", "classifier"]),
    ],
)
def test_a_head_has_its_labels_and_begins_alike_by_the_seed(path: str, objective: str, modules: list[str]) -> None:
    torch.manual_seed(1)
    model = load(path, objective)
    torch.manual_seed(2)
    again, other = load(path, objective), load(path, objective, seed=7)
    assert head_modules(model) == modules
    assert model.config.num_labels == (1 if objective == "reward" else 3)
    drawn = 0
    for (name, one), two, three in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
        # Of a masked language model ModernBERT's dense layer is there already.
        if any(name.startswith(f"{each}.") for each in modules) and one.dim() > 1 and not torch.equal(one, three):
            drawn += 1
            assert 0.01 < one.std() < 0.04
        elif one.dim() > 1:
            assert torch.equal(one, three)
    assert drawn >= 1


def test_the_body_is_that_of_the_files() -> None:
    stored, model = load_file("llama/model.safetensors"), load("llama", "reward")
    held = dict(model.named_parameters())
    assert all(torch.equal(value, held[name].detach()) for name, value in stored.items() if name in held)


def test_a_model_that_lacks_a_layer_is_refused() -> None:
    from shutil import copytree

    copytree("llama", "hollow")
    stored = load_file("hollow/model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, "hollow/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of the model's .* such as model.layers.1.mlp.up_proj.weight"):
        load("hollow")


@pytest.mark.parametrize("path", ["bert", "roberta", "distilbert", "modernbert", "llama"])
def test_adapters_leave_the_head_to_be_trained_in_full(path: str) -> None:
    source = source_of(path, method={"name": "lora", "r": 4})
    model = add_method(source.load(dtypes(source.recipe), "eager"), source.recipe, dtypes(source.recipe))
    base, heads = model.get_base_model(), head_modules(load(path))
    trained = [name for name, each in base.named_parameters() if each.requires_grad]
    of_head = [name for name in trained if any(name.startswith(f"{each}.") for each in heads)]
    assert of_head and all(".modules_to_save." in name for name in of_head)
    assert all("lora_" in name for name in trained if name not in of_head)
    assert {name.partition(".modules_to_save")[0] for name in of_head} == set(heads)


def test_a_quantized_base_keeps_its_head_whole() -> None:
    source = source_of("bert", method={"name": "lora", "r": 4, "quantization": "nf4"}, precision="bf16")
    model = source.load(dtypes(source.recipe), "eager")
    kinds = {name: type(each).__name__ for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert kinds["bert.pooler.dense"] == kinds["classifier"] == "Linear"
    assert kinds["bert.encoder.layer.0.attention.self.query"] == "Linear4bit"


def test_a_row_is_scored_alike_wherever_padding_stands() -> None:
    model, tokenizer = load("llama", "reward").eval(), AutoTokenizer.from_pretrained("llama")
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    with torch.no_grad():
        apart = torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])
        for side in ("left", "right"):
            batch = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt")
            assert torch.allclose(model(**batch).logits, apart, atol=1e-6), side


def test_an_encoder_decoder_is_no_classifier_here() -> None:
    with pytest.raises(UserError, match="which Transformers cannot load as a classifier of texts"):
        tiny_model("facebook/blenderbot-400M-distill", Path("blenderbot"))
        source_of("blenderbot")
