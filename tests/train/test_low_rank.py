"""Optimizers that project gradients, and those that update within the backward pass: by what a recipe says, and on from
a checkpoint."""

from __future__ import annotations

import sys

import galore_stand_in
import pytest
import torch
import transformers.trainer_optimizer
from galore_stand_in import GaLoreAdamW
from harness import losses
from safetensors.torch import load_file
from small import place_with, set_up, trained

place = place_with("llama")
KIND = ["optimizer.max_grad_norm=0", "batch.micro_batch_size=4", "optimizer.args={rank: 4}"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "galore_torch", galore_stand_in)
    monkeypatch.setattr(transformers.trainer_optimizer, "is_galore_torch_available", lambda: True)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("galore_adamw", ["optimizer.beta1=0.3", "optimizer.beta2=0.6", "optimizer.eps=1e-5"]), ("galore_adafactor", [])],
)
def test_an_optimizer_that_updates_in_the_backward_pass_trains_as_one_that_does_not(
    name: str, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[tuple[float, ...]]] = {}
    step = GaLoreAdamW.step

    def watched(self: GaLoreAdamW, closure: None = None) -> None:
        group = self.param_groups[0]
        rates.append((group["lr"], *group["betas"], group["eps"]))
        step(self)

    monkeypatch.setattr(GaLoreAdamW, "step", watched)
    weights = []
    for kind in (name, f"{name}_layerwise"):
        rates = seen[kind] = []
        trainer = set_up(
            *KIND, *settings, f"optimizer.name={kind}", "schedule.max_steps=5", "schedule.warmup_steps=2"
        ).trainer
        trainer.train()
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert [rate for rate, *_ in seen[name]] == pytest.approx([0, 5e-3, 1e-2, 7.5e-3, 2.5e-3])
    assert sorted({*seen[f"{name}_layerwise"]}) == sorted({*seen[name]})
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize("name", ["galore_adamw", "galore_adamw_layerwise"])
def test_a_run_whose_gradients_are_projected_goes_on_from_a_checkpoint(name: str) -> None:
    overrides = [*KIND, f"optimizer.name={name}", "checkpoint.save_steps=2"]
    straight = trained(name, *overrides)
    again = trained(f"{name}_again", *overrides, f"checkpoint.resume={straight / 'checkpoints' / 'checkpoint-2'}")
    assert losses(again) == losses(straight)[2:]
    first, second = (load_file(run / "final" / "model.safetensors") for run in (straight, again))
    assert all(torch.equal(second[key], value) for key, value in first.items())


def test_projectors_lie_where_their_parameters_do() -> None:
    trainer = set_up(*KIND, "optimizer.name=galore_adamw").trainer
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    groups = [
        group | {"params": [each.detach().to("meta").requires_grad_() for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    elsewhere = type(optimizer)(groups)
    elsewhere.load_state_dict(optimizer.state_dict())
    projectors = [values["projector"] for values in elsewhere.state.values() if "projector" in values]
    assert len(projectors) == sum(len(group["params"]) for group in groups if "rank" in group) > 0
    assert {each.ortho_matrix.device.type for each in projectors} == {"meta"}
