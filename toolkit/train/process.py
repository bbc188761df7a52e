"""This process: its memory allocator, the Ctrl-C of its terminal, and how it ends. Imports torch only when asked."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from toolkit.common import UserError
from toolkit.distributed.layout import World
from toolkit.files import write_json
from toolkit.own_process import end_with_parent

# malloc.h: from which size on blocks are mapped one by one, and how much free memory is kept.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def prepare_process() -> None:
    """Settings of libraries that must be made before they start working."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _keep_memory()
    if not sys.stderr.isatty():
        disable_progress_bar()


def _keep_memory() -> None:
    """Lets glibc keep what is freed.

    It hands large blocks back to the kernel after every operation, which then clears each page anew: 12 demo steps took
    31 s instead of 23.
    """
    with contextlib.suppress(AttributeError, OSError):  # Not every C library has it.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**26)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)


def hand_back_memory() -> None:
    """Has glibc hand back what is free, so that it counts as such; of many weights it would keep most."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def stop_with_launcher() -> None:
    """Has this process told to stop where its launcher dies, not to run on alone; only for accelerate's and torch's.

    To be called before the imports that take seconds: of a launcher that has died before, nobody is told.
    """
    if _launched_by_accelerate() or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


@contextmanager
def ahead_of_launcher() -> Iterator[None]:
    """Lets the training, not `accelerate launch`, answer Ctrl-C; does nothing without such a launcher.

    For one process `accelerate launch` waits in plain Python: at Ctrl-C it ends with a stack trace after a quarter of
    a second, while the training is still saving. So in a terminal this process takes the foreground and alone hears
    Ctrl-C.
    """
    if not _launched_by_accelerate() or not sys.stdin.isatty() or os.tcgetpgrp(0) != os.getpgrp():
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
        with contextlib.suppress(OSError):  # The terminal was closed.
            os.tcsetpgrp(0, launchers_group)
        for number, handler in previous.items():
            signal.signal(number, handler)


def take_terminal() -> None:
    """Takes the foreground back from a process that `ahead_of_launcher` gave it to and that was killed."""
    if not sys.stdin.isatty():
        return
    try:
        os.killpg(os.tcgetpgrp(0), 0)
    except PermissionError:
        return
    except ProcessLookupError:
        previous = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpgrp())
        signal.signal(signal.SIGTTOU, previous)


def _launched_by_accelerate() -> bool:
    """Whether the parent is `accelerate launch` for a single process; several are led by torch's elastic agent."""
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    modules = (b"accelerate.commands", b"toolkit.cli.start")
    return any(part.endswith(b"/accelerate") or part.startswith(modules) for part in command)


class Terminated(KeyboardInterrupt):
    """One of `stop_signals` outside of the steps, when nothing is to be saved: it ends what Ctrl-C ends there."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


ONE_SIGNAL_SECONDS = 2.0
"""Signals within so many seconds count as one: launchers pass a terminal's on a second time, and shells do."""
_AGAIN_SECONDS = 0.05
_told_at = -math.inf


def stop_signals() -> tuple[int, ...]:
    """SIGTERM, and SIGHUP, which is sent where a terminal is closed, unless `nohup` has it ignored.

    torch's elastic agent hears SIGHUP even then, passes it on, and kills later whom that has not ended.
    """
    passed_on = "SIGHUP" in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    heard = passed_on or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGHUP) if heard else (signal.SIGTERM,)


@contextmanager
def told_to_stop() -> Iterator[None]:
    """Has `stop_signals` raise `Terminated`: by default they end Python in mid-sentence, and nobody learns why. After
    Ctrl-C they come from launchers that have heard it too, and do not count.

    What is raised while an object is cleared away Python drops, so it is raised again a moment later; Ctrl-C's, too.
    """
    global _told_at
    if threading.current_thread() is not threading.main_thread():
        yield  # Which alone can do so.
        return
    _told_at = -math.inf
    numbers = [*stop_signals()]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    previous = {number: signal.signal(number, _terminate) for number in numbers}
    timers: list[threading.Timer] = []
    say, sys.unraisablehook = sys.unraisablehook, _raise_again_or(sys.unraisablehook, timers)
    try:
        yield
    finally:
        sys.unraisablehook = say
        for each in timers:
            each.cancel()  # Whoever answers these signals next was not asked to stop.
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise_again_or(say: Callable[[Any], object], timers: list[threading.Timer]) -> Callable[[Any], object]:
    """What Python calls with an error that it drops: says it, unless somebody is stopping this process."""

    def dropped(unraisable: Any) -> None:
        global _told_at
        if not isinstance(error := unraisable.exc_value, KeyboardInterrupt):
            say(unraisable)
            return
        _told_at = -math.inf
        number = error.exit_code - 128 if isinstance(error, Terminated) else signal.SIGINT
        # Here it would be dropped once more.
        again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
        timers.append(again)
        again.start()

    return dropped


def _terminate(number: int, frame: object) -> None:
    global _told_at
    before, _told_at = _told_at, time.monotonic()
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)  # type: ignore[arg-type]
    # What is cleared away for the first one is not left half-done for the second.
    if _told_at - before > ONE_SIGNAL_SECONDS:
        raise Terminated(number)


def _end_as_usual() -> None:
    # What is forked from here has no word to say, and pools end their processes so.
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL),
                          (signal.SIGINT, signal.default_int_handler)):  # fmt: skip
        if signal.getsignal(number) is _terminate:
            signal.signal(number, usual)


os.register_at_fork(after_in_child=_end_as_usual)


def end_with_training(worker: int) -> None:
    """Has a process that prepares batches end when the training says so, and not by what was sent to the training.

    torch's elastic agent, terminals and batch systems send their signals to all processes at once, and without its
    workers a training could not take the step after which it saves.

    Args:
        worker: Its number, as a data loader says it.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Not on macOS.
        # Torch's own handler would end this process. Only who waits for a signal learns who sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        training = multiprocessing.parent_process()  # Not the process that forked this one, where a server does that.
        assert training is not None
        threading.Thread(target=_await_term_of, args=(training.pid,), daemon=True).start()


def _await_term_of(process: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != process:
        pass
    os._exit(0)


TELL_SECONDS = 2.0
"""How long a process waits for the first one of its machine, which starts at about the same time, to say the same."""


def tell(error: UserError, world: World) -> None:
    """Prints why this process ends: in full on the first, or on the lowest that is left, in a line on others.

    What all processes find wrong is said once: launchers end the others of a machine as soon as its first has ended.
    torch's elastic agent repeats it at the end of its report of the failure.
    """
    if world.local_rank:
        time.sleep(TELL_SECONDS)
    speaks = getattr(error, "speaks", world.rank == 0)
    text = f"error: {error}" if speaks else f"error on process {world.rank}: {error.what}"
    print(text, file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        moment = str(int(time.time()))
        with contextlib.suppress(OSError):
            write_json(Path(file), {"message": {"extraInfo": {"py_callstack": text, "timestamp": moment}}})


def peak_host_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():
        # The other figure counts what the parent held when it started this process.
        _, found, rest = status.read_text(encoding="ascii", errors="replace").partition("\nVmHWM:")
        if found:
            return int(rest.split(maxsplit=1)[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def leave_process_group() -> None:
    """A process group left open makes a correct run end with a non-zero exit code."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit code of `main`, and all that Python does at its end, except taking the interpreter
    apart.

    An error that nobody has a word for is printed with its stack trace; another start may not meet it again, which is
    what its exit code says (sysexits.h).

    Threads of libraries that still run in C++ code then abort the process ("terminate called without an active
    exception"), now and then, after a run that was right.
    """
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = os.EX_TEMPFAIL
    # Tells pools of `concurrent.futures` to end, such as that of torch's compiler, and waits for threads but daemons.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
