"""The traces that come with the package: there for every shipped recipe, and still what tracing would say."""

from __future__ import annotations

import gzip
import json

import pytest
from ship_traces import settings

from toolkit.planner.trace.fit import trace
from toolkit.planner.trace.store import SHIPPED
from toolkit.planner.trace.types import Trace


def test_every_setting_of_the_shipped_recipes_is_traced_and_nothing_else() -> None:
    """After a change of what is traced, of recipes or of versions: `make traces`."""
    shipped = {key for file in SHIPPED.glob("*.json.gz") for key in json.loads(gzip.decompress(file.read_bytes()))}

    assert shipped == settings().keys()


@pytest.mark.parametrize("index", [0, pytest.param(-1, marks=pytest.mark.matrix)])
def test_a_shipped_trace_is_what_tracing_says(index: int) -> None:
    each = [each for each in settings().values() if each.config.get("num_hidden_layers") == 16][index]
    shipped = json.loads(gzip.decompress((SHIPPED / f"{each.architecture()}.json.gz").read_bytes()))

    assert Trace.from_json(shipped[each.key()]) == trace(each)


def test_shipped_traces_are_small() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.glob("*.json.gz")) < 1_000_000
