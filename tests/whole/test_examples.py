"""The examples in the docstrings of what a newcomer calls first are true."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest

from toolkit.distributed.layout import batch_layout, run_length
from toolkit.planner.hardware import find
from toolkit.recipe.load import load
from toolkit.recipe.rules import load_checked

NAMES = {
    "batch_layout": batch_layout,
    "find": find,
    "load": load,
    "load_checked": load_checked,
    "run_length": run_length,
}


@pytest.mark.parametrize(
    "place",
    [
        "recipe.load.load",
        "recipe.rules.check.load_checked",
        "distributed.engines.deepspeed_config",
        "distributed.engines.training_arguments",
        "planner.build.estimate",
    ],
)
def test_example_gives_what_it_says(place: str) -> None:
    module, _, name = place.rpartition(".")
    function: Any = getattr(importlib.import_module(f"toolkit.{module}"), name)
    [example] = doctest.DocTestFinder(recurse=False).find(function, name, globs=NAMES | {name: function})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
