"""The other processes of a training: which of them has ended, and why.

A communication library only says that a connection broke, after minutes or in a page of traces, and not who is to
blame. What ends a process is told to all through the rendezvous' store; one that was killed tells nobody, but its
neighbours on the same machine see that it has gone. No collective operation is needed for either.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError, Store

from toolkit.common import UserError, in_background, in_words
from toolkit.distributed.rendezvous import Rendezvous, SharedError
from toolkit.train.continued import GO_ON
from toolkit.train.health.sentry import DUMP

_ANSWER_SECONDS = 5.0
"""How long is waited for the store, which answers in milliseconds."""
_HEAR_SECONDS = 3.0
"""How long a process that fails waits for the others to hear why; launchers end them as soon as it has ended."""
_KILLED = (
    "look at what was printed there last; the kernel kills a process when the host's memory is full, and a batch "
    f"system at its limits; {GO_ON}"
)


class PeerError(SharedError):
    """Another process has ended the run.

    Args:
        speaks: Whether this process says it in full, as the lowest of those that are left.
        hangs: Whether nothing moves, so that there is no use in waiting for the training itself.
    """

    def __init__(
        self, what: str, change: str, speaks: bool, hangs: bool = False, exit_code: int = os.EX_TEMPFAIL
    ) -> None:
        super().__init__(what, change, exit_code)
        self.speaks, self.hangs = speaks, hangs


class Peers:
    """What one process knows of the others. All must be there when it is made."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.name, self.world = rendezvous.name, rendezvous.world
        own = [_place(), os.getpid()]
        everyone = dict(rendezvous.exchange("processes", own, lambda values: list(values.items())))
        self.pids = {rank: pid for rank, (place, pid) in everyone.items() if place == own[0] and pid != own[1]}
        self._neighbours: dict[int, psutil.Process] = {}
        for rank, pid in self.pids.items():
            with contextlib.suppress(psutil.Error):
                self._neighbours[rank] = psutil.Process(pid)
        self._store = rendezvous.connection("peers")
        self._asking = threading.Lock()
        self._asked: Future[Any] | None = None
        self._found: PeerError | None = None
        self._heard = False
        self.gone: set[int] = set()

    def look(self) -> PeerError | None:
        """Who has ended the run, if anybody; tells it to all. What was found first stays.

        Raises:
            TimeoutError: If the process beside which the store is does not answer.
        """
        self._found = self._found or self._look()
        return self._found

    def _look(self) -> PeerError | None:
        dead = self._dead()
        try:
            if found := self.ask(lambda store: _read(store, "end")):
                return self._error(*found)
            left = self.ask(lambda store: [rank for rank in dead if store.check([f"left/{rank}"])]) if dead else []
            if not (dead := [rank for rank in dead if rank not in left]):
                return None
            return self.end(dead, f"{self._who(dead)} ended without a word: killed, or crashed", _KILLED)
        except DistError:
            # With the store's own process, or its launcher. A process is there a moment longer than its connections.
            time.sleep(0.5)
            dead = self._dead()
            # Others that are gone too may have ended for want of it, a moment before this one looked.
            dead = [0] if 0 in dead else dead
            where = self._who(dead) if dead else f"{self.name(0)}, or its launcher,"
            return self._error(dead or [0], f"{where} ended without a word: killed, or crashed", _KILLED)

    def reason(self, seconds: float) -> PeerError | None:
        """What `look` finds within some seconds."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(TimeoutError):
                if found := self.look():
                    return found
            if time.monotonic() > end:
                return None
            time.sleep(0.1)

    def killed(self) -> PeerError | None:
        """What `look` says of a process of this machine that has gone, if one has."""
        with contextlib.suppress(TimeoutError):
            return self.look() if self._dead() else None
        return None

    def end(
        self, gone: Iterable[int], what: str, change: str, hangs: bool = False, exit_code: int = os.EX_TEMPFAIL
    ) -> PeerError:
        """Tells all why the run ends, and which processes cannot hear it; returns what was told first."""
        message = json.dumps([sorted(gone), what, change, hangs, exit_code])
        return self._error(*json.loads(self.ask(lambda store: store.compare_set("end", "", message))))

    def failed(self, error: BaseException) -> None:
        """Tells the others why this process ends, and gives them the time to hear it.

        Args:
            error: What ends it; a `PeerError` is known to them.
        """
        rank, size = self.world.rank, self.world.world_size
        what, change, code = in_words(error)
        what = what if isinstance(error, SharedError) else f"{self.name(rank)}: {what}"
        change = change if isinstance(error, UserError) else "; ".join(filter(None, (change, GO_ON)))
        with contextlib.suppress(DistError, TimeoutError):
            if not isinstance(error, PeerError):
                self.end([], what, change, exit_code=code)
            until = time.monotonic() + _HEAR_SECONDS
            while self.ask(lambda store: store.add("heard", 0)) < size - len(self.gone) and time.monotonic() < until:
                time.sleep(0.05)

    def silent(self, what: str, change: str) -> PeerError:
        """What to say where the process beside which the store is does not answer, and nothing can be told to any."""
        gone = [0] if self.world.rank else []
        return self._error(gone, f"{what}{self.name(0)}, or its launcher, does not answer", change, hangs=True)

    def publish(self, state: dict[str, Any]) -> None:
        """Shows the others how this process gets on."""
        self.ask(lambda store: store.set(f"at/{self.world.rank}", json.dumps(state)))

    def states(self) -> dict[int, dict[str, Any]]:
        """What all have published last."""
        ranks = range(self.world.world_size)
        found = self.ask(lambda store: {rank: _read(store, f"at/{rank}") for rank in ranks})
        return {rank: state for rank, state in found.items() if state}

    def kill_gone(self) -> None:
        """Ends those on this machine that do not answer, so that they give back what they hold."""
        for rank in self.gone & self._neighbours.keys():
            with contextlib.suppress(psutil.Error):
                self._neighbours[rank].send_signal(DUMP)
                time.sleep(0.5)
                self._neighbours[rank].kill()

    def leave(self) -> None:
        """Says that this process needs the others no more."""
        with contextlib.suppress(DistError, TimeoutError):
            self.ask(lambda store: store.set(f"left/{self.world.rank}", "1"))

    def ask(self, call: Callable[[Store], Any]) -> Any:
        """Asks the store.

        Raises:
            DistError: If it has gone.
            TimeoutError: If it does not answer, has not answered the last question yet, or no memory is left to ask.
        """
        with self._asking:
            if self._asked and not self._asked.done():
                raise TimeoutError
            try:
                self._asked = in_background(lambda: call(self._store))
            except RuntimeError:  # No thread can be started.
                raise TimeoutError from None
            return self._asked.result(_ANSWER_SECONDS)

    def _dead(self) -> list[int]:
        return [rank for rank, process in self._neighbours.items() if not _lives(process)]

    def _who(self, ranks: list[int]) -> str:
        return ", ".join(f"{self.name(rank)} (pid {self.pids[rank]})" for rank in ranks)

    def _error(
        self, gone: list[int], what: str, change: str, hangs: bool = False, exit_code: int = os.EX_TEMPFAIL
    ) -> PeerError:
        self.gone |= {*gone}
        if not self._heard:
            self._heard = True
            with contextlib.suppress(DistError, TimeoutError):
                self.ask(lambda store: store.add("heard", 1))
        speaks = self.world.rank == min({*range(self.world.world_size)} - self.gone, default=0)
        return PeerError(what, change, speaks, hangs, exit_code)


def _read(store: Store, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def _place() -> str:
    """The machine, and what it shows of its processes: only there does a number name the same one."""
    files = (Path("/proc/sys/kernel/random/boot_id").read_text, lambda: os.readlink("/proc/self/ns/pid"))
    try:
        return "".join(each().strip() for each in files)
    except OSError:
        return f"only {os.getpid()}"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
