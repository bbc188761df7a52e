"""Files that are there in full or not at all, and room for them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.common import UserError, concealed


def write_atomically(file: Path, text: str | bytes) -> None:
    """Writes a file so that readers see the old or the new text, never a part, whoever else writes it."""
    # Processes of two containers may have one number, and would empty each other's file.
    partial = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(text if isinstance(text, bytes) else text.encode())
        partial.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        error.filename = str(file)  # Nobody knows the other name.
        raise


def read_file(file: Path) -> bytes:
    """What is in a file.

    Raises:
        OSError: Also of a pipe or a device in its place, for which one would wait, or read, for ever.
    """
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "is no file, but a folder, a pipe or a device", str(file))
    return file.read_bytes()


def set_aside(file: Path) -> Path:
    """Renames a file that cannot be read, so that a new one takes its place and nothing of it is lost."""
    names = (file.with_name(f"{file.name}.damaged{number or ''}") for number in itertools.count())
    place = next(name for name in names if not name.exists())
    return file.replace(place)


def write_json(file: Path, content: Any) -> None:
    """Writes a JSON file as `write_atomically` does, without values of `conceal`; of half a surrogate pair, which is no
    text, a question mark."""
    text = json.dumps(concealed(content), indent=2, ensure_ascii=False) + "\n"
    write_atomically(file, text.encode("utf-8", "replace").decode("utf-8"))


def write_json_lines(file: Path, rows: Iterable[Any]) -> None:
    """Writes a file with a line of JSON for each row, as `write_json` does."""
    text = "".join(json.dumps(concealed(row), ensure_ascii=False) + "\n" for row in rows)
    write_atomically(file, text.encode("utf-8", "replace").decode("utf-8"))


def check_disk(folder: Path, need: float, what: str, change: str) -> None:
    """Refuses, with what to change, `what` takes more bytes than the disk of a folder has left."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(f"{folder} has {free / 1e9:.2f} GB of disk left; {what} {need / 1e9:.2f} GB", change)
