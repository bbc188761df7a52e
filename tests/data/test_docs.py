"""What docs/data.md says about formats and settings is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toolkit.data.auditing.problems import MIN_UNTRAINED_FATAL
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task
from toolkit.data.reading.hub import SECONDS
from toolkit.data.reading.readers import COMPRESSIONS, KINDS
from toolkit.data.reading.splits import SPLITS
from toolkit.data.streaming import AUDITED_ROWS, SHUFFLE_BUFFER
from toolkit.recipe.data import FORMATS, Data, Source
from toolkit.recipe.embedding import Embedding

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^\| `(\w+)` \| `(\{.*\})` \|$", PAGE, re.MULTILINE))


def test_every_format_has_an_example() -> None:
    assert EXAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_what_they_say(name: str) -> None:
    objectives = {"source_target": "seq2seq", "preference": "dpo"}
    objectives |= {"labelled": "classification", "tagged": "token_classification"}
    objectives |= {"related": "embedding", "scored": "embedding"}
    settings = {"related": Embedding(negatives=1), "scored": Embedding(loss="cosent")}
    objective = objectives.get(name, "sft")
    row = json.loads(EXAMPLES[name])
    task = Task(objective, "auto", True, embedding=settings.get(name, Embedding()))
    row_format = recognise([row], Source(path="d"), task)
    assert row_format.name == name and row_format.convert(row, "d:1")


def test_all_settings_and_file_types_are_explained() -> None:
    settings = {"num_proc", "sources", "format", "columns"}  # of which the last three are explained by example
    for name in Data.model_fields.keys() - settings:
        assert f"data.{name}" in PAGE, name
    for word in [*KINDS, *COMPRESSIONS, *SPLITS, *(alias for aliases in SPLITS.values() for alias in aliases)]:
        assert f"`{word}`" in PAGE, word


def test_figures_on_the_page_are_those_that_hold() -> None:
    page = " ".join(PAGE.split())
    assert f"drawn from those read so far, up to {SHUFFLE_BUFFER:,}" in page
    assert f"The audit sees the first {AUDITED_ROWS:,} rows of each source" in page
    assert f"A hub that does not answer within {SECONDS:g} seconds" in page
    assert "more than half of the rows have no trained token" in page and MIN_UNTRAINED_FATAL == 0.5
