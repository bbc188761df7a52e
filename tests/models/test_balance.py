"""Routers of mixtures are balanced by text alone, however rows are laid out and filled up."""

from __future__ import annotations

from typing import Any

import pytest
import small
import torch
from transformers.models.mixtral import modeling_mixtral

from toolkit.models import balance
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.train.trainers import objectives

place = small.place_with("moe")
ROWS = 3


def balanced(*overrides: str) -> float:
    """The balance of the routers over a few rows, as it is trained."""
    trainer = (training := small.set_up("model.path=moe", *overrides)).trainer
    batch = trainer.data_collator([training.prepared.train[row] for row in range(ROWS)])
    assert ("attention_mask" in batch) != ("text_counts" in batch), "something is filled up"
    trainer.router_aux_loss_coef = 1.0
    with torch.no_grad():
        _, found = trainer.scores(trainer.model.train(), batch)
    return float(found)


def test_padding_is_not_balanced_in_any_layout(place: Any) -> None:
    padded = balanced("model.attention=eager")
    assert balanced("model.attention=torch_varlen") == pytest.approx(padded, rel=1e-6)
    packed = ("data.packing=true", "seq_len=125", "batch.micro_batch_size=1")
    in_rows = balanced(*packed, "model.attention=sdpa")
    assert balanced(*packed, "model.attention=torch_varlen") == pytest.approx(in_rows, rel=1e-6)


def test_what_is_computed_once_is_balanced_as_often_as_documents_have_it(place: Any) -> None:
    padded, varlen = balanced("model.attention=eager"), "model.attention=torch_varlen"
    found = {shares: balanced(varlen, f"batch.share_prefixes={shares}") for shares in ("true", "false")}
    assert found["true"] == pytest.approx(padded, rel=1e-6) == found["false"]


def test_nor_is_it_by_the_models_own_forward(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = balanced("model.attention=torch_varlen")
    monkeypatch.setattr(objectives, "choose", lambda *_: HeadChoice(fused=False))
    assert balanced("model.attention=torch_varlen") == pytest.approx(fused, rel=1e-6)


def test_a_mask_of_attention_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    routed, mask = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),), torch.ones(2, 3)
    mask[0, 1:] = 0
    plain = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", plain)
    balance.leave_out_padding(modeling_mixtral.MixtralForCausalLM.__new__(modeling_mixtral.MixtralForCausalLM))
    masked = modeling_mixtral.load_balancing_loss_func
    with balance.of_text(torch.tensor([True, False, False])):
        assert masked(routed, 4, 2, mask) == plain(routed, 4, 2, mask)
        with balance.of_text(mask.bool()):
            assert masked(routed, 4, 2) == masked(routed, 4, 2, attention_mask=None) == plain(routed, 4, 2, mask)
    assert masked(routed, 4, 2) == plain(routed, 4, 2) != plain(routed, 4, 2, mask)
