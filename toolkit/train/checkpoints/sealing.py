"""The second part of a save: what lies aside in full is flushed, sealed and renamed; if need be by the next start.

It counts from the moment of the renaming on. A note beside it says that it is there in full; until it is flushed,
only for the machine that has it in memory, as long as that is not restarted.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.files import remove_partial, write_json
from toolkit.recipe import Recipe
from toolkit.seal import fault, seal
from toolkit.train.checkpoints import fast_folder
from toolkit.train.checkpoints.checkpoint import rotate
from toolkit.train.checkpoints.storage import boot, flush, flush_all, unwritable

Take = Callable[[Recipe, Path], dict[str, Any] | None]
"""As `fast_folder.take_left`."""
_IN_MEMORY = "in_memory"
"""In a note: the `boot` of the machine that may still hold in memory what lies aside."""


def aside(checkpoints: Path) -> Path:
    """The folder, beside the checkpoints of a run, into which engines write the next one."""
    return checkpoints / ".aside"


def complete_left(folder: Path, recipe: Recipe, take: Take = fast_folder.take_left) -> None:
    """Completes the checkpoint that a run which was killed had written in full.

    Args:
        take: Copies what it had taken in into fast folders.

    Raises:
        UserError: If the run folder cannot be written.
    """
    limit = recipe.checkpoint.save_total_limit
    try:
        for note in aside(folder).glob("checkpoint-*.json"):
            with contextlib.suppress(ValueError):
                values = json.loads(note.read_text(encoding="utf-8"))
                in_memory = values.pop(_IN_MEMORY, None)
                written = note.with_suffix("")
                if written.is_dir() and (in_memory is None or (in_memory and in_memory == boot())):
                    complete(folder, values, limit)
                elif not written.exists() and not fault(folder / written.name):
                    _make_room(folder, values["step"], limit)
        if left := take(recipe, aside(folder)):
            complete(folder, left, limit)
    except OSError as error:
        raise unwritable(folder.parent, error, writing=True) or error from error


def is_left(folder: Path) -> bool:
    """Whether there may be anything for `complete_left`."""
    return any(aside(folder).glob("checkpoint-*.json")) or fast_folder.is_left(aside(folder))


def complete(folder: Path, values: Mapping[str, Any], limit: int | None) -> None:
    """Makes a checkpoint count that has been written aside.

    Args:
        folder: Of the checkpoints.
        values: What it is sealed with; among them its step.
        limit: How many checkpoints stay.

    Raises:
        OSError: If it cannot be written.
    """
    step = values["step"]
    place, written = folder / f"checkpoint-{step}", aside(folder) / f"checkpoint-{step}"
    room(aside(folder)).unlink(missing_ok=True)
    remove_partial(written)  # Of a seal, by one that was killed.
    write_json(note := written.with_suffix(".json"), {**values, _IN_MEMORY: boot()})
    flush_all(written)
    write_json(note, values)
    flush(seal(written, values))
    flush(written)
    # What is left of a damaged one.
    shutil.rmtree(place, ignore_errors=True)
    written.rename(place)
    flush(folder)
    _make_room(folder, step, limit)


def _make_room(folder: Path, step: int, limit: int | None) -> None:
    """Deletes what nobody needs once a checkpoint counts; its note last, which has the next start do this again."""
    rotate(folder, step, limit)
    shutil.rmtree(aside(folder), ignore_errors=True)


def room(folder: Path) -> Path:
    """A file whose place small ones take where the disk is full."""
    return folder / ".room"
