"""Whether the disk of a run folder is so slow that checkpoints are better taken in elsewhere first, and where.

A disk is measured by writing to it: file systems say of themselves neither how fast they are nor whether a write
returns before the data is there.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from toolkit.common import bytes_text
from toolkit.distributed.rendezvous import Rendezvous
from toolkit.planner.hardware.host_memory import host_memory
from toolkit.planner.plan import Plan
from toolkit.recipe import Loaded
from toolkit.recipe.sections import MEMORY
from toolkit.train.checkpoints.fast_folder import KEY, FastFolder, remove_dead
from toolkit.train.checkpoints.sealing import aside
from toolkit.train.plan_guard import PlanGuard
from toolkit.train.run_folder import RunFolder

_PROBE = 2**24
"""Bytes that are written to see how fast a disk is. A checkpoint that is not twice as large is no burden to any."""
_SLOW, _LONG = 400e6, 1.0
"""A disk is slow if it takes fewer bytes/s than this, of which a process writes several times as many, and training
would wait for it longer than so many seconds."""


def open_folder(
    loaded: Loaded, guard: PlanGuard | None, rendezvous: Rendezvous, folder: RunFolder, tell: Callable[[str], None]
) -> tuple[Loaded, PlanGuard | None, FastFolder | None]:
    """The recipe and its plan with `checkpoint.staging` decided, and the folder of this machine, if there is to be one.

    All processes must call this, and come to the same answer.

    Args:
        guard: The plan, on the first process; None where none can be made, and on others.
        tell: Shows a line.

    Raises:
        UserError: If the folder that the recipe names cannot be used.
    """
    settings, why = loaded.recipe.checkpoint, ""
    staging = settings.staging if settings.saves else "none"
    if staging == "auto":
        staging, why = _decided(guard.plan if guard else None, rendezvous, folder.path)
    if why:
        tell(why)
    if staging == "none":
        return loaded, guard, None
    if settings.staging == "auto":
        recipe = loaded.recipe.with_values({KEY: staging})
        loaded = loaded.decided(recipe, {**loaded.chosen, KEY: f"{staging}: {why}"})
        if guard:
            guard = dataclasses.replace(guard, loaded=loaded)
            folder.update_manifest(plan=guard.plan)
    # By the plan of the first process; other machines need no more.
    part = rendezvous.exchange("part", None, lambda _: guard.plan.disk.part if guard else 0)
    return loaded, guard, FastFolder(loaded.recipe, rendezvous.world, part, aside(folder.checkpoints))


def _decided(plan: Plan | None, rendezvous: Rendezvous, run: Path) -> tuple[str, str]:
    """What `auto` comes to, and what is to be said of it; nothing where the disk is fast enough."""
    world = rendezvous.world
    if world.local_rank == 0:
        remove_dead(Path(MEMORY))  # Of whose memory this one may be in need.
    left = [host_memory(world.local_world_size).bytes, psutil.virtual_memory().available, _free(Path(MEMORY))]

    def judge(everybodys: Mapping[int, list[int]]) -> list[str]:
        part = plan.disk.part if plan else 0
        if not plan or part < 2 * _PROBE:
            return ["none", ""]
        rate = _rate(run)
        if rate > _SLOW or part < rate * _LONG:
            return ["none", ""]
        slow = f"the disk of {run} takes {bytes_text(rate)}/s"
        limit, *available = (min(each) for each in zip(*everybodys.values(), strict=True))
        free = max(0, min(limit - plan.host.peak, *available))
        if free < 2 * part:
            memory = f"{bytes_text(2 * part)} of memory, {bytes_text(free)} are left"
            wait = f"training will wait about {part / rate:.0f} s for each checkpoint"
            return ["none", f"{slow}: {wait}. To go on meanwhile takes {memory}, or {KEY}=PATH of a fast disk"]
        return [str(MEMORY), f"{slow}, so checkpoints go through memory: {bytes_text(part)} of each machine"]

    chosen, why = rendezvous.exchange("staging", left, judge)
    return chosen, why


def _free(folder: Path) -> int:
    """Bytes that can be written to a folder; 0 if it cannot be."""
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK | os.X_OK) else 0


def _rate(folder: Path) -> float:
    """Bytes/s at which a file is written and closed in a folder: the better of two, because others write too."""
    seconds = []
    for _ in range(2):
        file = folder / f".probe-{secrets.token_hex(4)}.partial"
        try:
            started = time.monotonic()
            with file.open("wb", buffering=0) as stream:
                stream.write(bytes(_PROBE))
            # Also what closing took.
            seconds.append(time.monotonic() - started)
        finally:
            file.unlink(missing_ok=True)
    return _PROBE / min(seconds)
