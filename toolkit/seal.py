"""Seals of folders, such as checkpoints and prepared data: what one consists of, by content, and who wrote it.

The files themselves are never interpreted. When all are written, every file's SHA-256 is recorded beside them. A folder
without this record was cut off while saving; with other files than it names, or another content, it is damaged, and
nothing of it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from toolkit.cache import build_once, share
from toolkit.common import content_hash
from toolkit.files import read_file, write_json

_RECORD, _FORMER = "seal.json", "checkpoint.json"
"""The name of the record; what it was called before, in checkpoints that are still read."""
UNREAD = "cannot be read"
"""How `fault` begins where a disk does not let a folder be read, which may be whole."""
_THREADS = 8
"""Files hashed at once; one thread takes 1 to 2 GB/s, the disk mostly less than all of them."""


def build_sealed(path: Path, build: Callable[[Path], None]) -> Path:
    """Returns `path` as `cache.build_once` does; one that is not as it was built is built again."""

    def build_and_seal(folder: Path) -> None:
        build(folder)
        seal(folder, {})

    return build_once(path, build_and_seal, fault)


def seal(checkpoint: Path, values: Mapping[str, Any]) -> Path:
    """Records that a folder is whole. To be called when every process has written its part. Returns the record.

    Args:
        values: What to record beside the files: `step`, `method` and who wrote it.
    """
    share(checkpoint)
    record = {**values, "files": contents(checkpoint)}
    # Last of all, and as one operation: it makes the checkpoint count.
    write_json(checkpoint / _RECORD, {**record, "sha256": content_hash(record)})
    return checkpoint / _RECORD


def read_seal(checkpoint: Path) -> dict[str, Any]:
    """What `seal` recorded; empty if there is no record, it cannot be read, or it is not as it was written."""
    try:
        return _recorded(checkpoint)
    except OSError:
        return {}


def _recorded(checkpoint: Path) -> dict[str, Any]:
    """The same.

    Raises:
        OSError: If there is no record, or it cannot be read.
    """
    try:
        record = json.loads(read_file(_record(checkpoint)))
        digest = record.pop("sha256")
    except (ValueError, LookupError, AttributeError, TypeError):
        return {}
    return record if digest == content_hash(record) else {}


def fault(checkpoint: Path, raised: Container[int] = ()) -> str:
    """Why nothing can be read from a checkpoint, for a sentence that begins with its name; empty if it is whole.

    Args:
        raised: Numbers of errors of reading it that are raised.
    """
    try:
        record = _recorded(checkpoint)
    except FileNotFoundError:
        return "was cut off while saving"
    except OSError as error:
        if error.errno in raised:
            raise
        return unread(error)
    if not record:
        return f"is damaged: {_record(checkpoint).name} is not as it was written"
    if reason := damage(checkpoint, record["files"], raised):
        return reason
    added = sorted({*_files(checkpoint)} - record["files"].keys())
    return f"holds what was not saved with it: {_some(added)}" if added else ""


def damage(folder: Path, sealed: Mapping[str, Sequence[Any]], raised: Container[int] = ()) -> str:
    """What is wrong with the files of a folder, for a sentence that begins with its name; empty if nothing is.

    Args:
        sealed: Bytes and SHA-256 of each by its name, as `contents` has them.
        raised: Numbers of errors of reading them that are raised.
    """
    try:
        there = {*_files(folder)}
        if missing := [name for name in sealed if name not in there]:
            return f"is damaged: it lacks {_some(missing)}"
        # Sizes first: they tell most damages without reading gigabytes.
        changed = [name for name, (size, _) in sealed.items() if (folder / name).stat().st_size != size]
        now = {} if changed else contents(folder, sealed)
    except OSError as error:
        if error.errno in raised:
            raise
        return unread(error)
    if changed := changed or [name for name, content in now.items() if content != [*sealed[name]]]:
        return f"is damaged: {_some(changed)} differs from what was saved"
    return ""


def unread(error: OSError) -> str:
    """What `fault` says where reading ended with an error."""
    return f"{UNREAD}: {error.strerror}: {error.filename}"


def _files(checkpoint: Path) -> list[str]:
    files = (file.relative_to(checkpoint).as_posix() for file in sorted(checkpoint.rglob("*")) if not file.is_dir())
    return [name for name in files if name != _record(checkpoint).name]


def _record(checkpoint: Path) -> Path:
    former = checkpoint / _FORMER
    return former if former.exists() and not (checkpoint / _RECORD).exists() else checkpoint / _RECORD


def contents(folder: Path, names: Iterable[str] | None = None) -> dict[str, list[Any]]:
    """Bytes and SHA-256 of files, by their names; of all that are there unless names are given."""

    def content(name: str) -> tuple[str, list[Any]]:
        with (folder / name).open("rb") as stream:
            try:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                error.filename = str(folder / name)  # Of one that was opened the system does not say which it is.
                raise
            return name, [stream.tell(), digest]

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return dict(pool.map(content, _files(folder) if names is None else names))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
