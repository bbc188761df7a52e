"""What is read layer by layer equals what the libraries make of a whole model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small import FP8, INT4, INT8, LORA, NF4, SEQ2SEQ, dequantized, place_with

from toolkit.distributed.engines import dtypes
from toolkit.models.adapters import add_method
from toolkit.models.blockwise import Blockwise, Merged, Weights, blocks
from toolkit.models.load import ModelSource
from toolkit.models.tiny import tiny_model
from toolkit.recipe.rules import load_checked

HOST = torch.device("cpu")


place = place_with("llama", "moe", "gpt2", "blenderbot")


KINDS = {
    "lora": LORA,
    "bf16": [*LORA, "precision=bf16"],
    "rslora": [*LORA, "method.use_rslora=true"],
    "dora": [*LORA, "method.use_dora=true"],
    "tied": [*LORA, "method.modules_to_save=[embed_tokens, lm_head]"],
    "nf4": NF4,
    "nf4-experts": [*NF4, "model.path=moe"],
    "nf4-dora": [*NF4, "method.use_dora=true"],
    "int8": INT8,
    "fp8": FP8,
    "fp8-experts": [*FP8, "model.path=moe"],
    "fp8-conv1d": [*FP8, "model.path=gpt2"],
    "int4": INT4,
    "int4-experts": [*INT4, "model.path=moe"],
    "experts": [*LORA, "model.path=moe"],
    "conv1d": [*LORA, "model.path=gpt2"],
    "seq2seq": [*NF4, *SEQ2SEQ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_that_peft_merges_into_the_whole_model(kind: str, tmp_path: Path) -> None:
    recipe = load_checked("small", KINDS[kind]).recipe
    source, types = ModelSource.open(recipe), dtypes(recipe)
    base: Any = source.load(types, "eager")
    if recipe.method.quantization != "none":
        base = dequantized(base)
    adapted = add_method(base.float(), recipe, types)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "final")
    expected = dict(adapted.merge_and_unload(safe_merge=True).named_parameters(remove_duplicate=False))

    weights = source.in_files(types, tmp_path / "work")
    blockwise = Blockwise(weights.adapted({tmp_path / "final": 1.0}), weights, HOST)
    blockwise.merging = True
    merged = Merged(blockwise, torch.float32)
    for name, parameter in expected.items():
        torch.testing.assert_close(merged[name], parameter.data, rtol=0, atol=1e-6, msg=name)
    merged.close()
    assert all(
        each.is_meta
        for name, each in blockwise.model.named_parameters()
        if "lora_" not in name and name.split(".")[-2] == "base_layer"
    )


@pytest.mark.parametrize("stored", [NF4, INT8], ids=["nf4", "int8"])
def test_a_quantized_base_has_the_biases_that_were_trained(stored: list[str], tmp_path: Path) -> None:
    recipe = load_checked("small", [*stored, "model.path=gpt2", "extra.lora.bias=all"]).recipe
    source, types = ModelSource.open(recipe), dtypes(recipe)
    trained = add_method(source.load(types, "eager"), recipe, types)
    biases = {name: each for name, each in trained.named_parameters() if name.endswith("bias")}
    for each in biases.values():
        each.data += torch.randn_like(each)
    trained.save_pretrained(tmp_path / "final")
    weights = source.in_files(types, tmp_path / "work")
    read = dict(weights.adapted({tmp_path / "final": 1.0}, as_trained=True).named_parameters())
    assert biases
    for name, each in biases.items():
        assert torch.equal(read[name].to(each), each), name


@pytest.mark.parametrize(
    "config", ["LlamaConfig", "Llama4TextConfig", "Gemma4TextConfig", "ProphetNetConfig", "MambaConfig"]
)
def test_models_compute_the_same_layer_by_layer(config: str) -> None:
    """Also those that look at their embeddings' weights from outside."""
    import transformers

    objective = "seq2seq" if config == "ProphetNetConfig" else "language_modelling"
    model = tiny_model(getattr(transformers, config)(), objective)
    inputs = {
        name: torch.arange(1, 20)[None] for name in ("input_ids", *(["labels"] if objective == "seq2seq" else []))
    }
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
    files = dict(model.named_parameters(remove_duplicate=False))
    empty = copy.deepcopy(model)
    assert len(blocks(empty)) > 2
    for module in empty.modules():
        for key, parameter in module._parameters.items():
            module._parameters[key] = None if parameter is None else torch.nn.Parameter(parameter.to("meta"))
    with torch.no_grad():
        assert torch.equal(
            Blockwise(empty, Weights(files, empty), HOST).model(**inputs, use_cache=False).logits, expected
        )
