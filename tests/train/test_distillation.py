"""Learning from a teacher: the loss written out with all logits, and TRL's; who may teach whom; metrics; resuming."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import losses, metrics
from small import loss_and_gradients, populate, set_up, trained
from tiny import tiny_model
from torch.nn import functional as F

from toolkit.common import UserError
from toolkit.train.main import main

DISTILL = ["objective=distillation", "distillation.teacher.path=teacher"]
LOSSES = {
    "forward": {},
    "reverse": {"beta": 1.0},
    "between": {"beta": 0.3},
    "softer": {"beta": 0.5, "temperature": 2.5, "ce_share": 0.25},
    "forward-softer": {"temperature": 0.7, "ce_share": 0.4},
}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with two tiny Llamas, of which the teacher is deeper and its embeddings are filled up further."""
    folder = tmp_path_factory.mktemp("distillation")
    populate(folder, "llama", "gemma")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "teacher", seed=7, layers=3)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.resize_token_embeddings(len(model.model.embed_tokens.weight) + 24, mean_resizing=False)
        # Random models are all but uniform: nobody would learn much of their words.
        model.model.embed_tokens.weight.data.mul_(8)
    model.save_pretrained(folder / "teacher")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def written_out(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta=0.0, temperature=1.0, ce_share=0.0
) -> torch.Tensor:
    """The loss of tokens, of all their logits (tokens, vocabulary)."""
    common = min(student.shape[1], teacher.shape[1])
    s = (student[:, :common] / temperature).softmax(1)
    t = (teacher[:, :common] / temperature).softmax(1)
    m = beta * t + (1 - beta) * s
    if beta == 0:
        divergence = (t * (t.log() - s.log())).sum(1)
    elif beta == 1:
        divergence = (s * (s.log() - t.log())).sum(1)
    else:
        divergence = beta * (t * (t / m).log()).sum(1) + (1 - beta) * (s * (s / m).log()).sum(1)
    return (1 - ce_share) * divergence + ce_share * F.cross_entropy(student, labels, reduction="none")


def all_logits(session: Any, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, vocabulary) of the student, with gradients, and of the teacher; and the labels: row by row."""
    trainer, found = session.trainer, []
    for row in range(rows):
        example = session.prepared.train[row]
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"])[1:]
        own = trainer.model.train()(input_ids=ids).logits[0, :-1]
        theirs = trainer.teacher.model(input_ids=ids).logits[0, :-1].detach()
        kept = labels != -100
        found.append((own[kept], theirs[kept], labels[kept]))
    return tuple(map(torch.cat, zip(*found, strict=True)))  # type: ignore[return-value]


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_all_logits(name: str) -> None:
    session = set_up(*DISTILL, *(f"distillation.{key}={value}" for key, value in LOSSES[name].items()))
    loss, gradients = loss_and_gradients(session)
    student, teacher, labels = all_logits(session)
    assert teacher.shape[1] == student.shape[1] + 24
    wanted = written_out(student, teacher, labels, **LOSSES[name]).mean()
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=2e-6)
    for key, parameter in session.trainer.model.named_parameters():
        distance = (gradients[key] - parameter.grad).norm() / parameter.grad.norm()
        assert distance < 1e-5, key


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_is_trls(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    session = set_up(*DISTILL, f"distillation.beta={beta}", "distillation.temperature=1.5")
    loss, _ = loss_and_gradients(session)
    student, teacher, _ = all_logits(session)
    both = (student[None], teacher[None, :, : student.shape[1]])
    labels = torch.zeros(1, len(student))
    wanted = gkd.GKDTrainer.generalized_jsd_loss(*both, labels=labels, beta=beta, temperature=1.5)
    assert loss == pytest.approx(wanted.item(), rel=2e-6)
