"""Modules of this package that run in a process of their own, beside this one."""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)
_RUN = """\
import runpy, sys
root, name, *sys.argv[1:] = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
from toolkit.own_process import end_with_parent
end_with_parent()
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """What runs a module with arguments, until it is done or the thread that starts it has ended.

    `python -m` would look for the module in the working folder first, where a user may have a package of the same name,
    and not find it in a checkout that is not installed.
    """
    return [sys.executable, "-P", "-c", _RUN, _ROOT, module, *arguments]


def end_with_parent() -> None:
    """Has this process told to stop once the thread that started it ends, not to run on alone. On Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
