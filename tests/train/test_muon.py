"""Muon and AdamW as one optimizer: what each updates, and how."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import losses
from peft import LoraConfig, get_peft_model
from ranks import Ranks
from small import LORA, place_with, set_up
from transformers import AutoConfig, AutoModelForSequenceClassification

from toolkit.train.main import main
from toolkit.train.muon import hidden_matrices

MUON = ["optimizer.name=muon", "optimizer.weight_decay=0.1"]


place = place_with("llama", "moe", "gpt2", "qwen")


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Jordan et al. 2024: five steps of a quintic iteration towards U V^T, in bf16."""
    wide = matrix.bfloat16() if matrix.shape[0] <= matrix.shape[1] else matrix.bfloat16().T
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        # 3.4445 X + (-4.7750 G + 2.0315 G G) X, rounded once for each product as torch does.
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), wide, beta=3.4445)
    return (wide if matrix.shape[0] <= matrix.shape[1] else wide.T).float()


def by_hand(steps: int, decay: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training, one formula after the other."""
    trainer = set_up("batch.micro_batch_size=4", f"schedule.max_steps={steps}", "schedule.name=constant").trainer
    model, rate, rows = trainer.model.train(), 1e-2, list(trainer.batches.order.between(0, 4 * steps))
    first = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    second = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    curve = []
    for step in range(steps):
        batch = trainer.data_collator([trainer.train_dataset[int(row)] for row in rows[4 * step : 4 * step + 4]])
        loss = trainer.compute_loss(model, batch, num_items_in_batch=batch["labels"][:, 1:].ne(-100).sum())
        loss.backward()
        curve.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, weight in model.named_parameters():
            gradient, weight = weight.grad, weight.data
            weight *= 1 - rate * decay * (weight.ndim > 1)
            if weight.ndim == 2 and "embed" not in name:
                first[name] = 0.95 * first[name] + 0.05 * gradient
                update = orthogonalized(0.95 * first[name] + 0.05 * gradient)
                weight -= rate * 0.2 * math.sqrt(max(weight.shape)) * update
            else:
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.999 * second[name] + 0.001 * gradient**2
                unbiased = (second[name] / (1 - 0.999 ** (step + 1))).sqrt()
                weight -= rate * first[name] / (1 - 0.9 ** (step + 1)) / (unbiased + 1e-8)
        model.zero_grad()
    return curve, {name: each.detach() for name, each in model.named_parameters()}


def test_training_equals_one_by_hand() -> None:
    settings = ["batch.micro_batch_size=4", "schedule.max_steps=4", "schedule.name=constant"]
    trainer = set_up("optimizer.name=muon", "optimizer.weight_decay=5", *settings).trainer
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    curve, weights = by_hand(4, decay=5.0)
    assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == pytest.approx(curve, rel=1e-3)
    for name, weight in trainer.model.named_parameters():
        moved = weights[name] - before[name]
        # Products in bf16 round otherwise where a gradient differs in its last bit, and small singular values grow.
        off = 0.1 if weight.ndim == 2 and "embed" not in name else 0.02
        assert float((weight.detach() - weights[name]).norm()) < off * float(moved.norm()), name


@pytest.mark.parametrize("model", ["llama", "qwen", "gpt2", "moe"])
def test_matrices_of_layers_are_muons_and_the_rest_is_adamws(model: str) -> None:
    trainer = set_up(*MUON, f"model.path={model}").trainer
    groups = {id(p): group for group in trainer.create_optimizer().param_groups for p in group["params"]}
    parameters = dict(trainer.model.named_parameters())
    assert len(groups) == len(parameters)
    for name, parameter in parameters.items():
        outer = any(part in name for part in ("embed_tokens", "lm_head", "wte", "wpe"))
        assert groups[id(parameter)]["muon"] == (parameter.ndim == 2 and not outer), name
        assert groups[id(parameter)]["weight_decay"] == (0.0 if parameter.ndim == 1 else 0.1), name
    # Experts are one tensor of three dimensions.
    assert any(each.ndim == 3 for each in parameters.values()) == (model == "moe")


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_heads_for_texts_are_adamws(adapted: bool) -> None:
    config = AutoConfig.from_pretrained("qwen", num_labels=4)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    head = model.score.weight
    if adapted:
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
        head = model.get_base_model().score.modules_to_save["default"].weight
    trained = {each for each in model.parameters() if each.requires_grad and each.ndim == 2}
    assert head in trained
    embeddings = {model.get_input_embeddings().weight} & trained
    assert hidden_matrices(model) == trained - {head} - embeddings


@pytest.mark.parametrize(("saved", "halves"), [("[]", {True}), ("[lm_head]", {True, False})], ids=["lora", "and head"])
def test_adapters_are_matrices_of_layers(saved: str, halves: set[bool]) -> None:
    trainer = set_up(*MUON, *LORA, "model.path=qwen", f"method.modules_to_save={saved}").trainer
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}
    trainer.train()
    assert {group["muon"] for group in trainer.optimizer.param_groups} == halves
    for name, weight in trainer.model.named_parameters():
        # The first step of B alone changes anything: A gets no gradient while B is zero.
        assert name not in before or not torch.equal(weight, before[name]), name


def test_settings_reach_both_halves() -> None:
    keys = ["optimizer.momentum=0.9", "optimizer.beta2=0.95", "optimizer.args={ns_steps: 4, nesterov: false}"]
    optimizer = set_up(*MUON, *keys).trainer.create_optimizer()
    muon, adamw = (next(g for g in optimizer.param_groups if g["muon"] is half) for half in (True, False))
    stated: dict[str, Any] = {"momentum": 0.9, "ns_steps": 4, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    assert {key: muon[key] for key in stated} == stated
    assert (adamw["betas"], adamw["fused"], adamw["lr"]) == ((0.9, 0.95), True, muon["lr"])


@pytest.mark.matrix
def test_a_continued_run_equals_one_that_was_never_stopped() -> None:
    whole = [*MUON, "schedule.max_steps=6", "checkpoint.save_steps=3"]
    assert main(["recipe=small", *whole, "output.name=whole"]) == 0
    checkpoint = Path("runs/whole/checkpoints/checkpoint-3").resolve()
    assert main(["recipe=small", *whole, "output.name=continued", f"checkpoint.resume={checkpoint}"]) == 0
    assert losses(Path("runs/continued")) == losses(Path("runs/whole"))[3:]


def test_two_replicas_take_the_same_steps_as_one_process(place: Path, ranks: Ranks) -> None:
    assert main(["recipe=small", *MUON, "output.name=alone"]) == 0
    done = ranks.run(place, "recipe=small", *MUON, "output.name=two", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(place / "runs/two") == pytest.approx(losses(place / "runs/alone"), rel=1e-3)
