"""Pairs of answers in training: TRL's own losses on the same model and rows, metrics, and the reference."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import losses, metrics, write_jsonl, write_recipe
from safetensors.torch import load_file
from small import ALL_CUTS, CUTS, set_up
from tiny import perturb, tiny_model

from toolkit.cli.main import main as toolkit
from toolkit.recipe.preference import OF_DIFFERENCES, Preference
from toolkit.train.main import main
from toolkit.train.trainers.preference import PairTrainer
from toolkit.train.trainers.reference import FILE

RECIPE = """
description: A small training on pairs
model: {path: llama}
data: {sources: [pairs.jsonl], eval_split: 0.2}
objective: dpo
precision: fp32
optimizer: {learning_rate: 1.0e-3}
schedule: {max_steps: 4}
batch: {seq_len: 64, global_batch_size: 4, micro_batch_size: 2}
evaluation: {num_prompts: 0}
"""
ROWS = [
    {
        "prompt": f"{n}: two words",
        "chosen": f" are {n} and {n * 7}." * (1 + n % 3),
        "rejected": f" is {n}." * (1 + n % 2),
    }
    for n in range(30)
]
SMOOTHED = ["preference.label_smoothing=0.1"]
LOSSES = {
    **{name: [f"preference.loss={name}"] for name in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard")},
    **{name: [f"preference.loss={name}"] for name in ("apo_zero", "apo_down", "sigmoid")},
    **{name: [f"preference.loss={name}", *SMOOTHED] for name in ("robust", "exo_pair")},
    "sigmoid_norm": ["preference.length_normalized=true"],
}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with a tiny Llama, pairs and a recipe."""
    folder = tmp_path_factory.mktemp("preference")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    write_jsonl(folder / "pairs.jsonl", ROWS)
    write_recipe(folder, "small", RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def trl_loss(name: str, beta: float, rows: list[dict[str, Any]], folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """TRL's own loss and gradients of these rows, for the changed model with the original one as its reference."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    model, reference = (AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float32) for _ in range(2))
    perturb(model, 0.05)
    smoothing = 0.1 if name in ("robust", "exo_pair") else 0.0
    arguments = DPOConfig(
        output_dir=str(folder), loss_type=[name], beta=beta, label_smoothing=smoothing, report_to=[], use_cpu=True,
        bf16=False, per_device_train_batch_size=len(rows), activation_checkpointing=False, remove_unused_columns=False,
    )  # fmt: skip
    trainer = DPOTrainer(
        model, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained("llama"),
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(rows))])
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_trls(name: str, tmp_path: Path) -> None:
    session = set_up("preference.beta=0.3", *LOSSES[name], "data.shuffle=false", "~data.eval_split")
    trainer = session.trainer
    reference = torch.cat([answers_of(session, row)[0] for row in range(4)]).detach()
    trainer.reference = torch.zeros(30, 2, dtype=torch.float64)
    trainer.reference[:4] = reference
    perturb(trainer.model, 0.05)
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(4)])
    total, count, _ = trainer.score(trainer.model.train(), batch)
    assert count == 4
    (total / count).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, gradients = trl_loss(name, 0.3, ROWS[:4], tmp_path)
    assert (total / count).item() == pytest.approx(wanted, rel=2e-5)
    own = {each: parameter.grad for each, parameter in trainer.model.named_parameters() if parameter.grad is not None}
    assert own.keys() == gradients.keys()
    for each, gradient in gradients.items():
        assert (own[each] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, each


def answers_of(session: Any, *rows: int) -> Any:
    trainer = session.trainer
    return trainer.answers(trainer.model, trainer.data_collator([trainer.train_dataset[row] for row in rows]))


def test_answers_are_scored_alike_alone_and_beside_others() -> None:
    session = set_up()
    alone = torch.cat([answers_of(session, row)[0] for row in range(6)])
    together, tokens, _ = answers_of(session, *range(6))
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
    # By hand, through the model's own forward.
    pair = session.prepared.train[3]
    first = pair["seq_lengths"][0]
    for side, part in enumerate((slice(first), slice(first, None))):
        ids, labels = (torch.tensor(pair[key][part]) for key in ("input_ids", "labels"))
        own = session.trainer.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        trained = (labels[1:] != -100).nonzero()[:, 0]
        wanted = own[trained, labels[1:][trained]].sum().item()
        assert alone[3, side].item() == pytest.approx(wanted, rel=1e-5)
        assert tokens[3, side] == len(trained)


@pytest.mark.parametrize("overrides", [[], ["method.name=lora", "optimizer.learning_rate=5e-3"]], ids=["full", "lora"])
def test_a_run_says_how_its_pairs_fare(overrides: list[str]) -> None:
    name = "-".join(["fares", *overrides[:1]]).replace("=", "-")
    assert main(["recipe=small", "max_steps=12", f"output.name={name}", "evaluation.every_steps=6", *overrides]) == 0
    rows = metrics(Path("runs") / name)
    first, *later = [row for row in rows if "eval_loss" in row]
    # The model is its own reference.
    assert first["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["eval_accuracy"] == 0.5 and first["eval_reward_margin"] == pytest.approx(0, abs=1e-5)
    assert first["eval_pairs"] == 6 and "eval_perplexity" not in first
    last = later[-1]
    assert last["eval_loss"] < first["eval_loss"] and last["eval_accuracy"] > 0.8 and last["eval_reward_margin"] > 0.05
    steps = [row for row in rows if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and steps[0]["reward_margin"] == pytest.approx(
        0, abs=1e-4
    )
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[-1]["accuracy"] > 0.7
    assert steps[0]["logp_chosen"] < 0
    page = (Path("runs") / name / "report.html").read_text(encoding="utf-8")
    assert "Answers preferred rightly" in page and "Rewards of answers" in page and "perplexity" not in page.lower()
    card = (Path("runs") / name / "final" / "README.md").read_text(encoding="utf-8")
    assert "direct preference optimisation" in card and "answers preferred rightly" in card


@pytest.mark.parametrize("objective", ["cpo", "simpo", "orpo"])
def test_objectives_without_a_reference_train(objective: str) -> None:
    assert main(["recipe=small", "max_steps=12", f"output.name={objective}", f"objective={objective}"]) == 0
    run = Path("runs") / objective
    held_out = [row for row in metrics(run) if "eval_loss" in row]
    assert held_out[-1]["eval_loss"] < held_out[0]["eval_loss"]
    assert not (run / FILE).exists()


@pytest.mark.parametrize("cuts", [CUTS, pytest.param(ALL_CUTS, marks=pytest.mark.matrix)], ids=["each once", "all"])
def test_training_does_not_depend_on_how_pairs_fall_into_micro_batches(cuts: Any) -> None:
    curves = []
    for size, more in cuts:
        name = f"cut-{len(cuts)}-{size}-{len(curves)}"
        arguments = ["recipe=small", f"batch.micro_batch_size={size}", f"output.name={name}", *more]
        assert main([*arguments, "preference.sft_weight=0.2"]) == 0
        curves.append(losses(Path("runs") / name))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-6)


def test_a_run_that_goes_on_compares_with_what_it_began_with() -> None:
    saving = ["checkpoint.save_steps=2", "checkpoint.rehearse=false"]
    assert main(["recipe=small", "output.name=straight", *saving]) == 0
    straight = Path("runs/straight")
    (straight / "manifest.json").write_text(
        json.dumps(json.loads((straight / "manifest.json").read_text()) | {"status": "interrupted", "final": None})
    )
    wanted, kept = losses(straight), (straight / FILE).read_bytes()
    shutil.rmtree(straight / "final")
    shutil.rmtree(straight / "checkpoints" / "checkpoint-4")
    assert main(["recipe=small", "output.name=straight", *saving]) == 0
    assert losses(straight) == pytest.approx(wanted, rel=1e-6) and (straight / FILE).read_bytes() == kept


def test_a_run_whose_reference_is_gone_does_not_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    saving = ["checkpoint.save_steps=2", "checkpoint.rehearse=false", "output.name=gone"]
    assert main(["recipe=small", *saving]) == 0
    run = Path("runs/gone")
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted", "final": None}))
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    (run / FILE).write_bytes(b"no numbers")
    assert main(["recipe=small", *saving]) != 0
    assert "reference.safetensors is gone or damaged" in capsys.readouterr().err


def test_a_longer_run_goes_on_from_a_shorter_one_only_with_a_reference_of_all_its_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two steps of four pairs come to eight of them; zeros in place of the others' log-probabilities would be no
    reference."""
    saving = ["recipe=small", "checkpoint.save_steps=2", "checkpoint.rehearse=false", "schedule.name=constant"]
    assert main([*saving, "output.name=short", "max_steps=2"]) == 0
    goes_on = [*saving, "checkpoint.resume=runs/short/checkpoints/checkpoint-2"]
    assert main([*goes_on, "output.name=longer", "max_steps=4"]) != 0
    assert "reference.safetensors lacks what the reference says of 8 " in capsys.readouterr().err
    # Six steps of four come to all 24 pairs.
    assert main([*saving, "output.name=all", "max_steps=6", "checkpoint.save_total_limit=3"]) == 0
    goes_on = [*saving, "checkpoint.resume=runs/all/checkpoints/checkpoint-2"]
    assert main([*goes_on, "output.name=again", "max_steps=8"]) == 0
    assert losses(Path("runs/again"))[:4] == pytest.approx(losses(Path("runs/all"))[2:], rel=1e-6)


def test_a_checkpoint_of_other_pairs_has_no_reference_of_these(capsys: pytest.CaptureFixture[str]) -> None:
    """The file that is named is there, and whole."""
    saving = ["recipe=small", "checkpoint.save_steps=2", "max_steps=4"]
    assert main([*saving, "output.name=these"]) == 0
    goes_on = [*saving, "output.name=those", "checkpoint.resume=runs/these/checkpoints/checkpoint-2"]
    write_jsonl(Path("those.jsonl"), ROWS[2:])
    assert main([*goes_on, "data.sources=[those.jsonl]"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "error: runs/these/reference.safetensors is the reference of other rows" in said
    assert "begin a new one from its final model" in said and "restore it" not in said


def test_an_adapter_of_preferences_answers_and_is_merged(capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["method.name=lora", "optimizer.learning_rate=5e-3", "output.name=adapter"]
    assert main(["recipe=small", *lora, "evaluation.num_prompts=1", "evaluation.max_new_tokens=4"]) == 0
    assert toolkit(["generate", "runs/adapter", "--prompt", "3: two words"]) == 0
    assert toolkit(["merge", "runs/adapter"]) == 0 and Path("runs/adapter/merged/model.safetensors").is_file()
    assert toolkit(["report", "runs/adapter"]) == 0
    samples = json.loads(Path("runs/adapter/samples.json").read_text(encoding="utf-8"))
    assert samples[0]["reference"] and samples[0]["after"] is not None


def test_another_run_from_the_same_weights_takes_the_reference_from_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Of rows that no earlier test session has had in its cache.
    rows = [row | {"prompt": f"{row['prompt']} {secrets.token_hex(4)}"} for row in ROWS]
    write_jsonl(Path("fresh.jsonl"), rows)
    data, said = "data.sources=[fresh.jsonl]", []
    for name, *overrides in (["first"], ["second", "optimizer.learning_rate=1e-4"], ["third", "precision=bf16"]):
        assert main(["recipe=small", f"output.name={name}", data, *overrides]) == 0
        said.append("Scoring 22 pairs once" in capsys.readouterr().out)
    # Four steps of four pairs and six held out; what computes otherwise is another reference.
    assert said == [True, False, True]
    first, second, third = (load_file(Path("runs") / name / FILE)["log_probs"] for name in ("first", "second", "third"))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_what_compares_differences_alone_is_normalised_by_length() -> None:
    assert set(OF_DIFFERENCES) <= set(LOSSES) - {"sigmoid_norm"}


@pytest.mark.parametrize(
    ("objective", "values"),
    [
        ("dpo", {}),
        ("dpo", {"loss": "ipo"}),
        ("dpo", {"length_normalized": True}),
        ("cpo", {}),
        ("simpo", {"beta": 2.0}),
        ("orpo", {"beta": 0.1}),
    ],
)
def test_pairs_of_long_answers_are_won_by_little(objective: str, values: dict[str, Any]) -> None:
    """Of 1,000 tokens each: a lead of half a nat is one, and one of what sums are rounded by is none."""
    tokens = torch.full((4, 2), 1000)
    reference = torch.full((4, 2), -2000.0, dtype=torch.float64)
    for lead, won in ((0.5, 4.0), (1e-4, 2.0)):
        log_probs = reference + torch.tensor([lead, -lead], dtype=torch.float64)
        trainer = SimpleNamespace(
            answers=lambda *_, given=log_probs: (given, tokens, None),
            reference=reference if objective == "dpo" else None,
            objective=objective,
            settings=Preference(**values),
        )
        _, sums, _ = PairTrainer._judged(trainer, None, {"rows": torch.arange(4)})  # type: ignore[arg-type]
        assert sums[4].item() == won
