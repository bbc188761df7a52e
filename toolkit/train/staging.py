"""Checkpoints on their way to the disk: engines write them aside, and training goes on while they are made to count.

A save has two parts. All processes write their files into a folder aside, for which training waits. Then the first one
flushes them to the drive, seals them by content, renames the folder to where checkpoints are looked for and deletes the
oldest, in a thread beside the next steps. A process that is killed meanwhile leaves the folder and a note of what it
holds, and the next start does the rest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object

from toolkit.common import UserError, in_background, write_json
from toolkit.recipe import Recipe
from toolkit.seal import seal
from toolkit.train.checkpoint import record, rotate
from toolkit.train.storage import flush, unwritable

_log = logging.getLogger("toolkit.train")
MOST_FAILURES = 2
"""So many saves in a row that cannot be written end a run; after fewer the next one may work."""


def aside(checkpoints: Path) -> Path:
    """The folder, beside the checkpoints of a run, into which engines write the next one."""
    return checkpoints / ".aside"


class Saves:
    """The saving side of one training's checkpoints; each process has one.

    Args:
        folder: Of the checkpoints.
        world_size: Processes of the run.
        model: What `checkpoint.trained` says of its model.

    Attributes:
        failure: Why the newest checkpoint could not be written, on all processes.
    """

    def __init__(self, folder: Path, recipe: Recipe, world_size: int, model: Mapping[str, Any]) -> None:
        self.folder, self._recipe, self._world_size, self.model = folder, recipe, world_size, model
        self._behind: Future[None] | None = None
        self.failures = 0
        self.failure: UserError | None = None

    def write(self, accelerator: Any, step: int, write: Callable[[], None]) -> None:
        """Has a checkpoint written aside. All processes must call this.

        A save for which the disk does not do is said, and training goes on: the next one may work.

        Args:
            write: Writes this process's part into `aside`.

        Raises:
            UserError: On all processes, if it is the second such save in a row.
        """
        leads, written = accelerator.is_main_process, self.failure is None
        # Before new files take the room of those that are still on their way.
        if not self._agree(accelerator, [self.settled()] if leads else []) and written:
            self.failures = 0
        self.failure = None
        if not self._agree(accelerator, _attempt(self.folder.parent, self._clear) if leads else []):
            # DeepSpeed has processes wait for those that raise.
            raises = accelerator.distributed_type == DistributedType.DEEPSPEED
            self._agree(accelerator, _attempt(self.folder.parent, write, _room(self.folder), raises))

    def _clear(self) -> None:
        shutil.rmtree(aside(self.folder), ignore_errors=True)
        aside(self.folder).mkdir(parents=True)
        _room(self.folder).write_bytes(bytes(2**16))

    def complete(self, accelerator: Any, step: int) -> None:
        """Has what was written last made to count, behind the steps that follow. All processes must call this."""
        if self.failure:
            return
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            values = record(step, self._recipe, self._world_size, self.model)
            limit = self._recipe.checkpoint.save_total_limit
            self._behind = in_background(lambda: _complete(self.folder, step, values, limit))

    def wait(self) -> None:
        """Waits until nothing is on its way."""
        if self._behind:
            self._behind.exception()

    def settled(self) -> UserError | None:
        """Waits for the newest save; returns why it could not be made to count, if the disk is to blame."""
        behind, self._behind = self._behind, None
        error = behind.exception() if behind else None
        if error and not (reason := unwritable(self.folder.parent, error)):
            raise error
        return reason if error else None

    def end(self, needed: bool) -> None:
        """Waits for the newest save, which is the last one.

        Args:
            needed: Whether the run is lost without it.

        Raises:
            UserError: If it is needed and failed.
        """
        if (reason := self.settled() or self.failure) and needed:
            raise reason
        if reason:
            _log.warning("the last checkpoint could not be saved: %s", reason.what)

    def _agree(self, accelerator: Any, reasons: Sequence[UserError | None]) -> bool:
        """Whether this save fails on any process."""
        told = gather_object([(reason.whole, reason.change) for reason in reasons if reason])
        if not told:
            return False
        self.failure = UserError(*told[0])
        self.failures += 1
        if self.failures == MOST_FAILURES:
            raise self.failure
        if accelerator.is_main_process:
            _log.warning(
                "%s; this checkpoint is not saved, training goes on, and the next failure ends it: %s",
                *(self.failure.what, self.failure.change),
            )
        return True


def complete_left(folder: Path, limit: int | None) -> None:
    """Completes the checkpoint that a run which was killed had written in full."""
    for note in aside(folder).glob("checkpoint-*.json"):
        with contextlib.suppress(ValueError):
            values = json.loads(note.read_text(encoding="utf-8"))
            if note.with_suffix("").is_dir():
                _complete(folder, values["step"], values, limit)


def is_left(folder: Path) -> bool:
    """Whether there is anything for `complete_left`."""
    return any(aside(folder).glob("checkpoint-*.json"))


def _complete(folder: Path, step: int, values: Mapping[str, Any], limit: int | None) -> None:
    place, written = folder / f"checkpoint-{step}", aside(folder) / f"checkpoint-{step}"
    _room(folder).unlink(missing_ok=True)
    write_json(note := written.with_suffix(".json"), values)
    for each in (*written.rglob("*"), written):
        flush(each)
    seal(written, values)
    # What is left of a damaged one.
    shutil.rmtree(place, ignore_errors=True)
    written.rename(place)
    flush(folder)
    note.unlink()
    aside(folder).rmdir()
    rotate(folder, step, limit)


def _room(folder: Path) -> Path:
    """A file whose place small ones take where the disk is full."""
    return aside(folder) / ".room"


def _attempt(
    folder: Path, write: Callable[[], None], room: Path | None = None, raises: bool = False
) -> list[UserError]:
    """Why a run folder could not be written; empty if all went well.

    Engines have processes wait for each other between files. One that ended at its first failure would be waited for,
    so a file that `torch.save` cannot write is left out, and the engine hears nothing of it.

    Args:
        room: A file to remove for the small ones that follow one that could not be written.
        raises: Whether to raise what others than `torch.save` cannot write.
    """
    reasons: list[UserError] = []
    save = torch.save

    def failed(error: Exception) -> None:
        if not (reason := unwritable(folder, error)):
            raise error
        reasons.append(reason)

    def save_or_go_on(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        try:
            save(content, file, *args, **kwargs)
        except Exception as error:
            failed(error)
            for each in (file, room):
                if isinstance(each, str | os.PathLike):
                    Path(each).unlink(missing_ok=True)

    torch.save = save_or_go_on  # type: ignore[assignment]
    try:
        write()
    except Exception as error:
        if raises:
            raise
        failed(error)
    finally:
        torch.save = save
    return reasons
