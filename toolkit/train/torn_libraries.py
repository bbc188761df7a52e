"""Libraries that a linker did not finish, in torch's cache of compiled code.

Compilers of torch link to the final name, and take whatever has that name: after a run that was killed, or stopped by
Ctrl-C, while it compiled, no later run could load the library, and each would train without compiled layers.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
from pathlib import Path

from filelock import Timeout

from toolkit.cache import locked

_log = logging.getLogger("toolkit.train")
_HEADER = struct.Struct("<4s36xQ10xHH2x")
"""Magic number, place of the table of sections, bytes of an entry and how many there are, in a header of ELF64."""


def remove_torn() -> None:
    """Removes those that nobody is linking right now. Reads 64 bytes of each library."""
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    if sys.platform != "linux" or not folder.is_absolute():
        return
    removed = 0
    for library in [file for kind in ("so", "o") for file in folder.glob(f"??/*.{kind}") if is_torn(file)]:
        try:
            # As torch locks what it compiles.
            with locked(folder / "locks" / f"{library.name.partition('.')[0]}.lock", timeout=0):
                if is_torn(library):
                    library.unlink()
                    removed += 1
        except (Timeout, OSError):
            _log.debug("left %s as it is", library, exc_info=True)
    if removed:
        _log.info("Removed unfinished code from %s, which is compiled again: whoever compiled it was stopped", folder)


def is_torn(library: Path) -> bool:
    """Whether a library or an object file of Linux is not whole; the table of sections is the last that is written.

    Source: the ELF-64 Object File Format, figures 2 and 3.
    """
    try:
        with library.open("rb") as stream:
            head, size = stream.read(_HEADER.size), os.fstat(stream.fileno()).st_size
    except OSError:
        return False
    if len(head) < _HEADER.size:
        return True
    magic, place, entry, count = _HEADER.unpack(head)
    return bool(magic != b"\x7fELF" or not place or size < place + entry * count)
