"""Checkpoints of every engine: which are whole, and what can continue from them.

The engines' files are never interpreted. When all processes have written theirs, the first one records what a
checkpoint consists of and who wrote it. Without this record, or with other files than it names, the checkpoint was cut
off while saving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.common import UserError, write_json
from toolkit.recipe import Recipe

_RECORD = "checkpoint.json"
_IN_STATE = {"learning_rate", "weight_decay", "beta1", "beta2", "eps", "momentum"}
"""Of the optimizer, what its saved state holds."""


def seal(checkpoint: Path, step: int, recipe: Recipe, world_size: int) -> None:
    """Records that a checkpoint is whole. To be called when every process has written its part."""
    files = {file: file.stat().st_size for file in sorted(checkpoint.rglob("*")) if file.is_file()}
    record = {
        "step": step,
        "method": recipe.method.name,
        "optimizer": recipe.optimizer.model_dump(include=_IN_STATE),
        **writer(recipe, world_size),
        "files": {file.relative_to(checkpoint).as_posix(): size for file, size in files.items()},
    }
    write_json(checkpoint / _RECORD, record)


def writer(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """Who writes the checkpoints of a run: settings of the strategy that decide their form, and processes."""
    strategy = recipe.strategy
    written_by: dict[str, Any] = {"strategy": strategy.name}
    if strategy.name == "fsdp":
        written_by["state_dict_type"] = strategy.state_dict_type
    if strategy.zero_stage:
        written_by["offload_optimizer"] = strategy.offload_optimizer
    return {**written_by, "world_size": world_size}


def missing_files(checkpoint: Path) -> list[str]:
    """What a checkpoint lacks to continue from it: files of its record that are not there, or of another size."""
    record = _record(checkpoint)
    if not record:
        return [_RECORD]
    return [
        name
        for name, size in record["files"].items()
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size != size
    ]


def newest(folder: Path) -> tuple[Path | None, list[Path]]:
    """The newest whole checkpoint of a folder, and those that are passed over because they were cut off."""
    checkpoints = list(folder.glob("checkpoint-*"))
    whole = [checkpoint for checkpoint in checkpoints if not missing_files(checkpoint)]
    return max(whole, key=step_of, default=None), sorted(set(checkpoints) - set(whole))


def step_of(checkpoint: Path) -> int:
    """The optimizer step at which a whole checkpoint was saved."""
    return int(_record(checkpoint)["step"])


def check_named(checkpoint: Path, recipe: Recipe) -> None:
    """Refuses a checkpoint that the user named and that this recipe cannot continue.

    Raises:
        UserError: If it is cut off, holds another method's weights, or has no step left to take.
    """
    what = f"checkpoint.resume={checkpoint}"
    if missing := missing_files(checkpoint):
        raise UserError(
            f"{what} is not a whole checkpoint of this toolkit: no {', '.join(missing[:5])}",
            "name another checkpoint",
        )
    method = _record(checkpoint)["method"]
    if method != recipe.method.name:
        kinds = {"lora": "an adapter", "full": "a full model"}
        raise UserError(
            f"{what} holds {kinds[method]}, the recipe trains {kinds[recipe.method.name]}",
            "set method.name as the checkpoint was trained",
        )
    steps = recipe.schedule.max_steps
    if steps is not None and steps <= step_of(checkpoint):
        raise UserError(
            f"{what} is at step {step_of(checkpoint)} already, schedule.max_steps is {steps}",
            "raise schedule.max_steps",
        )


def check_readable(checkpoint: Path, recipe: Recipe, world_size: int) -> None:
    """Refuses a checkpoint in a form that the launched strategy and processes cannot read.

    Raises:
        UserError: Naming who wrote it and who would read it.
    """
    saved, now = _record(checkpoint), writer(recipe, world_size)
    if _form(saved) != _form(now):
        raise UserError(
            f"{checkpoint} was saved by {_described(saved)}; {_described(now)} cannot read it",
            f"continue with {_described(saved)}, or start anew beside it with checkpoint.resume=never",
        )


def not_changed(checkpoint: Path, recipe: Recipe) -> list[str]:
    """What the recipe says otherwise of the optimizer than the checkpoint, whose state brings its own back."""
    now = recipe.optimizer.model_dump(include=_IN_STATE)
    saved = _record(checkpoint).get("optimizer", now)
    return [
        f"optimizer.{key}={value:g} has no effect: {checkpoint.name} goes on with {saved[key]:g}. "
        "checkpoint.resume=never begins anew"
        for key, value in now.items()
        if saved.get(key, value) != value
    ]


def _form(writer: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for those who read each other's checkpoints."""
    strategy = writer["strategy"]
    if strategy == "fsdp":
        return strategy, writer["state_dict_type"]
    if strategy.startswith("zero"):
        # Every process reads back the part it wrote. Stages 1 and 2 divide the optimizer's state in the same way.
        return strategy == "zero3", writer["offload_optimizer"] == "nvme", writer["world_size"]
    return ("whole",)


def _described(writer: Mapping[str, Any]) -> str:
    settings = f"strategy.name={writer['strategy']}"
    if "state_dict_type" in writer:
        settings += f" strategy.state_dict_type={writer['state_dict_type']}"
    if writer.get("offload_optimizer", "none") != "none":
        settings += f" strategy.offload_optimizer={writer['offload_optimizer']}"
    number = writer["world_size"]
    return f"{settings} on {number} process" + ("es" if number > 1 else "")


def _record(checkpoint: Path) -> dict[str, Any]:
    """What `seal` wrote; empty if it did not."""
    try:
        return json.loads((checkpoint / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
