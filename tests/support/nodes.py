"""Nodes of a cluster on one machine: network namespaces with a host name and an address each, joined by a cable."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import environment
from ranks import Launch, Ranks

_NUMBERS = itertools.count()
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000


@dataclass(frozen=True)
class Node:
    """A network namespace.

    Args:
        host: Its host name.
        address: Its address; the other nodes reach it there.
        namespace: Name for `ip netns`; also the name of its network interface.
    """

    host: str
    address: str
    namespace: str

    def start(
        self, folder: Path, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a command on this node, in a shell as fresh as that of another machine."""
        enter = f"ip netns exec {self.namespace} unshare --uts sh -c".split()
        return subprocess.Popen(
            [*enter, f'hostname {self.host}; exec "$@"', "sh", *command],
            cwd=folder,
            env={**environment(), **self._variables(), **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def fork(self, ranks: Ranks, folder: Path, *arguments: str, entry: str, **variables: str) -> Launch:
        """Calls a module's `main` on this node, in a process of `ranks`."""
        own = {**self._variables(), **variables, "NODE": f"{self.namespace} {self.host} {entry}"}
        return ranks.start(folder, *arguments, entry="nodes", **own)

    def _variables(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": self.namespace, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

    def cut_off(self) -> None:
        """Pulls the cable."""
        _ip("-n", self.namespace, "link", "set", self.namespace, "down")

    def stop_all(self) -> None:
        """Ends every process on this node."""
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in _ip("netns", "pids", self.namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Moves this process to its node, and calls the `main` that it was started for."""
    namespace, host, entry = os.environ["NODE"].split()
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as place:
        if libc.setns(place.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(host)
    return importlib.import_module(entry).main(arguments)


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes that reach each other; skips the test where that is not permitted. Nothing of them stays behind."""
    number = next(_NUMBERS)
    names = [f"tk{os.getpid()}x{number}{letter}" for letter in "ab"]
    nodes = [Node(f"node-{name[-1]}", f"10.77.0.{index}", name) for index, name in enumerate(names, 1)]
    try:
        try:
            for node in nodes:
                _ip("netns", "add", node.namespace)
            ends = [["name", name, "netns", name] for name in names]
            _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for node in nodes:
                _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", node.namespace)
                _ip("-n", node.namespace, "link", "set", node.namespace, "up")
                _ip("-n", node.namespace, "link", "set", "lo", "up")
            subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"network namespaces need iproute2 and util-linux: {error}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            if Path("/run/netns", node.namespace).exists():
                node.stop_all()
                subprocess.run(["ip", "netns", "del", node.namespace], check=False)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
