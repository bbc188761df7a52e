"""How adapters begin: the model says what it said, and what is published stands on the base as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small import LORA, place_with, set_up, with_callbacks

from toolkit.models.load import ModelSource
from toolkit.train import train
from toolkit.train.export import load_trained
from toolkit.train.merge import merge
from toolkit.train.optimizer import optimizer_class

place = place_with("llama")


def logits(model: Any, session: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([session.prepared.train[0]["input_ids"]])).logits


WAYS = {
    "gaussian": [],
    "orthogonal": [],
    "pissa": ["method.rank_pattern.q_proj=4", "method.use_dora=true"],
    "olora": ["method.use_rslora=true", "method.rank_pattern.q_proj=4", "method.alpha_pattern.q_proj=3"],
}


@pytest.mark.parametrize("way", WAYS)
def test_adapters_begin_without_an_effect_and_end_on_the_base_as_it_was(way: str) -> None:
    overrides = [*LORA, "method.r=8", f"method.init_lora_weights={way}", f"output.name={way}", *WAYS[way]]
    session, callbacks = with_callbacks(*overrides, "method.modules_to_save=[input_layernorm]")
    before = logits(ModelSource.open(session.recipe).load(session.dtypes, "eager"), session)
    # PiSSA and OLoRA do not begin at zero.
    assert bool(session.start) == (way in ("pissa", "olora"))
    torch.testing.assert_close(logits(session.module, session), before, atol=2e-5, rtol=0)
    session.trainer.train()
    train.finish(session, callbacks)
    trained = logits(session.module, session)
    assert (trained - before).abs().max() > 1e-3
    _, published, _ = load_trained(session.folder.path)
    torch.testing.assert_close(logits(published, session), trained, atol=2e-5, rtol=0)
    merge([session.folder.path], session.folder.path / "merged")


def test_second_matrices_learn_faster_with_loraplus() -> None:
    session = set_up(*LORA, "method.loraplus_lr_ratio=16", "optimizer.weight_decay=0.1")
    _, kwargs = optimizer_class(session.recipe, session.trainer.args, session.trainer.model)
    names = {id(parameter): name for name, parameter in session.trainer.model.named_parameters()}
    rates = {names[id(each)]: group["lr"] for group in kwargs["params"] for each in group["params"]}
    rate = session.recipe.optimizer.learning_rate
    assert len(rates) == sum(each.requires_grad for each in session.trainer.model.parameters())
    assert all(math.isclose(each, rate * (16 if "lora_B" in name else 1)) for name, each in rates.items())
    session.trainer.train()
    assert {group["initial_lr"] for group in session.trainer.optimizer.param_groups} == {rate, 16 * rate}
