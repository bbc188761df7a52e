"""Layers that wait on the host and come to the device when they compute."""

from __future__ import annotations

import models_doc
import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.common import UserError
from toolkit.models.streamed_layers import stream_layers
from toolkit.models.tiny import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "gemma3_text"])
def test_it_computes_what_it_did_with_one_layer_at_a_time_on_the_device(kind: str) -> None:
    model = tiny_model(models_doc.configuration(kind), "sft").eval().requires_grad_(False)
    ids = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids, use_cache=False).logits
    waiting = {name: each.data_ptr() for name, each in model.named_parameters()}
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    seen: list[set[str]] = []

    def look(*_: object) -> None:
        seen.append({name for name, each in model.named_parameters() if each.data_ptr() != waiting[name]})

    stream_layers(model, CPU, "distillation.teacher.offload")
    for layer in layers:
        next(iter(layer.children())).register_forward_pre_hook(look)
    for _ in range(2):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    own = [{id(each) for each in layer.parameters()} for layer in layers]
    assert seen == 2 * [{name for name, each in model.named_parameters() if id(each) in part} for part in own]
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == waiting


def test_weights_are_back_when_a_layer_fails() -> None:
    model = tiny_model(models_doc.configuration("llama"), "sft").eval().requires_grad_(False)
    waiting = [each.data_ptr() for each in model.parameters()]
    stream_layers(model, CPU, "distillation.teacher.offload")

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)
    assert [each.data_ptr() for each in model.parameters()] == waiting


def test_code_without_layers_is_refused_by_the_recipes_key() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = type("Config", (), {"model_type": "own"})()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"distillation\.teacher\.offload: the code of a own"):
        stream_layers(model, CPU, "distillation.teacher.offload")
