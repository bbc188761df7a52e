"""What a run would refuse of its data, from the names and the first rows of local files, in a moment.

Hub data sets, built-in data and files at addresses are left to the run, and so is whatever needs the tokenizer. A file
that can only be read whole is opened if it is small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from toolkit.common import UserError
from toolkit.data import readers, remote
from toolkit.data.formats import Task, recognise
from toolkit.data.sources import open_source
from toolkit.recipe import Problem, Recipe, origin_of
from toolkit.recipe.schema import Source

_ROWS = 20
_WHOLE = ("json", "csv", "tsv", "text")
"""Kinds of files that are read whole."""
_WHOLE_BYTES = 20e6


def data_problems(recipe: Recipe, origins: Mapping[str, str]) -> list[Problem]:
    """Missing files and splits, columns that no format has or that `columns` misspells, rows of a wrong form.

    Args:
        origins: Where the recipe's values were written.
    """
    # Whether the tokenizer has a template is not known without it; the run asks.
    task = Task(recipe.objective, recipe.data.train_on, has_chat_template=True)
    problems: dict[str, Problem] = {}
    for path, source in _sources(recipe):
        try:
            _check(source, task)
        except UserError as error:
            place = "data.columns" if "`data.columns`" in error.what and "data.columns" in origins else path
            problems.setdefault(error.what, Problem(place, error.what, origin_of(place, origins), hint=error.change))
    return list(problems.values())


def _sources(recipe: Recipe) -> Iterator[tuple[str, Source]]:
    data = recipe.data
    for number, source in enumerate(data.training_sources()):
        yield f"data.sources.{number}", source
    held_out = data.evaluation_sources()
    for number, source in enumerate(held_out):
        yield (f"data.eval_sources.{number}" if number < len(data.eval_sources) else "data.eval_split"), source


def _check(source: Source, task: Task) -> None:
    if "://" in source.path:
        return remote.require_known(source.path)
    if source.path.startswith("builtin:"):
        return
    reader = open_source(source, streaming=True)
    files = reader.local_files()
    if not files or any(readers.kind(file) in _WHOLE and file.stat().st_size > _WHOLE_BYTES for file in files[:1]):
        return
    head = list(itertools.islice(reader.rows(), _ROWS))
    rows = recognise([row for _, row in head], source, task)
    for where, row in head:
        rows.convert(row, where)
