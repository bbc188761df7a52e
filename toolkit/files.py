"""Files that are there in full or not at all, and room for them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from toolkit.common import UserError, bytes_text, concealed

ALSO_OF_SOCKETS = (errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT)
UNANSWERED = (errno.EIO, errno.ESTALE, *ALSO_OF_SOCKETS)
"""Numbers of errors of a disk that does not answer now, such as one of a network: what lies there may be whole."""
_LONGEST_SECONDS = 86_400.0
"""So long nothing is written without a change of its folder."""


def write_atomically(file: Path, text: str | bytes) -> None:
    """Writes a file so that readers see the old or the new text, never a part, whoever else writes it."""
    with _written_beside(file, text) as partial:
        partial.replace(file)


def write_new(file: Path, text: str | bytes) -> None:
    """Writes a file that is not there yet, in a folder that is made where there is none; none that somebody else writes
    meanwhile is replaced.

    Raises:
        FileExistsError: If there is one, or a link in its place.
    """
    with contextlib.suppress(FileExistsError):  # Of what is no folder, the error of writing says more.
        file.parent.mkdir(parents=True, exist_ok=True)
    with _written_beside(file, text) as partial:
        try:
            os.link(partial, file)
        except FileExistsError:
            raise
        except OSError as error:
            # Some disks, such as FAT and those of object stores, know no second name of a file.
            if os.path.lexists(file):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file)) from error
            partial.replace(file)


@contextlib.contextmanager
def _written_beside(file: Path, text: str | bytes) -> Iterator[Path]:
    """A file with this text that is to be renamed, and is gone afterwards."""
    # Processes of two containers may have one number, and would empty each other's file.
    partial = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(text if isinstance(text, bytes) else text.encode())
        yield partial
    except OSError as error:
        error.filename = str(file)  # Nobody knows the other name.
        raise
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def remove_partial(folder: Path, alone: bool = True) -> None:
    """Removes from a folder what processes that were killed have left of files.

    Args:
        alone: Whether nobody else writes there now; else what is not old stays.
    """
    for partial in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):
            if partial.is_file() and (alone or is_old(partial)):
                partial.unlink()


def is_old(partial: Path) -> bool:
    """Whether nobody can be writing it any more, also on a disk that keeps locks from other machines."""
    # Where the clock was set back, what was written lies in the future.
    return abs(time.time() - partial.stat().st_mtime) > _LONGEST_SECONDS


def write_named(file: Path, text: str) -> None:
    """Writes a file that the user has named as `write_atomically` does, in a folder that is made where there is none.

    What a link leads to is written, so that the link stays; into a pipe or a device, such as `/dev/stdout`, the text
    is sent.
    """
    if is_stream(file):
        file.write_text(text, encoding="utf-8")
        return
    file = Path(os.path.realpath(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def is_stream(file: Path) -> bool:
    """Whether it is a pipe, a device or a socket, which takes what is written and keeps nothing to be replaced."""
    return file.exists() and not file.is_file() and not file.is_dir()


def read_file(file: Path) -> bytes:
    """What is in a file.

    Raises:
        OSError: Also of a pipe or a device in its place, for which one would wait, or read, for ever.
    """
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "is no file, but a folder, a pipe or a device", str(file))
    try:
        return file.read_bytes()
    except OSError as error:
        error.filename = str(file)  # Of one that was opened the system does not say which it is.
        raise


def set_aside(file: Path, why: BaseException | None = None) -> Path:
    """Renames a file that cannot be read, so that a new one takes its place and nothing of it is lost.

    Args:
        why: The error of reading it.

    Raises:
        OSError: This error, if the disk does not answer: the file stays where it is, and may be whole.
    """
    if isinstance(why, OSError) and why.errno in UNANSWERED:
        raise why
    names = (file.with_name(f"{file.name}.damaged{number or ''}") for number in itertools.count())
    place = next(name for name in names if not name.exists())
    return file.replace(place)


def as_json(content: Any, indent: int | None = None) -> str:
    """Content as JSON, without values of `conceal`. What JSON has no numbers for is `"NaN"`, `"Infinity"` or
    `"-Infinity"`, which `float`, pydantic and pandas read, as a text; half of a surrogate pair, which is no text, is a
    question mark."""
    text = json.dumps(_with_numbers(concealed(content)), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace").decode("utf-8")


def _with_numbers(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return json.dumps(content)
    if isinstance(content, dict):
        return {_with_numbers(key): _with_numbers(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_with_numbers(value) for value in content]
    return content


def write_json(file: Path, content: Any) -> None:
    """Writes a JSON file, see `as_json`, as `write_atomically` does."""
    write_atomically(file, as_json(content, indent=2) + "\n")


def write_json_lines(file: Path, rows: Iterable[Any]) -> None:
    """Writes a file with a line of JSON for each row, as `write_json` does."""
    write_atomically(file, "".join(as_json(row) + "\n" for row in rows))


def too_long(path: Path) -> bool:
    """Whether a path, or a name in it, is longer than its file system takes. `lexists` says only that nothing is there,
    and `Path.exists` fails."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def not_writable(folder: Path) -> str:
    """Why nothing can be written into a folder, which need not be there yet, for a sentence about what would be; empty
    where it can. Asked before work is done whose results would be lost."""
    if too_long(folder):
        return "its path, or a name in it, is longer than this file system takes"
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if os.path.islink(nearest) and not os.path.exists(nearest):
        return f"{nearest} is a link to {os.readlink(nearest)}, which is not there"
    if not os.path.isdir(nearest):
        return f"{nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is read-only, or another user's"
    try:
        # In some, such as /proc, nobody can make a file, whatever its mode says.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        return f"no file can be made in {nearest} ({error.strerror})"
    return ""


def check_disk(folder: Path, need: float, what: str, change: str) -> None:
    """Refuses, with what to change, `what` takes more bytes than the disk of a folder has left."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(f"{folder} has {bytes_text(free)} of disk left; {what} {bytes_text(need)}", change)


def below(folder: Path) -> Iterator[Path]:
    """Everything in a folder and below that is no folder and not hidden. Links to folders are followed, each once."""

    def fail(error: OSError) -> None:
        raise error

    seen = set[str]()
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in names if not name.startswith("."))
