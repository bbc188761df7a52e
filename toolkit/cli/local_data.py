"""What is known of data that may lie on this machine; nothing is imported where it cannot."""

from __future__ import annotations

from pathlib import Path

from toolkit.data.statistics import DataStatistics, statistics_of
from toolkit.recipe import Loaded, Problem, Recipe


def data_problems(loaded: Loaded) -> list[Problem]:
    """See `toolkit.data.check`."""
    if not any(map(_may_be_local, _paths(loaded.recipe))):
        return []
    from toolkit.data import check

    return check.data_problems(loaded.recipe, loaded.origins)


def row_lengths(recipe: Recipe) -> DataStatistics | None:
    """Figures of the data: counted if it was prepared, else estimated from a sample if all of it is local."""
    if (figures := statistics_of(recipe)) or not all(map(_may_be_local, _paths(recipe))):
        return figures
    from toolkit.data.sample import sampled

    # Plans of a sweep have the same data.
    key = recipe.model_dump_json(include={"data", "model", "objective", "batch"})
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
