"""Checkpoints that go through a fast folder: no step waits for the run folder's disk, nothing is lost or mixed up."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
from faults import run, saved
from harness import losses
from nodes import two_nodes
from ranks import Finished, Ranks

from toolkit.cache import is_held
from toolkit.common import UserError, in_background
from toolkit.distributed.layout import World
from toolkit.recipe import Recipe
from toolkit.train.checkpoints import fast_folder
from toolkit.train.checkpoints.fast_folder import FastFolder, copy_left, held, remove_dead, take_left, whole
from toolkit.train.checkpoints.sealing import aside

ENGINES = [name if name == "single" else pytest.param(name, marks=pytest.mark.matrix) for name in faults.ENGINES]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_go_on_while_a_checkpoint_is_copied_and_a_kill_loses_none(
    ranks: Ranks, home: Path, fast: Path, engine: str
) -> None:
    """What is saved after step 3 may be copied from step 6 on, or never: then the next start does it."""
    every, through, held = "checkpoint.save_steps=3", f"checkpoint.staging={fast}", f"3 all hold {fast}.go"
    straight, code, said = run(ranks, home, engine, f"{engine}-straight", "", every, "checkpoint.staging=none")
    assert code == 0, said[-3000:]
    folder, code, said = run(ranks, home, engine, f"{engine}-held", f"{held}\n6 0 release {fast}.go", every, through)
    assert code == 0, said[-3000:]
    assert json.loads(Path(f"{fast}.go").read_text()) == [6, []]
    assert list(saved(folder)) == [3, 6] and not aside(folder / "checkpoints").exists()
    assert losses(folder) == losses(straight) and [*fast.iterdir()] == []
    killed, code, _ = run(ranks, home, engine, f"{engine}-killed", f"{held}.not\n6 all kill", every, through)
    assert code and list((killed / "checkpoints").glob("checkpoint-*")) == []
    _, code, said = run(ranks, home, engine, killed.name, "", every, through)
    assert code == 0, said[-3000:]
    manifest = json.loads((killed / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["resumed_from"].endswith("checkpoint-3") and losses(killed) == losses(straight)
    assert [*fast.iterdir()] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_folder_that_is_full_and_a_run_folder_that_is_full(ranks: Ranks, home: Path, fast: Path, engine: str) -> None:
    through = f"checkpoint.staging={fast}"
    folder, code, said = run(ranks, home, engine, f"{engine}-once", "2 all limit 100000\n3 all limit -1", through)
    assert code == 0, said[-3000:]
    assert f"{fast}/toolkit-staging-" in said and "or set checkpoint.staging" in said
    assert "this checkpoint is not saved, training goes on" in said and list(saved(folder)) == [4, 6]
    folder, code, said = run(ranks, home, engine, f"{engine}-full", "2 0 fill 1", through)
    assert code == 0, said[-3000:]
    assert f"runs/{folder.name} cannot be written: its disk is full" in said
    assert list(saved(folder)) == [4, 6]
    folder, code, said = run(ranks, home, engine, f"{engine}-twice", "2 0 fill 1000", through)
    assert code == 1 and "Traceback" not in said and "its disk is full" in said, said[-3000:]
    # Its last checkpoint is still there, and the next start copies it.
    _, code, said = run(ranks, home, engine, folder.name, "", through)
    assert code == 0, said[-3000:]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["resumed_from"].endswith("checkpoint-4")
    assert len(losses(folder)) == 6


@pytest.mark.parametrize(
    "choice", ["checkpoint.keep_best=eval_loss", pytest.param("checkpoint.average_last=2", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_models_to_choose_from_are_written_behind_the_steps_too(
    ranks: Ranks, home: Path, fast: Path, engine: str, choice: str
) -> None:
    settings = [choice, "checkpoint.save_steps=3", "evaluation.every_steps=3", "learning_rate=1e-2"]
    settings = settings if "best" in choice else [*settings, "evaluation.at_start=false"]
    name = f"{engine}-{choice[11:15]}"
    straight, code, said = run(ranks, home, engine, f"{name}-straight", "", *settings)
    assert code == 0, said[-3000:]
    happens = f"3 all hold {fast}.go\n6 0 release {fast}.go"
    folder, code, said = run(ranks, home, engine, name, happens, *settings, f"checkpoint.staging={fast}")
    assert code == 0, said[-3000:]
    assert json.loads(Path(f"{fast}.go").read_text()) == [6, []]
    published = [json.loads((each / "manifest.json").read_text())["published"] for each in (straight, folder)]
    assert published[0] == published[1]
    # Killed before they are written: neither they nor their checkpoint count, and the next start makes both.
    killed, code, _ = run(
        ranks,
        home,
        engine,
        f"{name}-killed",
        f"3 all hold {fast}.not\n6 all kill",
        *settings,
        f"checkpoint.staging={fast}",
    )
    assert (
        code and not [*(killed / "snapshots").glob("step-3")] and not [*(killed / "checkpoints").glob("checkpoint-*")]
    )
    _, code, said = run(ranks, home, engine, killed.name, "", *settings, f"checkpoint.staging={fast}")
    assert code == 0, said[-3000:]
    assert json.loads((killed / "manifest.json").read_text())["published"] == published[0]


@pytest.mark.matrix
def test_a_rehearsal_reads_what_was_copied(ranks: Ranks, home: Path, fast: Path) -> None:
    settings = [f"checkpoint.staging={fast}", "checkpoint.save_steps=21", "max_steps=21"]
    folder, code, said = run(ranks, home, "zero2", "rehearsed", "2 all kill", *settings)
    assert code and list(saved(folder)) == [1], said[-3000:]
    _, code, said = run(ranks, home, "zero2", "full-rehearsed", "1 0 fill 1000", *settings)
    assert code == 1 and "its disk is full" in said and "Traceback" not in said, said[-3000:]


def test_who_is_asked_to_stop_copies_what_is_saved(ranks: Ranks, home: Path, fast: Path) -> None:
    folder, _, said = run(ranks, home, "zero2", "stopped", "5 all signal SIGTERM", f"checkpoint.staging={fast}")
    assert list(saved(folder)) == [4, 5], said[-3000:]
    assert [*fast.iterdir()] == []


def on_two_machines(ranks: Ranks, home: Path, name: str, happens: str, *settings: str) -> tuple[Path, list[Finished]]:
    """A training with a process on each of two machines, and how they ended."""
    with two_nodes() as nodes:
        started = []
        for rank, node in enumerate(nodes):
            world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            world |= {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29500", "FAULTS": happens}
            started.append(node.fork(ranks, home, *settings, f"output.name={name}", entry="faults", **world))
        return home / "runs" / name, [each.wait() for each in started]


@pytest.mark.parametrize(
    "engine", ["zero2", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("fsdp", "ddp"))]
)
def test_two_machines_that_are_killed_lose_no_step_that_both_have_taken_in(
    ranks: Ranks, home: Path, fast: Path, engine: str
) -> None:
    """What is saved after step 3 is never copied; then both copy their part at the next start. Where one of them has
    lost its part, nothing is made of the other's."""
    settings = ["recipe=small", f"strategy.name={engine}", f"checkpoint.staging={fast}", "checkpoint.save_steps=3"]
    straight, ended = on_two_machines(ranks, home, f"left-{engine}-straight", "", *settings)
    assert [each.returncode for each in ended] == [0, 0], "".join(each.stderr[-3000:] for each in ended)
    for name, lost in (("whole", False), ("lost", True)):
        happens = f"3 all hold {fast}.not\n6 all kill"
        folder, ended = on_two_machines(ranks, home, f"left-{engine}-{name}", happens, *settings)
        assert all(each.returncode for each in ended) and list((folder / "checkpoints").glob("checkpoint-*")) == []
        assert len([*fast.iterdir()]) == 2
        if lost:
            shutil.rmtree(max(fast.iterdir()))
        _, ended = on_two_machines(ranks, home, folder.name, "", *settings)
        assert [each.returncode for each in ended] == [0, 0], "".join(each.stderr[-3000:] for each in ended)
        resumed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["resumed_from"]
        assert (resumed or "").endswith("checkpoint-3") != lost
        assert losses(folder) == losses(straight) and [*fast.iterdir()] == []


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["zero2", "fsdp", "ddp"])
def test_each_of_two_machines_copies_its_own_part(ranks: Ranks, home: Path, fast: Path, engine: str) -> None:
    settings = ["recipe=small", f"strategy.name={engine}", f"checkpoint.staging={fast}", "checkpoint.save_steps=3"]

    def train(name: str, happens: str) -> tuple[Path, str]:
        folder, ended = on_two_machines(ranks, home, f"two-{engine}-{name}", happens, *settings)
        assert [each.returncode for each in ended] == [0, 0], "".join(each.stderr[-3000:] for each in ended)
        assert [*fast.iterdir()] == []
        return folder, " ".join(ended[0].stderr.split())

    folder, _ = train("held", f"3 1 hold {fast}.go\n6 0 release {fast}.go")
    assert json.loads(Path(f"{fast}.go").read_text()) == [6, []] and list(saved(folder)) == [3, 6]
    folder, said = train("full", "3 1 fill 1")
    assert "its disk is full; this checkpoint is not saved, training goes on" in said and list(saved(folder)) == [6]


VALUES = {"step": 3, "strategy": "ddp"}


def recipe(staging: object) -> Recipe:
    base = {"model": {"path": "m"}, "data": {"sources": ["d"]}}
    return Recipe.model_validate({**base, "checkpoint": {"save_steps": 3, "staging": str(staging)}})


def die(folder: FastFolder) -> None:
    """As its process would, of which only the lock goes."""
    folder._held.close()


def machine(monkeypatch: pytest.MonkeyPatch, fast: Path, run: Path, number: int = 0, of: int = 1) -> FastFolder:
    """The folder of one machine, with a part of a checkpoint in it."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{number}")
    folder = FastFolder(recipe(fast), World(number, 0, of, 1), 0, aside(run / "checkpoints"))
    (folder.place / "checkpoint-3").mkdir()
    (folder.place / "checkpoint-3" / f"part-{number}.pt").write_bytes(b"0123456789")
    return folder


def test_the_first_machine_waits_for_the_others_or_says_what_they_lack(
    tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = (machine(monkeypatch, fast, tmp_path / "run", number, 2) for number in range(2))
    target = aside(tmp_path / "run" / "checkpoints")
    target.mkdir(parents=True)
    sent = in_background(lambda: first.send(VALUES))
    with pytest.raises(TimeoutError):
        sent.result(0.5)
    other.send(VALUES)
    sent.result(10)
    assert sorted(file.name for file in (target / "checkpoint-3").iterdir()) == ["part-0.pt", "part-1.pt"]
    # None of them may be completed alone.
    assert take_left(recipe(fast), target) is None
    shutil.rmtree(target)
    target.mkdir()
    copy = shutil.copyfile
    full = lambda source, to: copy(source, "/dev/full" if "part-1" in str(to) else to)  # noqa: E731
    monkeypatch.setattr(shutil, "copyfile", full)
    sent = in_background(lambda: first.send(VALUES))
    with pytest.raises(OSError, match="No space left"):
        other.send(VALUES)
    with pytest.raises(UserError, match="its disk is full"):
        sent.result(10)
    shutil.rmtree(target)
    target.mkdir()
    first.patience = 0.0
    with pytest.raises(UserError, match="1 of 2 machines have not copied their part of checkpoint-3"):
        first.send(VALUES)


def _cut(place: Path) -> None:
    (place / "checkpoint-3" / "part-0.pt").write_bytes(b"01234")


def _other(place: Path) -> None:
    (place / "token").write_text("of another save")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": _cut,
    "missing": lambda place: (place / "checkpoint-3" / "part-0.pt").unlink(),
    "added": lambda place: (place / "checkpoint-3" / "more.pt").touch(),
    "another save": _other,
    "deleted": shutil.rmtree,
}


def test_parts_of_two_machines_are_one_checkpoint_or_none(
    tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [machine(monkeypatch, fast, tmp_path / "run", number, 2) for number in range(2)]
    target = aside(tmp_path / "run" / "checkpoints")
    target.mkdir(parents=True)

    def parts() -> list[str]:
        found = []
        for number in range(2):
            monkeypatch.setattr(socket, "gethostname", lambda number=number: f"host-{number}")
            with held(recipe(fast), target) as part:
                found.append(part)
        return found

    for folder in folders:
        die(folder)
    assert parts() == ["", ""]
    folders[0]._note(VALUES)
    assert [bool(part) for part in parts()] == [True, False] and whole(target, parts()) is None
    folders[1]._note({**VALUES, "step": 6})
    (folders[1].place / "checkpoint-6").mkdir()
    assert whole(target, parts()) is None, "of different steps"
    folders[1]._note(VALUES)
    both = parts()
    assert whole(target, both) == VALUES and whole(target, both[:1]) is None and whole(target, both[1:]) is None
    copy_left(recipe(fast), target, both[1])
    assert [file.name for file in (target / "checkpoint-3").iterdir()] == ["part-1.pt"]
    _cut(folders[0].place)
    assert whole(target, parts()) is None


@pytest.mark.parametrize("damage", [*DAMAGES, "machine started anew", "another run folder", "note", ""])
def test_only_what_is_there_in_full_is_copied_by_the_next_start(
    tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder = machine(monkeypatch, fast, tmp_path / "run")
    target = aside(tmp_path / "run" / "checkpoints")
    target.mkdir(parents=True)
    folder.send(VALUES)
    die(folder)
    shutil.rmtree(target / "checkpoint-3")
    if damage in DAMAGES:
        DAMAGES[damage](folder.place)
    elif damage == "machine started anew":
        monkeypatch.setattr(fast_folder, "boot", lambda: "another")
    elif damage == "another run folder":
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        target = aside(tmp_path / "copy" / "checkpoints")
    elif damage:
        (target / "staged-0.json").write_text('{"values": {"step": "../3"}}', encoding="utf-8")
    assert take_left(recipe(fast), target) == (None if damage else VALUES)
    assert (target / "checkpoint-3").exists() == (not damage)


def test_what_a_start_copies_is_not_removed_by_the_start_of_another_run(
    tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that were killed on one machine, say, and are started again at once."""
    folder = machine(monkeypatch, fast, tmp_path / "run")
    target = aside(tmp_path / "run" / "checkpoints")
    target.mkdir(parents=True)
    folder._note(VALUES)
    die(folder)
    copy = shutil.copyfile

    def copy_beside_another(source: Path, to: Path) -> None:
        machine(monkeypatch, fast, tmp_path / "other").remove()
        copy(source, to)

    monkeypatch.setattr(shutil, "copyfile", copy_beside_another)
    assert take_left(recipe(fast), target) == VALUES
    assert (target / "checkpoint-3" / "part-0.pt").read_bytes() == b"0123456789"
    # Once it is copied, it is removed; a start of this run that comes meanwhile waits for that.
    begun, removed = threading.Event(), threading.Event()

    def remove_slowly(place: Path, **kwargs: Any) -> None:
        begun.set()
        removed.wait(60)
        remove(place, **kwargs)

    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove_slowly)
    removing = in_background(lambda: remove_dead(fast))
    assert begun.wait(60)
    again = in_background(lambda: machine(monkeypatch, fast, tmp_path / "run"))
    with pytest.raises(TimeoutError):
        again.result(0.2)
    removed.set()
    removing.result(10)
    assert is_held(again.result(10).place / ".lock")


def test_what_dead_runs_left_goes_and_nothing_else(tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whose locks are held for as long as these are there.
    one = machine(monkeypatch, fast, tmp_path / "one")
    shutil.copytree(one.place, twin := fast / "toolkit-staging-dead")
    other = machine(monkeypatch, fast, tmp_path / "live")
    assert not twin.exists() and one.place.exists()
    live = other.place
    (fast / "toolkit-other").mkdir()
    foreign = [fast / "toolkit-other"]
    if os.geteuid() == 0:
        (stranger := fast / "toolkit-staging-stranger").mkdir()
        (stranger / ".lock").touch()
        os.chown(stranger, 12345, 12345)
        foreign.append(stranger)
    # Another machine's of this run, if they share the disk: it may hold a part that is not taken yet.
    shutil.copytree(live, part := fast / f"toolkit-staging-elsewhere-0-{live.name.rpartition('-')[2]}")
    remove_dead(fast, live)
    assert part.exists()
    remove_dead(fast)
    assert all(place.exists() for place in (one.place, live, *foreign)) and not part.exists()
    monkeypatch.setattr(fast_folder, "_REMOVAL_SECONDS", 0.0)
    with pytest.raises(UserError, match="another process uses"):
        machine(monkeypatch, fast, tmp_path / "live")
    if os.geteuid() == 0:
        os.chown(live, 12345, 12345)
        with pytest.raises(UserError, match="is another user's"):
            machine(monkeypatch, fast, tmp_path / "live")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"checkpoint.staging: .*/file/toolkit-staging-.* cannot be written"):
        machine(monkeypatch, tmp_path / "file", tmp_path / "run")
    with pytest.raises(
        UserError, match=r"checkpoint\.staging: this machine's part of a checkpoint takes 1,048,576 TiB"
    ):
        FastFolder(recipe(tmp_path / "fast"), World(), 2**60, aside(tmp_path / "run"))
    assert [*(tmp_path / "fast").iterdir()] == []  # Of a refused start nothing stays.


def test_a_start_that_fails_leaves_nothing_on_the_fast_disk(ranks: Ranks, home: Path, fast: Path) -> None:
    shutil.copytree(home / "llama", broken := home / "broken")
    os.truncate(broken / "model.safetensors", 100_000)
    _, code, said = run(ranks, home, "single", "broken", "", f"checkpoint.staging={fast}", "model.path=broken")
    assert code and "broken" in said and fast.is_dir() and [*fast.iterdir()] == []


@pytest.mark.parametrize("gone", [True, False])
def test_which_of_the_two_disks_does_not_answer_is_said(
    tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    one = machine(monkeypatch, fast, tmp_path / "run")
    (target := aside(tmp_path / "run" / "checkpoints")).mkdir(parents=True)
    part = one.place / "checkpoint-3" / "part-0.pt"
    if gone:
        listed = fast_folder._files
        monkeypatch.setattr(fast_folder, "_files", lambda folder: listed(folder) | {"part-1.pt": 1})
    else:
        part.unlink()
        part.symlink_to("/proc/self/mem")  # Reading it is an input/output error.
    with pytest.raises(
        UserError, match="was deleted before" if gone else r"cannot be read: Input/output error"
    ) as said:
        one.send(VALUES)
    assert str(one.place) in said.value.what and "checkpoint.staging" in said.value.change
    shutil.rmtree(target / "checkpoint-3")
    part.unlink(missing_ok=True)
    part.write_bytes(b"0123456789")
    monkeypatch.undo()
    (target / "checkpoint-3" / "part-0.pt").mkdir(parents=True)
    with pytest.raises(OSError) as of_target:
        one.send(VALUES)
    assert str(of_target.value.filename) == str(target / "checkpoint-3" / "part-0.pt")
