"""What `samples.json` holds: prompts, the model's answers before and after training, and what the data says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models_doc
import pytest
from small import populate
from tiny import tiny_kind

from toolkit.cli.main import main as cli
from toolkit.train.main import main


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    populate(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def samples(*overrides: str) -> list[dict[str, Any]]:
    """Those of a training."""
    assert main(["recipe=small", "checkpoint.save_steps=1", *overrides]) == 0
    content: list[dict[str, Any]] = json.loads(Path("runs/small/samples.json").read_text(encoding="utf-8"))
    return content


def test_prompts_of_the_recipe_are_answered_before_and_after() -> None:
    given = "evaluation.prompts=['What is a list?','What is a dict?']"
    first, second = samples(given, "evaluation.num_prompts=2", "schedule.max_steps=4")
    assert [first["prompt"], second["prompt"]] == ["What is a list?", "What is a dict?"]
    assert all(isinstance(row[key], str) for row in (first, second) for key in ("before", "after"))
    assert first.get("reference") is None


def test_without_prompts_held_out_rows_are_asked_and_their_answers_shown() -> None:
    rows = samples("data.eval_split=0.2", "evaluation.num_prompts=3")
    texts = Path("chat.jsonl").read_text(encoding="utf-8")
    assert len(rows) == 3
    assert all(json.dumps(row["reference"])[1:-1] in texts for row in rows)


def test_a_model_that_transformers_cannot_write_with_is_trained_without_answers(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_kind(models_doc.stated("bamba", "sft"), place / "bamba")
    keys = [f"model.path={model}", "evaluation.prompts=['What is a list?']", "evaluation.num_prompts=1"]
    assert main(["recipe=small", *keys]) == 0
    shown = capsys.readouterr()
    assert "no prompts are answered: Transformers cannot write with this bamba" in " ".join(shown.err.split())
    assert not Path("runs/small/samples.json").exists()
    assert cli(["generate", "runs/small", "--prompt", "What is a list?"]) == 1
    assert "error: Transformers cannot write with this bamba" in capsys.readouterr().err


def test_who_goes_on_asks_no_trained_model_for_answers_before_training(place: Path) -> None:
    """Those that were given then stay. A prompt that comes later, and a run that begins elsewhere, have none."""
    asked = "evaluation.prompts=['What is a list?']"
    (first,) = samples(asked, "evaluation.num_prompts=1")
    run = place / "runs" / "small"
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    more = ["evaluation.prompts=['What is a dict?','What is a list?']", "evaluation.num_prompts=2"]
    later, same = samples(*more)
    assert (same["prompt"], same["before"]) == (first["prompt"], first["before"])
    assert later["prompt"] == "What is a dict?" and later["before"] is None and isinstance(later["after"], str)

    # The model is there, and what follows its saving is missing.
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted"}), encoding="utf-8")
    (run / "samples.json").unlink()
    (completed,) = samples(asked, "evaluation.num_prompts=1")
    assert completed["before"] is None and completed["after"] == same["after"]

    elsewhere = [f"checkpoint.resume={run}/checkpoints/checkpoint-1", "output.name=elsewhere"]
    assert main(["recipe=small", asked, "evaluation.num_prompts=1", *elsewhere]) == 0
    (other,) = json.loads(Path("runs/elsewhere/samples.json").read_text(encoding="utf-8"))
    assert other["before"] is None and other["after"] == same["after"]
