"""Saves that training does not wait for, saves that fail, and what is left of a process that was killed in one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import pytest
from faults import engines, run, saved
from harness import losses, metrics
from ranks import Ranks

from toolkit.common import in_background
from toolkit.distributed.layout import World
from toolkit.recipe import Recipe
from toolkit.seal import fault, read_seal
from toolkit.train.checkpoints import sealing
from toolkit.train.checkpoints.sealing import aside, complete, complete_left
from toolkit.train.checkpoints.staging import Saves


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.home(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("engine", engines())
def test_training_goes_on_after_a_save_that_fails(ranks: Ranks, home: Path, engine: str) -> None:
    """No file may be larger than 20 kB while the first checkpoint is saved: it is left out, the others are not."""
    straight, code, said = run(ranks, home, engine, f"{engine}-straight")
    assert code == 0, said[-3000:]
    folder, code, said = run(ranks, home, engine, f"{engine}-once", "2 all limit 20000\n3 all limit -1")
    assert code == 0, said[-3000:]
    assert "larger than this process may write (ulimit -f); this checkpoint is not saved, training goes on" in said
    assert list(saved(folder)) == [4, 6] == list(saved(straight))
    assert losses(folder) == losses(straight)
    assert [row["step"] for row in metrics(folder)] == [row["step"] for row in metrics(straight)]
    assert not aside(folder / "checkpoints").exists()


@pytest.mark.parametrize("engine", engines())
def test_a_second_failure_in_a_row_ends_the_run_and_loses_nothing(ranks: Ranks, home: Path, engine: str) -> None:
    folder, code, said = run(ranks, home, engine, f"{engine}-twice", "4 all limit 20000")
    assert code == 1 and "error: " in said and "ulimit -f" in said, said[-3000:]
    assert "Traceback" not in said
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "failed" and "ulimit -f" in manifest["error"]
    assert list(saved(folder)) == [2]
    again, code, said = run(ranks, home, engine, folder.name)
    assert code == 0, said[-3000:]
    straight, _, _ = run(ranks, home, engine, f"{engine}-straight")
    assert losses(again) == pytest.approx(losses(straight), rel=1e-6)


def killed_in_save(straight: Path, name: str, step: int) -> tuple[Path, Path]:
    """A copy of a finished run as a kill leaves it when all files of a checkpoint are written aside, and the latter."""
    folder = straight.with_name(name)
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "final")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}), encoding="utf-8")
    for later in range(step + 1, 7):
        shutil.rmtree(folder / "checkpoints" / f"checkpoint-{later}", ignore_errors=True)
    newest = folder / "checkpoints" / f"checkpoint-{step}"
    values = {key: value for key, value in read_seal(newest).items() if key != "files"}
    (newest / "seal.json").unlink()
    written = aside(newest.parent) / newest.name
    written.parent.mkdir()
    newest.rename(written)
    note = written.with_suffix(".json")
    note.write_text(json.dumps(values), encoding="utf-8")
    return folder, note


def test_one_that_was_killed_before_a_save_counted_goes_on_from_it(ranks: Ranks, home: Path) -> None:
    straight, code, said = run(ranks, home, "single", "single-straight")
    assert code == 0, said[-3000:]
    folder, _ = killed_in_save(straight, "killed-behind", 4)
    _, code, said = run(ranks, home, "single", folder.name)
    assert code == 0, said[-3000:]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["resumed_from"].endswith("checkpoint-4")
    assert losses(folder) == losses(straight)


def test_what_was_not_written_in_full_is_not_completed(ranks: Ranks, home: Path) -> None:
    straight, _, _ = run(ranks, home, "single", "single-straight")
    folder, note = killed_in_save(straight, "killed-in-save", 6)
    note.unlink()
    _, code, said = run(ranks, home, "single", folder.name)
    assert code == 0, said[-3000:]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["resumed_from"].endswith("checkpoint-4")
    assert list(saved(folder)) == [4, 6] and not aside(folder / "checkpoints").exists()


def test_a_checkpoint_that_cannot_be_read_now_is_not_replaced_or_deleted(ranks: Ranks, home: Path) -> None:
    straight, _, _ = run(ranks, home, "single", "single-straight")
    folder, note = killed_in_save(straight, "unread", 6)
    complete(folder / "checkpoints", json.loads(note.read_text(encoding="utf-8")), 2)
    newest = folder / "checkpoints" / "checkpoint-6"
    sealed = (newest / "seal.json").rename(home / "sealed")
    (newest / "seal.json").symlink_to("/proc/self/mem")  # Reading it is an input/output error.
    _, code, said = run(ranks, home, "single", folder.name)
    assert code == 0 and list(saved(folder)) == [4, 6], said[-3000:]
    kept = folder / "checkpoints" / "unread-checkpoint-6"
    assert f"checkpoint-6 may be whole, and is kept as {kept.relative_to(home)}" in said
    (kept / "seal.json").unlink()
    sealed.rename(kept / "seal.json")
    assert not fault(kept)


def written_aside(folder: Path) -> Path:
    """A checkpoint of step 2 that all processes have written."""
    written = aside(folder) / "checkpoint-2"
    written.mkdir(parents=True)
    for name in ("weights", "state"):
        (written / name).write_text(name, encoding="utf-8")
    return written


def test_all_of_a_checkpoint_is_on_the_drive_before_it_counts(tmp_path: Path, order: list[str]) -> None:
    written_aside(tmp_path)
    complete(tmp_path, {"step": 2}, None)
    assert not fault(tmp_path / "checkpoint-2")
    before, after = order[: order.index("renamed")], order[order.index("renamed") :]
    assert {"weights", "state"} < {*before[: before.index("seal.json")]}
    assert before[-1] == "checkpoint-2", "its list of files"
    assert after == ["renamed", tmp_path.name]


RECIPE = Recipe.model_validate({"model": {"path": "a/b"}, "data": {"sources": ["c"]}})


def left(recipe: Recipe, target: Path) -> None:
    """No machine has taken anything in."""


@pytest.mark.parametrize("at", ["flush_all", "seal"])
@pytest.mark.parametrize("restarted", [True, False])
def test_what_was_not_flushed_counts_only_on_the_machine_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, restarted: bool
) -> None:
    """A file that was on its way to the drive when the machine lost its power may be there with nothing in it."""
    written = written_aside(tmp_path)

    def killed(*of: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sealing, at, killed)
        complete(tmp_path, {"step": 2}, None)
    if restarted:
        monkeypatch.setattr(sealing, "boot", lambda: "another")
    if restarted and at == "flush":
        (written / "weights").write_text("", encoding="utf-8")
    complete_left(tmp_path, RECIPE, take=left)
    assert (tmp_path / "checkpoint-2").exists() == (at == "seal" or not restarted)


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_killed_process_had_yet_to_delete_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """After the last save nothing else would. Where the newest checkpoint has been damaged since, all others stay."""
    limit = RECIPE.checkpoint.save_total_limit
    assert limit
    for step in range(-limit, 0):
        (tmp_path / f"checkpoint-{step + 2}").mkdir()
    written_aside(tmp_path)

    def killed(*of: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sealing, "rotate", killed)
        complete(tmp_path, {"step": 2}, limit)
    there = sorted(tmp_path.glob("checkpoint-*"))
    assert len(there) == limit + 1
    if not whole:
        (tmp_path / "checkpoint-2" / "weights").unlink()
    complete_left(tmp_path, RECIPE, take=left)
    assert sorted(tmp_path.glob("checkpoint-*")) == there[whole:]
    assert aside(tmp_path).exists() != whole


def test_what_a_disk_does_not_give_back_yet_is_in_no_saves_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network's disk a deleted file stays while another program reads it, and its folder with it. A note that
    stayed would have the next start delete later checkpoints."""
    left = aside(tmp_path) / "checkpoint-2" / ".nfs01"
    left.parent.mkdir(parents=True)
    left.touch()
    (note := aside(tmp_path) / "checkpoint-2.json").write_text('{"step": 2}', encoding="utf-8")
    monkeypatch.setattr(shutil, "rmtree", lambda place, ignore_errors: None)
    loaded: Any = None
    Saves(tmp_path, loaded, World(), {})._clear()
    assert left.exists() and not note.exists()


def test_a_fast_folder_that_cannot_be_cleared_does_not_undo_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))

    fast: Any = SimpleNamespace(place=tmp_path, send=lambda values: None, clear=clear)
    loaded: Any = SimpleNamespace(recipe=RECIPE)
    saves = Saves(tmp_path / "run" / "checkpoints", loaded, World(), {}, fast)
    (aside(saves.folder) / "checkpoint-3").mkdir(parents=True)
    saves._behind = in_background(lambda: saves._complete({"step": 3}, leads=True))
    assert saves.settled() is None and not fault(saves.folder / "checkpoint-3")
