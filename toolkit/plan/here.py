"""Plans for the processes of a launch on this kind of machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from toolkit.hardware import Hardware, find, this_machine
from toolkit.plan.build import decide
from toolkit.policy import World
from toolkit.recipe import Loaded


def launched_on(
    world: World, folder: str | Path | None = None, environment: Mapping[str, str] = os.environ
) -> Hardware:
    """The hardware of a launch: a device of this machine for each of its processes, and other nodes like this one.

    Args:
        folder: The user's recipes folder, see `hardware.find`.

    Raises:
        UserError: If the GPUs of this machine differ.
    """
    # `accelerate launch --cpu` means the CPU, also where there are GPUs.
    own = Path(folder) if folder else None
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() == "true"
    here = find("cpu", own) if on_cpu else this_machine(own)
    if here.device.kind == "cpu":
        # The processes share its cores.
        here = find(f"cpux{world.local_world_size}", own)
    count, nodes = world.local_world_size, world.num_nodes
    sizes = f"x{count}" * (world.world_size > 1) + f"x{nodes}" * (nodes > 1)
    return dataclasses.replace(here, name=f"{here.device.name}{sizes}", devices_per_node=count, nodes=nodes)


def decided(loaded: Loaded, world: World, folder: str | Path | None = None) -> Loaded:
    """The recipe with what it leaves to the plan decided for a launch. All processes come to the same answer.

    Raises:
        UserError: If nothing fits, or these processes cannot take the recipe.
    """
    if not loaded.recipe.undecided:
        return loaded
    return loaded.decided(*decide(loaded.recipe, launched_on(world, folder)))
