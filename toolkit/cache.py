"""Folders made once and shared by every process: content-addressed, complete or absent, never half written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cache_dir() -> Path:
    """The cache of this toolkit: `$TOOLKIT_CACHE`, else `~/.cache/accelerate-toolkit`."""
    return Path(os.environ.get("TOOLKIT_CACHE") or Path.home() / ".cache" / "accelerate-toolkit")


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Returns `path`, a folder that `build` fills if it is not there yet.

    One process builds while the others wait on a file lock, before any process group exists, so no collective can
    time out. The folder appears under its name only when it is complete.

    Args:
        path: The folder; its name should be a hash of everything its content depends on.
        build: Called with an empty temporary folder beside `path`.
    """
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.is_dir():
            # Under the lock nobody else builds this folder: what is there was left by a process that was killed.
            for abandoned in path.parent.glob(f".{path.name}.*.partial"):
                shutil.rmtree(abandoned, ignore_errors=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            partial.mkdir()
            try:
                build(partial)
                partial.rename(path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return path
