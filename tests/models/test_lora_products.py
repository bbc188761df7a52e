"""LoRA's updates that are added by the product that forms them are PEFT's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from toolkit.models.lora_products import add_by_product, without_idle

TOKENS, WIDTH = 24, 64


class Passes(TorchDispatchMode):
    """Counts operations over all outputs of a layer, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == TOKENS * WIDTH:
            name = func.overloadpacket.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        return result


class Projection(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x)


def adapted(model: torch.nn.Module, **settings: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 4, "lora_alpha": 10, "target_modules": "all-linear", "lora_dropout": 0.0, **settings})
    model = get_peft_model(model, config)
    for name, each in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(each, std=0.1)
    return model


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))


def both(**settings: Any) -> tuple[Any, Any]:
    peft = adapted(llama(), **settings)
    ours = copy.deepcopy(peft)
    add_by_product(ours)
    return peft, ours


def passed(model: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch, and the gradients of the adapters."""
    torch.manual_seed(2)
    ids = torch.randint(64, (2, 12))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_dropout": 0.3},
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_bias": True},
        {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 3}},
        {"init_lora_weights": "pissa"},
        {"target_modules": ["q_proj", "down_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_loss_and_gradients_are_peft_s(settings: dict[str, Any]) -> None:
    """In 64 bits, which show more than the rounding of 32, that is 1e-6 of a gradient in either."""
    (loss, gradients), (other, others) = (passed(model.train().double()) for model in both(**settings))
    torch.testing.assert_close(other, loss, rtol=1e-13, atol=0)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-13 * gradient.norm(), name


def test_16_bits_are_rounded_no_more_than_peft_does() -> None:
    """The mean error of a layer's outputs in bf16, from those in fp32."""
    model, errors = adapted(Projection(), target_modules=["base"]), []
    x = torch.randn(1, 50 * TOKENS, WIDTH)
    exact = model(x)
    for ours in (False, True):
        if ours:
            add_by_product(model)
        with torch.autocast("cpu", torch.bfloat16):
            errors.append(float((model(x) - exact).square().mean().sqrt()))
    assert 0 < errors[1] <= errors[0]


def test_an_adapter_that_is_off_or_merged_is() -> None:
    peft, ours = (model.eval() for model in both())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        base = llama().eval()(input_ids=ids).logits
        with ours.disable_adapter():
            assert torch.equal(ours(input_ids=ids).logits, base)
        expected = peft(input_ids=ids).logits
        ours.merge_adapter()
        torch.testing.assert_close(ours(input_ids=ids).logits, expected)
        ours.unmerge_adapter()
        torch.testing.assert_close(ours(input_ids=ids).logits, expected)
        merged = ours.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, expected)
    assert (expected - base).abs().max() > 1e-3


def test_several_adapters_at_once_are_peft_s() -> None:
    both_models = both()
    for model in both_models:
        torch.manual_seed(3)
        model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        model.base_model.set_adapter(["default", "other"])
    ids = torch.arange(12)[None]
    one, other = (model.eval()(input_ids=ids).logits for model in both_models)
    torch.testing.assert_close(one, other)


def test_a_layer_is_passed_over_twice_less() -> None:
    """Twice forward, and once backward, for which PEFT multiplies all outputs by the scaling."""
    counts = []
    for ours in (False, True):
        model = adapted(Projection(), target_modules=["base"])
        if ours:
            add_by_product(model)
        with Passes() as passes:
            model(torch.randn(1, TOKENS, WIDTH)).sum().backward()
        counts.append(passes.counts)
    peft, ours_counts = counts
    assert peft["mul"] == 2 and "mul" not in ours_counts
    assert ours_counts["addmm"] == 1 and peft["mm"] == ours_counts["mm"] + 1


def test_updates_that_are_zero_are_left_out_and_nothing_else_changes() -> None:
    model = adapted(llama(), lora_dropout=0.1)
    add_by_product(model)
    layers = [each for each in model.modules() if hasattr(each, "lora_B")]
    for layer in layers[:-1]:
        torch.nn.init.zeros_(layer.lora_B["default"].weight)
    frozen = layers[0].lora_A["default"].weight.requires_grad_(False)
    ids = torch.arange(TOKENS).unsqueeze(0)
    model.eval()
    ran: list[str] = []
    for name, each in model.named_modules():
        if name.endswith("lora_A.default"):
            each.register_forward_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        assert len(ran) == len(layers)
        ran.clear()
        with without_idle(model):
            given = model(input_ids=ids).logits
        assert len(ran) == 1
        model(input_ids=ids)
    assert torch.equal(given, wanted)
    assert len(ran) == 1 + len(layers)
    assert not frozen.requires_grad
