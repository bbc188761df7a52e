"""The rendezvous of a run's processes, before and while their process group starts.

A process group that hangs names nobody. The rendezvous store can: it is a TCP server beside the first process (or in
its launcher), where each process leaves values and a heartbeat. A process may be slow, as one that tokenises is, but it
may not fall silent. What one process finds wrong is told to all. Costs a thread and a message per second and process;
torch's own `monitored_barrier` exists for gloo only, and only once the group has started.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from toolkit.common import UserError, first_line, in_background, in_words
from toolkit.distributed.layout import World

TIMEOUT_SECONDS = 120.0
"""How long a process may stay silent.

A constant, because a recipe knows nothing of clusters: launchers start all processes at about the same time, importing
the libraries from a cold network disk takes less than this, and whatever takes longer sends heartbeats meanwhile.
"""
GROUP_SECONDS = 300.0
"""How long starting the process group may take, with DeepSpeed's compilation of an operation when it is used first."""
_BEAT_SECONDS = 1.0
_LEAVE_SECONDS = 5.0
PREFIX = "rendezvous/{}"
"""Prefix of the keys, by how often torch's agent has restarted its processes."""

Values = Mapping[int, Any]
"""Rank to the value it put into the store."""


class SharedError(UserError):
    """An error of the run as a whole, not of the process that noticed it.

    Args:
        exit_code: Of all processes; `os.EX_TEMPFAIL` where another start may not meet it again.
    """

    def __init__(self, what: str, change: str = "", exit_code: int = 1) -> None:
        super().__init__(what, change)
        self.exit_code = exit_code


@contextlib.contextmanager
def connect(world: World) -> Iterator[Rendezvous]:
    """Joins the other processes. A failure inside the block ends them too, and they hear why. No-op for one process.

    Raises:
        UserError: If the first process is not there, or another one failed.
    """
    rendezvous = Rendezvous(world)
    try:
        rendezvous.introduce()
        yield rendezvous
    except (Exception, KeyboardInterrupt) as error:
        while rendezvous.ends:
            # Its thread has said why and is about to end this process; what was interrupted by that says less.
            time.sleep(_BEAT_SECONDS)
        if rendezvous.group_deadline is not None and lost_connection(error):
            rendezvous.tell(shared := rendezvous.group_error(first_line(error)))
            raise shared from error
        rendezvous.tell(error)
        raise
    else:
        rendezvous.close()
    finally:
        rendezvous.stop()


def lost_connection(error: BaseException) -> bool:
    """Whether a library says that it cannot reach another process. Gloo has no class of errors of its own."""
    return isinstance(error, DistError) or "gloo" in str(error).lower()


class Rendezvous:
    """One process's connection to the others, see `connect`."""

    def __init__(self, world: World) -> None:
        self.world = world
        # By when the process group must have started; None while nobody starts it.
        self.group_deadline: float | None = None
        self.ends = False
        self._collectives: list[str] = []
        self._labels: dict[int, str] = {}
        self._silent: list[int] = []
        self._closed = threading.Event()
        self._store: PrefixStore | None = None
        if world.world_size > 1:
            self._store, address = _open_store(world)
            self._labels[world.rank] = f"{socket.gethostname()} {address}"
            self._store.add(f"beat/{world.rank}", 1)
            own = self._store.clone()  # type: ignore[attr-defined]
            threading.Thread(target=self._beat, args=(own,), daemon=True).start()

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self._store is None

    @property
    def network_hint(self) -> str:
        """What to change when processes that see the store do not reach each other."""
        address = self._labels[self.world.rank].split()[-1]
        return (
            "open all TCP ports between the nodes, and on each set NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) to "
            f"the interface of that network (here the one with {address}); NCCL_DEBUG=INFO tells more"
        )

    @property
    def _of_network(self) -> tuple[str, int]:
        return self.network_hint, os.EX_TEMPFAIL

    def introduce(self) -> None:
        """Waits until all processes are there, and learns where they are."""
        if self._store is not None:
            rank, label = self.world.rank, self._labels[self.world.rank]
            if self._ask(lambda store: store.add(f"present/{rank}", 1)) > 1:
                raise SharedError(
                    f"two processes say that they are rank {rank}, one of them on {label}",
                    "give every node its own --machine_rank (or RANK), from 0",
                )
            self._labels = dict(self.exchange("label", label, lambda labels: list(labels.items())))

    def exchange(self, topic: str, value: Any, judge: Callable[[Values], Any]) -> Any:
        """Every process gives a value; the first one judges them all; everyone gets its answer.

        Waits as long as all processes live.

        Args:
            topic: Used once in a run, by all processes in the same order.
            value: This process's, as JSON can hold it.
            judge: Called on the first process with all values; what it raises is raised on all.

        Raises:
            UserError: If a process has gone or failed, or as `judge` says.
        """
        if self.alone:
            return judge({0: value})
        # Without heartbeats, one that is only slow would count as gone.
        assert not self._closed.is_set(), f"the rendezvous is over: {topic}"
        self._put(f"{topic}/{self.world.rank}", value)
        if self.world.rank:
            return self._wait({0: f"{topic}/answer"})[0]
        answer = judge(self._wait({rank: f"{topic}/{rank}" for rank in range(self.world.world_size)}))
        self._put(f"{topic}/answer", answer)
        return answer

    def connection(self, topic: str) -> Store:
        """A connection of its own to the store, with keys of its own, which stands as long as the first process or its
        launcher does."""
        assert self._store is not None, "a single process has no store"
        return PrefixStore(topic, self._store.clone())  # type: ignore[attr-defined]

    def begin_group(self) -> None:
        """From here to `close` this process may hang in a library; then it reports and ends by itself."""
        self.group_deadline = time.monotonic() + GROUP_SECONDS

    def comes_to(self, what: str) -> None:
        """This process comes to a collective operation; all processes come to the same ones in the same order, each in
        its group."""
        self._collectives.append(what)
        self._ask(lambda store: store.add(f"collectives/{self.world.rank}", 1))

    def has_done(self) -> None:
        """It is through the operation that it came to last."""
        self._ask(lambda store: store.add(f"collectives/{self.world.rank}", 1))

    def group_error(self, why: str) -> UserError:
        """Who has gone; else who did not come, or is in what others are through; else that they do not reach each
        other."""
        others = [rank for rank in range(self.world.world_size) if rank != self.world.rank]

        def beats(store: Store) -> list[int]:
            return [store.add(f"beat/{rank}", 0) for rank in others]

        try:
            first = self._ask(beats)
            time.sleep(5 * _BEAT_SECONDS)
            second = self._ask(beats)
            # Two for each operation: as they come to it, and when they are through.
            done = self._ask(lambda store: {rank: store.add(f"collectives/{rank}", 0) for rank in others})
            own = self._ask(lambda store: store.add(f"collectives/{self.world.rank}", 0))
        except UserError as error:
            return error
        if silent := [rank for rank, old, new in zip(others, first, second, strict=True) if old == new]:
            return self._gone(silent, "stopped answering while the process group started")
        if (least := min(done.values())) < own:
            last, what = [rank for rank in others if done[rank] == least], self._collectives[least // 2]
            how = "cannot exchange data in" if least % 2 else "did not come to"
            return SharedError(f"{self.name(*last)} {how} {what}: {why}", *self._of_network)
        return SharedError(f"the processes are all there, but cannot exchange data: {why}", *self._of_network)

    def close(self) -> None:
        """Leaves the rendezvous. The first process, at whose side the store may be, leaves last."""
        if self._store is not None and not self._closed.is_set():
            self.stop()
            self._leave(self._store, self.world.world_size)

    def stop(self) -> None:
        """Ends the heartbeat."""
        self.group_deadline = None
        self._closed.set()

    def tell(self, error: BaseException) -> None:
        """Tells the other processes why this one ends, and gives them the time to hear it."""
        store = self._store
        if store is None or self._closed.is_set() or self._silent == [0]:
            return
        self.stop()
        what, change, code = in_words(error)
        if code == 128 + signal.SIGTERM:
            # Launchers send it to all processes beside one that was killed, which another start may not meet again.
            code = os.EX_TEMPFAIL
        what = what if isinstance(error, SharedError) else f"{self.name(self.world.rank)}: {what}"
        message = json.dumps([what, change, code, self.world.world_size - len(self._silent)])
        with contextlib.suppress(DistError, TimeoutError):
            ended = _within(_LEAVE_SECONDS, lambda: store.compare_set("end", "", message))
            self._leave(store, json.loads(ended)[3])

    def _leave(self, store: Store, present: int) -> None:
        """Waits a moment until all have come to the end: launchers end all processes of a node as soon as one ends."""
        end = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(DistError, TimeoutError):
            _within(_LEAVE_SECONDS, lambda: store.add("left", 1))
            while _within(_LEAVE_SECONDS, lambda: store.add("left", 0)) < present and time.monotonic() < end:
                time.sleep(0.05)

    def name(self, *ranks: int) -> str:
        """`ranks 0-3 (node-a 10.0.0.1), rank 4 (node-b 10.0.0.2)`; hosts only where there are several."""
        hosts: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            hosts.setdefault(self.host(rank), []).append(rank)
        parts = []
        for host, members in hosts.items():
            ordinals = f"rank {members[0]}" if len(members) == 1 else f"ranks {_spans(members)}"
            parts.append(f"{ordinals} ({host})" if self.world.num_nodes > 1 else ordinals)
        return ", ".join(parts)

    def host(self, rank: int) -> str:
        """Name and address of a machine. Launchers number processes node by node: one tells where the others are."""
        width = self.world.local_world_size
        node = [label for other, label in self._labels.items() if other // width == rank // width]
        return self._labels.get(rank) or next(iter(node), "host unknown")

    def _put(self, key: str, value: Any) -> None:
        self._ask(lambda store: store.set(key, json.dumps(value)))

    def _wait(self, keys: Mapping[int, str]) -> dict[int, Any]:
        """The values of these keys, each owed by a rank that must not fall silent."""
        values: dict[int, Any] = {}
        began = time.monotonic()
        heard = dict.fromkeys(keys, (0, began))

        def look(store: Store) -> dict[int, int]:
            """Takes what has come; heartbeats of those still owing."""
            if store.check(["end"]):
                raise SharedError(*json.loads(store.get("end"))[:3])
            came = [rank for rank in keys if rank not in values and store.check([keys[rank]])]
            values.update({rank: json.loads(store.get(keys[rank])) for rank in came})
            return {rank: store.add(f"beat/{rank}", 0) for rank in keys if rank not in values}

        while beats := self._ask(look):
            moment = time.monotonic()
            heard |= {rank: (beat, moment) for rank, beat in beats.items() if beat != heard[rank][0]}
            if silent := [rank for rank in beats if moment - heard[rank][1] > TIMEOUT_SECONDS]:
                ever = any(beats[rank] for rank in silent)
                how = "stopped answering {:g} s ago" if ever else "did not answer within {:g} s"
                raise self._gone(silent, how.format(TIMEOUT_SECONDS))
            # Prompt at first, and light on the store where thousands ask, or wait for an hour of tokenising.
            time.sleep(min(1.0, min(0.05, self.world.world_size / 1000) + (moment - began) / 20))
        return values

    def _gone(self, ranks: Sequence[int], how: str) -> UserError:
        self._silent = list(ranks)
        # Rank 0 misses itself where its launcher held the store and has ended.
        if self.world.rank == 0 and 0 not in ranks:
            everyone = {rank: f"label/{rank}" for rank in range(self.world.world_size)}
            come = self._ask(
                lambda store: {rank: store.get(key) for rank, key in everyone.items() if store.check([key])}
            )
            self._labels |= {rank: json.loads(label) for rank, label in come.items()}
        return SharedError(
            f"{self.name(*ranks)} {how}",
            "look at what was printed there last; launch with the same arguments on every node, and from each "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} must be reachable",
            os.EX_TEMPFAIL,
        )

    def _ask(self, call: Callable[[Store], Any]) -> Any:
        """Asks the store. Where the network has gone it raises, or hangs beyond its own time-out."""
        store = self._store
        assert store is not None, "a single process has no store"
        try:
            return _within(TIMEOUT_SECONDS, lambda: call(store))
        except DistError:
            raise self._gone([0], "has ended") from None
        except TimeoutError:
            raise self._gone([0], f"stopped answering {TIMEOUT_SECONDS:g} s ago") from None

    def _beat(self, store: Store) -> None:
        """The heartbeat. While the group starts it is also the only one who can report that it hangs."""
        try:
            while not self._closed.wait(_BEAT_SECONDS):
                store.add(f"beat/{self.world.rank}", 1)
                if (deadline := self.group_deadline) is None:
                    continue
                if store.check(["end"]):
                    self._exit(SharedError(*json.loads(store.get("end"))[:3]))
                # The first process says who is missing; should it hang itself, the others end all the same.
                elif time.monotonic() > deadline + 2 * _LEAVE_SECONDS * (self.world.rank > 0):
                    self._exit(self.group_error(f"nothing for {GROUP_SECONDS:g} s"))
        except DistError as error:
            if self.group_deadline is not None:
                self._exit(SharedError(f"{self.name(0)} stopped answering: {first_line(error)}", *self._of_network))

    def _exit(self, error: UserError) -> None:
        """Ends a process whose main thread hangs where nothing can interrupt it."""
        if not self._closed.is_set():
            self.ends = True
            rank = self.world.rank
            print(f"error on process {rank}: {error.what}" if rank else f"error: {error}", file=sys.stderr, flush=True)
            self.tell(error)
            os._exit(error.exit_code)


def _open_store(world: World) -> tuple[PrefixStore, str]:
    """The store, and this node's own address on the way to it.

    The launcher's store where torch's agent keeps one, else one that the process group will share.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise UserError(
            f"the launcher started {world.world_size} processes and set no MASTER_ADDR and MASTER_PORT",
            "start with accelerate launch, torchrun or `toolkit launch`",
        )
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    open_store = functools.partial(TCPStore, host, int(port), timeout=timeout, wait_for_workers=False)
    server = None
    if world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            server = open_store(is_master=True, multi_tenant=True)
        except DistError as error:
            raise UserError(
                f"port {port} cannot be opened on {host}: {first_line(error)}",
                "launch with another --main_process_port",
            ) from None
    address = _reach(host, int(port))
    # An agent's store outlives a restart of its workers.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(PREFIX.format(restart), server or open_store()), address


def _reach(host: str, port: int) -> str:
    """Waits until the first process listens. The store would wait as well, but with pages of stack traces."""
    began = time.monotonic()
    end = began + TIMEOUT_SECONDS
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(1.0, end - time.monotonic())) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"rank 0 ({host}:{port}) did not answer within {TIMEOUT_SECONDS:g} s: {error.strerror or error}",
                    "start the first node, and open that port to this one; --main_process_ip must be an address of the "
                    "first node",
                ) from None
        time.sleep(min(0.2, 0.01 + (time.monotonic() - began) / 10))


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of a call that may hang; raises TimeoutError if it does. An executor's thread would keep Python up."""
    return in_background(call).result(seconds)


def _spans(ranks: Sequence[int]) -> str:
    """`0-3, 5` from 0, 1, 2, 3, 5."""
    runs = itertools.groupby(enumerate(ranks), lambda numbered: numbered[1] - numbered[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
