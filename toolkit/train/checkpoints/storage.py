"""The disk of a run: what has been written is on it, and what to say when it cannot be written any more."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import Timeout

from toolkit.cache import build_beside, locked
from toolkit.common import UserError, bytes_text, in_a_line
from toolkit.files import ALSO_OF_SOCKETS, not_writable, too_long
from toolkit.train.continued import GO_ON

_STORAGE = {
    **{errno.ENOSPC: "its disk is full", errno.EDQUOT: "the quota of its disk is used up"},
    **{errno.EFBIG: "a file would be larger than this process may write (ulimit -f)"},
    **{errno.EROFS: "its disk has become read-only", errno.EIO: "its disk does not answer (input/output error)"},
    **{errno.EACCES: "it may not be written any more", errno.EPERM: "it may not be written any more"},
    **dict.fromkeys((errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN), "its disk is not mounted any more"),
    errno.ETIMEDOUT: "its disk does not answer in time",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What no reading ends with."""
_UNNUMBERED = ("PytorchStreamWriter", "iostream error", "unexpected pos", "Failed to write")
"""What C++ code says of a file that it could not write, without the reason's number."""


def unwritable(
    folder: Path, error: BaseException, key: str = "output.dir", *, writing: bool = False
) -> UserError | None:
    """What to say of an error that ended a run because its folder could not be written; None for any other, also for
    one that says itself which folder it was, such as the cache.

    The folder is tried, because most writers do not say what is wrong.

    Args:
        key: The setting that names another folder.
        writing: Whether it ended the writing of a file there. The disk is to blame then also where it works again.
    """
    if isinstance(error, UserError):
        return None
    errors = _chain(error)
    numbers = _numbers(errors)
    unnumbered = [each for each in errors if any(sign in str(each) for sign in _UNNUMBERED)]
    if not any(number in _STORAGE or number == errno.ENOENT for number in numbers) and not unnumbered:
        return None
    if is_gone(folder):
        return UserError(f"{folder} was deleted while it was trained in", "start again; keep the folder until it ends")
    known = (number for number in numbers if number in _STORAGE and (writing or number not in ALSO_OF_SOCKETS))
    number = next(known, None) or _tried(folder)
    change = f"make it writable, or set {key}"
    if number is None:
        if not (writing and unnumbered):
            return None
        why = in_a_line(unnumbered[-1])
        return UserError(f"{folder} could not be written for a moment: {why}", f"{change}; {GO_ON}")
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = bytes_text(shutil.disk_usage(folder).free)
        fewer = "lower checkpoint.save_total_limit, " * (key == "output.dir")
        change = f"free space there ({free} are left), {fewer}or set {key}"
    return UserError(f"{folder} cannot be written: {_STORAGE[number]}", f"{change}; {GO_ON}")


def unanswered(error: OSError) -> UserError:
    """What to say of a file that is needed and may be whole, but is on a disk that does not answer."""
    return UserError(
        f"{error.filename} cannot be read: its disk does not answer ({error.strerror})",
        "see that it is mounted, then type the same command; delete its folder only if the drive is broken",
    )


def check_new(output: Path, key: str) -> None:
    """Refuses a folder that `build_new` could not make, before what goes into it is computed.

    Args:
        key: What names another folder.

    Raises:
        UserError: If there is something already, or nothing can be written.
    """
    if os.path.lexists(output):
        raise UserError(f"{output} exists already", _name(key))
    if reason := not_writable(output if too_long(output) else output.parent):
        raise _refused(output, reason, key)


def _refused(output: Path, reason: str, key: str) -> UserError:
    return UserError(f"{output} cannot be written: {reason}", _name(key))


def _name(key: str) -> str:
    return f"name another folder with {key}"


def build_new(output: Path, build: Callable[[Path], None], key: str) -> None:
    """Has a folder filled that is not there yet, and that is there once it is whole.

    Args:
        build: See `build_once`.
        key: What names another folder.

    Raises:
        UserError: If its disk has no room or takes no such folder, or another process fills it at the same time.
    """

    def fill(folder: Path) -> None:
        with room_for(output, folder, key):
            build(folder)
            flush_all(folder)

    lock = Path(f"{output}.lock")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, timeout=1))
        except Timeout:
            raise UserError(f"another process writes {output} right now", f"wait for it, or {_name(key)}") from None
        except OSError as error:
            raise _refused(output, error.strerror or str(error), key) from error
        stack.callback(lock.unlink, missing_ok=True)  # While it is held: the next process may have its own.
        if os.path.lexists(output):
            raise UserError(f"another process has written {output} meanwhile", f"use it, or {_name(key)}")
        build_beside(output, fill)
        flush(output.parent)


@contextlib.contextmanager
def room_for(output: Path, folder: Path, key: str) -> Iterator[None]:
    """Has an error for which a disk is too full say so.

    Args:
        output: What is being written, for people.
        folder: Where it lies until it is whole; it is removed after an error.
        key: What names another folder.

    Raises:
        UserError: In the place of such an error.
    """
    try:
        yield
    except Exception as error:
        number = next((number for number in _numbers(_chain(error)) if number in _FULL), None)
        if number is None:
            raise
        change = "raise that limit"
        if number != errno.EFBIG:
            held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            room = bytes_text(shutil.disk_usage(folder).free + held)
            change = f"free space there, where {room} were not enough, or {_name(key)}"
        raise UserError(f"{output} cannot be written: {_STORAGE[number]}", f"{change}; nothing was written") from error


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


def _numbers(errors: list[BaseException]) -> list[int]:
    """Those of the system, which Rust's errors, and those of other processes, have in their texts."""
    said = (re.findall(r"\b(?:os error|Errno) (\d+)\b", str(each)) for each in errors)
    numbers = [each.errno for each in errors if isinstance(each, OSError) and each.errno is not None]
    return [*numbers, *(int(number) for found in said for number in found)]


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those that led to it; torch's checkpoints raise the errors of all processes as one."""
    errors: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in errors:
        errors.append(following)
        errors += [each for each, _ in getattr(following, "failures", {}).values()]
        following = following.__cause__ or following.__context__
    return errors


def boot() -> str:
    """Names the time since this machine was started; empty where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


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


def flush_all(folder: Path) -> None:
    """Has all of a folder on the drive, see `flush`, before it is moved to where it counts: after a loss of power a new
    name may be there already and what was written under the old one not yet."""
    for each in (*folder.rglob("*"), folder):
        flush(each)
