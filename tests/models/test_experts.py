"""Experts of mixtures under autocast: grouped products in 16 bits, equal to a loop over the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from toolkit.models.experts import autocast_grouped_products


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
