"""Whether a training that failed on this machine has ended on the first one too."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable, Sequence

from torch.distributed import DistError, PrefixStore, TCPStore

from toolkit.common import in_background
from toolkit.distributed.rendezvous import PREFIX

_ANSWER_SECONDS = 5.0
"""How long a store that is there may take to answer."""
_PAUSE_SECONDS = 1.0


def await_end(host: str, port: int, ranks: Sequence[int], say: Callable[[str], None]) -> None:
    """Waits while the store there is one at which these ranks have met before: their training has then not ended on the
    first machine, and who came there now would be a second process of its number.

    Args:
        say: Takes a line, should it have to wait.
    """
    told = False
    while _have_met(host, port, ranks):
        if not told:
            say(f"waiting until the training that failed has ended on the first machine too ({host}:{port})")
        told = True
        time.sleep(_PAUSE_SECONDS)


def _have_met(host: str, port: int, ranks: Sequence[int]) -> bool:
    timeout = datetime.timedelta(seconds=_ANSWER_SECONDS)

    def ask() -> bool:
        store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return any(PrefixStore(PREFIX.format(0), store).check([f"present/{rank}"]) for rank in ranks)

    try:
        # The store's own client would wait for one that listens.
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError:
        return False
    try:
        return bool(in_background(ask).result(2 * _ANSWER_SECONDS))
    except DistError:
        return False
    except TimeoutError:
        return True
