"""Trainings to which something happens at the end of a step: `FAULTS="STEP RANK NAME …"` in the environment, by lines.

A fault is real: signals are sent, limits are set, files are removed. `NAME` is a function below.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Trains, with the faults that `FAULTS` names, on the engines of `cpu_engines`."""
    import cpu_engines
    from transformers import TrainerCallback

    from toolkit.train import setup

    rank = int(os.environ.get("RANK", "0"))
    lines = [line.split() for line in os.environ.get("FAULTS", "").splitlines()]
    faults = {(int(step), name): values for step, of, name, *values in lines if of in ("all", str(rank))}

    class Happens(TrainerCallback):
        def __init__(self, session: Any) -> None:
            self.session = session

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for (step, name), values in faults.items():
                if step == state.global_step + 1:
                    FAULTS[name](self.session, *values)

    build = setup.Callbacks.__init__

    def with_faults(self: Any, session: Any) -> None:
        build(self, session)
        session.trainer.add_callback(Happens(session))

    setup.Callbacks.__init__ = with_faults  # type: ignore[method-assign]
    return cpu_engines.main(arguments)


def _kill(session: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _signal(session: Any, name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def _limit_files(session: Any, size: str) -> None:
    """Files may be no larger, as on a disk with so little room; `-1` lifts it."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), hard))


def _delete(session: Any) -> None:
    shutil.rmtree(session.folder.path)


def _hang(session: Any) -> None:
    time.sleep(3600)


def _wait(session: Any, file: str) -> None:
    """Until a file is there."""
    while not Path(file).exists():
        time.sleep(0.01)


FAULTS: dict[str, Callable[..., None]] = {
    **{"kill": _kill, "signal": _signal, "limit": _limit_files, "delete": _delete, "hang": _hang, "wait": _wait}
}
