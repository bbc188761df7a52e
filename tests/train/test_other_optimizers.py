"""Optimizers of other packages whose state or steps are not as torch expects: they train by what a recipe says, and on
from a checkpoint."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import galore_stand_in
import pytest
import torch
import transformers.trainer_optimizer
from galore_stand_in import GaLoreAdamW
from harness import losses
from safetensors.torch import load_file
from small import place_with, set_up, trained
from tiny import tiny_kind
from transformers import AutoConfig

from toolkit.common import UserError
from toolkit.train import optimizer

place = place_with("llama", "gpt2")
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


def test_a_model_whose_gradients_would_not_be_projected_is_refused() -> None:
    """GPT-2's layers are of a class of Transformers' own, and its output head is its embeddings."""
    with pytest.raises(UserError, match="none of GPT2LMHeadModel is trained"):
        set_up(*KIND, "optimizer.name=galore_adamw", "model.path=gpt2")


def test_projectors_lie_where_their_parameters_do() -> None:
    trainer = set_up(*KIND, "optimizer.name=galore_adamw").trainer
    trainer.train()
    inner = trainer.optimizer.optimizer
    groups = [
        group | {"params": [each.detach().to("meta").requires_grad_() for each in group["params"]]}
        for group in inner.param_groups
    ]
    elsewhere, saved = type(inner)(groups), inner.state_dict()
    # FSDP has names in the place of numbers.
    saved["state"] = {str(key): values for key, values in saved["state"].items()}
    saved["param_groups"] = [group | {"params": [*map(str, group["params"])]} for group in saved["param_groups"]]
    elsewhere.load_state_dict(saved)
    projectors = [values["projector"] for values in elsewhere.state.values() if "projector" in values]
    assert len(projectors) == sum(len(group["params"]) for group in groups if "rank" in group) > 0
    assert {each.ortho_matrix.device.type for each in projectors} == {"meta"}


class StateInGroups(torch.optim.Optimizer):
    """Keeps its momentum where GrokAdamW does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = group.get("state", {}).get(parameter, {})
                if not state:
                    state = {"step": 0, "momentum": torch.zeros_like(parameter)}
                    group.setdefault("state", {})[parameter] = state
                state["step"] += 1
                state["momentum"] = 0.9 * state["momentum"] + parameter.grad
                parameter.sub_(state["momentum"], alpha=group["lr"] / state["step"])


def test_state_that_an_optimizer_keeps_in_its_groups_is_found_in_a_checkpoint() -> None:
    kind: Any = type("StateInGroups", (optimizer._HasItsState, StateInGroups), {})

    def taught(steps: int, weight: torch.Tensor, saved: Any = None) -> tuple[torch.Tensor, Any]:
        parameters = [torch.nn.Parameter(weight.clone()), torch.nn.Parameter(2 * weight)]
        built = kind([{"params": [each]} for each in parameters], {"lr": 0.1})
        if saved:
            built.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = parameter.detach() - 1
            built.step()
        torch.save(built.state_dict(), file := io.BytesIO())
        return parameters[0].detach(), file.getvalue()

    first, saved = taught(2, torch.ones(3) * 5)
    assert torch.equal(taught(3, first, saved)[0], taught(5, torch.ones(3) * 5)[0])


NORMS = {"mamba": {"hidden_size": 32, "num_hidden_layers": 1}, "hyperclovax": {"use_post_norm": True}}


@pytest.mark.parametrize("kind", NORMS)
def test_no_norm_is_decayed_whatever_it_is_called(kind: str, place: Path) -> None:
    tiny_kind(AutoConfig.for_model(kind, **NORMS[kind]), place / kind)
    trainer = set_up(f"model.path={kind}", "optimizer.weight_decay=0.1").trainer
    optimizer = trainer.create_optimizer()
    named = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decayed, spared = (
        {named[id(each)] for group in optimizer.param_groups if bool(group["weight_decay"]) == decays for each in
         group["params"]}
        for decays in (True, False)
    )  # fmt: skip
    assert not [name for name in decayed if "norm" in name]
    assert [name for name in spared if "norm" in name] and decayed | spared == {*named.values()}
