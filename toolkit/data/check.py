"""What a run would refuse in its data, checked in a moment from the names and the first rows of local files.

Hub data sets, built-in data and files at addresses are left to the run, and so is whatever needs the tokenizer. A file
that can only be read whole is opened if it is small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from toolkit.common import UserError
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task, is_empty
from toolkit.data.reading import readers, remote
from toolkit.data.reading.sources import open_source
from toolkit.recipe import Problem, Recipe, origin_of
from toolkit.recipe.data import Source

_ROWS = 20
_WHOLE = ("json", "csv", "tsv", "text")
"""Kinds of files that are read whole."""
_WHOLE_BYTES = 20e6


def data_problems(recipe: Recipe, origins: Mapping[str, str]) -> list[Problem]:
    """Missing files and splits, columns that no format has or that `columns` misspells, rows of a wrong form, small
    files with nothing to train on.

    Args:
        origins: Where the recipe's values were written.
    """
    # Whether the tokenizer has a template is not known without it; the run asks.
    task = Task.of(recipe, has_chat_template=True)
    problems: dict[str, Problem] = {}

    def add(path: str, what: str, hint: str) -> None:
        problems.setdefault(what, Problem(path, what, origin_of(path, origins), hint=hint))

    for key, sources in (("data.sources", _training(recipe)), ("data.eval_sources", _held_out(recipe))):
        is_silent = []
        for path, source in sources:
            try:
                is_silent.append(_check(source, task))
            except UserError as error:
                is_silent.append(False)
                named = "`data.columns`" in error.what and "data.columns" in origins
                add("data.columns" if named else path, error.what, error.change)
        if is_silent and all(is_silent):
            add(key, "no row has anything to train on", "check the rows, `data.columns` and `data.train_on`")
    return list(problems.values())


def _training(recipe: Recipe) -> Iterator[tuple[str, Source]]:
    for number, source in enumerate(recipe.data.training_sources()):
        yield f"data.sources.{number}", source


def _held_out(recipe: Recipe) -> Iterator[tuple[str, Source]]:
    data = recipe.data
    for number, source in enumerate(data.evaluation_sources()):
        yield (f"data.eval_sources.{number}" if number < len(data.eval_sources) else "data.eval_split"), source


def _check(source: Source, task: Task) -> bool:
    """Whether it was read whole, and no row of it has anything to train on."""
    if "://" in source.path:
        remote.require_known(source.path)
        return False
    if source.path.startswith("builtin:"):
        return False
    reader = open_source(source, streaming=True)
    files = reader.local_files()
    if not files or any(readers.kind(file) in _WHOLE and file.stat().st_size > _WHOLE_BYTES for file in files[:1]):
        return False
    head = list(itertools.islice(reader.rows(), _ROWS))
    found = recognise([row for _, row in head], source, task)
    is_silent = [is_empty(found.convert(row, where), task) for where, row in found.rows(head)]
    return all(is_silent) and len(head) < _ROWS
