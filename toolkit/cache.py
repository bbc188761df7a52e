"""The cache, and files that several users share: who may use what, and what to do where one may not.

A cache may be another user's, wholly or in parts: made with a umask that lets nobody else write or read, or on a disk
that is read-only. What can be read there is used; what cannot be written goes to a cache of the user's own instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from toolkit.files import is_old, remove_partial, write_atomically

LOCK = ".lock"
"""The file in the folder of a run or a search that the process at work there has locked, however it ends."""
_log = logging.getLogger("toolkit")


def cache_dir() -> Path:
    """The cache of this toolkit: `$TOOLKIT_CACHE`, else `~/.cache/accelerate-toolkit`."""
    return Path(os.environ.get("TOOLKIT_CACHE") or home())


def find(path: Path) -> Path:
    """Where something of the cache lies that this user can read; `path` where it does not."""
    return next((place for place in _places(path) if _readable(place)), path)


def writable(path: Path) -> Path:
    """Where this user can write something of the cache, in a folder that is there; `path` where it cannot be."""
    for place in _places(path):
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            if _replaceable(place):
                if place != path:
                    _say(cache_dir(), home())
                return place
    return path


def keep(path: Path, text: str | bytes) -> None:
    """Puts a file into the cache, in a folder from which goes what processes that were killed have left of others.

    Raises:
        OSError: If it can be written nowhere.
    """
    place = writable(path)
    write_atomically(place, text)
    remove_partial(place.parent, alone=False)


@contextlib.contextmanager
def locked(file: Path, timeout: float = -1) -> Iterator[None]:
    """Holds a lock, whoever made its file. It goes with the process, however it ends.

    Args:
        timeout: Seconds to wait; -1 for ever, 0 not at all.

    Raises:
        filelock.Timeout: If another process holds it.
        PermissionError: If its file may not be read.
        OSError: If there can be no such file.
    """
    with contextlib.ExitStack() as stack:
        if not file.exists():
            # Where no file can be made, as in /proc, `FileLock` would try for ever.
            file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o666))
        if os.access(file, os.W_OK) or not file.exists():
            stack.enter_context(FileLock(file, timeout=timeout))
        else:
            # For a lock it is enough to read; `FileLock` would write.
            stream, end = stack.enter_context(file.open("rb")), time.monotonic() + timeout
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | (0 if timeout < 0 else fcntl.LOCK_NB))
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise Timeout(str(file)) from None
                    time.sleep(0.05)
        yield


def is_held(file: Path) -> bool:
    """Whether a process holds a lock, see `locked`; also where the disk knows of none and nobody can tell."""
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def build_once(path: Path, build: Callable[[Path], None], fault: Callable[[Path], str] = lambda folder: "") -> Path:
    """Returns `path`, a folder that `build` fills if it is not there yet; or the same in this user's own cache.

    One process builds while the others wait on a file lock, before any process group exists, so no collective can
    time out. The folder appears under its name only when it is complete.

    Args:
        path: The folder; its name should be a hash of everything its content depends on.
        build: Called with an empty temporary folder beside `path`.
        fault: Why a folder that is there cannot be used, for a sentence that begins with its name; empty if it can.
    """
    _log.debug("cache: %s", path)
    for place in _places(path):
        if _readable(place) and os.path.isdir(place) and not fault(place):
            return place
    place = writable(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{place}.lock")):
        if place.is_dir():
            # Another process was here before, unless it is still the same.
            if not (reason := fault(place)):
                return place
            _log.warning("%s %s, and is made again", place, reason)
            shutil.rmtree(place)
        build_beside(place, build)
    return place


def build_beside(place: Path, build: Callable[[Path], None]) -> None:
    """Has a folder filled beside its place, and moves it there. To be called under a lock, so that nobody else builds
    it."""
    for abandoned in _abandoned(place):
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        build(partial)
        share(partial)
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _abandoned(place: Path) -> Iterator[Path]:
    """What processes that were killed have left of this folder, whose lock is held here; and of others beside it."""
    for partial in place.parent.glob(".*.partial"):
        with contextlib.suppress(OSError):
            of = place.with_name(partial.name[1:].rsplit(".", maxsplit=2)[0])
            lock = Path(f"{of}.lock")
            if of == place or (is_old(partial) and partial.is_dir() and lock.exists() and not is_held(lock)):
                yield partial


def share(folder: Path) -> None:
    """Gives the files of a folder the modes that the umask gives: some libraries write for the user alone."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            mode = file.stat().st_mode & 0o777
            if (wanted := mode | (0o666 & ~umask)) != mode:
                with contextlib.suppress(PermissionError):  # Of another user.
                    file.chmod(wanted)


def own_folder(path: Path) -> Path:
    """A folder of the cache, or else of the user's own, that is this user's: what lies there is run."""
    for place in _places(path):
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if place.stat().st_uid == os.geteuid() and os.access(place, os.W_OK | os.X_OK):
                return place
    return path


def home() -> Path:
    """The user's own cache: in their home, or beside temporary files where that cannot be written."""
    # Of a user whom the system does not know, as in a container, `Path.home` raises.
    home = Path(os.path.expanduser("~")).absolute() / ".cache" / "accelerate-toolkit"
    if is_own(home):
        return home
    temporary = Path(tempfile.gettempdir(), f"accelerate-toolkit-{os.geteuid()}")
    with contextlib.suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        # Anybody can make it there.
        if temporary.lstat().st_uid == os.geteuid() and not temporary.is_symlink():
            return temporary
    return home


def _places(path: Path) -> list[Path]:
    """A path of the cache, and the same in the user's own, where the cache is not theirs alone."""
    root, own = cache_dir(), home()
    if root == own or not path.is_relative_to(root) or is_own(root):
        return [path]
    return [path, own / path.relative_to(root)]


def is_own(folder: Path) -> bool:
    """Whether a folder is this user's and can be written, or could be made."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not os.path.isdir(nearest):
        return True  # A mistake, which an error will name.
    return os.access(nearest, os.W_OK | os.X_OK) and (nearest != folder or nearest.stat().st_uid == os.geteuid())


def _readable(place: Path) -> bool:
    # Of what lies in a folder that is closed, `Path.is_dir` raises.
    return os.access(place, os.R_OK | os.X_OK if os.path.isdir(place) else os.R_OK)


def _replaceable(place: Path) -> bool:
    """Whether this user can put something there, and lock it."""
    lock, folder = Path(f"{place}.lock"), place.parent
    if not os.access(folder, os.W_OK | os.X_OK) or (lock.exists() and not os.access(lock, os.R_OK)):
        return False
    if not place.exists() or place.stat().st_uid == os.geteuid():
        return True
    # Of another user: a folder is not ours to remove, nor a file where the folder says so.
    return place.is_file() and not folder.stat().st_mode & stat.S_ISVTX


@functools.cache
def _say(root: Path, home: Path) -> None:
    _log.warning("%s is not this user's to write; what is missing there is kept in %s", root, home)
