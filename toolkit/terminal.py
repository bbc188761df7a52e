"""What reaches the user's terminal, and who gets its Ctrl-C when a launcher stands between."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def quiet_libraries() -> None:
    """Keeps what libraries say to their own developers out of the user's way; errors stay."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("bitsandbytes", "DeepSpeed", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")


@contextmanager
def ahead_of_launcher() -> Iterator[None]:
    """Lets the training, not `accelerate launch`, answer Ctrl-C.

    For one process `accelerate launch` waits in plain Python: at Ctrl-C it ends with a stack trace after a quarter of
    a second, while the training is still saving. So in a terminal this process takes the foreground and alone hears
    Ctrl-C; and where the launcher dies all the same, this process is told to save and stop instead of running on alone.
    Does nothing without such a launcher.
    """
    if not _launched_by_accelerate():
        yield
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not sys.stdin.isatty() or os.tcgetpgrp(0) != os.getpgrp():
        yield
        return
    launchers_group = os.getpgrp()
    # Changing the foreground from the background would stop this process; the suspend key would hang the terminal,
    # because the shell watches the launcher.
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTTOU, signal.SIGTSTP)}
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(0, launchers_group)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _launched_by_accelerate() -> bool:
    """Whether the parent is `accelerate launch` for a single process; several are led by torch's elastic agent."""
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(part.endswith(b"/accelerate") or b"accelerate.commands" in part for part in command)
