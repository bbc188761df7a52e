"""`toolkit transfer SWEEP … recipe=NAME`: the learning rate that sweeps of small models found, for a larger one."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.common import UserError
from toolkit.recipe import Loaded, Recipe, model_configs
from toolkit.recipe.dotted import inline, value_at
from toolkit.recipe.load import load_resolved
from toolkit.report.learning_rate import Estimate, Point, best_rate, for_width
from toolkit.report.load import number, read_run

_SAME = ("objective", "method.name", "optimizer.name")
"""What has to be the same for a learning rate to mean the same."""
_NOTED = ("batch.global_batch_size", "batch.seq_len", "schedule.max_steps", "schedule.num_epochs", "schedule.name")
"""What moves the best learning rate by less, and is said."""


def transfer(sweeps: Sequence[Path], target: Loaded, recipes: str | None = None) -> str:
    """What a larger model's recipe could have as its learning rate.

    Args:
        sweeps: Folders of `toolkit sweep`, each of a model of its own width.
        target: The recipe of the model that is to be trained.
        recipes: The user's recipes folder.

    Raises:
        UserError: If a sweep says nothing of the learning rate, or not of this kind of training.
    """
    width, lines, found = _width(target.recipe, target.name), list[str](), list[tuple[int, Estimate]]()
    noted = dict[str, None]()
    for folder in sweeps:
        swept, points = _points(folder)
        recipe = swept[0]
        # Of every run: their losses are compared with each other.
        differ = dict.fromkeys(
            text for each in swept for key in _SAME if (text := _difference(each, target.recipe, key))
        )
        if differ:
            raise UserError(
                f"{folder} says nothing of {target.name}: {'; '.join(differ)}", "sweep with the same settings"
            )
        try:
            estimate = best_rate(points)
        except UserError as error:
            raise UserError(f"{folder}: {error.what}", error.change) from None
        size = _width(recipe, str(folder))
        found.append((size, estimate))
        lines.append(f"{len(points)} runs in {folder}, hidden size {size:,}: {estimate.text()}")
        noted |= dict.fromkeys(text for key in _NOTED if (text := _difference(recipe, target.recipe, key)))
    offered = for_width(found, width)
    lines.append(f"{target.name}, hidden size {width:,}: {offered.text()}")
    if {size for size, _ in found} != {width} and len({size for size, _ in found}) == 1:
        lines.append(
            "How it falls with the width was not measured: mostly between not at all and in inverse proportion.\n"
            "Name a sweep of a model of another width as well to measure it."
        )
    lines += [f"not the same: {text}" for text in noted]
    words = ["toolkit", "launch", f"recipe={target.name}", f"learning_rate={offered.ends[1]:.2g}"]
    lines.append(f"to train with it: {shlex.join([*words, *(['--recipes', recipes] if recipes else [])])}")
    return "\n".join(lines)


def _points(folder: Path) -> tuple[list[Recipe], list[Point]]:
    """The finished runs of a sweep, and their recipes."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "name a folder of `toolkit sweep`")
    recipes, points = list[Recipe](), list[Point]()
    for run in sorted(place.parent for place in folder.glob("*/recipe.yaml")):
        record = read_run(run)
        loss = number((record.result or {}).get("eval_loss"))
        if record.manifest.status != "finished" or loss is None or not math.isfinite(loss):
            continue
        recipe = load_resolved(run / "recipe.yaml")
        values: dict[str, Any] = recipe.model_dump(mode="json", exclude={"output", "description"})
        rate = values["optimizer"].pop("learning_rate")
        recipes.append(recipe)
        points.append(Point(rate, loss, json.dumps(values, sort_keys=True)))
    if not points:
        raise UserError(f"{folder} holds no finished run with a held-out loss", "name a folder of `toolkit sweep`")
    return recipes, points


def _width(recipe: Recipe, where: str) -> int:
    config = model_configs.config_of(recipe.model)
    width = model_configs.width(config) if config else None
    if width is None:
        raise UserError(
            f"the hidden size of {recipe.model.path} ({where}) is not known here", "download its config.json"
        )
    return width


def _difference(one: Recipe, other: Recipe, key: str) -> str:
    dumps = [each.model_dump(mode="json") for each in (one, other)]
    for dump, each in zip(dumps, (one, other), strict=True):
        dump["batch"]["global_batch_size"] = each.batch.sequences_per_step  # Whichever key says it.
    values = [value_at(dump, key.split(".")) for dump in dumps]
    return "" if values[0] == values[1] else f"{key} is {inline(values[0])} there, {inline(values[1])} here"
