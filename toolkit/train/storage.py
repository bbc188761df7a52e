"""The disk of a run: what has been written is on it, and what to say when it cannot be written any more."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from toolkit.common import UserError

_STORAGE = {
    **{errno.ENOSPC: "its disk is full", errno.EDQUOT: "the quota of its disk is used up"},
    **{errno.EFBIG: "a file would be larger than this process may write (ulimit -f)"},
    **{errno.EROFS: "its disk has become read-only", errno.EIO: "its disk does not answer (input/output error)"},
    **{errno.EACCES: "it may not be written any more", errno.EPERM: "it may not be written any more"},
    **{errno.ESTALE: "its disk is not mounted any more"},
}
_UNNUMBERED = ("PytorchStreamWriter", "iostream error", "unexpected pos", "os error", "Failed to write")
"""What C++ and Rust code says of a file that it could not write, without the reason's number."""


def unwritable(folder: Path, error: BaseException, key: str = "output.dir") -> UserError | None:
    """What to say of an error that ended a run because its folder could not be written; None for any other.

    The folder is tried, because most writers do not say what is wrong.

    Args:
        key: The setting that names another folder.
    """
    errors = _chain(error)
    numbers = [each.errno for each in errors if isinstance(each, OSError)]
    if not any(number in _STORAGE or number == errno.ENOENT for number in numbers) and not any(
        sign in str(each) for each in errors for sign in _UNNUMBERED
    ):
        return None
    again = "the same command goes on from the newest whole checkpoint"
    if is_gone(folder):
        return UserError(f"{folder} was deleted while it was trained in", "start again; keep the folder until it ends")
    number = next((number for number in numbers if number in _STORAGE), None) or _tried(folder)
    if number is None:
        return None
    change = f"make it writable, or set {key}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free / 1e9
        fewer = "lower checkpoint.save_total_limit, " * (key == "output.dir")
        change = f"free space there ({free:.2f} GB are left), {fewer}or set {key}"
    return UserError(f"{folder} cannot be written: {_STORAGE[number]}", f"{change}; {again}")


def is_gone(folder: Path) -> bool:
    """Whether a folder was deleted; of one that may not be looked at, `Path.is_dir` raises."""
    try:
        folder.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _tried(folder: Path) -> int | None:
    """Why 16 MB cannot be written there, if they cannot."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**24))
    except OSError as error:
        return error.errno if error.errno in _STORAGE else None
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those that led to it; torch's checkpoints raise the errors of all processes as one."""
    errors: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in errors:
        errors.append(following)
        errors += [each for each, _ in getattr(following, "failures", {}).values()]
        following = following.__cause__ or following.__context__
    return errors


def flush(place: Path) -> None:
    """Has a file, or a folder's list of files, on the drive, not only in memory on the way to it.

    What reads the file next reads the drive, where the system can be told so.
    """
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
