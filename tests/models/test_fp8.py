"""Frozen weights in fp8: what rounding costs, that products are those of the restored weight, and of what type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from toolkit.models import fp8
from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.fp8 import Fp8Linear, empty_in_fp8, stored_in_fp8
from toolkit.planner.memory.states import stored_bytes
from toolkit.planner.trace.types import Tensors


def restored(weight: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return weight.quant_state.restored(weight, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_costs_what_three_bits_of_mantissa_do_whatever_the_size_of_a_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, 64)[:, None]
    weight = (torch.randn(64, 256) * sizes).to(dtype)
    weight[5] = 0
    stored = stored_in_fp8(weight)
    assert stored.dtype == torch.uint8 and stored.shape == (64 * 256 + 64, 1) and not stored.requires_grad
    lost = (restored(stored) - weight.float()).norm(dim=1) / weight.float().norm(dim=1).clamp(min=1e-30)
    assert lost.max() < 0.031 and lost[5] == 0
    # No number is further off than half of the last bit, or of the smallest one.
    finest = weight.float().abs().amax(1, keepdim=True) / 448 * 2**-9
    assert ((restored(stored) - weight.float()).abs() <= weight.float().abs() / 16 + finest).all()
    assert torch.equal(restored(stored, torch.bfloat16).float(), restored(stored))
    assert torch.equal(restored(stored_in_fp8(restored(stored))), restored(stored)), "nothing is lost twice"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_the_smallest_numbers_of_a_type_are_kept(dtype: torch.dtype) -> None:
    finest = torch.finfo(dtype)
    weight = torch.tensor([[1.0, -2.0, 0.0], [6.0, 1.0, -0.5]]) * max(finest.tiny * finest.eps * 4, 2.0**-126)
    assert torch.equal(restored(stored_in_fp8(weight.to(dtype))), weight)


@pytest.mark.parametrize("shape", [(48, 32), (4, 48, 32)])
def test_memory_is_planned_to_the_byte(shape: tuple[int, ...]) -> None:
    stored, empty = stored_in_fp8(torch.randn(shape)), empty_in_fp8(fp8.Fp8Weight(torch.empty(shape)), torch.float32)
    assert stored.nbytes == stored_bytes(Tensors("layer", shape, 1, False, "fp8"), 2)
    assert (stored.shape, stored.quant_state) == (empty.shape, empty.quant_state)


def test_a_row_uses_the_range_of_e4m3_and_does_not_leave_it() -> None:
    weight = torch.tensor([[448.0, 1.0], [448.1, 1.0], [7.0, 0.5], [-7.01, 0.5]])
    numbers, scales = (stored := stored_in_fp8(weight)).quant_state.split(stored)  # type: ignore[union-attr]
    assert scales.flatten().tolist() == [1, 2, 2**-6, 2**-5]
    assert numbers.float().abs().amax(1).tolist() == [448, 224, 448, 224]


def layer(source: torch.nn.Module) -> tuple[Fp8Linear, torch.Tensor]:
    """A layer in fp8, and its weight restored in fp32."""
    plain: Any = source.to(torch.bfloat16)
    quantized = Fp8Linear(plain)
    weight = plain.weight.detach()
    quantized.weight = stored_in_fp8(weight.T.contiguous() if isinstance(plain, Conv1D) else weight)
    return quantized, restored(quantized.weight)


@pytest.mark.parametrize("source", [torch.nn.Linear(48, 32), torch.nn.Linear(48, 32, bias=False), Conv1D(32, 48)])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_layer_and_its_gradient_are_those_of_the_restored_weight(source: torch.nn.Module, autocast: bool) -> None:
    quantized, weight = layer(source)
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


def test_the_backward_pass_waits_for_stored_bytes_alone() -> None:
    quantized, _ = layer(torch.nn.Linear(64, 64))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        quantized(torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True))
    assert [each.dtype for each in kept] == [torch.uint8]


def test_products_in_fp8_are_as_close_as_rounding_of_rows_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's way; torch multiplies in fp8 on CPUs too, but slowly."""
    torch.manual_seed(0)
    quantized, weight = layer(torch.nn.Linear(64, 48, bias=False))
    input = torch.randn(2, 40, 64).bfloat16().requires_grad_()
    # Rows of very different sizes, as activations and gradients have.
    sizes = torch.logspace(-2, 2, 40)[:, None].bfloat16()
    later = torch.randn(2, 40, 48).bfloat16() * sizes

    def passes() -> tuple[torch.Tensor, torch.Tensor]:
        output = quantized(input * sizes)
        (gradient,) = torch.autograd.grad(output, input, later)
        return output.float(), gradient.float()

    exact = passes()
    assert not quantized.multiplies_in_fp8(input), "a CPU"
    monkeypatch.setattr(Fp8Linear, "multiplies_in_fp8", lambda layer, rows: True)
    for rounded, wanted in zip(passes(), exact, strict=True):
        off = (rounded - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert 0.01 < off.max() < 0.06
    zeros = functional.linear(torch.zeros(1, 64), weight)
    assert torch.equal(quantized(torch.zeros(1, 64, dtype=torch.bfloat16)).float(), zeros), "nothing is divided by zero"


@pytest.mark.parametrize("in_fp8", [False, True])
def test_compiled_layers_are_one_graph_and_compute_the_same(in_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attn_implementation="sdpa",
    )  # fmt: skip
    base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, each in list(base.model.named_modules()):
        if isinstance(each, torch.nn.Linear):
            base.model.set_submodule(name, layer(each)[0])
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False)).train()
    monkeypatch.setattr(Fp8Linear, "multiplies_in_fp8", lambda layer, rows: in_fp8)

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
