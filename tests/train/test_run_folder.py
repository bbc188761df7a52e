"""The run folder: whose it is, whether the disk will hold it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import write_recipe
from safetensors.torch import save_file
from second_user import NOBODY, as_nobody, shared
from small import populate, set_up

from toolkit.common import UserError, in_background
from toolkit.distributed.layout import World, batch_layout
from toolkit.models.load import ModelSource
from toolkit.recipe import Loaded, load
from toolkit.recipe.load import load_resolved
from toolkit.report.load import read_run
from toolkit.report.terminal import Progress
from toolkit.seal import contents, read_seal, seal
from toolkit.train import decide
from toolkit.train import model as loading
from toolkit.train.checkpoints import checkpoint
from toolkit.train.identity import recipe_hash
from toolkit.train.run_folder import (
    RunFolder,
    claim,
    claim_together,
    hash_files,
    stages,
    versions,
)

__all__ = ["shared"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a recipe `small`."""
    write_recipe(tmp_path, "small", "model: {path: nowhere}\ndata: {sources: [a.jsonl]}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(*overrides: str) -> Loaded:
    return load("small", list(overrides))


@pytest.mark.parametrize(
    ("settings", "moves"),
    [
        (["description=other"], False),
        (["strategy=zero2", "strategy.reduce_bucket_size=7"], False),
        (["batch.micro_batch_tokens=7"], False),
        (["compile=layers"], False),
        (["data.num_proc=1"], False),
        (["evaluation.every_steps=3"], False),
        (["output.name=x"], False),
        (["schedule.early_stopping_min_delta=0.1"], False),
        (["checkpoint.save_steps=7"], False),
        (["checkpoint.keep_best=eval_loss"], True),
        (["checkpoint.average_last=3"], True),
        (["schedule.early_stopping_patience=3"], True),
        (["method.name=lora"], True),
        (["data.eval_split=0.5"], True),
        (["batch.global_batch_size=7"], True),
        (["schedule.max_steps=7"], True),
        (["objective=language_modelling"], True),
        (["tf32=false"], True),
    ],
    ids=str,
)
def test_which_settings_another_run_is_told_by(settings: list[str], moves: bool) -> None:
    assert (recipe_hash(small(*settings).recipe) != recipe_hash(small().recipe)) == moves
    if moves:
        stopped()
        with pytest.raises(UserError, match=f"differs in {settings[0].partition('=')[0]}"):
            claim(small(*settings), 2)


@pytest.mark.parametrize(
    ("chooses", "changed"),
    [
        ("checkpoint.keep_best=eval_loss", "evaluation.every_steps=3"),
        ("checkpoint.average_last=3", "checkpoint.save_steps=7"),
        ("schedule.early_stopping_patience=3", "evaluation.every_steps=3"),
        ("schedule.early_stopping_patience=3", "schedule.early_stopping_min_delta=0.1"),
    ],
)
def test_what_decides_which_model_is_published_moves_the_weights(chooses: str, changed: str) -> None:
    stopped(chooses)
    (Path("runs/small") / "recipe.yaml").write_text(small(chooses).to_yaml())
    with pytest.raises(UserError, match=rf"differs in {changed.partition('=')[0]} \("):
        claim(small(chooses, changed), 2)


def test_versions_are_those_of_the_libraries_that_decide_a_runs_numbers() -> None:
    """Without those that are not installed, such as flash-attn where there is no GPU."""
    libraries = {
        *("accelerate-toolkit", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "bitsandbytes"),
        *("datasets", "hydra-core", "omegaconf", "pydantic", "tokenizers", "safetensors", "flash-attn"),
    }
    installed = {each.name.lower() for each in metadata.distributions() if each.name}
    assert versions() == {name: metadata.version(name) for name in libraries & installed}


def test_only_one_process_claims_and_all_get_the_same_folder() -> None:
    saved = stopped()
    answers: list[Any] = []

    class Together:
        """Stands for the rendezvous of two processes."""

        def __init__(self, rank: int) -> None:
            self.world = World(rank, rank, 2, 2)

        def exchange(self, topic: str, value: Any, judge: Any) -> Any:
            assert (value is None) == bool(self.world.rank)
            answers.append(value if value is not None else answers[0])
            return json.loads(json.dumps(judge({0: answers[0], 1: None})))

    for rank in (0, 1):
        assert claim_together(small(), Together(rank)) == RunFolder(Path("runs/small"), False, saved, {}, False)  # type: ignore[arg-type]


def test_a_name_with_a_folder_becomes_one_folder(place: Path) -> None:
    write_recipe(place, "nested/tiny", "model: {path: nowhere}\ndata: {sources: [a.jsonl]}\n")
    assert claim(load("nested/tiny", []), 1).path == Path("runs/nested-tiny")


def test_a_folder_that_cannot_be_written_is_told(place: Path) -> None:
    (place / "file").write_text("")
    with pytest.raises(UserError, match=r"file/small cannot be written: .*file is no folder") as refused:
        claim(small("output.dir=file"), 1)
    assert refused.value.change == "set output.dir to a folder you own"
    (place / "link").symlink_to("gone")
    for overrides in (["output.dir=link"], ["output.dir=.", "output.name=link"]):
        with pytest.raises(UserError, match=r"cannot be written: .*link is a link to gone, which is not there"):
            claim(small(*overrides), 1)


@pytest.mark.parametrize(
    ("left", "foreign"),
    [
        ("recipe.yaml", False),
        ("manifest.json", False),
        ("audit.json", False),
        (".lock", False),
        ("metrics.jsonl.partial", False),
        ("metrics.jsonl", True),
        ("audit.json.bak", True),
    ],
)
def test_what_an_attempt_leaves_that_never_took_a_step(place: Path, left: str, foreign: bool) -> None:
    (place / "runs" / "small").mkdir(parents=True)
    (place / "runs" / "small" / left).touch()
    if not foreign:
        assert claim(small(), 1) == RunFolder(Path("runs/small"))
    else:
        with pytest.raises(UserError, match="holds files that are no run"):
            claim(small(), 1)


def test_attempt_without_results_can_be_repeated_with_another_recipe(place: Path) -> None:
    claim(small(), 1).update_manifest(hashes={"recipe": recipe_hash(small().recipe)}, status="failed")
    assert claim(small("seed=1"), 1).path == Path("runs/small")


def test_foreign_folder_is_refused(place: Path) -> None:
    (place / "runs" / "small").mkdir(parents=True)
    (place / "runs" / "small" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"output\.name"):
        claim(small(), 1)
    assert [file.name for file in (place / "runs" / "small").iterdir()] == ["thesis.tex"]


def test_file_in_place_of_the_folder_is_refused(place: Path) -> None:
    (place / "runs").mkdir()
    (place / "runs" / "small").write_text("a file")
    with pytest.raises(UserError, match="is a file"):
        claim(small(), 1)
    assert claim(small("checkpoint.resume=never"), 1).path == Path("runs/small-2")


def test_hash_follows_content_and_trusts_a_hub_blobs_name(place: Path) -> None:
    one, two = place / "a.safetensors", place / "b.safetensors"
    one.write_bytes(b"weights")
    two.write_bytes(b"other weights")
    before = hash_files([one, two])
    assert hash_files([two, one]) == before
    one.write_bytes(b"Weights")
    assert hash_files([one, two]) != before
    blob = place / ("ab" * 32)
    blob.write_bytes(b"never read")
    (place / "c.safetensors").symlink_to(blob)
    named = hash_files([place / "c.safetensors"])
    blob.write_bytes(b"still not read")
    assert hash_files([place / "c.safetensors"]) == named


def test_two_threads_write_the_manifest_together(place: Path) -> None:
    folder = claim(small(), 1)
    writing = [in_background(lambda n=n: folder.update_manifest(hashes={str(n): "x"})) for n in range(20)]
    folder.update_manifest(status="running")
    assert [each.result() for each in writing] == [None] * 20
    assert len(folder.manifest().hashes) == 20 and folder.manifest().status == "running"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_manifest_whose_disk_does_not_answer_is_not_replaced_by_an_empty_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = claim(small(), 1)
    folder.update_manifest(hashes={"recipe": recipe_hash(small().recipe)}, status="finished")
    before = (folder.path / "manifest.json").read_bytes()
    (folder.path / "metrics.jsonl").touch()

    def read(file: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(file))

    with monkeypatch.context() as patch:
        patch.setattr("toolkit.report.load.read_file", read)
        for use in (lambda: folder.update_manifest(status="running"), lambda: claim(small(), 1)):
            with pytest.raises(OSError, match=os.strerror(number)):
                use()
        assert read_run(folder.path).problems  # A report is made all the same.
    assert [file.name for file in folder.path.glob("manifest*")] == ["manifest.json"]
    assert (folder.path / "manifest.json").read_bytes() == before


def test_nobody_waits_until_the_model_is_hashed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    populate(place, "llama")
    hashing = threading.Event()

    def slowly(files: list[Path]) -> str:
        assert hashing.wait(60)
        return hash_files(files)

    load, weights = ModelSource.load, place / "llama" / "model.safetensors"
    weights.rename(place / "not downloaded yet")
    weights.touch()  # A folder without weights is refused before.

    def downloading(source: ModelSource, *arguments: Any) -> Any:
        (place / "not downloaded yet").replace(weights)
        return load(source, *arguments)

    monkeypatch.setattr(loading, "hash_files", slowly)
    monkeypatch.setattr(ModelSource, "load", downloading)
    session = set_up()
    assert "model" not in session.folder.manifest().hashes
    hashing.set()
    session.hashed.result()
    assert session.folder.manifest().hashes["model"] == hash_files(session.source.weight_files())


HASHES = {"data": "0123", "model": "4567"}
LAYOUT = batch_layout(load("smollm2_135m_full", ["global_batch_size=6", "micro_batch_size=1"]).recipe, 2)


def stopped(*overrides: str, step: int = 3, hashes: dict[str, str] = HASHES) -> Path:
    """The checkpoint of a run that was stopped; its folder is claimed and described."""
    folder = claim(small(*overrides), 2)
    (folder.path / "recipe.yaml").write_text(small(*overrides).to_yaml())
    folder.describe(small(*overrides), LAYOUT, hashes)
    saved = folder.checkpoints / f"checkpoint-{step}"
    saved.mkdir(parents=True)
    (saved / "weights").write_text("content")
    seal(saved, checkpoint.record(step, small(*overrides), 2, {}))
    return saved


def test_manifest_says_how_a_run_was_started_and_continued(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["toolkit/run.py", "recipe=small", "description=two words"])
    saved = stopped("extra.lora.bias=all", "output.name=first")
    folder = RunFolder(Path("runs/first"))
    first = folder.manifest()
    # One recipe has many runs.
    assert (first.name, first.status) == ("first", "running")
    assert first.command == "python toolkit/run.py recipe=small 'description=two words'"
    assert first.started and not first.continued and not first.finished and not first.resumed_from
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", first.started)
    assert first.versions["python"] == platform.python_version() and {"torch", "trl"} <= first.versions.keys()
    assert first.saved_by == {"strategy": "ddp", "world_size": 2} and first.batch == LAYOUT
    assert first.hashes == {"recipe": recipe_hash(small("extra.lora.bias=all").recipe), **HASHES}
    assert first.extra == {"lora.bias": "all"} and first.git is None
    assert first.hardware and first.hardware.cpu_cores and first.hardware.ram_bytes

    folder.update_manifest(finished="now", error="none", status="interrupted")
    assert folder.manifest().hashes == first.hashes, "what is not named stays"
    again = small("extra.lora.bias=all", "output.name=first", "checkpoint.save_steps=7")
    claim(again, 2).describe(again, LAYOUT, HASHES, notes=["something"])
    second = folder.manifest()
    assert (second.started, second.finished, second.status) == (first.started, None, "running")
    assert second.continued and second.resumed_from == str(saved) and second.notes == ["something"]


def test_manifest_names_the_commit_of_the_folder_and_whether_it_was_changed(place: Path) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "recipes"], ["commit", "-q", "-m", "recipe"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    for changed in (False, True):
        folder = RunFolder(place)
        folder.describe(small(), LAYOUT, {})
        noted = folder.manifest().git
        assert noted and (noted.commit, noted.dirty) == (commit, changed)


@pytest.mark.parametrize("kind", HASHES)
def test_a_run_does_not_continue_on_another_model_or_other_data(kind: str) -> None:
    saved = stopped()
    folder, other = claim(small(), 2), {**HASHES, kind: "89ab"}
    assert folder.resume_from == saved
    with pytest.raises(UserError, match=rf"the {kind} of runs/small changed .*\({HASHES[kind]} then, 89ab now\)"):
        folder.describe(small(), LAYOUT, other)
    assert folder.manifest().hashes[kind] == HASHES[kind]
    folder.describe(small(), LAYOUT, HASHES)
    # Whoever names a checkpoint wants that one, under whatever data.
    named = small(f"checkpoint.resume={saved}")
    claim(named, 2).describe(named, LAYOUT, HASHES)
    new = claim(small("checkpoint.resume=never"), 2)
    new.describe(small("checkpoint.resume=never"), LAYOUT, other)
    assert new.path == Path("runs/small-2") and new.resume_from is None


@pytest.mark.parametrize(("left", "fits"), [(400, True), (300, False)])
def test_a_disk_needs_room_only_for_what_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, left: int, fits: bool
) -> None:
    """A run for which the disk did when it began goes on there."""
    stopped()
    folder = claim(small(), 2)
    (folder.checkpoints / "checkpoint-3" / "more").write_bytes(bytes(600 - folder.kept_bytes()))
    guard: Any = SimpleNamespace(
        plan=SimpleNamespace(notes=[], disk=None), loaded=small(), check=lambda: pytest.fail("it is forced")
    )
    monkeypatch.setattr(decide, "run_folder_bytes", lambda *of: 1000)
    monkeypatch.setattr(decide, "brief_text", lambda plan: SimpleNamespace(plain=""))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=left))
    with nullcontext() if fits else pytest.raises(UserError, match="checkpoints and models still need"):
        decide._checked(guard, folder, Progress(), force=True)


def test_a_start_that_is_accepted_removes_what_killed_ones_have_left_of_files() -> None:
    stopped()
    left = Path("runs/small/.held_out_rows.json.7.89ab.partial")
    left.write_text("[", encoding="utf-8")
    folder = claim(small(), 2)
    with pytest.raises(UserError, match="changed since the run began"):
        folder.describe(small(), LAYOUT, {"data": "89ab"})
    assert left.exists()
    folder.describe(small(), LAYOUT, HASHES)
    assert not left.exists()


def test_what_was_not_hashed_when_a_run_ended_is_not_compared() -> None:
    stopped(hashes={"data": "0123"})
    folder = claim(small(), 2)
    folder.describe(small(), LAYOUT, HASHES)
    assert folder.manifest().hashes.items() >= HASHES.items()


def test_an_attempt_without_checkpoint_starts_anew_on_other_data() -> None:
    for data in ("0123", "89ab"):
        folder = claim(small(), 2)
        folder.describe(small(), LAYOUT, {"data": data})
        assert folder.resume_from is None and folder.manifest().hashes["data"] == data


def test_folder_of_another_recipe_is_refused_with_the_keys_that_move_weights(place: Path) -> None:
    stopped()
    with pytest.raises(UserError) as refused:
        claim(small("seed=1", "schedule.max_steps=5", "description=other"), 2)
    assert "differs in schedule.max_steps (None there, 5 here), seed (42 there, 1 here)" in refused.value.what
    assert "description" not in refused.value.what
    many = [f"extra.training_arguments.{key}=1" for key in ("neftune_noise_alpha", "router_aux_loss_coef")]
    with pytest.raises(UserError) as refused:
        claim(small("seed=1", "optimizer={beta1: 0.5, beta2: 0.5, weight_decay: 0.5}", "seq_len=8", *many), 2)
    assert refused.value.what.count(" there, ") == 5, "no more than can be read"
    (place / "runs" / "small" / "recipe.yaml").unlink()
    with pytest.raises(UserError, match="no readable recipe"):
        claim(small("seed=1"), 2)


def test_a_claim_says_where_to_go_on_and_what_it_passes_over(place: Path) -> None:
    whole, cut = stopped(), stopped(step=9)
    (cut / "weights").unlink()
    why = {cut: "is damaged: it lacks weights"}
    assert claim(small(), 2) == RunFolder(Path("runs/small"), False, whole, why, False)
    elsewhere = claim(small(f"checkpoint.resume={whole}", "output.name=new"), 2)
    assert elsewhere == RunFolder(Path("runs/new"), False, whole, {}, False)
    assert elsewhere.final == Path("runs/new/final")
    final = write_model(Path("runs/small"))
    completed = claim(small(), 2)
    assert completed == RunFolder(Path("runs/small"), False, final, {}, False) and completed.is_trained
    RunFolder(Path("runs/small")).update_manifest(status="finished")
    assert claim(small(), 2) == RunFolder(Path("runs/small"), finished=True)
    for number in (2, 3):
        new = claim(small("checkpoint.resume=never"), 2)
        assert (new.path, new.resume_from) == (Path(f"runs/small-{number}"), None)
        (new.path / "metrics.jsonl").touch()


@pytest.mark.parametrize("name", ["seal.json", "weights"])
def test_a_run_does_not_begin_anew_because_no_checkpoint_can_be_read_now(place: Path, name: str) -> None:
    """It would delete them."""
    whole, later = stopped(), stopped(step=9)
    for each in (whole, later):
        (each / "weights").write_bytes(b"")
        seal(each, read_seal(each))
    with _unread(later / name):
        assert claim(small(), 2).resume_from == whole
        with _unread(whole / name), pytest.raises(UserError) as refused:
            claim(small(), 2)
    assert refused.value.what == f"{whole / name} cannot be read: its disk does not answer (Input/output error)"
    assert claim(small(), 2).resume_from == later


def test_what_cannot_be_read_now_is_kept_whatever_is_kept_of_it_already(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = stopped()
    for number in ("", "-2"):
        later = stopped(step=9)
        (later / "seal.json").unlink()
        (later / "seal.json").symlink_to("/proc/self/mem")  # Reading it is an input/output error.
        for named in ([], [f"checkpoint.resume={whole}"]):
            claimed = claim(small(*named), 2)
            assert claimed.resume_from == whole and [*claimed.passed_over] == [later]
            # It makes no room for others.
            assert claimed.kept_bytes() == sum(file.stat().st_size for file in whole.iterdir())
        checkpoint.keep_unread(claimed.passed_over)
        kept = later.with_name(f"unread-checkpoint-9{number}")
        assert kept.is_dir() and not later.exists() and f"is kept as {kept}" in caplog.text


def test_a_start_that_cannot_keep_what_it_cannot_read_changes_nothing(shared: Path) -> None:
    """Nor does it set the manifest aside, without which the folder is no run's."""
    run = shared / "run"
    unread = run / "checkpoints" / "checkpoint-9"
    unread.mkdir(parents=True)
    (run / "manifest.json").write_text("{", encoding="utf-8")
    os.chown(run, NOBODY, NOBODY)
    imports = (
        "from pathlib import Path\nfrom toolkit.recipe import load\nfrom toolkit.train.run_folder import RunFolder\n"
        "loaded = load('smollm2_135m_lora_demo', [])"
    )
    code = (
        f"run = Path({str(run)!r})\n"
        "why = {run / 'checkpoints' / 'checkpoint-9': 'cannot be read: …', run / 'manifest.json': 'cannot be read'}\n"
        "folder = RunFolder(run, passed_over=why, accepted=False)\n"
        "try: folder.describe(loaded, None, {})\nfinally: print(folder.accepted)"
    )
    done = as_nobody(shared, imports, code)
    assert "checkpoint-9 may be whole, and cannot be kept as unread-checkpoint-9: Permission denied" in done.stderr
    assert "move it away, or wait until the disk answers" in done.stderr and done.stdout == "False\n"
    assert unread.is_dir() and sorted(each.name for each in run.iterdir()) == ["checkpoints", "manifest.json"]


@contextmanager
def _unread(file: Path) -> Iterator[None]:
    """Has reading a file be an input/output error."""
    content = file.read_bytes()
    file.unlink()
    file.symlink_to("/proc/self/mem")
    yield
    file.unlink()
    file.write_bytes(content)


def test_a_folder_that_is_trained_in_is_held() -> None:
    folder = claim(small(), 1)
    with folder.held(), pytest.raises(UserError, match="another process is training in runs/small"), folder.held():
        pass
    with folder.held():
        pass


def test_a_folder_is_not_claimed_before_the_one_that_trains_in_it_has_saved() -> None:
    """What it saves when it ends would be trained anew, and deleted."""
    folder = claim(small(), 1)
    with folder.held():
        with pytest.raises(UserError, match="another process is training in runs/small"):
            claim(small(), 1)
        assert claim(small("checkpoint.resume=never"), 1).path.name == "small-2"
    assert claim(small(), 1).path == folder.path == claim(small("checkpoint.resume=never"), 1).path


def test_stages_are_those_of_the_adapter_and_itself(place: Path) -> None:
    assert stages(None) == []
    first = place / "runs" / "first" / "final"
    assert stages(str(first)) == [str(first)]
    second = RunFolder(place / "runs" / "second")
    second.path.mkdir(parents=True)
    second.update_manifest(started_from=stages(str(first)))
    assert stages(str(second.final)) == [str(first), str(second.final)]


def test_run_folders_of_before_micro_batches_were_auto_are_read(place: Path) -> None:
    file = place / "recipe.yaml"
    written, count = re.subn(r"micro_batch_size: \S+", "micro_batch_size: null", small().to_yaml())
    file.write_text(written)
    assert count == 1 and load_resolved(file).batch.micro_batch_size == "auto"


def write_model(run: Path) -> Path:
    """A model that the run has published."""
    final = run / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    save_file({"weight": torch.ones(4)}, final / "model.safetensors")
    RunFolder(run).update_manifest(final={"step": 3, "files": contents(final)})
    return final


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shutil.rmtree, "is damaged: it lacks config.json, model.safetensors"),
        (lambda final: (final / "config.json").unlink(), "is damaged: it lacks config.json"),
        (lambda final: os.truncate(final / "model.safetensors", 80), "is damaged: model.safetensors differs"),
        (lambda final: (final / "config.json").write_bytes(b"()"), "is damaged: config.json differs"),
        (lambda final: RunFolder(final.parent).update_manifest(final=None), "has no record of its files"),
    ],
    ids=["folder", "config", "cut", "same-size", "record"],
)
def test_a_finished_run_without_its_model_goes_on_from_its_last_checkpoint(
    damage: Callable[[Path], Any], reason: str
) -> None:
    saved = stopped()
    RunFolder(Path("runs/small")).update_manifest(status="finished")
    damage(write_model(Path("runs/small")))
    again = claim(small(), 2)
    assert not again.finished and again.resume_from == saved
    assert again.passed_over[again.final].startswith(reason)
    shutil.rmtree(saved)
    with pytest.raises(UserError, match=f"final {reason}.*, and no checkpoint is left to go on from"):
        claim(small(), 2)


@pytest.mark.parametrize("key", ["model.path", "model.adapter"])
def test_a_damaged_model_of_another_run_is_refused_before_anything_is_written(place: Path, key: str) -> None:
    final = write_model(place / "runs" / "first")
    loaded = small("output.name=second")
    claim(dataclasses.replace(loaded, recipe=loaded.recipe.with_values({key: str(final)})), 1)
    shutil.rmtree(place / "runs" / "second")
    (final / "config.json").write_bytes(b"()")
    with pytest.raises(UserError, match=r"first/final is damaged: config\.json differs from what was saved"):
        claim(dataclasses.replace(loaded, recipe=loaded.recipe.with_values({key: str(final)})), 1)
    assert not (place / "runs" / "second").exists()


@pytest.mark.usefixtures("place")
def test_a_recipe_that_expands_without_an_end_is_none_that_can_be_read() -> None:
    """Read as recipes are; PyYAML would merge for hours."""
    run = stopped().parents[1]
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12))]
    (run / "recipe.yaml").write_text("\n".join(lines))
    began = time.process_time()
    with pytest.raises(UserError, match="the folder has no readable"):
        claim(small("seed=2"), 2)
    assert time.process_time() - began < 5
