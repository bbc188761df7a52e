"""The places that a run's recipe names, for commands that are typed in another folder than the run was started in."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from toolkit.files import read_file
from toolkit.recipe.base import Place, Section
from toolkit.recipe.schema import Recipe

T = TypeVar("T", bound=Section)
_READ = ("model", "data", "distillation", "rewards")
"""Sections whose places are read; the others name what a run writes."""


def as_seen_by(run: Path, recipe: Recipe) -> Recipe:
    """The recipe of a run, with the relative paths of what it reads as the run saw them.

    They are followed from the folder in which the run was started, as long as something is there; from here where the
    run has come from another machine, or was moved together with what it reads.
    """
    try:
        folder = Path(json.loads(read_file(run / "manifest.json"))["working_folder"])
        if folder.samefile(os.curdir):
            return recipe
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return recipe  # Of a run from before this was noted, or a folder that is gone.

    def followed(section: Section) -> dict[str, str]:
        return {key: path for key in _places(section) if (path := _from(folder, getattr(section, key)))}

    return recipe.with_values({name: _changed(getattr(recipe, name), followed) for name in _READ})


def as_written(section: T) -> T:
    """A section of a recipe, or a whole one, with its paths as they were before `as_seen_by`."""
    return _changed(section, lambda each: each._written)


def _changed(value: Any, change: Callable[[Section], dict[str, str]]) -> Any:
    """A value with other paths in all of its sections."""
    if isinstance(value, list | tuple):
        return type(value)(_changed(each, change) for each in value)
    if not isinstance(value, Section):
        return value
    paths = change(value)
    inner = {key: _changed(each, change) for key, each in value if key not in paths}
    copy = value.model_copy(update=inner | paths)
    copy._written = {key: getattr(value, key) for key in paths if key not in value._written}
    return copy


def _places(section: Section) -> list[str]:
    """Keys of a section whose values are paths, or may be."""
    hints = get_type_hints(type(section), include_extras=True)
    places = (key for key in type(section).model_fields if Place in (hints[key], *get_args(hints[key])))
    return [key for key in places if getattr(section, key) is not None]


def _from(folder: Path, path: str) -> str:
    """A relative path followed from a folder; empty where nothing is there."""
    if os.path.isabs(path):
        return ""
    if os.path.lexists(folder / path):
        return str(folder / path)
    # It becomes a part of the pattern.
    return os.path.join(glob.escape(str(folder)), path) if glob.glob(path, root_dir=folder, recursive=True) else ""
