"""What can be said about data on this machine, and about where a run here would write.

Nothing is imported where it cannot be known.
"""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.data.statistics import DataStatistics, statistics_of
from toolkit.recipe import Loaded, Problem, Recipe, origin_of


def local_problems(loaded: Loaded) -> list[Problem]:
    """What a run on this machine would refuse of its data, see `toolkit.data.check`, and of its output folder."""
    return [*_data_problems(loaded), *_output_problems(loaded)]


def _data_problems(loaded: Loaded) -> list[Problem]:
    if not any(_may_be_local(path) or "://" in path for path in _paths(loaded.recipe)):
        return []
    from toolkit.data import check

    return check.data_problems(loaded.recipe, loaded.origins)


def _output_problems(loaded: Loaded) -> list[Problem]:
    output = loaded.recipe.output
    folder = Path(output.dir, output.name or "").absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    key = "output.name" if output.name and nearest == folder else "output.dir"
    if not nearest.is_dir():
        what = f"{nearest} is a file, so no folder can be made there"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        what = f"{nearest} cannot be written"
    else:
        return []
    return [Problem(key, what, origin_of(key, loaded.origins), hint=f"set {key} to a folder you own")]


def row_lengths(recipe: Recipe) -> DataStatistics | None:
    """Figures of the data: counted if it was prepared, else estimated from a sample if all of it is local."""
    if (figures := statistics_of(recipe)) or not all(map(_may_be_local, _paths(recipe))):
        return figures
    from toolkit.data.sample import sampled

    # Plans of a sweep have the same data.
    key = recipe.model_dump_json(include={"data", "model", "objective", "batch", "rollout"})
    if key not in _SAMPLED:
        _SAMPLED[key] = sampled(recipe)
    return _SAMPLED[key]


_SAMPLED: dict[str, DataStatistics | None] = {}


def _paths(recipe: Recipe) -> list[str]:
    return [source.path for source in (*recipe.data.sources, *recipe.data.eval_sources)]


def _may_be_local(path: str) -> bool:
    """Whether a path may mean a file here, and not a data set on the hub, which is `name` or `owner/name`."""
    named = path.count("/") == 1 and not path.startswith(".") and not Path(path).suffix and not Path(path).exists()
    return "://" not in path and not path.startswith("builtin:") and not named
