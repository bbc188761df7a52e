"""Checkpoints that are taken in by a fast folder of each machine, and copied to the run folder behind the steps.

On a disk whose writes return only when the data is there, such as a network's, training would wait for every byte. All
processes of a machine write into its folder instead; the first of them copies what they wrote into the run folder,
beside the next steps. Of several machines each leaves a file there that names its part, or says why it failed: the
first process completes the checkpoint when it sees all of them. No collective operation is needed for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import Timeout

from toolkit.cache import locked
from toolkit.common import UserError, in_a_line, in_background
from toolkit.distributed.layout import World
from toolkit.distributed.nvme import remove_abandoned
from toolkit.files import check_disk, write_json
from toolkit.recipe import Recipe
from toolkit.recipe.sections import MEMORY
from toolkit.seal import contents
from toolkit.train.checkpoints.storage import boot, flush, unwritable

KEY = "checkpoint.staging"
_FOLDERS, _NOTES = "toolkit-staging-", "staged-*.json"
"""How these folders are called, and notes in the run folder of what each one holds in full."""
_PATIENCE = 300.0
"""Clients of network file systems see each other's files up to a minute late."""
_REMOVAL_SECONDS = 5.0
"""How long is waited for another run's start, which may be removing what this run has left here."""
_STREAMS = 8
"""Files copied at once: a network's disk gives one of them only a part of its rate."""


def remove_dead(root: Path, own: Path | None = None) -> None:
    """Removes what runs of this user that were killed have left on this machine, but for the run of one folder: where
    its machines share a disk, the others may not have taken theirs yet."""
    remove_abandoned(root, f"{_FOLDERS}*", spared=f"*-{own.name.rpartition('-')[2]}" if own else "")


class FastFolder:
    """Where the processes of one machine write the checkpoints of one run.

    Args:
        recipe: With `checkpoint.staging` decided.
        part: Bytes that they write of a checkpoint, by the plan; 0 where it is not known.
        target: The folder, in the run folder, into which it is copied.

    Attributes:
        patience: Seconds without a byte more after which another machine's part is given up.

    Raises:
        UserError: If it cannot be used, on the machine's first process.
    """

    def __init__(self, recipe: Recipe, world: World, part: int, target: Path) -> None:
        self.patience = _PATIENCE
        self.place = _place(recipe, target)
        self.leads = world.local_rank == 0
        self._target, self._rank, self._machines = target, world.rank, world.num_nodes
        self._held = contextlib.ExitStack()
        if self.leads:
            self._take(part)

    def _take(self, part: int) -> None:
        change = f"set {KEY} to a folder on a fast disk of each machine, or to none"
        try:
            locks = False
            while not locks:
                self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
                # Where all may write, somebody else may have made it.
                if self.place.is_symlink() or self.place.stat().st_uid != os.geteuid():
                    raise UserError(f"{KEY}: {self.place} is another user's", change)
                with contextlib.suppress(FileNotFoundError):  # Who was waited for has removed it.
                    self._held.enter_context(locked(self.place / ".lock", timeout=_REMOVAL_SECONDS))
                    locks = True
        except Timeout:
            raise UserError(f"{KEY}: another process uses {self.place}", "wait for it, or set output.name") from None
        except OSError as error:
            raise UserError(f"{KEY}: {self.place} cannot be written: {error.strerror}", change) from error
        remove_dead(self.place.parent, self.place)
        self.clear()
        try:
            check_disk(self.place, part, f"{KEY}: this machine's part of a checkpoint takes", change)
        except UserError:
            self.remove()
            raise

    def clear(self) -> None:
        """Makes room for the next checkpoint."""
        self.place.mkdir(mode=0o700, exist_ok=True)
        for each in self.place.glob("[!.]*"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()

    def send(self, values: Mapping[str, Any]) -> None:
        """Copies this machine's part of a checkpoint into the run folder; the first process then waits for the others.

        Args:
            values: What the checkpoint is to be sealed with.

        Raises:
            OSError: If the run folder cannot be written.
            UserError: If files are missing, or another machine's part does not come.
        """
        name = _name(values)
        self._note(values)
        if self._rank == 0:
            _copy(self.place / name, self._target / name)
            self._others(name)
            return
        told: dict[str, Any] = {"files": _files(self.place / name)}
        try:
            _copy(self.place / name, self._target / name)
        except Exception as error:
            # Also for what tells of it.
            for file in told["files"]:
                (self._target / name / file).unlink(missing_ok=True)
            reason = unwritable(self._target.parent.parent, error, writing=True) or error
            reason = reason if isinstance(reason, UserError) else UserError(in_a_line(reason))
            told["error"] = [reason.whole, reason.change]
            raise
        finally:
            write_json(self._target / f"part-{self._rank}.json", told)

    def _note(self, values: Mapping[str, Any]) -> None:
        """Has the next start on these machines finish what this one may not come to."""
        token = secrets.token_hex(8)
        (self.place / "token").write_text(token, encoding="utf-8")
        told = {"token": token, "boot": boot(), "files": _files(self.place / _name(values)), "values": values}
        write_json(self._target / _NOTES.replace("*", str(self._rank)), {**told, "machines": self._machines})

    def _others(self, name: str) -> None:
        """Waits until all that other machines were to copy is there."""
        copied, since = -1, time.monotonic()
        while True:
            parts = [part for file in self._target.glob("part-*.json") if (part := _read(file))]
            if failed := [part["error"] for part in parts if "error" in part]:
                raise UserError(*failed[0])
            named = {file: size for part in parts for file, size in part["files"].items()}
            if len(parts) == self._machines - 1 and named.items() <= _files(self._target / name).items():
                return
            if (now := sum(_files(self._target).values())) != copied:
                copied, since = now, time.monotonic()
            if time.monotonic() - since > self.patience:
                raise UserError(
                    f"{self._machines - 1 - len(parts)} of {self._machines} machines have not copied their part of "
                    f"{name} from {self.place} to {self._target}",
                    f"look at these machines, or set {KEY}=none",
                )
            time.sleep(0.2)

    def remove(self) -> None:
        """Gives it back, when nothing is left to be copied."""
        if self.leads:
            shutil.rmtree(self.place, ignore_errors=True)
            self._held.close()


def take_left(recipe: Recipe, target: Path) -> dict[str, Any] | None:
    """Copies the checkpoint that a run on one machine, which was killed, had taken in in full, if it is still there.

    Args:
        target: The folder, in the run folder, into which it was to be copied.

    Returns:
        What it is to be sealed with; None if there is none.

    Raises:
        OSError: If the run folder cannot be written.
    """
    with held(recipe, target) as part:
        if found := whole(target, [part]):
            copy_left(recipe, target, part)
    return found


def is_left(target: Path) -> bool:
    """Whether there is anything for `take_left`."""
    return any(target.glob(_NOTES))


@contextlib.contextmanager
def held(recipe: Recipe, target: Path) -> Iterator[str]:
    """Names the part of a checkpoint on its way to `target` that is on this machine in full; empty if there is none, or
    another process holds it. It stays meanwhile: another run that starts here removes what dead ones have left."""
    place = _place(recipe, target)
    with contextlib.ExitStack() as stack:
        part = ""
        with contextlib.suppress(Timeout, OSError):
            if (place / ".lock").is_file():  # Else locking would make it.
                stack.enter_context(locked(place / ".lock", timeout=0))
                part = _part(place, target)
        yield part


def _part(place: Path, target: Path) -> str:
    with contextlib.suppress(LookupError, TypeError, ValueError, OSError):
        token = (place / "token").read_text(encoding="utf-8")
        note = _notes(target)[token]
        # After a start of the machine a disk may hold less than it said.
        known = (note["boot"], note["files"]) == (boot(), _files(place / _name(note["values"])))
        if known and boot() and place.stat().st_uid == os.geteuid():
            return token
    return ""


def whole(target: Path, parts: Collection[str]) -> dict[str, Any] | None:
    """What the checkpoint on its way to `target` is to be sealed with, if these are all of its parts; else None."""
    if not (notes := _notes(target)):
        return None
    with contextlib.suppress(LookupError, TypeError):
        values: dict[str, Any] = next(iter(notes.values()))["values"]
        machines = {note["machines"] for note in notes.values()}
        same = all(note["values"] == values for note in notes.values())
        if machines == {len(notes)} and same and notes.keys() <= set(parts):
            return values
    return None


def copy_left(recipe: Recipe, target: Path, part: str) -> None:
    """Copies what this machine has of a checkpoint.

    Raises:
        OSError: If the run folder cannot be written.
    """
    name = _name(_notes(target)[part]["values"])
    _copy(_place(recipe, target) / name, target / name)


def await_left(target: Path) -> None:
    """Waits until this machine sees what all have copied.

    Raises:
        UserError: If something does not come.
    """
    notes, end = _notes(target).values(), time.monotonic() + _PATIENCE
    for note in notes:
        while not note["files"].items() <= _files(target / _name(note["values"])).items():
            if time.monotonic() > end:
                raise UserError(f"not all files of {_name(note['values'])} have come to {target}", "try again")
            time.sleep(0.2)


def _notes(target: Path) -> dict[str, dict[str, Any]]:
    """Of each machine that was about to copy its part of a checkpoint, by the part's token."""
    read = map(_read, sorted(target.glob(_NOTES)))
    return {str(note.get("token")): note for note in read}


def _place(recipe: Recipe, target: Path) -> Path:
    """The folder of one run on this machine; others may share the disk."""
    staging = recipe.checkpoint.staging
    root = Path(MEMORY if staging == "auto" else staging)
    run = hashlib.sha256(os.fsencode(os.path.realpath(target))).hexdigest()[:16]
    return root / f"{_FOLDERS}{socket.gethostname()}-{os.geteuid()}-{run}"


def _name(values: Mapping[str, Any]) -> str:
    return f"checkpoint-{int(values['step'])}"


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _files(folder: Path) -> dict[str, int]:
    """Bytes of each file below a folder."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def _copy(source: Path, target: Path) -> None:
    """Copies all files of a folder, and has them on the drive."""
    left = deque(sorted(_files(source)))
    for file in left:
        (target / file).parent.mkdir(parents=True, exist_ok=True)

    def stream() -> None:
        with contextlib.suppress(IndexError):  # Another one has taken the last.
            while file := left.popleft():
                try:
                    shutil.copyfile(source / file, target / file)
                except OSError as error:
                    contents(source, [file])  # Of which disk it is, the error of a copy does not say.
                    error.filename = str(target / file)
                    raise
                flush(target / file)

    streams = [in_background(stream) for _ in range(min(_STREAMS, len(left)))]
    for error in [each.exception() for each in streams]:
        if isinstance(error, OSError) and Path(str(error.filename)).is_relative_to(source):
            if isinstance(error, FileNotFoundError):
                raise UserError(f"{error.filename} was deleted before it was copied", f"leave what lies in {KEY}")
            change = f"look at its disk, or set {KEY} to a folder on another one, or to none"
            raise UserError(f"{error.filename} cannot be read: {error.strerror}", change)
        if error:
            raise error
