"""Losses of held-out rows in a run's folder: of which evaluations, of starts that go on, and of which rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from harness import metrics
from small import place_with, set_up, trained
from transformers import TrainerState

from toolkit.distributed.layout import World
from toolkit.recipe.rules import load_checked
from toolkit.report.load import read_run
from toolkit.train import callbacks
from toolkit.train.evaluation import row_losses, untrained
from toolkit.train.evaluation.evaluate import Evaluated
from toolkit.train.main import main

place = place_with("llama")
HELD_OUT = ["data.eval_split=0.2", "method=lora", "evaluation.every_steps=1"]


def kept(run: Path) -> dict[str, Any]:
    return json.loads((run / row_losses.FILE).read_text(encoding="utf-8"))


def test_a_run_that_goes_on_keeps_the_rows_of_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says by how much its loss has changed on the same rows, as a run that was never stopped does."""
    whole = trained("whole", *HELD_OUT)
    monkeypatch.setattr(callbacks.CleanStop, "asked", lambda stop: stop_at(2))

    def stop_at(step: int) -> bool:
        file = Path("runs/stopped/metrics.jsonl")
        return file.is_file() and any(row["step"] == step for row in metrics(file.parent))

    command = ["recipe=small", "max_steps=4", "output.name=stopped", *HELD_OUT]
    assert main(command) == 0
    assert [*kept(Path("runs/stopped"))["sums"]] == ["0", "3"]
    monkeypatch.undo()
    assert main(command) == 0
    stopped = Path("runs/stopped")
    assert kept(stopped) == kept(whole) and [*kept(whole)["sums"]] == ["0", "4"]
    change = read_run(stopped).change
    losses = [row["eval_loss"] for row in metrics(stopped) if row["step"] in (0, 4) and "eval_loss" in row]
    assert change and change.value == pytest.approx(losses[1] - losses[0], rel=1e-4) and change.half > 0
    page = " ".join((stopped / "report.html").read_text(encoding="utf-8").split())
    assert f"change {change.text()}" in page
    assert f"its change     {change.text()}" in capsys.readouterr().out


def test_the_rows_of_the_model_that_is_published_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.5])

    def found(session: Any) -> Evaluated:
        loss = next(losses)
        return Evaluated({"eval_loss": loss}, [[2 * loss, loss], [2.0, 1.0]])

    monkeypatch.setattr(callbacks, "evaluate", found)
    monkeypatch.setattr(
        callbacks, "evaluate_untrained", lambda session: Evaluated({"eval_loss": 4.0}, [[8.0, 4.0], [2.0, 1.0]])
    )
    run = trained("best", *HELD_OUT, "checkpoint.keep_best=eval_loss")
    assert kept(run)["sums"] == {"0": [8.0, 4.0], "2": [2.0, 1.0], "4": [5.0, 2.5]}
    assert read_run(run).change.value == -3.0


def test_what_the_untrained_model_said_of_each_row_is_kept_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(untrained, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(untrained, "_WORTH_KEEPING", 0.0)
    monkeypatch.setattr(untrained.concurrent.futures, "wait", lambda futures, timeout: futures[0].exception())
    one = kept(trained("one", *HELD_OUT))
    monkeypatch.setattr(untrained, "evaluate", lambda session: pytest.fail("it was asked"))
    assert kept(trained("two", *HELD_OUT, "learning_rate=2e-2"))["sums"]["0"] == one["sums"]["0"]


def test_rows_are_the_same_where_they_are_measured_alike() -> None:
    def of(*overrides: str) -> str:
        training = set_up("data.eval_split=0.2", *overrides)
        return row_losses.measured(training.recipe, training.trainer.eval_dataset)

    own = of()
    assert own == of("method=lora", "data.packing=true", "learning_rate=1e-3", "micro_batch_size=1")
    assert own not in (of("data.eval_split=0.3"), of("data.train_on=all"))
    recipes = [
        load_checked("small", ["objective=distillation", "distillation.teacher.path=llama", *each]).recipe
        for each in ([], ["distillation.on_policy=0.5", "rollout.max_completion_tokens=64"], ["distillation.beta=0.5"])
    ]
    rows = set_up("data.eval_split=0.2").trainer.eval_dataset
    first, drawn, other = (row_losses.measured(recipe, rows) for recipe in recipes)
    assert first == drawn != other


def test_only_the_first_process_hashes_rows_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it where its own run goes on."""
    training = set_up("data.eval_split=0.2")
    asked: list[int] = []
    monkeypatch.setattr(row_losses, "measured", lambda *args: asked.append(rank) or "these")
    for rank in (1, 0):
        session = dataclasses.replace(training, world=World(rank=rank, world_size=2))
        rows, state = row_losses.RowLosses(session), TrainerState()
        row_losses.Comparable(session, rows).on_train_begin(None, state, None)
    rows.keep(0, [[1.0] * 8, [1.0] * 8])
    assert asked == [0] and kept(training.folder.path)["measured"] == "these"
    row_losses.Comparable(session, row_losses.RowLosses(session)).on_train_begin(None, state, None)
    assert asked == [0]


def test_a_damaged_file_is_set_aside() -> None:
    training = set_up("data.eval_split=0.2")
    file = training.folder.path / row_losses.FILE
    file.write_text('{"measured"', encoding="utf-8")
    row_losses.RowLosses(training).keep(1, [[1.0] * 8, [1.0] * 8])
    assert kept(training.folder.path)["sums"] == {"1": [1.0] * 8}
    assert file.with_name(f"{file.name}.damaged").is_file()


def test_a_file_whose_disk_does_not_answer_is_neither_set_aside_nor_replaced() -> None:
    training = set_up("data.eval_split=0.2")
    file = training.folder.path / row_losses.FILE
    file.symlink_to("/proc/self/mem")  # Reading it is an input/output error.
    losses = row_losses.RowLosses(training)
    losses.keep(1, [[1.0] * 8, [1.0] * 8])
    assert losses.change({"eval_loss": 1.0}, {"eval_loss": 1.0}, 1) is None
    assert [each.name for each in file.parent.glob(f"{file.name}*")] == [file.name] and file.is_symlink()
