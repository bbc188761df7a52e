"""Answers the questions of `plan.traces.ask`, and remakes the traces that are shipped.

Without arguments it answers every line of standard input, a question in JSON, with a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from toolkit.errors import in_a_line
from toolkit.terminal import quiet_libraries


def main() -> int:
    """Returns 0; an answer may say why there is no trace."""
    quiet_libraries()
    if sys.argv[1:] == ["--ship"]:
        from toolkit.tracing.ship import ship

        for line in ship():
            print(line, flush=True)
        return 0
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:
            answer = {"error": getattr(error, "what", "") or in_a_line(error), "change": getattr(error, "change", "")}
        print(json.dumps(answer), flush=True)
    return 0


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    if "config" in question:
        from toolkit.model import load_config
        from toolkit.recipe import Recipe

        return {"config": load_config(Recipe.model_validate(question["config"])).to_dict()}
    from toolkit.plan.setting import Setting
    from toolkit.tracing import trace

    return {"trace": trace(Setting(**question["trace"])).to_json()}


if __name__ == "__main__":
    sys.exit(main())
