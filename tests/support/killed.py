"""Trainings that are killed at a moment: `KILLED=before:toolkit.train.train.publish:1` at the first call of `publish`.

The process that comes to it kills itself, as the kernel would: nothing is caught, flushed or closed. With `:SIGTERM` at
the end it is asked to stop instead.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Sequence
from typing import Any

import cpu_engines


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, as `cpu_engines` does."""
    when, path, number, *names = os.environ["KILLED"].split(":")
    sent = signal.Signals[names[0]] if names else signal.SIGKILL
    *parts, name = path.split(".")
    owner: Any = importlib.import_module(".".join(part for part in parts if part.islower()))
    for part in parts:
        owner = owner if part.islower() else getattr(owner, part)
    call, calls = getattr(owner, name), 0

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(number) and when == "before":
            os.kill(os.getpid(), sent)
        result = call(*args, **kwargs)
        if calls == int(number) and when == "after":
            os.kill(os.getpid(), sent)
        return result

    setattr(owner, name, killed)
    return cpu_engines.main(arguments)
