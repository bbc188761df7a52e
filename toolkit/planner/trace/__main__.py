"""Answers the questions of `store.ask`: for every line of standard input, a question in JSON, a line of JSON."""

from __future__ import annotations

import json
import socket
import sys
import urllib.parse
import urllib.request
from typing import Any

from toolkit.common import in_a_line, quiet_libraries


def main() -> int:
    """Returns 0; an answer may say why there is no trace."""
    quiet_libraries()
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:
            answer = {"error": getattr(error, "what", "") or in_a_line(error), "change": getattr(error, "change", "")}
        print(json.dumps(answer), flush=True)
    return 0


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    if "config" in question:
        from huggingface_hub import constants

        from toolkit.models.load import ModelSource
        from toolkit.recipe import Recipe

        constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE or not _resolves(constants.ENDPOINT)
        return {"config": ModelSource.open(Recipe.model_validate(question["config"])).config.to_dict()}
    from toolkit.planner.trace.fit import trace
    from toolkit.planner.trace.types import Setting

    return {"trace": trace(Setting(**question["trace"])).to_json()}


def _resolves(endpoint: str) -> bool:
    """Whether the hub's name is known here: its client would try for half a minute before it says no."""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(endpoint).hostname, None)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
