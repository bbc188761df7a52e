"""Answers the questions of `store.ask`: for every line of standard input, a question in JSON, a line of JSON."""

from __future__ import annotations

import json
import sys
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
        from toolkit.models.load import ModelSource
        from toolkit.recipe import Recipe

        return {"config": ModelSource.open(Recipe.model_validate(question["config"])).config.to_dict()}
    from toolkit.planner.trace.fit import trace
    from toolkit.planner.trace.types import Setting

    return {"trace": trace(Setting(**question["trace"])).to_json()}


if __name__ == "__main__":
    sys.exit(main())
