"""The trainings of one command, each in its own process: one after another, or several at once on separate GPUs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cli import launch
from toolkit.cli.restarts import STOPPED, Group
from toolkit.common import UserError, usable_cores
from toolkit.recipe import Loaded

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 2.0
"""Metrics of running trainings are read so often."""


@dataclass(frozen=True)
class Trial:
    """One combination of values.

    Args:
        loaded: The recipe with them.
        arguments: What starts it: `recipe=NAME key=value …`.
        changes: The values alone, `key=value` each.
    """

    loaded: Loaded
    arguments: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.loaded.run_folder


@dataclass(frozen=True)
class Share:
    """What one of the trainings that run at once has of the machine.

    Args:
        gpus: How many; None for those that the recipe asks for.
        variables: What its processes find in their environment.
    """

    gpus: int | None
    variables: Mapping[str, str]

    def cluster(self, loaded: Loaded) -> launch.Cluster:
        """The machine as this training sees it.

        Raises:
            UserError: If the recipe cannot be trained on it.
        """
        found = launch.cluster(loaded.recipe, self.gpus, 1, None, None, None, False)
        launch.check(loaded.recipe, found, loaded.folder)
        return found


def shares(parallel: int, gpus: int | None) -> list[Share]:
    """The machine divided among so many trainings at once.

    Args:
        gpus: Of this machine, for all of them together; None for all.

    Raises:
        UserError: If there are fewer GPUs than trainings.
    """
    if parallel == 1:
        return [Share(gpus, {})]
    used = launch.gpu_names()[:gpus]
    if not used:
        # By itself each training would compute with all cores.
        threads = max(1, usable_cores() // parallel)
        return [Share(0, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))})] * parallel
    if len(used) < parallel:
        raise UserError(
            f"--parallel {parallel}: {len(used)} GPUs can be used here, and each training needs one",
            f"set --parallel {len(used)} at most",
        )
    each = len(used) // parallel
    parts = [used[at * each : (at + 1) * each] for at in range(parallel)]
    return [Share(each, {"CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in parts]


def train(
    trials: Iterator[Trial],
    places: list[Share],
    began: Callable[[Trial], None],
    ended: Callable[[Trial, int], None],
    hopeless: Callable[[Trial], bool] | None = None,
) -> int:
    """Trains what comes, as places for it become free. Returns 0, or the exit code with which somebody stopped it.

    Args:
        trials: Asked for the next one whenever a place is free.
        places: One training at a time in each. Of several each writes what it prints beside its folder, in `NAME.log`.
        began: Is told of each training that starts.
        ended: Is told of each that ended, with its exit code.
        hopeless: Says of a running training whether to stop it.
    """
    group = Group()
    free, running = list(places), list[tuple[Share, Trial, subprocess.Popen[bytes]]]()
    told, looked, stopped = set[Path](), time.monotonic(), 0
    while True:
        while free and not (group.stopped or stopped) and (trial := next(trials, None)):
            if group.stopped:  # While it was chosen.
                break
            began(trial)
            running.append((share := free.pop(0), trial, _start(group, trial, share, len(places) > 1)))
        if not running:
            return stopped or group.stopped
        time.sleep(_POLL_SECONDS)
        looks = hopeless is not None and time.monotonic() > looked + _LOOK_SECONDS
        for each in list(running):
            share, trial, process = each
            if (status := process.poll()) is not None:
                running.remove(each)
                group.forget(process)
                free.append(share)
                status = status if status >= 0 else 128 - status
                if status in STOPPED and trial.folder not in told:
                    stopped = status
                ended(trial, status)
            elif looks and hopeless and trial.folder not in told and hopeless(trial):
                told.add(trial.folder)
                process.terminate()
        looked = time.monotonic() if looks else looked


def _start(group: Group, trial: Trial, share: Share, apart: bool) -> subprocess.Popen[bytes]:
    cluster = share.cluster(trial.loaded)
    line, variables = launch.line(cluster, None, trial.arguments), {**launch.variables(cluster), **share.variables}
    if not apart:
        return group.start(line, variables, 0)
    log = trial.folder.with_name(f"{trial.folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return group.start(line, variables, 0, **streams)
