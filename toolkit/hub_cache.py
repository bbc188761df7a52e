"""The caches of the hub's libraries, where they are another user's.

`huggingface_hub` and `datasets` know one cache each, into which they write locks, refs and downloads, and they fail
where they may not. They are then pointed to a cache of the user's own before they are imported. Links in it lead to
what can be read of the other, so that only what is missing there is downloaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit import cache

_FOLDERS = {
    "HF_HUB_CACHE": "hub",
    "HF_DATASETS_CACHE": "datasets",
    "HF_MODULES_CACHE": "modules",
    "HF_XET_CACHE": "xet",
}
"""The variable that names a cache to its folder in HF_HOME."""
_NAMED = ("HF_HUB_CACHE", "HF_DATASETS_CACHE")
"""Those in which a repository has a folder of its own."""

_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?|hf://.*")

_log = logging.getLogger("toolkit")


def on_hub(name: str | None) -> bool:
    """Whether a model or data of this name is on the hub: neither built in, nor here, nor at another address."""
    return bool(name and _ON_HUB.fullmatch(name)) and not os.path.exists(name or "")


def hub_caches() -> list[Path]:
    """Where files of hub repositories may lie: the hub's cache, and the user's own where `use_own` has made one."""
    return list(dict.fromkeys([_place("HF_HUB_CACHE"), _own() / "hub"]))


def use_own(names: Iterable[str]) -> None:
    """Points the hub's libraries to caches of this user's where theirs cannot be written, which is told in one line.

    To be called before they are imported: they read the variables that this sets at import.

    Args:
        names: What will be asked for; of what else is in the hub's cache nothing can be written. Without any name that
            is on the hub nothing is done.
    """
    if not (named := set(filter(on_hub, names))):
        return
    told: list[str] = []
    closed: list[Path] = []
    for variable, folder in _FOLDERS.items():
        place, own = _place(variable), _own() / folder
        if place == own or _writable(place, variable, named):
            continue
        try:
            own.mkdir(parents=True, exist_ok=True)
            if variable in _NAMED:
                with cache.locked(own / ".lock"):
                    closed += _take_over(variable, place, own, named)
                told.append(str(place))
        except OSError:
            _log.debug("no cache of the user's own in place of %s", place, exc_info=True)
            continue  # There is none; the libraries will say what they cannot write.
        os.environ[variable] = str(own)
    token = Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token")
    if not _readable(token):  # The client only knows of one that is not there.
        os.environ["HF_TOKEN_PATH"] = str(_own() / "token")
    if told:
        which = f"; {closed[0]} is closed to it, unless its owner types `chmod -R a+rX` there" if closed else ""
        what = "%s %s not this user's to write; what is missing there is kept in %s%s"
        _log.warning(what, " and ".join(told), "is" if len(told) == 1 else "are", _own(), which)


def _take_over(variable: str, place: Path, own: Path, named: set[str]) -> list[Path]:
    """Links what can be read of a cache into another. Returns the folders of it that are closed to this user."""
    closed: list[Path] = []
    for folder in _children(place, closed):
        target = own / folder.name
        if not _of(folder.name, named):
            # Libraries may want to read it all the same, such as a kernel; who writes into it has named it.
            if variable == "HF_HUB_CACHE" and folder.name.count("--") and not os.path.lexists(target):
                target.symlink_to(folder)
            continue
        if target.is_symlink():
            target.unlink()
        if variable == "HF_DATASETS_CACHE":
            _link(folder, target, closed)
            continue
        for ref in _files(folder / "refs", closed):
            copy = target / ref.relative_to(folder)
            if not copy.exists() or copy.stat().st_mtime_ns < ref.stat().st_mtime_ns:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ref, copy)
        _link(folder / "snapshots", target / "snapshots", closed)
    return closed


def _link(source: Path, target: Path, closed: list[Path]) -> None:
    """Makes the folders of a tree, with links to the files; to none of a folder that cannot be read as a whole."""
    children = list(_children(source, closed))
    files = [child for child in children if not child.is_dir() and child.suffix != ".lock"]
    shut = [file for file in files if not os.access(file, os.R_OK)]
    closed += [source] * bool(shut)
    for child in children:
        link = target / child.name
        if child.is_dir():
            _link(child, link, closed)
        elif child in files and not shut and not link.exists():
            target.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # It leads to what is gone.
            link.symlink_to(child.resolve())


def _children(folder: Path, closed: list[Path]) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except FileNotFoundError:
        return
    except PermissionError:
        closed.append(folder)


def _files(folder: Path, closed: list[Path]) -> Iterator[Path]:
    for child in _children(folder, closed):
        if child.is_dir():
            yield from _files(child, closed)
        elif os.access(child, os.R_OK):
            yield child
        else:
            closed.append(child)


def _writable(place: Path, variable: str, named: set[str]) -> bool:
    """Whether this user can write into a cache and into what it has of these repositories, and take their locks."""
    nearest = next(each for each in (place, *place.parents) if os.path.exists(each))
    if not os.access(nearest, os.W_OK | os.X_OK):
        return False
    if not place.is_dir() or variable not in _NAMED:
        return True
    own = [entry for entry in place.iterdir() if _of(entry.name, named)]
    own += [place / ".locks" / entry.name for entry in own]
    return all(map(_writable_tree, own))


def _writable_tree(entry: Path) -> bool:
    if entry.is_symlink() or not entry.exists():
        return True
    if not entry.is_dir():
        return os.access(entry, os.W_OK)
    closed: list[OSError] = []
    for folder, _, files in os.walk(entry, onerror=closed.append):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return False
        if not all(os.access(Path(folder, name), os.W_OK) for name in files if name.endswith(".lock")):
            return False
        # The hub's library reads every file of a snapshot, and cannot replace what it may not read.
        if not all(os.access(Path(folder, name), os.R_OK) for name in files):
            return False
    return not closed


def _of(entry: str, named: set[str]) -> bool:
    """Whether a folder or lock in a cache is of one of these: `models--a--B`, `a___b`, `…_a___b_….lock`."""
    plain = _plain(re.sub(r"^(models|datasets)--", "", entry))
    return any(plain == _plain(name) or (entry.endswith(".lock") and _plain(name) in plain) for name in named)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _place(variable: str) -> Path:
    """Where a cache lies, as the hub's libraries put it."""
    former = os.environ.get("HUGGINGFACE_HUB_CACHE") if variable == "HF_HUB_CACHE" else None
    return Path(os.environ.get(variable) or former or _home() / _FOLDERS[variable]).expanduser().absolute()


def _home() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HOME") or default).expanduser()


def _own() -> Path:
    return cache.home() / "huggingface"


def _readable(file: Path) -> bool:
    """Whether a file can be read, or is not there for certain."""
    with contextlib.suppress(FileNotFoundError):
        try:
            file.stat()
        except PermissionError:
            return False
        return os.access(file, os.R_OK)
    return True
