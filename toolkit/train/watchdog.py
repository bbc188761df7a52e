"""Ends a training that another process has left, with one message instead of the traces of a broken connection."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator

from toolkit.common import concealed
from toolkit.distributed.rendezvous import Rendezvous, lost_connection
from toolkit.train.peers import PeerError, Peers
from toolkit.train.process import tell
from toolkit.train.run_folder import RunFolder

TICK_SECONDS = 1.0
_GRACE_SECONDS = 5.0
"""How long the training itself has to end, once another process has ended the run."""
_REASON_SECONDS = 3.0
"""How long is looked for who is to blame for a broken connection."""
_EXIT_SECONDS = 60.0
"""How long the libraries may take to end after a failure."""


class Watchdog:
    """A thread that looks after the other processes. See `watching`."""

    def __init__(self, rendezvous: Rendezvous, folder: RunFolder) -> None:
        self._folder, self._world = folder, rendezvous.world
        self._peers = None if rendezvous.alone else Peers(rendezvous)
        self._ended = threading.Event()
        self._started = False

    def start(self) -> None:
        """To be called when the process group has started, which the rendezvous has watched until then."""
        self._started = True
        threading.Thread(target=self._run, daemon=True, name="watchdog").start()

    def stop(self) -> None:
        """This process needs the others no more."""
        if not self._ended.is_set():
            self._ended.set()
            if self._peers:
                self._peers.leave()

    def failed(self, error: BaseException) -> None:
        """Tells the others why the training ends here.

        Raises:
            PeerError: If it was another process that ended it, and broke the connection.
        """
        self._ended.set()
        if not (self._peers and self._started):
            return
        # Libraries may wait for the others while they end.
        stop = threading.Timer(_EXIT_SECONDS, os._exit, (getattr(error, "exit_code", os.EX_TEMPFAIL),))
        stop.daemon = True
        stop.start()
        reason = self._peers.reason(_REASON_SECONDS) if lost_connection(error) else None
        self._peers.failed(reason or error)
        if reason:
            self._note(reason, "".join(traceback.format_exception(error)))
            raise reason from error

    def _run(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            reason = None
            with contextlib.suppress(TimeoutError):
                reason = self._peers.look() if self._peers else None
            # The training mostly hears of it by itself: a connection breaks.
            if reason and not self._ended.wait(_GRACE_SECONDS):
                self._exit(reason)

    def _exit(self, reason: PeerError) -> None:
        """Ends a process whose main thread hangs where nothing can interrupt it."""
        self._note(reason, stacks())
        if self._peers:
            self._peers.failed(reason)
        tell(reason, self._world)
        os._exit(reason.exit_code)

    def _note(self, reason: PeerError, where: str) -> None:
        """Keeps where this process was, and in the manifest why the run ended. The disk may be to blame."""
        with contextlib.suppress(OSError):
            file = self._folder.path / "stacks" / f"rank-{self._world.rank}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(concealed(where), encoding="utf-8")
            if reason.speaks:
                self._folder.end("failed", error=str(reason))


@contextlib.contextmanager
def watching(rendezvous: Rendezvous, folder: RunFolder) -> Iterator[Watchdog]:
    """Looks after the other processes while a training runs. All processes must come here.

    Raises:
        PeerError: If another one has ended the training, instead of what a library says of that.
    """
    dog = Watchdog(rendezvous, folder)
    try:
        yield dog
    except BaseException as error:
        dog.failed(error)
        raise
    finally:
        dog.stop()


def stacks() -> str:
    """Where each thread of this process is, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"{names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)) for ident, frame in frames
    )
