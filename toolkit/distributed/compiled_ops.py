"""DeepSpeed's C++ operations: compiled at first use, once for all processes, before a group exists that could time out.

torch keeps other processes from compiling the same operation by a file and waits for as long as that file is there. A
process that is killed while it compiles leaves it behind, and every later run would wait for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import psutil

from toolkit.cache import cache_dir, is_own, locked, own_folder
from toolkit.common import UserError, first_line

_log = logging.getLogger("toolkit.distributed")

ELSEWHERE_SECONDS = 3 * 60
"""Who compiles has the file open, which does not show on another machine that shares this folder; there, compiling
writes a file every minute or so."""


def load(builder: Any, needs: str) -> None:
    """Compiles an operation if that was not done before.

    Args:
        builder: One of `deepspeed.ops.op_builder`.
        needs: What to install where it cannot be compiled, or what to set instead.

    Raises:
        UserError: If it cannot be compiled.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob(f"**/{builder.name}/*.so")):
        # Before the lock: another process may be the first to get it, and only one is heard.
        _log.info("Compiling DeepSpeed's %s: once, for some minutes", builder.name)
    with locked(folder / "toolkit.lock"):
        wait_for_compilers()
        try:
            builder.load()
        except (RuntimeError, ImportError) as error:
            message = f"DeepSpeed's {builder.name} cannot be built on this machine: {first_line(error)}"
            raise UserError(message, needs) from error


def wait_for_compilers() -> None:
    """Waits for processes that compile operations, and removes what killed ones left behind."""
    for lock in [*_folder().glob("*/lock"), *_folder().glob("*/*/lock")]:
        told, written, since = False, 0.0, time.monotonic()
        while lock.is_file():
            if (newest := _last_written(lock.parent)) != written:
                written, since = newest, time.monotonic()
            # Where the clock was set back, what was written lies in the future.
            quiet_seconds = max(time.time() - written, time.monotonic() - since)
            if not _held(lock) and quiet_seconds > ELSEWHERE_SECONDS:
                lock.unlink(missing_ok=True)
                _log.info("Removed %s: whoever compiled there was stopped", lock)
                break
            if not told:
                _log.info("Waiting for the process that compiles %s", lock.parent.name)
                told = True
            time.sleep(0.5)


def _folder() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not is_own(folder):
        # torch writes there, and runs what it finds.
        own = own_folder(cache_dir() / "extensions")
        _log.warning("%s is not this user's; DeepSpeed's operations are compiled in %s", folder, own)
        os.environ["TORCH_EXTENSIONS_DIR"], folder = str(own), own
    return folder


def _held(lock: Path) -> bool:
    """Whether a process of this user on this machine has the file open."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                return True
    return False


def _last_written(folder: Path) -> float:
    """When something was last written there."""
    written = []
    # Another process may remove it meanwhile.
    with contextlib.suppress(FileNotFoundError):
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                written.append(file.stat().st_mtime)
    return max(written, default=0.0)
