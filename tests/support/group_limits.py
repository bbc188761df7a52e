"""`cpu_engines`, which says at the end of training how long the processes of each group wait for each other."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import cpu_engines
import torch
from torch.distributed import distributed_c10d


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, as `toolkit.run` does."""
    training = importlib.import_module("toolkit.train.train")
    finish = training.finish

    def told(*given: Any) -> None:
        backends = (group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map)
        print("groups wait", [int(each.options._timeout.total_seconds()) for each in backends], flush=True)
        finish(*given)

    training.finish = told  # type: ignore[attr-defined]
    return cpu_engines.main(arguments)
