"""The parts of a plan that a launch uses: the hardware, and a recipe in which everything an engine depends on is
decided."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from toolkit.distributed.layout import World
from toolkit.planner.auto import fastest_precision
from toolkit.planner.build import config_of, decide
from toolkit.planner.hardware import Hardware, find, once_measured, this_machine
from toolkit.recipe import Loaded, Recipe


def decide_engine(recipe: Recipe, hardware: Hardware) -> tuple[Recipe, dict[str, str]]:
    """The recipe with all that an engine depends on decided, and the reasons; raises as `decide`.

    A CPU that was never measured is measured for it: what is decided must not differ when the run is continued.
    """
    hardware = once_measured(hardware, before=lambda: config_of(recipe))
    recipe, precision = fastest_precision(recipe, hardware)
    recipe, chosen = (recipe, {}) if recipe.knows_engine else decide(recipe, hardware)
    return recipe, precision | chosen


def decide_for_launch(loaded: Loaded, world: World, folder: str | Path | None = None) -> Loaded:
    """The recipe with all that an engine depends on decided for a launch. All processes come to the same answer.

    Raises:
        UserError: If nothing fits, or these processes cannot take the recipe.
    """
    recipe, chosen = decide_engine(loaded.recipe, launched_on(world, folder))
    return loaded.decided(recipe, {**loaded.chosen, **chosen})


def launched_on(
    world: World, folder: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> Hardware:
    """The hardware of a launch: a device of this machine for each of its processes, and other nodes like this one.

    Args:
        folder: The user's recipes folder, see `hardware.find`.

    Raises:
        UserError: If the GPUs of this machine differ.
    """
    # `accelerate launch --cpu` means the CPU, also where there are GPUs.
    own = Path(folder) if folder else None
    environment = os.environ if environment is None else environment
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() == "true"
    machine = find("cpu", own) if on_cpu else this_machine(own)
    if machine.device.kind == "cpu":
        # The processes share its cores.
        machine = find(f"cpux{world.local_world_size}", own)
    count, nodes = world.local_world_size, world.num_nodes
    sizes = f"x{count}" * (world.world_size > 1) + f"x{nodes}" * (nodes > 1)
    return dataclasses.replace(machine, name=f"{machine.device.name}{sizes}", devices_per_node=count, nodes=nodes)
