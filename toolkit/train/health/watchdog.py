"""Ends a training that hangs, or that another process has left, with one message that names who is to blame.

The training's loops say what they do, with `beat`. A thread of each process shows that to the others once a second
through the rendezvous' store, without any collective operation, and ends the process where its main thread cannot. A
training hangs when no process of it gets on: while one reads, saves or evaluates, the others may wait for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError

from toolkit.common import concealed, duration, in_background
from toolkit.distributed.rendezvous import Rendezvous, lost_connection
from toolkit.recipe import Recipe
from toolkit.train.continued import GO_ON
from toolkit.train.health import stragglers
from toolkit.train.health.peers import PeerError, Peers
from toolkit.train.health.sentry import Sentry
from toolkit.train.health.stragglers import Comparison, pace
from toolkit.train.process import Terminated, tell
from toolkit.train.run_folder import RunFolder, status_after

TICK_SECONDS = 1.0
_GRACE_SECONDS = 5.0
"""How long the training itself has to end, once another process has ended the run."""
_REASON_SECONDS = 3.0
"""How long is looked for who is to blame for a broken connection."""
_EXIT_SECONDS = 60.0
"""How long the libraries may take to end after a failure."""


_STOPPED_SECONDS = 20.0
"""Longer than the watchdog's own questions take. If more passes between two looks, the whole process was stopped, and
that is no time in which it hung."""
_MOVED_BYTES = 2**16
"""A process that reads or writes as much between two looks gets on."""
_LOOKS = 3
"""So many looks apart a process that answers has shown another state."""
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "deepspeed", "accelerate"))
_ANSWER_SECONDS = 30.0
"""How long the others may take to end a process that does not answer."""
_current: Watchdog | None = None


def beat(doing: str, together: bool = True) -> None:
    """Says that this process gets on, and what it does now; does nothing where no watchdog is.

    Args:
        together: Whether all processes come here. Who has come here less often than the others, holds them up.
    """
    if _current:
        _current.beat(doing, together)


class Watchdog:
    """A thread that looks after this process and the others. See `watching`.

    Attributes:
        ends: Whether it is ending this process, and has noted why. The main thread then has errors that follow from it.
    """

    def __init__(self, rendezvous: Rendezvous, recipe: Recipe, folder: RunFolder) -> None:
        self._folder, self._world = folder, rendezvous.world
        self._peers = None if rendezvous.alone else Peers(rendezvous)
        self._comparison = Comparison(rendezvous.host) if self._peers and self._world.rank == 0 else None
        minutes = recipe.faults.hang_minutes
        self._limit = minutes * 60 if minutes else None
        self._stacks = folder.path.resolve() / "stacks" / f"rank-{self._world.rank}.txt"
        self._sentry: Sentry | None = None
        self._ended = threading.Event()
        self._started = self.ends = False
        self._beats = self._together = self._looks = self._unanswered = 0
        self._doing = "setting up"
        # When it first looked for so long that nothing moved, and the states of all then.
        self._stalled: tuple[int, dict[int, dict[str, Any]]] | None = None
        self._still, self._looked, self._seen = 0.0, time.monotonic(), (0, 0)

    def beat(self, doing: str, together: bool = True) -> None:
        """See the function of this name."""
        if self._limit and self._started and not self._sentry:
            # Of several, the others say first who does not answer.
            patience = self._limit + (_ANSWER_SECONDS if self._peers else 0)
            self._sentry = Sentry(patience, self._stacks, self._change())
        self._doing = doing
        self._together += together
        self._beats += 1
        self._say()

    def _say(self) -> None:
        if self._sentry and self._beats:
            self._sentry.beat(self._doing, self._beats + self._looks)

    def start(self) -> None:
        """To be called when the process group has started, which the rendezvous has watched until then."""
        self._started = True
        if self._peers:
            # Who is stopped before the first look is known to be there.
            with contextlib.suppress(DistError, TimeoutError):
                self._peers.publish(self._state())
        threading.Thread(target=self._run, daemon=True, name="watchdog").start()

    def stop(self) -> None:
        """This process needs the others no more."""
        if not self._ended.is_set():
            self._ended.set()
            self._rest()
            if self._peers:
                self._peers.leave()

    def failed(self, error: BaseException) -> None:
        """Tells the others why the training ends here.

        Raises:
            PeerError: If it was another process that ended it, and broke the connection.
        """
        self._ended.set()
        self._rest()
        if not (self._peers and self._started):
            return
        # Libraries may wait for the others while they end.
        stop = threading.Timer(_EXIT_SECONDS, os._exit, (getattr(error, "exit_code", os.EX_TEMPFAIL),))
        stop.daemon = True
        stop.start()
        reason = self._peers.reason(_REASON_SECONDS) if lost_connection(error) else None
        if isinstance(error, Terminated):
            reason = self._peers.killed()  # Launchers tell the others of a machine to stop.
        self._peers.failed(reason or error)
        if reason:
            self._note(reason, "".join(traceback.format_exception(error)))
            raise reason from error

    def _rest(self) -> None:
        if self._sentry:
            self._sentry.stop()

    def _run(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._age()
            stalled = self._limit is not None and self._still > self._limit
            reason = None
            try:
                reason = self._look(stalled)
                self._unanswered = 0
            except TimeoutError:
                self._unanswered += 1
                if stalled and self._unanswered >= _LOOKS and self._peers:
                    reason = self._peers.silent(f"no process has got on for {duration(self._still)}: ", self._change())
            except DistError:
                pass  # The next look says whose connection it was.
            # The training mostly hears of a process that has gone by itself: a connection breaks.
            if reason and (reason.hangs or not self._ended.wait(_GRACE_SECONDS)):
                self._exit(reason)

    def _look(self, stalled: bool) -> PeerError | None:
        if self._peers:
            if reason := self._peers.look():
                return reason
            self._peers.publish(self._state())
            if self._comparison:
                self._comparison.look(self._peers.states)
        if not stalled:
            self._stalled = None
        return self._hang() if stalled else None

    def _age(self) -> None:
        """Adds up for how long this process has not got on."""
        now, (beats, moved) = time.monotonic(), self._seen
        elapsed, self._looked = min(now - self._looked, _STOPPED_SECONDS), now
        self._seen = self._beats, _bytes_moved()
        gets_on = self._beats != beats or self._seen[1] - moved > _MOVED_BYTES
        # Before its first beat a process may download or convert for hours.
        self._still = 0.0 if gets_on or not self._beats else self._still + elapsed
        self._looks += 1
        self._say()

    def _state(self) -> dict[str, Any]:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        where, waits = _where(frame) if frame else ("", False)
        return {
            **{"looks": self._looks, "still": self._still, "together": self._together},
            **{"doing": self._doing, "where": where, "waits": waits, "pace": pace()},
        }

    def _hang(self) -> PeerError | None:
        """What to say of a training of which no process gets on; None as long as one does."""
        assert self._limit is not None, "without a limit nothing hangs"
        own = self._world.rank
        states = (self._peers.states() if self._peers else {}) | {own: self._state()}
        if self._stalled is None:
            self._stalled = self._looks, states
        # Not waited for here: the others look whether this process answers.
        since, before = self._stalled
        if self._looks - since < _LOOKS:
            return None
        others = [rank for rank in range(self._world.world_size) if rank != own]
        looks = [tuple(each.get(rank, {}).get("looks") for each in (before, states)) for rank in others]
        silent = [rank for rank, (first, last) in zip(others, looks, strict=True) if first == last]
        answering = {rank: state for rank, state in states.items() if rank not in silent}
        if any(state["still"] < self._limit / 2 for state in answering.values()):
            return None
        what = f"no process has got on for {duration(self._still)}: "
        if not self._peers:
            what = f"the training has not got on for {duration(self._still)}: it is {_at(states[own])}"
            return PeerError(what, self._change(), True, True)
        least = min(state["together"] for state in answering.values())
        behind = [rank for rank, state in answering.items() if state["together"] == least]
        outside = [rank for rank, state in answering.items() if not state["waits"]]
        if silent:
            what += f"{self._peers.name(*silent)} does not answer"
        elif suspects := next((ranks for ranks in (behind, outside) if 0 < len(ranks) < len(answering)), None):
            other = next(state for rank, state in answering.items() if rank not in suspects)
            what += f"{self._peers.name(*suspects)} is {_at(states[suspects[0]])}; the others are {_at(other)}"
        else:
            what += f"all are {_at(states[own])}"
        return self._peers.end(silent, what, self._change(), hangs=True)

    def _change(self) -> str:
        return (
            f"{self._folder.path / 'stacks'} shows where each process was; {GO_ON}; faults.hang_minutes says how long "
            "is waited"
        )

    def _exit(self, reason: PeerError) -> None:
        """Ends a process whose main thread hangs where nothing can interrupt it."""
        where, self.ends = stacks(), True
        with contextlib.suppress(TimeoutError):
            # It may be the disk that hangs.
            in_background(lambda: self._note(reason, where)).result(_GRACE_SECONDS)
        if self._peers:
            self._peers.failed(reason)
        tell(reason, self._world)
        if self._peers and reason.hangs:
            self._peers.kill_gone()
        os._exit(reason.exit_code)

    def _note(self, reason: PeerError, where: str) -> None:
        """Keeps where this process was, and in the manifest why the run ended, unless that was before it was accepted.
        The disk may be to blame."""
        if not self._folder.accepted:
            return
        with contextlib.suppress(OSError):
            self._stacks.parent.mkdir(exist_ok=True)
            self._stacks.write_text(concealed(where), encoding="utf-8")
            if reason.speaks:
                self._folder.end(status_after(reason), error=str(reason))


@contextlib.contextmanager
def watching(rendezvous: Rendezvous, recipe: Recipe, folder: RunFolder) -> Iterator[Watchdog]:
    """Looks after a training while it runs. All its processes must come here.

    Raises:
        PeerError: If another one has ended the training, instead of what a library says of that.
    """
    global _current
    dog = _current = Watchdog(rendezvous, recipe, folder)
    try:
        yield dog
    except BaseException as error:
        dog.failed(error)
        raise
    finally:
        _current = None
        dog.stop()


def stacks() -> str:
    """Where each thread of this process is, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"{names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)) for ident, frame in frames
    )


def _where(frame: FrameType) -> tuple[str, bool]:
    """Where a thread is, and whether it is a library of the engines that does not return."""
    if frame.f_code.co_filename == stragglers.__file__ and frame.f_back:
        frame = frame.f_back  # The library waits, in what times it.
    file = frame.f_code.co_filename
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})", any(name in file for name in _LIBRARIES)


def _at(state: dict[str, Any]) -> str:
    return f"{state['doing']}, at {state['where']}"


def _bytes_moved() -> int:
    """Bytes that this process has read and written so far, as far as the machine tells."""
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
        return int(lines["rchar"]) + int(lines["wchar"])
    return 0
