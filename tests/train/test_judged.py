"""Answers judged one by one in training: TRL's own loss on the same model and rows, metrics, and what it depends on."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import losses, metrics, write_jsonl, write_recipe
from small import ALL_CUTS, CUTS, set_up
from tiny import perturb, tiny_model

from toolkit.train.main import main
from toolkit.train.trainers.reference import FILE

RECIPE = """
description: A small training on judged answers
model: {path: llama}
data: {sources: [judged.jsonl], eval_split: 0.2}
objective: kto
precision: fp32
optimizer: {learning_rate: 1.0e-3}
schedule: {max_steps: 4}
batch: {seq_len: 64, global_batch_size: 4, micro_batch_size: 2}
evaluation: {num_prompts: 0}
"""
ROWS = [
    {
        "prompt": f"{n}: two words",
        "completion": (f" are {n} and {n * 7}." if n % 3 else f" is {n}.") * (1 + n % 2),
        "label": bool(n % 3),
    }
    for n in range(30)
]
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with a tiny Llama, judged answers and a recipe."""
    folder = tmp_path_factory.mktemp("judged")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    for name, rows in (("judged", ROWS), ("few", ROWS[:6])):
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_recipe(folder, "small", RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def trl_loss(rows: list[dict[str, Any]], nearer: bool, folder: Path) -> tuple[float, float, dict[str, torch.Tensor]]:
    """TRL's own loss, divergence and gradients of these rows, of which it borrows answers from the row before. Of the
    original model and a changed one, which knows less, one is the reference."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import KTOConfig, KTOTrainer

    model, reference = (AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float32) for _ in range(2))
    perturb(reference if nearer else model, 0.05)
    arguments = KTOConfig(
        output_dir=str(folder), beta=0.3, report_to=[], use_cpu=True, bf16=False, activation_checkpointing=False,
        per_device_train_batch_size=len(rows), remove_unused_columns=False, **WEIGHTS,
    )  # fmt: skip
    trainer = KTOTrainer(
        model, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained("llama"),
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(rows))])
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), trainer._metrics["train"]["kl"][-1], gradients


@pytest.mark.parametrize("nearer", [False, True])
def test_loss_and_gradients_are_trls(nearer: bool, tmp_path: Path) -> None:
    weights = [f"preference.{name}={value}" for name, value in WEIGHTS.items()]
    few = ["data.sources=[few.jsonl]", "data.shuffle=false", "~data.eval_split", "global_batch_size=6"]
    session = set_up("preference.beta=0.3", *weights, *few, "micro_batch_size=3")
    trainer = session.trainer
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(6)])
    original = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    if nearer:
        perturb(trainer.model, 0.05)
    with torch.no_grad():
        trainer.reference, _, _ = trainer.answers(trainer.model, batch)
    trainer.model.load_state_dict(original)
    if not nearer:
        perturb(trainer.model, 0.05)
    trainer._divergence = trainer._moved([batch])
    total, count, _ = trainer.score(trainer.model.train(), batch)
    assert count == 6
    (total / count).backward()
    ring = np.random.default_rng(session.recipe.seed).permutation(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, divergence, gradients = trl_loss([ROWS[row] for row in ring], nearer, tmp_path)
    assert (trainer._divergence > 0) == nearer
    assert trainer._divergence.item() == pytest.approx(divergence, rel=1e-5)
    assert (total / count).item() == pytest.approx(wanted, rel=2e-5)
    own = {each: parameter.grad for each, parameter in trainer.model.named_parameters() if parameter.grad is not None}
    assert own.keys() == gradients.keys()
    for each, gradient in gradients.items():
        assert (own[each] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, each


@pytest.mark.parametrize("overrides", [[], ["method.name=lora", "optimizer.learning_rate=5e-3"]], ids=["full", "lora"])
def test_a_run_says_how_its_answers_fare(overrides: list[str]) -> None:
    name = "-".join(["fares", *overrides[:1]]).replace("=", "-")
    assert main(["recipe=small", "max_steps=16", f"output.name={name}", "evaluation.every_steps=8", *overrides]) == 0
    rows = metrics(Path("runs") / name)
    first, *later = [row for row in rows if "eval_loss" in row]
    # The model is its own reference, and has not moved.
    assert first["eval_loss"] == pytest.approx(0.5, abs=1e-6) and first["eval_kl"] == pytest.approx(0, abs=1e-5)
    assert first["eval_accuracy"] == 0.5 and first["eval_reward_margin"] == pytest.approx(0, abs=1e-5)
    assert first["eval_answers"] == 6 and "eval_perplexity" not in first
    last = later[-1]
    assert last["eval_loss"] < first["eval_loss"] and last["eval_accuracy"] > 0.6 and last["eval_reward_margin"] > 0.02
    steps = [row for row in rows if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-5) and steps[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert min(row["loss"] for row in steps[8:]) < steps[0]["loss"] and all(row["kl"] >= 0 for row in steps)
    page = (Path("runs") / name / "report.html").read_text(encoding="utf-8")
    assert "Answers preferred rightly" in page and "Rewards of answers" in page and "perplexity" not in page.lower()
    card = (Path("runs") / name / "final" / "README.md").read_text(encoding="utf-8")
    assert "Kahneman-Tversky" in card and "answers preferred rightly" in card


@pytest.mark.parametrize("cuts", [CUTS, pytest.param(ALL_CUTS, marks=pytest.mark.matrix)], ids=["each once", "all"])
def test_training_does_not_depend_on_how_answers_fall_into_micro_batches(cuts: Any) -> None:
    curves, figures = [], []
    for size, more in cuts:
        name = f"cut-{len(cuts)}-{size}-{len(curves)}"
        assert main(["recipe=small", f"batch.micro_batch_size={size}", f"output.name={name}", *more]) == 0
        curves.append(losses(Path("runs") / name))
        figures.append([row["eval_loss"] for row in metrics(Path("runs") / name) if "eval_loss" in row])
    assert max(row.get("kl", 0) for row in metrics(Path(f"runs/cut-{len(cuts)}-1-0"))) > 0.1
    for curve, held_out in zip(curves[1:], figures[1:], strict=True):
        assert curve == pytest.approx(curves[0], rel=1e-6) and held_out == pytest.approx(figures[0], rel=1e-6)


def test_the_divergence_is_that_of_the_step_before_it_is_taken() -> None:
    """By hand: how much likelier the answers of other rows have become since training began, on average."""
    session = set_up("~data.eval_split", "data.shuffle=false")
    trainer = session.trainer
    batches = [trainer.data_collator([trainer.train_dataset[row] for row in rows]) for rows in ((0, 1), (2, 3))]
    trainer.reference = torch.zeros(30, 2, dtype=torch.float64)
    before = others_of(session, range(4))
    trainer.reference[:4, 1] = torch.tensor(before)
    perturb(trainer.model, 0.05)
    gained = np.subtract(others_of(session, range(4)), before).mean()
    assert trainer._moved(batches).item() == pytest.approx(max(0.0, gained), rel=1e-4)
    trainer.reference[:4, 1] -= 100
    assert trainer._moved(batches).item() == pytest.approx(gained + 100, rel=1e-5)


def others_of(session: Any, rows: Any) -> list[float]:
    """Log-probability of the answer of another row behind each of these prompts, through the model's own forward."""
    found = []
    for number in rows:
        row = session.prepared.train[number]
        ids, labels = (torch.tensor(row[key][row["seq_lengths"][0] :]) for key in ("input_ids", "labels"))
        with torch.no_grad():
            scores = session.trainer.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        trained = (labels[1:] != -100).nonzero()[:, 0]
        found.append(scores[trained, labels[1:][trained]].sum().item())
    return found


def test_a_run_of_one_kind_of_answers_says_nothing_of_the_other() -> None:
    good = "".join(json.dumps(row | {"label": True}) + "\n" for row in ROWS)
    Path("good.jsonl").write_text(good, encoding="utf-8")
    assert main(["recipe=small", "output.name=good", "data.sources=[good.jsonl]"]) == 0
    rows = metrics(Path("runs/good"))
    assert all("reward_chosen" in row and "reward_rejected" not in row for row in rows if "loss" in row)
    assert all(
        math.isfinite(row["eval_loss"]) and "eval_reward_margin" not in row for row in rows if "eval_loss" in row
    )


def test_a_run_that_goes_on_compares_with_what_it_began_with() -> None:
    saving = ["checkpoint.save_steps=2", "checkpoint.rehearse=false"]
    assert main(["recipe=small", "output.name=straight", *saving]) == 0
    straight = Path("runs/straight")
    wanted, kept = losses(straight), (straight / FILE).read_bytes()
    manifest = json.loads((straight / "manifest.json").read_text())
    (straight / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted", "final": None}))
    shutil.rmtree(straight / "final")
    shutil.rmtree(straight / "checkpoints" / "checkpoint-4")
    assert main(["recipe=small", "output.name=straight", *saving]) == 0
    assert losses(straight) == pytest.approx(wanted, rel=1e-6) and (straight / FILE).read_bytes() == kept


@pytest.mark.parametrize("moved_by", [0.4, -0.4])
def test_a_rows_loss_holds_what_it_says_of_how_far_the_model_has_moved(moved_by: float) -> None:
    """To first order it is by how much the loss of all would change if the row counted a little more."""
    trainer = set_up().trainer
    held = len(trainer.eval_dataset)
    generator = torch.Generator().manual_seed(0)
    trainer.reference = torch.zeros(len(trainer.train_dataset) + held, 2, dtype=torch.float64)
    log_probs = torch.randn(held, 2, dtype=torch.float64, generator=generator) + moved_by
    good = torch.tensor(trainer.eval_dataset["desirable"][:])
    sums = log_probs.flatten().tolist()
    rows = trainer.row_losses(sums, None)
    mean = trainer.figures(sums, None)["eval_loss"]
    assert rows[:, 0].mean().item() == pytest.approx(mean, rel=1e-9) and (rows[:, 1] == 1).all()

    def loss(weights: torch.Tensor) -> torch.Tensor:
        share = weights / weights.sum()
        divergence = (share * log_probs[:, 1]).sum().clamp(min=0)
        lead = trainer.settings.beta * (log_probs[:, 0] - divergence)
        return (share * torch.where(good, torch.sigmoid(-lead), torch.sigmoid(lead))).sum()

    weights = torch.ones(held, dtype=torch.float64)
    for row in range(held):
        more, less = weights.clone(), weights.clone()
        more[row], less[row] = 1 + 1e-5, 1 - 1e-5
        change = (loss(more) - loss(less)).item() / 2e-5
        assert change * held == pytest.approx(rows[row, 0].item() - mean, abs=1e-7)
