"""The best model of a training, or the mean of its last ones, is what is published, on every engine and after kills."""

from __future__ import annotations

import json
import shutil
import signal
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import pytest
import torch
from harness import losses, metrics, write_recipe
from matrix import ENGINES, METHODS
from ranks import ON_CPU, Ranks
from safetensors.torch import load_file
from small import populate
from transformers import TrainerControl, TrainerState

from toolkit.common import UserError
from toolkit.recipe import Recipe
from toolkit.report.load import read_run
from toolkit.train import selection
from toolkit.train.run_folder import RunFolder
from toolkit.train.selection import EarlyStopping

# Held-out loss falls for some steps and rises then, for the learning rate is far too high.
RECIPE = """
description: A training that becomes worse
model: {path: llama}
data: {sources: [chat.jsonl], eval_split: 0.1}
precision: fp32
optimizer: {learning_rate: 3.0e-2}
schedule: {name: constant, max_steps: 6}
batch: {seq_len: 128, global_batch_size: 8, micro_batch_size: 2}
evaluation: {num_prompts: 1, max_new_tokens: 4, every_steps: 1}
checkpoint: {save_steps: 2}
"""
BEST = "checkpoint.keep_best=eval_loss"
# The best full model is that of step 2, the best adapter that of step 3.
_FAST = ["learning_rate=0.1", "optimizer.beta1=0.5", "max_steps=4"]
SETTINGS = {name: [*METHODS[name], *_FAST] if name != "full" else [] for name in ("full", "lora", "qlora", "dora")}
SETTINGS["pissa"] = [*SETTINGS["lora"], "method.init_lora_weights=pissa"]
SETTINGS["bf16"] = ["precision=bf16"]
MEAN = "checkpoint.average_last=2"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder; runs stay for the other tests."""
    folder = tmp_path_factory.mktemp("home")
    populate(folder, "llama")
    write_recipe(folder, "worse", RECIPE)
    return folder


def run(ranks: Ranks, home: Path, name: str, *overrides: str, engine: str = "single") -> Path:
    """A finished run of this name; continues what is there."""
    folder = home / "runs" / name
    if not (folder / "final").is_dir():
        arguments = ["recipe=worse", *ENGINES[engine], *overrides, f"output.name={name}"]
        processes, nodes = {"single": (1, 1), "fsdp_hybrid": (4, 2)}.get(engine, (2, 1))
        done = ranks.run(home, *arguments, processes=processes, nodes=nodes, entry=ON_CPU)
        assert done.returncode == 0, done.stderr[-6000:]
        (folder / "said.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    return folder


def final(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in (folder / "final").glob("*.safetensors") for name, each in load_file(file).items()}


def held_out(folder: Path) -> dict[int, float]:
    return {row["step"]: row["eval_loss"] for row in metrics(folder) if "eval_loss" in row}


def published(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["published"]


def equal(one: Path, other: Path) -> bool:
    """Whether two runs published the same weights, bit for bit."""
    weights, others = final(one), final(other)
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def answers(folder: Path) -> list[str]:
    return [row["after"] for row in json.loads((folder / "samples.json").read_text(encoding="utf-8"))]


def check_best(ranks: Ranks, home: Path, engine: str, method: str) -> None:
    """Against runs of the same engine that keep nothing: one of as many steps, and one that ends where it was best."""
    name, settings = f"{engine}-{method}", SETTINGS[method]
    best = run(ranks, home, f"{name}-best", BEST, *settings, engine=engine)
    plain = run(ranks, home, f"{name}-plain", *settings, engine=engine)
    evaluations = held_out(best)
    step = min(list(evaluations)[1:], key=lambda each: evaluations[each])
    assert step < max(evaluations) or method not in ("full", "lora", "bf16")
    assert losses(best) == losses(plain), "keeping models changes nothing of the training"
    # Without a best one to be found among all, the last model is evaluated as it is published.
    assert list(held_out(plain).values())[:-1] == list(evaluations.values())[:-1]
    shorter = run(ranks, home, f"{name}-{step}", *settings, f"schedule.max_steps={step}", engine=engine)
    assert published(best)["step"] == step and published(plain) is None
    assert equal(best, shorter) and equal(best, plain) == (step == max(evaluations))
    assert answers(best) == answers(shorter)
    record = read_run(best)
    assert record.result and record.result["eval_loss"] == evaluations[step]
    assert f"after step {step}" in (best / "final" / "README.md").read_text(encoding="utf-8")


def test_the_best_model_is_published(ranks: Ranks, home: Path) -> None:
    check_best(ranks, home, "single", "full")
    best = home / "runs" / "single-full-best"
    assert "the best of 6 evaluations by eval_loss, after step 2" in (best / "report.html").read_text(encoding="utf-8")
    assert "published      the best of 6 evaluations" in (best / "said.txt").read_text(encoding="utf-8")
    assert sorted(file.name for file in (best / "snapshots").iterdir()) == ["step-2"], "for the checkpoints"


DISTRIBUTED = ("ddp", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp", "fsdp_offload", "fsdp_hybrid")


WHOLE = ("single", "ddp", "zero2", "zero2_offload")
"""Engines on which each process has all of the base, which PiSSA takes."""
CELLS = [(engine, method) for engine in ("single", *DISTRIBUTED) for method in SETTINGS]


@pytest.mark.matrix
@pytest.mark.parametrize(("engine", "method"), [cell for cell in CELLS if cell[1] != "pissa" or cell[0] in WHOLE])
def test_the_best_model_is_published_on_every_engine(ranks: Ranks, home: Path, engine: str, method: str) -> None:
    check_best(ranks, home, engine, method)


PATIENCE = "schedule.early_stopping_patience=2"


def test_training_stops_when_nothing_improves_any_more(ranks: Ranks, home: Path) -> None:
    """After step 2 the held-out loss rises; each of two evaluations counts, whatever it is compared with."""
    plain = run(ranks, home, "single-full-plain")
    stopped = run(ranks, home, "stopped", PATIENCE)
    assert losses(stopped) == losses(plain)[:4]
    assert equal(stopped, run(ranks, home, "single-full-4", "schedule.max_steps=4"))
    said = (stopped / "said.txt").read_text(encoding="utf-8")
    assert "Stopping early after step 4 of 6: eval_loss has not improved in 2 evaluations." in said
    assert json.loads((stopped / "manifest.json").read_text(encoding="utf-8"))["status"] == "finished"
    # From step 1 to 2 the loss falls by 0.23.
    demanding = run(ranks, home, "demanding", PATIENCE, "schedule.early_stopping_min_delta=0.5", BEST)
    assert len(losses(demanding)) == 3 and published(demanding)["step"] == 2


def test_where_it_stops_early_the_last_model_is_part_of_the_mean(ranks: Ranks, home: Path) -> None:
    """Also between two checkpoints."""
    stopped = run(ranks, home, "stopped-mean", PATIENCE, "schedule.early_stopping_min_delta=0.5", MEAN)
    parts = [final(run(ranks, home, f"mean-{end}", f"schedule.max_steps={end}")) for end in (2, 3)]
    assert published(stopped) == {"step": 3, "what": "the mean of the models after steps 2, 3"}
    for name, found in final(stopped).items():
        assert torch.equal(found, (parts[0][name] + parts[1][name]) / 2)


@pytest.mark.parametrize(("values", "stops"), [([2, nan, nan], 3), ([nan, nan], 2), ([nan, 2, nan, 1, 1], None)])
def test_an_evaluation_without_a_number_is_none_that_improved(values: list[float], stops: int | None) -> None:
    patient = {"schedule": {"early_stopping_patience": 2}, "model": {"path": "a/b"}, "data": {"sources": ["c"]}}
    session: Any = SimpleNamespace(recipe=Recipe.model_validate(patient), progress=SimpleNamespace(message=print))
    stopping = EarlyStopping(session)
    state, control, stopped = TrainerState(max_steps=9), TrainerControl(), None
    for step, value in enumerate(values, start=1):
        state.global_step = step
        state.log_history.append({"step": step, "eval_loss": value})
        stopping.on_log(None, state, control, state.log_history[-1])
        stopped = stopped or (step if control.should_training_stop else None)
    assert stopped == stops


def check_mean(ranks: Ranks, home: Path, engine: str, method: str) -> None:
    name, settings = f"{engine}-{method}", [*SETTINGS[method], "max_steps=4"]
    averaged = run(ranks, home, f"{name}-mean-of-4", MEAN, *settings, engine=engine)
    parts = [run(ranks, home, f"{name}-{end}", *settings, f"max_steps={end}", engine=engine) for end in (2, 4)]
    assert losses(averaged) == losses(parts[1]), "keeping models changes nothing of the training"
    found, (first, second) = final(averaged), map(final, parts)
    assert found.keys() == first.keys()
    for tensor, one, other in ((found[key], first[key], second[key]) for key in found):
        assert torch.equal(tensor, ((one.float() + other.float()) / 2).to(tensor.dtype))
    assert published(averaged) == {"step": 4, "what": "the mean of the models after steps 2, 4"}
    if method == "full":  # What was evaluated is what was saved.
        again = run(ranks, home, f"{name}-again", f"model.path={averaged / 'final'}", "max_steps=1")
        assert held_out(again)[0] == pytest.approx(held_out(averaged)[4], rel=1e-6)
        assert held_out(averaged)[4] != held_out(parts[1])[4]


def test_the_mean_of_the_last_models_is_published(ranks: Ranks, home: Path) -> None:
    check_mean(ranks, home, "single", "full")


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["full", "lora", "bf16"])
@pytest.mark.parametrize("engine", ["single", *DISTRIBUTED])
def test_the_mean_of_the_last_models_is_published_on_every_engine(
    ranks: Ranks, home: Path, engine: str, method: str
) -> None:
    check_mean(ranks, home, engine, method)


KILLS = {
    "in-a-snapshot": "before:toolkit.train.checkpoints.snapshots.seal:2",
    "before-it-counts": "after:toolkit.train.checkpoints.snapshots.seal:2",
    "after-it-counts": "after:toolkit.train.checkpoints.snapshots.write:2",
    "in-an-evaluation": "before:toolkit.train.callbacks.evaluate:6",
    "before-publishing": "before:toolkit.train.train.publish:1",
    "after-publishing": "after:toolkit.train.train.publish:1",
}
FAST = [("single", "best", kill) for kill in ("before-it-counts", "in-an-evaluation", "before-publishing")]
FAST += [("single", "stream", "before-publishing")]
REST = [
    (engine, choice, kill)
    for engine in ("single", "ddp", "zero2", "zero3", "fsdp")
    for choice in ("plain", "stream", "best", "best-stopped", "mean")
    for kill in KILLS
    # A mean is evaluated less often, and what stops after step 4 has no sixth evaluation; others keep no models.
    if (kill in ("before-publishing", "after-publishing") or choice not in ("plain", "stream"))
    if (choice == "best" or kill != "in-an-evaluation") and (engine, choice, kill) not in FAST
]
STREAM = ["data.streaming=true", "data.eval_split=null", "data.eval_sources=[chat.jsonl]", "data.eval_max_samples=4"]
CHOICES = {
    "plain": [],
    "stream": STREAM,
    "best": [BEST],
    "best-stopped": [BEST, PATIENCE],
    "mean": [MEAN, "evaluation.every_steps=2"],
}


@pytest.mark.parametrize(
    ("engine", "choice", "kill"), [*FAST, *(pytest.param(*each, marks=pytest.mark.matrix) for each in REST)]
)
def test_what_is_published_is_the_same_after_a_kill(
    ranks: Ranks, home: Path, engine: str, choice: str, kill: str
) -> None:
    straight = run(ranks, home, f"{engine}-full-{choice}", *CHOICES[choice], engine=engine)
    folder, settings = home / "runs" / f"{engine}-{choice}-{kill}", [*ENGINES[engine], *CHOICES[choice]]
    arguments = ["recipe=worse", *settings, f"output.name={folder.name}"]
    processes = 1 if engine == "single" else 2
    done = ranks.run(home, *arguments, processes=processes, entry="killed", KILLED=KILLS[kill])
    assert -signal.SIGKILL in done.codes, done.stderr[-3000:]
    done = ranks.run(home, *arguments, processes=processes, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert equal(folder, straight) and published(folder) == published(straight)
    assert held_out(folder) == held_out(straight) and losses(folder) == losses(straight)
    assert answers(folder) == answers(straight)
    kept = [sorted(file.name for file in (each / "snapshots").glob("*")) for each in (folder, straight)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(("key", "value"), [("keep_best", "eval_loss"), ("average_last", 2)])
def test_what_a_checkpoint_on_its_way_needs_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    """The checkpoint of step 4 is not there yet when the weights after step 6, of which there is one too, are kept; a
    run that is killed then goes on from step 4."""
    recipe = {"checkpoint": {key: value}, "model": {"path": "a/b"}, "data": {"sources": ["c"], "eval_split": 0.1}}
    trainer = SimpleNamespace(saves=SimpleNamespace(fast=None, before=None))
    session: Any = SimpleNamespace(
        recipe=Recipe.model_validate(recipe), trainer=trainer, leads=True, dtypes=None,
        length=SimpleNamespace(save_steps=2), folder=RunFolder(tmp_path),
    )  # fmt: skip
    monkeypatch.setattr(selection, "broadcast_object_list", lambda box: None)
    monkeypatch.setattr(selection.snapshots, "take", lambda *of: {})
    monkeypatch.setattr(selection.snapshots, "write", lambda state, folder, values: folder.mkdir(parents=True))
    keeps, state = selection.Selection(session, pause=print), TrainerState(max_steps=8)
    (tmp_path / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    for step in (2, 4, 6):
        state.global_step = step
        state.log_history.append({"step": step, "eval_loss": 1 / step})
        keeps.on_step_end(None, state, None)
        keeps.on_log(None, state, None, state.log_history[-1])
    assert sorted(place.name for place in (tmp_path / "snapshots").iterdir()) == ["step-2", "step-4", "step-6"]


def test_a_snapshot_that_cannot_be_read_now_stays_and_the_run_ends(tmp_path: Path) -> None:
    checkpoint = SimpleNamespace(keep_best="eval_loss", average_last=None)
    trainer = SimpleNamespace(saves=SimpleNamespace(fast=None))
    recipe = SimpleNamespace(checkpoint=checkpoint)
    session: Any = SimpleNamespace(recipe=recipe, trainer=trainer, folder=RunFolder(tmp_path))
    (snapshot := tmp_path / "snapshots" / "step-2").mkdir(parents=True)
    (snapshot / "seal.json").symlink_to("/proc/self/mem")  # Reading it is an input/output error.
    with pytest.raises(UserError, match="cannot be read: its disk does not answer"):
        selection.Selection(session, pause=print)._found(4)
    assert (snapshot / "seal.json").is_symlink()


@pytest.mark.parametrize("choice", ["best", "mean"])
def test_another_runs_models_count_where_a_run_goes_on_from_it(ranks: Ranks, home: Path, choice: str) -> None:
    straight = run(ranks, home, f"single-full-{choice}", *CHOICES[choice])
    begun = straight / "checkpoints" / "checkpoint-4"
    folder = run(ranks, home, f"from-{choice}", *CHOICES[choice], f"checkpoint.resume={begun}")
    assert equal(folder, straight) and published(folder) == published(straight)
    alone = home / "moved" / choice / "checkpoints" / "checkpoint-4"
    shutil.copytree(begun, alone)
    folder = run(ranks, home, f"moved-{choice}", *CHOICES[choice], f"checkpoint.resume={alone}")
    said = " ".join((folder / "said.txt").read_text(encoding="utf-8").split())
    assert ("the model of step 2, the best so far by eval_loss, was not kept" in said) == (choice == "best")
    assert ("best of 2 evaluations" in published(folder)["what"]) == (choice == "best")
    assert published(folder)["step"] == 6


def test_evaluations_on_other_held_out_rows_do_not_count(ranks: Ranks, home: Path) -> None:
    """Neither for the best model nor for stopping early, which would have been right away; also after a restart."""
    straight = run(ranks, home, "single-full-best", BEST)
    begun = straight / "checkpoints" / "checkpoint-4"
    stops = "schedule.early_stopping_patience=2"
    same = run(ranks, home, "same-rows", BEST, f"checkpoint.resume={begun}", stops)
    assert published(same)["step"] == 2 and not (same / "metrics.jsonl").exists(), "on the same rows they count"
    settings = [BEST, stops, "data.eval_seed=1"]
    other = run(ranks, home, "other-rows", *settings, f"checkpoint.resume={begun}", engine="ddp")
    said = " ".join((other / "said.txt").read_text(encoding="utf-8").split())
    assert "the evaluations up to step 4 are of other held-out rows" in said
    assert published(other)["step"] in (5, 6) and "best of 2 evaluations" in published(other)["what"]
    assert len(losses(other)) == 2 and not (other / "snapshots" / "step-2").exists()
    shutil.rmtree(other / "final")
    again = run(ranks, home, "other-rows", *settings, engine="ddp")
    assert published(again) == published(other) and "other held-out rows" not in (again / "said.txt").read_text()


def test_a_published_model_that_was_deleted_is_published_again(ranks: Ranks, home: Path) -> None:
    straight = run(ranks, home, "single-full-best", BEST)
    folder = home / "runs" / "deleted"
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "final")
    run(ranks, home, "deleted", BEST)
    assert "deleted/final is damaged: it lacks " in " ".join((folder / "said.txt").read_text(encoding="utf-8").split())
    assert equal(folder, straight) and losses(folder) == losses(straight) and held_out(folder) == held_out(straight)
    assert answers(folder) == answers(straight)


def test_a_damaged_snapshot_is_not_published(ranks: Ranks, home: Path) -> None:
    """The run is continued from step 4, and the best model, of step 2, is lost: the best one from there on counts."""
    folder = home / "runs" / "damaged"
    arguments = ["recipe=worse", *ENGINES["single"], BEST, f"output.name={folder.name}"]
    ranks.run(home, *arguments, entry="killed", KILLED=KILLS["in-an-evaluation"])
    file = folder / "snapshots" / "step-2" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = ranks.run(home, *arguments, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "snapshots/step-2 is damaged: model.safetensors differs from what was saved" in " ".join(done.stderr.split())
    assert published(folder)["step"] == 6
    assert equal(folder, run(ranks, home, "single-full-plain"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder for trainings whose disk fails, each of whose models is better than those before."""
    return faults.home(tmp_path_factory.mktemp("disk"))


EACH = (BEST, "evaluation.every_steps=1", "learning_rate=2e-3")
EACH_MEAN = ("checkpoint.average_last=3", "checkpoint.save_steps=1")


@pytest.mark.parametrize("engine", faults.engines())
@pytest.mark.parametrize("choice", [EACH, pytest.param(EACH_MEAN, marks=pytest.mark.matrix)], ids=["best", "mean"])
def test_a_second_model_in_a_row_that_cannot_be_kept_ends_the_run(
    ranks: Ranks, disk: Path, engine: str, choice: tuple[str, ...]
) -> None:
    """No file may be larger than 20 kB from step 3 on. The same command goes on as if nothing had happened."""
    name = f"{engine}-{choice[0]}".replace("=", "-")
    folder, code, said = faults.run(ranks, disk, engine, name, "3 all limit 20000", *choice)
    assert code == 1 and "Traceback" not in said and "error: " in said, said[-3000:]
    assert "ulimit -f); the weights after step 3 are not kept to be published, training goes on" in said
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "failed" and "ulimit -f" in manifest["error"]
    # The best of them are found when a step has been noted.
    assert [row["step"] for row in metrics(folder) if "loss" in row][-1] == (4 if choice is EACH else 3)
    assert not list((folder / "snapshots").glob("*.partial"))
    _, code, said = faults.run(ranks, disk, engine, name, "", *choice)
    assert code == 0, said[-3000:]
    straight, code, said = faults.run(ranks, disk, engine, f"{name}-straight", "", *choice)
    assert code == 0 and equal(folder, straight) and published(folder) == published(straight), said[-3000:]


def test_training_goes_on_after_a_model_that_could_not_be_kept(ranks: Ranks, disk: Path) -> None:
    """Those of steps 1 and 3 cannot be; that of step 2 is between them, and that of step 4 is the best that is left."""
    often = "".join(f"{step} all limit {size}\n" for step, size in ((1, 20000), (2, -1), (3, 20000), (4, -1)))
    further = ["learning_rate=1e-2", "checkpoint.save_steps=100", "checkpoint.rehearse=false"]
    folder, code, said = faults.run(ranks, disk, "single", "at-times", often, *EACH[:2], *further)
    assert code == 0 and said.count("are not kept to be published, training goes on") == 2, said[-3000:]
    assert published(folder)["step"] == 4
