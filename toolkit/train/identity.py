"""What decides the weights that a run produces, by which another run is told from it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from toolkit.common import content_hash
from toolkit.recipe import Loaded, Recipe, files

_WITHOUT_EFFECT = {
    *("description", "output", "logging", "checkpoint", "evaluation", "activation_checkpointing", "strategy"),
    "parallel",
    *("batch.micro_batch_size", "batch.micro_batch_tokens", "compile", "extra.deepspeed"),
    "rollout.batch_size",
    *("data.num_proc", "data.num_workers", "schedule.early_stopping_patience", "schedule.early_stopping_min_delta"),
    # What decides over a batch that has ended the run, or is still to come.
    "faults",
}
"""Sections and keys that may change when a run is continued, because they do not move the weights."""
_ARGUMENTS = "extra.training_arguments"
_ARGUMENTS_WITH_EFFECT = {f"{_ARGUMENTS}.{key}" for key in ("neftune_noise_alpha", "router_aux_loss_coef")}
"""Of these alone; the others change time and memory, or how long processes wait for each other."""
_EVALUATIONS = tuple(f"evaluation.{key}" for key in ("every_steps", "num_beams", "max_new_tokens"))
_CHOOSE = {
    "checkpoint.keep_best": _EVALUATIONS,
    "checkpoint.average_last": ("checkpoint.save_steps", "checkpoint.save_epochs"),
    "schedule.early_stopping_patience": ("schedule.early_stopping_min_delta", *_EVALUATIONS),
}
"""Keys of these that move them all the same where they are set, and which others then do."""


def recipe_hash(recipe: Recipe) -> str:
    """Hash of all that decides the weights a run produces."""
    unread = set() if recipe.prefers else {"preference"}
    unread |= set() if recipe.reinforces else {"rewards", "policy"}
    unread |= set() if recipe.writes else {"rollout"}
    unread |= set() if recipe.distills else {"distillation"}
    content = _with_effect(dict(flat(recipe.model_dump(exclude=unread))))
    return content_hash(content)[:16]


def differences_of(path: Path, loaded: Loaded) -> list[str] | None:
    """Some of what the recipe in a run folder says otherwise of the weights; None if it cannot be read."""
    try:
        before = files.read(path / "recipe.yaml")
    except OSError:
        return None
    if before.problems:
        return None
    after = yaml.safe_load(loaded.to_yaml())
    old, new = dict(flat(before.values)), dict(flat(after))
    keys = [key for key in {**_with_effect(old), **_with_effect(new)} if old.get(key) != new.get(key)]
    return [f"{key} ({old.get(key)} there, {new.get(key)} here)" for key in keys[:5]]


def _with_effect(values: dict[str, Any]) -> dict[str, Any]:
    """Of a recipe's values by dotted key, those that decide the weights."""
    chosen_by = {each for key, others in _CHOOSE.items() if values.get(key) is not None for each in (key, *others)}
    if "rollout.server" in values:
        # Where one stands moves nothing; that one draws the answers does.
        values = {**values, "rollout.server": values["rollout.server"] is not None}
    passed = {path for path in values if path.startswith(f"{_ARGUMENTS}.")}
    if passed:
        kept = {path: value for path, value in values.items() if path not in passed - _ARGUMENTS_WITH_EFFECT}
        values = kept if passed & _ARGUMENTS_WITH_EFFECT else {**kept, _ARGUMENTS: {}}
    without = [path for path in values if any(f"{path}.".startswith(f"{key}.") for key in _WITHOUT_EFFECT)]
    return {path: value for path, value in values.items() if path in chosen_by or path not in without}


def flat(values: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The values of nested dicts, each with its dotted key."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values
