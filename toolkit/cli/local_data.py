"""What a run would refuse of its data, where that may lie on this machine; nothing is imported where it cannot."""

from __future__ import annotations

from pathlib import Path

from toolkit.recipe import Loaded, Problem


def data_problems(loaded: Loaded) -> list[Problem]:
    """See `toolkit.data.check`."""
    data = loaded.recipe.data
    if not any(_may_be_local(source.path) for source in [*data.sources, *data.eval_sources]):
        return []
    from toolkit.data import check

    return check.data_problems(loaded.recipe, loaded.origins)


def _may_be_local(path: str) -> bool:
    """Whether a path may mean a file here, and not a data set on the hub, which is `name` or `owner/name`."""
    named = path.count("/") == 1 and not path.startswith(".") and not Path(path).suffix and not Path(path).exists()
    return "://" not in path and not path.startswith("builtin:") and not named
