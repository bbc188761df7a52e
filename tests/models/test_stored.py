"""Frozen weights in fewer bits: that products are those of the restored weight, of what type, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.quantization.stored import FORMS, StoredLinear, StoredWeight, stored_as, stored_empty
from toolkit.planner.memory.states import stored_bytes
from toolkit.planner.trace.types import Tensors

in_each_form = pytest.mark.parametrize("form", FORMS)


@in_each_form
@pytest.mark.parametrize("shape", [(48, 32), (4, 48, 32), (5, 13)])
def test_memory_is_planned_to_the_byte(form: Any, shape: tuple[int, ...]) -> None:
    stored = stored_as(form, torch.randn(shape))
    empty = stored_empty(StoredWeight(torch.empty(shape), form=form), torch.float32)
    assert stored.dtype == torch.uint8 and stored.shape[1] == 1 and not stored.requires_grad
    assert stored.nbytes == stored_bytes(Tensors("layer", shape, 1, False, form), 2)
    assert (stored.shape, stored.quant_state) == (empty.shape, empty.quant_state)


def layer(source: torch.nn.Module, form: str) -> tuple[StoredLinear, torch.Tensor]:
    """A layer in a form, and its weight restored in fp32."""
    plain: Any = source.to(torch.bfloat16)
    quantized: Any = StoredLinear(plain, form)
    weight = plain.weight.detach()
    quantized.weight = stored_as(form, weight.T.contiguous() if isinstance(plain, Conv1D) else weight)
    return quantized, quantized.weight.quant_state.restored(quantized.weight, torch.float32)


@in_each_form
@pytest.mark.parametrize("source", [torch.nn.Linear(48, 32), torch.nn.Linear(48, 32, bias=False), Conv1D(32, 48)])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_layer_and_its_gradient_are_those_of_the_restored_weight(
    source: torch.nn.Module, autocast: bool, form: str
) -> None:
    quantized, weight = layer(source, form)
    input = torch.randn(2, 5, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = quantized(input)
        expected = functional.linear(input, weight)
        expected = expected if quantized.bias is None else expected + quantized.bias
    assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
    torch.testing.assert_close(output, expected.to(output.dtype), rtol=1e-2, atol=1e-2 if autocast else 1e-5)
    (gradient,) = torch.autograd.grad(output.square().sum(), input)
    (wanted,) = torch.autograd.grad(expected.square().sum(), input)
    torch.testing.assert_close(gradient, wanted, rtol=2e-2, atol=1e-1 if autocast else 1e-4)


@in_each_form
def test_the_backward_pass_waits_for_stored_bytes_alone(form: str) -> None:
    quantized, _ = layer(torch.nn.Linear(64, 64), form)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        quantized(torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True))
    assert [each.dtype for each in kept] == [torch.uint8]


@pytest.mark.parametrize(("form", "in_fp8"), [("fp8", False), ("fp8", True), ("int4", False)])
def test_compiled_layers_are_one_graph_and_compute_the_same(
    form: str, in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attn_implementation="sdpa",
    )  # fmt: skip
    base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, each in list(base.model.named_modules()):
        if isinstance(each, torch.nn.Linear):
            base.model.set_submodule(name, layer(each, form)[0])
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False)).train()
    monkeypatch.setattr(StoredLinear, "multiplies_in_fp8", lambda layer, rows: in_fp8)

    def trained(length: int) -> list[float]:
        ids = torch.randint(5, 120, (2, length), generator=torch.Generator().manual_seed(length))
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = [each.grad.norm() for each in model.parameters() if each.grad is not None]
        return [loss.item(), torch.stack(gradients).norm().item()]

    lengths = (17, 33, 40)
    expected = [trained(length) for length in lengths]
    layers = CompiledLayers(model, backend="eager")
    torch.testing.assert_close(torch.tensor([trained(length) for length in lengths]), torch.tensor(expected))
    assert layers.graphs == 1
