"""A save after the first step, read back at once: what cannot work fails in the first minute, not the first night.

Each file of the checkpoint is compared with its seal, and read as what it is, by one of the processes. The checkpoint
stays, as any other.
"""

from __future__ import annotations

import json
import pickletools
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from safetensors import safe_open
from transformers import TrainerCallback

from toolkit.common import UserError, first_line
from toolkit.seal import fault
from toolkit.train.session import Session


class Rehearsal(TrainerCallback):
    """Saves after the first step that is taken, and reads what was saved. To come after what completes checkpoints.

    Args:
        pause: Told the seconds that reading takes, which no step does.
    """

    def __init__(self, session: Session, pause: Callable[[float], None]) -> None:
        self._session, self._pause = session, pause
        self._step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session.folder.shared and self._session.length.rehearses(state.global_step):
            self._step = state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self._step:
            return
        started = time.monotonic()
        session, saves = self._session, self._session.trainer.saves
        place = saves.folder / f"checkpoint-{self._step}"
        unwritten = saves.settled() or saves.failure
        told = gather_object([(unwritten.whole, unwritten.change) if unwritten else None])
        if reason := next(filter(None, told), None):
            raise UserError(*reason)
        told = gather_object([_fault(place, session.world.rank, session.world.world_size)])
        if reason := next(filter(None, told), ""):
            raise UserError(
                f"the first checkpoint, {place}, {reason}",
                "look at that disk, or set output.dir to another one; checkpoint.rehearse=false leaves this trial out",
            )
        self._pause(time.monotonic() - started)


def _fault(place: Path, rank: int, world_size: int) -> str:
    """Why a checkpoint is no good; each process looks at its share of the files, the first one at the seal too."""
    if rank == 0 and (reason := fault(place)):
        return reason
    files = [file for file in sorted(place.rglob("*")) if file.is_file()]
    for file in files[rank::world_size]:
        try:
            _read(file)
        except Exception as error:  # Readers raise what they like.
            return f"cannot be read: {file.relative_to(place)}: {first_line(error)}"
    return ""


def _read(file: Path) -> None:
    """Reads a file without running anything that it may hold."""
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            tensors.keys()
    elif file.suffix == ".json":
        json.loads(file.read_text(encoding="utf-8"))
    elif file.suffix in (".pt", ".pth", ".bin"):
        with zipfile.ZipFile(file) as archive:
            # Of what torch had in memory when it wrote, each record has a checksum.
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
            _walk(archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl"))))
    elif file.name == ".metadata":
        _walk(file.read_bytes())


def _walk(pickled: bytes) -> None:
    for _ in pickletools.genops(pickled):
        pass
