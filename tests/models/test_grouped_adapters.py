"""Adapters that read the same rows have one product for their A matrices in compiled layers, and the same gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from transformers import AutoModelForCausalLM, LlamaConfig

from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.lora_products import add_by_product

ROWS, LENGTH, WIDTH, INNER, RANK = 2, 12, 64, 96, 4
PLAIN = {"target_modules": "all-linear"}
APART = [WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, INNER]
"""What the seven adapters of a layer read, a token."""
TOGETHER = [WIDTH, WIDTH, WIDTH, INNER]


def model_with(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    base = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads), dtype=dtype)
    config = LoraConfig(**{"r": RANK, "lora_alpha": 10, "init_lora_weights": False, **settings})
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    add_by_product(model)
    return model.train()


class Products:
    """Compiles nothing, and notes the sizes of the matrix products of each graph: (rows, inner, columns)."""

    def __init__(self) -> None:
        self.forward: list[tuple[int, ...]] = []
        self.backward: list[tuple[int, ...]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        passes = {"fw_compiler": self._noting(self.forward), "bw_compiler": self._noting(self.backward)}
        return aot_autograd(**passes)(graph, inputs)

    def _noting(self, found: list[tuple[int, ...]]) -> Any:
        def compiler(graph: Any, inputs: Any) -> Any:
            for node in graph.graph.nodes:
                if node.target == torch.ops.aten.mm.default:
                    left, right = (each.meta["val"].shape for each in node.args)
                    found.append(tuple(int(each) for each in (*left, right[1])))
            return nop(graph, inputs)

        return compiler


def trained(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch, and the gradients of the adapters."""
    torch.manual_seed(2)
    ids = torch.randint(128, (ROWS, LENGTH))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def compiled(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Products]:
    """A model as it is, one whose layers are compiled, and their products."""
    torch._dynamo.reset()
    plain, products = model_with(settings, dtype), Products()
    other = copy.deepcopy(plain)
    # The copied layers' own, not the methods of those that were copied.
    add_by_product(other)
    layers = CompiledLayers(other, backend=products)
    assert layers.layers == 2
    return plain, other, products


def test_rows_are_read_once_for_all_adapters_that_share_them() -> None:
    _, model, products = compiled(PLAIN)
    trained(model)
    tokens = ROWS * LENGTH
    ranks = {RANK, 2 * RANK, 3 * RANK}
    down = [inner for rows, inner, columns in products.forward if rows == tokens and columns in ranks]
    assert sorted(down) == sorted(TOGETHER)
    # The gradients of A, of (r, tokens) and rows; those of the rows, of (tokens, r) and A.
    of_weights = [each for each in products.backward if each[0] in ranks and each[1] == tokens]
    of_rows = [each for each in products.backward if each[0] == tokens and each[1] in ranks]
    assert sorted(columns for _, _, columns in of_weights) == sorted(TOGETHER)
    assert sorted(columns for _, _, columns in of_rows) == sorted(TOGETHER)


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        pytest.param({"target_modules": ["q_proj", "v_proj"]}, marks=pytest.mark.matrix),
        # Ranks and scales of each layer's own.
        {**PLAIN, "rank_pattern": {"k_proj": 2, "up_proj": 7}, "alpha_pattern": {"v_proj": 3}},
        pytest.param({**PLAIN, "use_rslora": True, "lora_bias": True}, marks=pytest.mark.matrix),
        pytest.param({**PLAIN, "use_dora": True}, marks=pytest.mark.matrix),
    ],
    ids=["all", "two", "ranks", "biases", "dora"],
)
def test_losses_and_gradients_are_those_of_each_on_its_own(settings: dict[str, Any]) -> None:
    plain, model, _ = compiled(settings)
    loss, expected = trained(plain)
    same, gradients = trained(model)
    torch.testing.assert_close(same, loss, rtol=1e-6, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.matrix
def test_in_16_bits_they_are_as_near_to_fp32() -> None:
    exact, _, _ = compiled(PLAIN)
    plain, model, _ = compiled(PLAIN, torch.bfloat16)
    _, wanted = trained(exact)
    apart, together = (trained(each)[1] for each in (plain, model))

    def off(found: dict[str, torch.Tensor]) -> float:
        return sum(((found[name].float() - each).norm() / each.norm()).item() for name, each in wanted.items())

    assert off(together) <= 1.1 * off(apart)


def test_rows_that_are_dropped_out_differ_and_have_products_of_their_own() -> None:
    _, model, products = compiled({**PLAIN, "lora_dropout": 0.1})
    trained(model)
    down = [inner for rows, inner, columns in products.forward if rows == ROWS * LENGTH and columns == RANK]
    assert sorted(down) == sorted(APART)


@pytest.mark.matrix
def test_weights_that_are_no_adapters_stay_apart() -> None:
    """To join what is trained in full would copy it in every pass."""
    torch._dynamo.reset()
    model, products = model_with(PLAIN).merge_and_unload().train().requires_grad_(True), Products()
    CompiledLayers(model, backend=products)
    trained(model)
    assert len(products.forward) == 7
