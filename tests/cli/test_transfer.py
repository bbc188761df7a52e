"""`toolkit transfer`: from the folders of sweeps to a learning rate for a larger model."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
from harness import write_recipe
from small import RECIPE, place_with

from toolkit.cli.main import main
from toolkit.cli.sweep import trials

place = place_with("llama")


def swept(place: Path, folder: str, best: float, *arguments: str) -> Path:
    """The folder of a sweep whose runs are finished, with losses that are least at a rate."""
    asked = ["recipe=small", "learning_rate=1e-3,2e-3,4e-3,8e-3,16e-3", "seed=1,2", f"output.dir={folder}", *arguments]
    for at, each in enumerate(trials(asked)):
        each.folder.mkdir(parents=True)
        recipe = each.loaded.recipe
        (each.folder / "recipe.yaml").write_text(each.loaded.to_yaml())
        (each.folder / "manifest.json").write_text(json.dumps({"status": "finished"}))
        loss = 2 + 0.1 * math.log(recipe.optimizer.learning_rate / best) ** 2 + 0.2 * recipe.seed + 0.001 * (at % 3)
        (each.folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "eval_loss": loss}) + "\n")
    return place / folder / "small-sweep"


def wider(place: Path, times: int) -> str:
    """A recipe of a model that is so many times as wide."""
    name, config = f"wide{times}", json.loads((place / "llama" / "config.json").read_text())
    config["hidden_size"] *= times
    (place / name).mkdir(exist_ok=True)
    (place / name / "config.json").write_text(json.dumps(config))
    write_recipe(place, name, RECIPE.replace("path: llama", f"path: {name}"))
    return name


def test_a_sweep_of_a_small_model_offers_a_rate_for_a_wider_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, name = swept(place, "one", 4e-3), wider(place, 4)
    assert main(["transfer", str(sweep), "--for", name]) == 0
    told = capsys.readouterr().out
    width = json.loads((place / "llama" / "config.json").read_text())["hidden_size"]
    assert f"10 runs in {sweep}, hidden size {width}: 0.004 (90%:" in told
    assert f"{name}, hidden size {4 * width}: 0.002 (90%: 0.000" in told
    assert "was not measured" in told
    assert told.splitlines()[-1] == f"to train with it: toolkit launch recipe={name} learning_rate=0.002"


def test_the_line_that_trains_names_the_folder_of_the_recipes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, name, own = swept(place, "elsewhere", 4e-3), wider(place, 2), place / "my recipes"
    own.mkdir()
    (place / "recipes" / f"{name}.yaml").rename(own / f"{name}.yaml")
    assert main(["transfer", str(sweep), "--for", name, "--recipes", "my recipes"]) == 0
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("to train with it: toolkit ")
    assert main([*shlex.split(line), "--gpus", "2", "--print"]) == 0
    assert "--recipes 'my recipes'" in capsys.readouterr().out


def test_what_is_unlike_is_refused_or_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapters = swept(place, "adapters", 4e-3, "method=lora")
    assert main(["transfer", str(adapters), "--for", "small"]) == 1
    assert "method.name is lora there, full here" in capsys.readouterr().err
    larger = swept(place, "larger", 4e-3, "batch.global_batch_size=8")
    assert main(["transfer", str(larger), "--for", "small"]) == 0
    assert "not the same: batch.global_batch_size is 8 there, 4 here" in capsys.readouterr().out
    same = swept(place, "tokens", 4e-3, "batch.tokens_per_step=512")
    assert main(["transfer", str(same), "--for", "small"]) == 0
    assert "not the same" not in capsys.readouterr().out
    write_recipe(place, "epochs", RECIPE.replace("max_steps: 2", "num_epochs: 5"))
    longer = swept(place, "longer", 4e-3, "schedule.num_epochs=3")
    assert main(["transfer", str(longer), "--for", "epochs"]) == 0
    assert "not the same: schedule.num_epochs is 3.0 there, 5.0 here" in capsys.readouterr().out
    assert main(["transfer", str(place / "llama"), "--for", "small"]) == 1
    assert "holds no finished run" in capsys.readouterr().err


def test_runs_of_another_kind_within_a_sweep_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = swept(place, "both", 4e-3, "method=full,lora")
    assert main(["transfer", str(both), "--for", "small"]) == 1
    assert "method.name is lora there, full here" in capsys.readouterr().err
    assert main(["transfer", "nowhere", "--for", "small"]) == 1
    assert "there is no folder nowhere" in capsys.readouterr().err


def test_a_best_rate_at_the_end_of_the_sweep_is_no_best_rate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = swept(place, "at-the-end", 64e-3)
    assert main(["transfer", str(sweep), "--for", "small"]) == 1
    assert "sweep higher ones too" in capsys.readouterr().err
