"""A limit on how long a block of code may run: what is read may be a program, or expand without end."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from toolkit.common import UserError


class TimeLimit:
    """A block that is ended, with an error, once its thread has worked for too long on it.

    What counts is the processor's time of the thread, so that a loaded or stopped machine ends nothing. A thread of
    the process looks on, because signals reach the main thread only; entering and leaving take a microsecond. What
    ends is Python code: a single call of a library's in C is waited for.

    Args:
        seconds: How long the block may work.
        error: Makes what is raised if it takes longer.
    """

    def __init__(self, seconds: float, error: Callable[[], UserError]) -> None:
        self.seconds, self.error, self.ended = seconds, error, False

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._around = _LIMITED.get(thread)
        with _LIMITS:
            _LIMITED[thread] = self
            if not _WATCHERS:
                _WATCHERS.append(threading.Thread(target=_end_late, daemon=True))
                _WATCHERS[0].start()

    def __exit__(self, *_: Any) -> None:
        thread = threading.get_ident()
        while True:
            try:
                with _LIMITS:
                    if self._around:
                        _LIMITED[thread] = self._around
                    else:
                        _LIMITED.pop(thread, None)
                    if self.ended:  # While one was on its way out, another may have been sent.
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
                break
            except _TooLate:  # It came on the way out.
                continue
        if self.ended:
            raise self.error() from None


class _TooLate(BaseException):
    """Raised in a thread by another; no `Exception`, so that nothing on its way takes it for its own."""


_LIMITS = threading.Lock()
_LIMITED: dict[int, TimeLimit] = {}
"""The innermost limit of every thread that has one."""
_WATCHERS: list[threading.Thread] = []
"""The thread that looks on, once there is a limit."""


def _forget_limits() -> None:
    """In a forked process, which has no thread but its own."""
    global _LIMITS
    _LIMITS = threading.Lock()
    _LIMITED.clear()
    _WATCHERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_limits)


def _end_late() -> None:
    began: dict[TimeLimit, float] = {}
    while True:
        time.sleep(0.2)
        with _LIMITS:
            began = {limit: began.get(limit, _worked(thread)) for thread, limit in _LIMITED.items()}
            for thread, limit in _LIMITED.items():
                if _worked(thread) - began[limit] > limit.seconds:
                    limit.ended = True
                    # What swallows it gets another; on its way out, which may take as long, it must not meet one.
                    began[limit] = _worked(thread) + limit.seconds
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLate))


def _worked(thread: int) -> float:
    """Seconds of the processor that a thread has had; of the clock where the system does not tell."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(thread)) if clock else time.monotonic()
