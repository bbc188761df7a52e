"""Answers the questions of `store.ask`: for every line of standard input, a question in JSON, a line of JSON."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from typing import Any

from toolkit.common import in_a_line
from toolkit.models.imports import quick_imports
from toolkit.output import quiet_libraries


def main() -> int:
    """Returns 0; an answer may say why there is no trace."""
    quiet_libraries()
    with quick_imports():
        import toolkit.planner.trace.fit  # noqa: F401
    # Collections would go through the libraries and the models again and again, for a fifth of the time that a trace
    # takes.
    gc.freeze()
    gc.disable()
    for line in sys.stdin:
        gc.collect()
        print(json.dumps(answer(json.loads(line))), flush=True)
    return 0


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a question; `error` says why there is none."""
    try:
        return _answer(question)
    except Exception as error:
        return {"error": getattr(error, "what", "") or in_a_line(error), "change": getattr(error, "change", "")}


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    if "config" in question:
        from toolkit.models.load import ModelSource
        from toolkit.recipe import Recipe

        return {"config": ModelSource.open(Recipe.model_validate(question["config"])).config.to_dict()}
    from toolkit.planner.trace.fit import trace
    from toolkit.planner.trace.setting import Setting

    return {"trace": trace(Setting(**question["trace"])).to_json()}


if __name__ == "__main__":
    sys.exit(main())
