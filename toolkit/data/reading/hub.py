"""Whether the hub answers, asked once in a process, before any library asks.

Libraries try again for each file, for many minutes where an address swallows what it is sent. One request of their own
client, with its proxies and certificates, settles it in seconds; where nothing comes back they are told that they are
offline, and take what is in the hub's cache. HF_HUB_ETAG_TIMEOUT, which they read too, sets how long to wait.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading

from toolkit.common import first_line
from toolkit.hub_cache import on_hub

SECONDS = 3.0
"""How long the hub may take to answer."""
_GATEWAY = (502, 503, 504)
"""Codes by which a proxy says that it got no answer itself."""

_log = logging.getLogger("toolkit.data")


def ask_for(*names: str | None) -> None:
    """Asks, see `offline`, if one of these is on the hub: neither built in, nor here, nor at another address."""
    if any(map(on_hub, names)):
        offline()


@functools.cache
def offline() -> bool:
    """Whether only the hub's cache is used: HF_HUB_OFFLINE says so, or the hub does not answer, which is told once."""
    from huggingface_hub import constants  # Takes a quarter of a second, and only what lies on the hub needs it.

    if constants.HF_HUB_OFFLINE:
        return True
    reason = silence(constants.ENDPOINT)
    if reason is None:
        return False
    first = os.environ.get("RANK", "0") == "0"
    _log.log(
        logging.WARNING if first else logging.DEBUG,
        "the hub at %s cannot be reached (%s); only what is in its cache is used",
        constants.ENDPOINT,
        reason,
    )
    constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return True


def silence(endpoint: str) -> str | None:
    """Why there is no answer; None if there is one, whatever it says."""
    from huggingface_hub.utils import get_session

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            status = get_session().head(endpoint, timeout=seconds, follow_redirects=False).status_code
            outcome.append(f"HTTP status {status}" if status in _GATEWAY else None)
        except Exception as error:  # The client's library differs between versions of the hub's.
            outcome.append(first_line(error))

    # The client's timeouts hold for each of its steps, and not for the look-up of a name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no answer in {seconds:g} s"
