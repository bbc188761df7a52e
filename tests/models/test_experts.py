"""Experts of mixtures: their products in 16 bits under autocast, and their weights in 4 bits under adapters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import write_recipe
from small import LORA, RECIPE, dequantized
from tiny import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.distributed.engines import dtypes
from toolkit.models.adapters import add_method
from toolkit.models.coverage import parameter_counts, require_quantized
from toolkit.models.load import ModelSource
from toolkit.models.quantization.experts import autocast_grouped_products
from toolkit.recipe.rules import load_checked


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("Qwen/Qwen3-30B-A3B", tmp_path_factory.mktemp("mixture"))


def trained(mixture: Path, implementation: str, dtype: torch.dtype | None) -> tuple[float, dict[str, torch.Tensor]]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        mixture, dtype=torch.float32, attn_implementation="eager", experts_implementation=implementation
    )
    ids = torch.arange(64).reshape(2, 32) % model.config.vocab_size
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if "experts" in name}


def test_grouped_products_follow_autocast_and_equal_a_loop(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    grouped = torch.nn.functional.grouped_mm

    def noted(rows: torch.Tensor, weights: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.extend((rows.dtype, weights.dtype))
        return grouped(rows, weights, **kwargs)

    autocast_grouped_products()
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noted)
    loss, gradients = trained(mixture, "grouped_mm", torch.bfloat16)
    assert set(seen) == {torch.bfloat16}, "fp32 masters must not pull the products into fp32"

    by_loop, expected = trained(mixture, "eager", torch.bfloat16)
    assert loss == pytest.approx(by_loop, rel=2e-3)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).norm() < 0.03 * expected[name].norm(), name

    seen.clear()
    loss, gradients = trained(mixture, "grouped_mm", None)
    by_loop, expected = trained(mixture, "eager", None)
    assert set(seen) == {torch.float32} and loss == pytest.approx(by_loop, rel=1e-6)


KINDS = {"qwen3_moe": "Qwen/Qwen3-30B-A3B", "mixtral": AutoConfig.for_model("mixtral", head_dim=128).to_dict()}
IDS = torch.arange(64).reshape(2, 32)


def adapted(folder: Path, quantization: str, monkeypatch: pytest.MonkeyPatch, restored: bool = False) -> Any:
    """The model in the folder with adapters on all of it that change what it says."""
    monkeypatch.chdir(folder.parent)
    write_recipe(folder.parent, "small", RECIPE)
    targets = "method.target_parameters=[experts.gate_up_proj, experts.down_proj]"
    stored = f"method.quantization={quantization}"
    recipe = load_checked("small", [*LORA, f"model.path={folder.name}", targets, stored]).recipe
    base = ModelSource.open(recipe).load(dtypes(recipe), "eager")
    require_quantized(base, recipe)
    model = add_method(dequantized(base) if restored else base, recipe, dtypes(recipe))
    torch.manual_seed(0)
    for name, each in model.named_parameters():
        if "lora_" in name:
            each.data = 0.1 * torch.randn(each.shape)
    return model


@pytest.mark.parametrize(("kind", "stored"), itertools.product(("qwen3_moe", "mixtral"), ("nf4", "fp8", "int4")))
def test_quantized_experts_compute_what_their_restored_weights_do(
    kind: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT by itself adds the adapters once more in every pass, or to other parameters than it names."""
    folder = tiny_model(KINDS[kind], tmp_path / kind)
    plain, quantized, restored = (
        adapted(folder, quantization, monkeypatch, whole)
        for quantization, whole in (("none", False), (stored, False), (stored, True))
    )
    counts = parameter_counts(quantized)
    ends = 2 * plain.get_input_embeddings().weight.numel()
    assert counts["base"] == parameter_counts(plain)["base"]
    assert counts["quantized"] > 0.99 * (counts["base"] - ends)

    # As a layer that is recomputed: its first pass is dropped.
    quantized.get_base_model().activation_checkpointing_enable()
    quantized.train()
    losses = [model(input_ids=IDS, labels=IDS).loss for model in (quantized, quantized, restored, plain)]
    assert losses[0] == losses[1] == losses[2], "with the adapters, each time once"
    assert losses[0].item() == pytest.approx(losses[3].item(), rel=0.02) and losses[0] != losses[3]
    for loss in losses[1:3]:
        loss.backward()
    by_name = dict(restored.named_parameters())
    for name, each in quantized.named_parameters():
        if each.requires_grad:
            assert each.grad is not None and torch.equal(each.grad, by_name[name].grad), name
