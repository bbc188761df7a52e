"""A machine on which a training failed, while the first one has not noticed."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from torch.distributed import PrefixStore, TCPStore

from toolkit.distributed import previous_attempt


def test_a_machine_that_starts_again_waits_until_the_first_has_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for one that has started anew, nor for one that is not there yet."""
    monkeypatch.setattr(previous_attempt, "_PAUSE_SECONDS", 0.05)
    said: list[str] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def await_end() -> threading.Thread:
        place = ("127.0.0.1", port)
        thread = threading.Thread(target=previous_attempt.await_end, args=(*place, [2, 3], said.append))
        thread.start()
        return thread

    await_end().join(10)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    await_end().join(10)
    assert not said
    PrefixStore("rendezvous/0", store).add("present/3", 1)
    waits = await_end()
    time.sleep(0.5)
    assert waits.is_alive() and len(said) == 1 and "has ended on the first machine too (127.0.0.1:" in said[0]
    del store
    waits.join(10)
    assert not waits.is_alive() and len(said) == 1
