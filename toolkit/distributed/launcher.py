"""The launcher's environment compared with the recipe. The recipe owns the strategy; a launcher only starts processes.

`accelerate launch` turns its flags, its `--config_file` and the user's default config into environment variables, and
Accelerate fills every setting that is left open from them. So all of them are compared: what would train something else
is refused with both sides named; of the rest the recipe's values stand, or, where it has no key, the launcher's are
taken over. `environment` then removes them all, so that no library reads a second opinion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.common import UserError
from toolkit.distributed import launcher_deepspeed
from toolkit.distributed.engines import fsdp_mesh
from toolkit.distributed.launcher_flags import Difference, engine_differences, text_of, variable_differences
from toolkit.distributed.layout import World, batch_layout
from toolkit.recipe import Recipe
from toolkit.recipe.libraries import flat


@dataclass(frozen=True)
class Launch:
    """What a launcher says beyond the recipe, where that trains nothing else.

    Args:
        ignored: Settings that differ, in which the recipe's values stand.
        taken_over: DeepSpeed's settings that a recipe has no key for, by dotted key.
        file: Where those come from.
    """

    ignored: tuple[str, ...]
    taken_over: Mapping[str, Any]
    file: str

    def lines(self) -> list[str]:
        """For the user, a line each."""
        taken_over = ", ".join(f"{key}={text_of(value)}" for key, value in self.taken_over.items())
        lines = {
            "ignored, the recipe decides": ", ".join(self.ignored),
            f"taken over from {self.file}": taken_over,
        }
        return [f"{title}: {text}" for title, text in lines.items() if text]


def check_launch(recipe: Recipe, world: World, environment: Mapping[str, str]) -> Launch:
    """Compares what the launcher put into the environment with the recipe.

    Raises:
        UserError: If it would train something else, naming both sides of every such difference; or if these processes
            cannot take the recipe.
    """
    assert recipe.knows_engine, recipe.undecided
    _check_processes(recipe, world, environment)
    layout = batch_layout(recipe, world.world_size)
    fsdp_mesh(recipe, world)
    differences = list(engine_differences(recipe, environment))
    differences += variable_differences(recipe, world, layout, environment)
    taken_over: dict[str, Any] = {}
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file and recipe.strategy.zero_stage:
        of_file, taken_over = launcher_deepspeed.compare(recipe, layout, file)
        differences += of_file
    if recipe.strategy.zero_stage == 3 and (classes := environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")):
        taken_over["zero_optimization.leaf_module.classes"] = classes.split(",")
    _check_partitions(recipe, world, taken_over)
    if refused := [difference for difference in differences if difference.recipe]:
        what = str(refused[0])
        if len(refused) > 1:
            what = f"recipe and launcher differ in {len(refused)} settings" + "".join(f"\n  {one}" for one in refused)
        raise UserError(what, _remedy(refused, environment))
    return Launch(tuple(difference.launcher for difference in differences), taken_over, file or "the launcher")


def _check_processes(recipe: Recipe, world: World, environment: Mapping[str, str]) -> None:
    if recipe.strategy.name == "single" and world.world_size > 1:
        raise UserError(
            f"the recipe says strategy.name=single, the launcher started {world.world_size} processes",
            "set strategy.name=ddp, or launch one process",
        )
    if environment.get("WORLD_SIZE", "1") != "1" and "MASTER_ADDR" not in environment:
        raise UserError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is set without MASTER_ADDR, the host where the processes meet",
            "start with toolkit launch, accelerate launch, torchrun or srun",
        )
    # Accelerate's launcher for a single process announces a rendezvous although it starts nobody else.
    if "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise UserError(
            "accelerate launch was asked for several processes and started one",
            "add --multi_gpu, which starts all of them without GPUs too, or use `toolkit launch`; for one process say "
            "--num_processes 1, and `unset MASTER_ADDR` if it is left over",
        )


def _check_partitions(recipe: Recipe, world: World, taken_over: Mapping[str, Any]) -> None:
    """Refuses groups that DeepSpeed asserts only once it holds the model."""
    key, processes = "zero_optimization.zero_hpz_partition_size", world.world_size
    size = (flat(recipe.extra.deepspeed) | dict(taken_over)).get(key)
    if size and processes % min(size, processes):
        sizes = [part for part in range(1, processes + 1) if processes % part == 0]
        raise UserError(
            f"{key}={size}: {processes} processes do not divide into groups of {size}",
            f"set it to one of {', '.join(map(str, sizes))}, or start a multiple of {size} processes",
        )


def _remedy(differences: list[Difference], environment: Mapping[str, str]) -> str:
    follow = dict.fromkeys(difference.follow for difference in differences)
    # Following the launcher in some settings only would be refused again.
    agree = f"set {' '.join(follow)}, or " if all(follow) else ""
    # Every launcher of accelerate sets this one.
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        names = " ".join(sorted({difference.variable for difference in differences}))
        return f"{agree}remove what another launch left behind: `unset {names}`"
    base = environment.get("XDG_CACHE_HOME", "~/.cache")
    default = Path(environment.get("HF_HOME", f"{base}/huggingface")).expanduser() / "accelerate/default_config.yaml"
    files = [str(file) for file in (default, Path(".deepspeed_env"), Path.home() / ".deepspeed_env") if file.is_file()]
    places = ", ".join(["the flags and --config_file of accelerate launch", *files])
    return f"{agree}launch with `toolkit launch`, or leave it out of {places}"
