"""A run that ends between its last step and its exit is completed by the same command, which takes no step."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import metrics, write_recipe
from matrix import ENGINES, METHODS, Difference, Result
from ranks import ON_CPU, Finished, Ranks
from small import populate

RECIPE = """
description: A training that is killed after its last step
model: {path: llama}
data: {sources: [chat.jsonl], eval_split: 0.1}
precision: bf16
optimizer: {learning_rate: 1.0e-2}
schedule: {max_steps: 4}
batch: {seq_len: 128, global_batch_size: 4, micro_batch_size: 2}
evaluation: {num_prompts: 1, max_new_tokens: 4}
"""
SAVES = "checkpoint.save_steps=2"
CHOICES = {
    "last": [],
    "best": ["checkpoint.keep_best=eval_loss", "evaluation.every_steps=1"],
    "best is last": ["checkpoint.keep_best=eval_loss", "evaluation.every_steps=1", "learning_rate=1e-4"],
    "mean": ["checkpoint.average_last=2", SAVES, "evaluation.every_steps=2"],
    "stopped": ["schedule.early_stopping_patience=1", "evaluation.every_steps=1", "learning_rate=1"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    populate(folder, "llama")
    write_recipe(folder, "small", RECIPE)
    return folder


def start(ranks: Ranks, home: Path, engine: str, name: str, *own: str, killed: str = "") -> tuple[Path, Finished]:
    entry = {"entry": "killed", "KILLED": killed} if killed else {"entry": ON_CPU}
    arguments = ["recipe=small", *ENGINES[engine], *own, f"output.name={name}"]
    done = ranks.run(home, *arguments, processes=1 if engine == "single" else 2, **entry, timeout=60)
    return home / "runs" / name, done


def straight(ranks: Ranks, home: Path, engine: str, choice: str, *own: str) -> Path:
    """A run to which nothing happens."""
    folder = home / "runs" / f"{engine} {choice} {' '.join(own)}".replace(" ", "-").replace("=", "-")
    if not folder.is_dir():
        _, done = start(ranks, home, engine, folder.name, *CHOICES[choice], *own)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


def manifest(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    return content


def steps(run: Path) -> list[dict[str, Any]]:
    """What was noted of each step, times included: no step that is taken again has the same."""
    return [row for row in metrics(run) if "loss" in row]


def figures(run: Path) -> list[dict[str, Any]]:
    """All lines of the metrics, but for times and memory."""
    shown = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_perplexity", "eval_tokens")
    return [{key: row.get(key) for key in shown} for row in metrics(run)]


def check_completed(run: Path, done: Finished, other: Path) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert figures(run) == figures(other)
    difference = Difference.between(Result.read(run), Result.read(other))
    assert max(vars(difference).values()) == 0, difference
    ended, wanted = manifest(run), manifest(other)
    assert ended["status"] == "finished" and not ended.get("error")
    assert all(ended.get(key) == wanted.get(key) for key in ("published", "parameters"))
    assert ended["final"]["step"] == wanted["final"]["step"]
    assert ended["measured"].keys() == wanted["measured"].keys()
    assert ended["measured"]["tokens"] == wanted["measured"]["tokens"]
    cards = [(each / "final" / "README.md").read_text(encoding="utf-8") for each in (run, other)]
    assert [line for line in cards[0].splitlines() if "held-out" in line or "loss" in line] == [
        line for line in cards[1].splitlines() if "held-out" in line or "loss" in line
    ]
    assert '<span class="status finished">' in (run / "report.html").read_text(encoding="utf-8")
    assert not (run / "final.partial").exists()
    left = [sorted(file.name for file in (each / "snapshots").glob("*")) for each in (run, other)]
    assert left[0] == left[1]


STAGES = {
    "before the model is saved": "before:toolkit.train.train.publish:1",
    "while it is saved": "before:toolkit.train.checkpoints.save.flush:1",
    "before it is in its place": "before:toolkit.train.train.contents:1",
    "before its card": "before:toolkit.train.train.write_card:1",
    "before the evaluation": "before:toolkit.train.callbacks.Evaluator.finish:1",
    "before the answers": "before:toolkit.train.evaluation.samples.session_answers:1",
    "after the answers": "after:toolkit.train.evaluation.samples.session_answers:1",
    "before the last card": "before:toolkit.train.train.write_card:2",
    "before the report": "before:toolkit.train.train.write_report:1",
    "after the report": "after:toolkit.train.train.write_report:1",
}
SAVED = [*STAGES][3:]
"""Stages from which on no checkpoint is needed."""
FAST = [("single", "last", "before the answers"), ("ddp", "last", "before the evaluation")]
FAST += [("single", "best is last", "before the evaluation")]
REST = [
    (engine, choice, stage)
    for engine in ("single", "ddp")
    for choice in CHOICES
    for stage in SAVED
    if (engine, choice, stage) not in FAST
]


@pytest.mark.parametrize(
    ("engine", "choice", "stage"), [*FAST, *(pytest.param(*each, marks=pytest.mark.matrix) for each in REST)]
)
def test_what_follows_the_saving_of_the_model_is_completed(
    ranks: Ranks, home: Path, engine: str, choice: str, stage: str
) -> None:
    check_stage(ranks, home, engine, choice, stage)


def check_stage(ranks: Ranks, home: Path, engine: str, choice: str, stage: str, *own: str) -> None:
    other = straight(ranks, home, engine, choice, *own)
    name = f"{other.name} {stage}".replace(" ", "-")
    run, done = start(ranks, home, engine, name, *CHOICES[choice], *own, killed=STAGES[stage])
    assert -signal.SIGKILL in done.codes, done.stderr[-3000:]
    before = steps(run)
    run, done = start(ranks, home, engine, name, *CHOICES[choice], *own)
    check_completed(run, done, other)
    assert steps(run) == before, "no step was taken again"
    assert "This run is finished" in start(ranks, home, engine, name, *CHOICES[choice], *own)[1].stdout


def test_models_that_were_yet_to_be_deleted_are_deleted(ranks: Ranks, home: Path) -> None:
    """A finished run keeps what its checkpoints need, which is nothing here."""
    settings, killed = CHOICES["best is last"], "before:toolkit.train.selection.Selection.clear:1"
    run, done = start(ranks, home, "single", "yet-to-be-deleted", *settings, killed=killed)
    assert -signal.SIGKILL in done.codes and list((run / "snapshots").iterdir()), done.stderr[-3000:]
    run, done = start(ranks, home, "single", run.name, *settings)
    check_completed(run, done, straight(ranks, home, "single", "best is last"))
    assert not list((run / "snapshots").iterdir()) and "was not kept" not in done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [*STAGES][:3])
@pytest.mark.parametrize("engine", ["single", "ddp", "zero2", "zero3", "fsdp"])
def test_a_model_that_was_not_saved_yet_is_saved_from_the_last_checkpoint(
    ranks: Ranks, home: Path, engine: str, stage: str
) -> None:
    check_stage(ranks, home, engine, "last", stage, SAVES)


CELLS = [
    (engine, method)
    for engine in ("single", "ddp", "zero2", "zero3", "fsdp")
    for method in METHODS
    # Others are refused: they begin by the whole base, or tie what was read by one process.
    if method not in {"zero3": ("eva", "loftq"), "fsdp": ("eva", "loftq", "lora_embeddings")}.get(engine, ())
    # These runs are among those of all stages.
    and (engine, method) not in (("single", "full"), ("ddp", "full"))
]


@pytest.mark.matrix
@pytest.mark.parametrize(("engine", "method"), CELLS)
def test_every_engine_and_method_is_completed_from_its_model(
    ranks: Ranks, home: Path, engine: str, method: str
) -> None:
    check_stage(ranks, home, engine, "last", "before the evaluation", *METHODS[method])


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_sigterm_after_the_last_step_loses_nothing(
    ranks: Ranks, home: Path, engine: str, stage: str, method: str
) -> None:
    """While the model is saved it is waited for; after that the process ends at once."""
    own = [SAVES, *METHODS[method]]
    other = straight(ranks, home, engine, "last", *own)
    name = f"{other.name} SIGTERM {stage}".replace(" ", "-")
    run, done = start(ranks, home, engine, name, *own, killed=f"{STAGES[stage]}:SIGTERM")
    if stage in SAVED:
        assert 128 + signal.SIGTERM in done.codes and manifest(run)["status"] == "interrupted", done.stderr[-3000:]
    else:
        assert done.returncode == 0 and manifest(run)["status"] == "interrupted", done.stderr[-3000:]
        assert "the model is saved" in done.stdout
    before = steps(run)
    run, done = start(ranks, home, engine, name, *own)
    check_completed(run, done, other)
    assert steps(run) == before


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "missing": Path.unlink,
}
FILES = {"full": ["model.safetensors", "config.json", "tokenizer.json"], "lora": ["adapter_model.safetensors"]}
FILES["lora"] += ["adapter_config.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("method", "name", "damage"),
    [
        ("full", "model.safetensors", "flipped"),
        *(
            pytest.param(method, name, damage, marks=pytest.mark.matrix)
            for method, names in FILES.items()
            for name in names
            for damage in DAMAGES
        ),
    ],
)
def test_a_damaged_model_is_written_again(ranks: Ranks, home: Path, method: str, name: str, damage: str) -> None:
    own = [SAVES, *METHODS[method]]
    other = straight(ranks, home, "single", "last", *own)
    run = home / "runs" / f"{method}-{name}-{damage}"
    _, done = start(ranks, home, "single", run.name, *own)
    before = steps(run)
    DAMAGES[damage](run / "final" / name)
    _, done = start(ranks, home, "single", run.name, *own)
    said = " ".join(done.stderr.split())
    wrong = f"it lacks {name}" if damage == "missing" else f"{name} differs from what was saved"
    assert f"final is damaged: {wrong}, and is passed over" in said
    check_completed(run, done, other)
    assert steps(run) == before


def test_a_damaged_model_without_a_checkpoint_is_said_in_one_message(ranks: Ranks, home: Path) -> None:
    run, done = start(ranks, home, "single", "alone")
    flip(run / "final" / "tokenizer.json")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    _, done = start(ranks, home, "single", "alone")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert "final is damaged: tokenizer.json differs from what was saved, and no checkpoint is left" in said
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_a_card_that_was_edited_is_no_damage(ranks: Ranks, home: Path) -> None:
    run = straight(ranks, home, "single", "last")
    (run / "final" / "README.md").write_text("My model", encoding="utf-8")
    (run / "final" / "model.gguf").write_bytes(b"its copy in another form")
    assert "This run is finished" in start(ranks, home, "single", run.name)[1].stdout
