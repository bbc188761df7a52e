"""Ends a process whose main thread holds Python's lock and hangs: no thread of its own can run then.

A small process beside it sees its watchdog count. If that stands still for as long as a training may hang, it has the
process write where its threads are, which `faulthandler` does without the lock, says so, and ends it. Runs as a
program of its own and imports the standard library only.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

DUMP = signal.SIGUSR2
"""On it a process writes where its threads are."""
_LOOK_SECONDS, _DUMP_SECONDS = 0.5, 1.0
_END_SECONDS = 5.0
"""How long it may take to end, which takes it milliseconds."""
_SIZE = 128
"""Bytes of what is said."""


class Sentry:
    """The process beside this one.

    Args:
        seconds: For how long this one may be silent.
        stacks: The file for where its threads were.
        change: What is said of what to do.
    """

    def __init__(self, seconds: float, stacks: Path, change: str) -> None:
        self._dump, said = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        said.truncate(_SIZE)
        self._said = mmap.mmap(said.fileno(), _SIZE)
        faulthandler.register(DUMP, self._dump, all_threads=True)
        files = [self._dump.fileno(), said.fileno()]
        arguments = [os.getpid(), *files, seconds, stacks, change]
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, arguments)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=files,
            # The signals of a terminal are for those that train.
            start_new_session=True,
        )

    def beat(self, doing: str, number: int) -> None:
        """Says that this process runs, and what it does. It is looked after from the first time on.

        Args:
            number: Another one than the last time.
        """
        self._said[:] = f"{number} {doing}".encode()[:_SIZE].ljust(_SIZE, b"\0")

    def stop(self) -> None:
        """This process is looked after no more."""
        if self._child.returncode is not None:
            return
        faulthandler.unregister(DUMP)
        with suppress(OSError), self._child.stdin as told:  # type: ignore[union-attr]
            # Workers that were forked may hold the other end of it open.
            told.write(b"end")
        try:
            self._child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def main(process: int, dump: int, said: int, seconds: float, stacks: Path, change: str) -> None:
    """Waits until the process is silent for some seconds, or has ended."""
    doing, heard = b"", time.monotonic()
    while time.monotonic() - heard < seconds:
        if select.select([0], [], [], _LOOK_SECONDS)[0]:
            _keep(dump, stacks)  # Another process may have asked for it before it ended this one.
            return
        before, doing = doing, os.pread(said, _SIZE, 0).rstrip(b"\0")
        if doing != before or not doing or _is_stopped(process):
            heard = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(process, DUMP)
        time.sleep(_DUMP_SECONDS)
        at, what = _keep(dump, stacks), doing.decode(errors="replace").partition(" ")[2]
        print(
            f"error: the training has not got on for {seconds:.0f} s and holds Python's lock: it is {what}, at {at}\n"
            f"  {change}",
            file=sys.stderr,
            flush=True,
        )
        os.kill(process, signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    """As by SIGSTOP or a debugger, which is no hanging."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2][1] in "Tt"
    return False


def _keep(dump: int, stacks: Path) -> str:
    """Writes what was dumped to its file. Returns the innermost line of the main thread, which comes last."""
    text = os.pread(dump, 2**20, 0).decode(errors="replace")
    if text:
        with suppress(OSError):
            stacks.parent.mkdir(exist_ok=True)
            stacks.write_text(text, encoding="utf-8")
    lines = text.rpartition("hread 0x")[2].splitlines()[1:]
    return lines[0].strip() if lines else "an unknown place"


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:4]]
    main(numbers[0], numbers[1], numbers[2], float(sys.argv[4]), Path(sys.argv[5]), sys.argv[6])
