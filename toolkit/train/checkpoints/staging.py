"""Checkpoints on their way to the disk: engines write them aside, and training goes on while they are made to count.

A save has two parts. All processes write their files into a folder aside, for which training waits; where the disk is
slow, into a `fast_folder` first. Then the first one flushes them to the drive, seals them by content, renames the
folder to where checkpoints are looked for and deletes the oldest, in a thread beside the next steps. A process that is
killed meanwhile leaves the folder and a note of what it holds, and the next start does the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch.distributed.checkpoint.api import CheckpointException

from toolkit.common import UserError, in_background
from toolkit.distributed.layout import World
from toolkit.recipe import Loaded
from toolkit.train.checkpoints import fast_folder
from toolkit.train.checkpoints.checkpoint import record
from toolkit.train.checkpoints.fast_folder import FastFolder
from toolkit.train.checkpoints.sealing import aside, complete, room
from toolkit.train.checkpoints.storage import unwritable

_log = logging.getLogger("toolkit.train")
_LAST_PATIENCE = 10.0
"""Seconds for which a process that ends early waits for another machine's part, which may be what has ended it."""
MOST_FAILURES = 2
"""So many saves in a row that cannot be written end a run; after fewer the next one may work."""


class Saves:
    """The saving side of one training's checkpoints; each process has one.

    Args:
        folder: Of the checkpoints.
        world: The processes of the run.
        model: What `checkpoint.trained` says of its model.
        fast: Where this machine takes checkpoints in; None for the run folder itself.

    Attributes:
        place: The folder into which engines write; while they do not, one without checkpoints. Transformers looks
            through it when training ends, while other processes may move what they have written.
        before: What must have ended before the next checkpoint counts, on the first process.
        failure: Why the newest checkpoint could not be written, on all processes.
    """

    def __init__(
        self, folder: Path, loaded: Loaded, world: World, model: Mapping[str, Any], fast: FastFolder | None = None
    ) -> None:
        self.folder, self._loaded, self._world, self.model = folder, loaded, world, model
        self.fast, self.place = fast, folder.parent
        self._written = fast.place if fast else aside(folder)
        self._behind: Future[None] | None = None
        self.before: Future[Any] | None = None
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
        leads, written, fast = accelerator.is_main_process, self.failure is None, self.fast
        # Before new files take the room of those that are still on their way.
        if not self._agree(accelerator, [self.settled()]) and written:
            self.failures = 0
        self.failure = None
        unready = _attempt(self._reason, self._clear) if leads else []
        if fast and fast.leads and not unready:
            unready = _attempt(self._reason_here, self._clear_here)
        if not self._agree(accelerator, unready):
            # DeepSpeed has processes wait for those that raise.
            raises = accelerator.distributed_type == DistributedType.DEEPSPEED
            self.place = self._written
            failed = _attempt(self._reason_here, write, room(self.place), raises)
            self.place = self.folder.parent
            self._agree(accelerator, failed)

    def _clear(self) -> None:
        place = aside(self.folder)
        shutil.rmtree(place, ignore_errors=True)
        # On a network's disk a file that another program reads stays, by another name, until it has done so.
        place.mkdir(parents=True, exist_ok=True)
        # By a note that stays, the next start would take an older checkpoint for the newest.
        for note in place.glob("*.json"):
            note.unlink()
        room(place).write_bytes(bytes(2**16))

    def _clear_here(self) -> None:
        assert self.fast
        self.fast.clear()
        room(self._written).write_bytes(bytes(2**16))

    def _reason(self, error: BaseException) -> UserError | None:
        return error if isinstance(error, UserError) else unwritable(self.folder.parent, error, writing=True)

    def _reason_here(self, error: BaseException) -> UserError | None:
        """Why this machine cannot take a checkpoint in, if the disk is to blame."""
        return unwritable(self._written, error, fast_folder.KEY, writing=True) if self.fast else self._reason(error)

    def complete(self, accelerator: Any, step: int) -> None:
        """Has what was written last made to count, behind the steps that follow. All processes must call this."""
        if self.failure:
            return
        accelerator.wait_for_everyone()
        if accelerator.is_main_process or (self.fast and self.fast.leads):
            values = record(step, self._loaded, self._world.world_size, self.model)
            values["local_world_size"] = self._world.local_world_size  # See `elastic.drawn_from`.
            leads = accelerator.is_main_process
            self._behind = in_background(lambda: self._complete(values, leads))

    def _complete(self, values: Mapping[str, Any], leads: bool) -> None:
        if self.before:
            self.before.exception()
        if self.fast:
            self.fast.send(values)
        if leads:
            complete(self.folder, values, self._loaded.recipe.checkpoint.save_total_limit)
        if self.fast:
            with contextlib.suppress(OSError):  # The checkpoint counts, and the next save clears it again.
                self.fast.clear()

    def settled(self) -> UserError | None:
        """Waits for the newest save; returns why it could not be made to count, if the disk is to blame."""
        behind, self._behind = self._behind, None
        error = behind.exception() if behind else None
        if error and not (reason := self._reason(error)):
            raise error
        return reason if error else None

    def close(self) -> None:
        """Waits for the newest save, after which a run ends early, and gives back what saving took, unless the next
        start is to copy it."""
        if self.fast:
            self.fast.patience = _LAST_PATIENCE
        self.settled()
        if self.fast and not fast_folder.is_left(aside(self.folder)):
            self.fast.remove()

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
        if self.fast:
            self.fast.remove()

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


def _attempt(
    why: Callable[[BaseException], UserError | None],
    write: Callable[[], None],
    spare: Path | None = None,
    raises: bool = False,
) -> list[UserError]:
    """Why a folder could not be written; empty if all went well.

    Engines have processes wait for each other between files. One that ended at its first failure would be waited for,
    so a file that `torch.save` cannot write is left out, and the engine hears nothing of it.

    Args:
        why: What is said of an error, if the disk is to blame.
        spare: A file to remove for the small ones that follow one that could not be written.
        raises: Whether to raise what others than `torch.save` cannot write.
    """
    reasons: list[UserError] = []
    save = torch.save

    def failed(error: BaseException) -> None:
        if not (reason := why(error)):
            raise error
        reasons.append(reason)

    def save_or_go_on(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        try:
            save(content, file, *args, **kwargs)
        except Exception as error:
            failed(error)
            for each in (file, spare):
                if isinstance(each, str | os.PathLike):
                    Path(each).unlink(missing_ok=True)

    torch.save = save_or_go_on  # type: ignore[assignment]
    try:
        write()
    except (Exception, CheckpointException) as error:  # FSDP's is none of the former, and comes to all processes.
        if raises:
            raise
        failed(error)
    finally:
        torch.save = save
    return reasons
