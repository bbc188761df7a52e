"""The planner's entry point: what a recipe costs on some hardware, and what its `auto` values become.

A plan is arithmetic on a recipe, a machine and a trace of what one micro-batch does to memory and compute units.
Everybody outside the planner calls this module, shows the classes of `plan` and names machines by `hardware`. It takes
milliseconds where the trace is known, and seconds where the model's code must be traced first. The alternative, to try
the recipe on the devices, needs the devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.common import UserError
from toolkit.data.statistics import DataStatistics, statistics_of
from toolkit.distributed.device_limits import check_device
from toolkit.planner.advice import advise
from toolkit.planner.auto import fastest_precision, resolve
from toolkit.planner.hardware import Hardware
from toolkit.planner.layouts import FREE, layouts
from toolkit.planner.memory.host import run_folder_bytes
from toolkit.planner.plan import Plan
from toolkit.planner.question import Question, config_of
from toolkit.planner.search import Changes, as_arguments, explore
from toolkit.planner.trace import store
from toolkit.planner.trace.store import Tracing
from toolkit.recipe import Recipe, compilation, model_configs

__all__ = ["config_of", "decide", "estimate", "estimate_layouts", "run_folder_bytes"]


def estimate(
    recipe: Recipe,
    name: str,
    hardware: Hardware,
    *,
    overrides: Sequence[str] = (),
    price: float | None = None,
    advice: bool = True,
    config: Mapping[str, Any] | None = None,
    statistics: DataStatistics | None = None,
    tracing: Tracing = "worker",
    context: int | None = None,
) -> Plan:
    """What a recipe costs on some hardware, with one process per device.

    Example:
        >>> loaded = load_checked("smollm2_135m_lora_demo")
        >>> estimate(loaded.recipe, loaded.name, find("h200")).fit.answer
        'yes'

    Args:
        name: The recipe's name.
        overrides: What was set on the command line, for the record.
        price: Of a GPU-hour.
        advice: Whether to look for better settings.
        config: The model's config, where it has been loaded.
        statistics: Figures of the prepared data, where they are at hand.
        tracing: Where the model's code is traced if it has not been before, which takes seconds: in a `worker`, a
            process of its own, or `in_process`, for a caller that has imported torch and transformers already.
        context: Tokens of a sequence that the trained model is to serve; by default `batch.seq_len`.

    Raises:
        UserError: If nothing fits that `auto` may stand for, the model's config cannot be found, the batch does not
            divide over the devices, or these cannot do what the recipe asks for.
        UnknownSize: If the model can be neither traced nor estimated.
    """
    question = Question(
        name, overrides, price, config or config_of(recipe), statistics or statistics_of(recipe), tracing, context
    )  # fmt: skip
    asked = recipe
    recipe, precision = fastest_precision(recipe, hardware)
    device = hardware.device
    check_device(recipe, device.kind, device.capability, device.title)
    if recipe.activation_checkpointing.mode == "elementwise":
        # The rules say it of a model whose config is at hand.
        unfit, lacks = compilation.unfit(recipe, question.config), hardware.lacks
        if why := unfit or (f"on this machine {lacks}" if lacks else ""):
            raise UserError(
                f"activation_checkpointing.mode=elementwise is done by compiled layers, and {why}",
                f"{'' if unfit else 'install it, or '}set activation_checkpointing.mode=full",
            )
    # An engine must be known before the data is prepared, and be the same when the run is continued; a micro-batch not.
    known = question.statistics if recipe.knows_engine else None
    chosen: dict[str, str] = {}
    if recipe.undecided:
        recipe, chosen = resolve(recipe, hardware, dataclasses.replace(question, statistics=known).plan)
    plan = question.plan(recipe, hardware, may_trace=True)
    assert plan is not None
    if plan.origin == "formulas" and config is None and not model_configs.known_model(recipe.model):
        # Formulas take any config; what Transformers can make no model of will not train.
        store.config_of(recipe)
    # Other settings may choose other micro-batches and strategies, and recompute other layers.
    again = {"batch.micro_batch_size": asked.batch.micro_batch_size, "strategy": asked.strategy}
    changeable = recipe.with_values(again | {"activation_checkpointing": asked.activation_checkpointing})
    suggestions = advise(changeable, hardware, plan, question.plan) if advice else []
    if advice and plan.fit.answer == "no" and all(each.kind == "option" for each in suggestions):
        # Advice knows what has been traced, which may be too little. These settings take the least memory.
        least = recipe.with_values({"batch.micro_batch_size": 1, "activation_checkpointing.mode": "full"})
        explore(least, hardware, functools.partial(question.plan, may_trace=True), ("strategy.name",))
        suggestions = advise(changeable, hardware, plan, question.plan)
    notes = [*question.batches(recipe, hardware), *plan.notes]
    most = model_configs.max_positions(question.config)
    if context and most and context > most:
        notes.append(f"the model has positions for {most:,} tokens: to serve more they must be scaled, as YaRN does")
    lengths = question.lengths(recipe, hardware, plan)
    return plan.model_copy(
        update={"chosen": precision | chosen | plan.chosen, "lengths": lengths, "advice": suggestions, "notes": notes}
    )


def estimate_layouts(
    recipe: Recipe,
    name: str,
    hardware: Hardware,
    *,
    overrides: Sequence[str] = (),
    price: float | None = None,
    statistics: DataStatistics | None = None,
    context: int | None = None,
) -> list[Plan]:
    """The plans of `layouts.layouts`: every way to divide a recipe over some hardware, each with its best setting.

    Each division of a model is traced once, which takes up to a minute; the arguments are those of `estimate`.

    Raises:
        UserError: If the model's config cannot be found, or no way goes with these devices.
    """
    question = Question(
        name, overrides, price, config_of(recipe), statistics or statistics_of(recipe), "worker", context
    )  # fmt: skip
    recipe, precision = fastest_precision(recipe, hardware)
    traced = functools.partial(question.plan, may_trace=True)
    if not (found := layouts(recipe, hardware, traced)):
        explore(recipe, hardware, traced, FREE)
        raise UserError(f"no way to divide the recipe goes with {hardware.name}", "change batch.global_batch_size")
    return [
        each.plan.model_copy(
            update={"overrides": _overridden(overrides, each.changes), "chosen": precision | each.plan.chosen}
        )
        for each in found
    ]


def _overridden(overrides: Sequence[str], changes: Changes) -> list[str]:
    """What would be typed for a setting, of what was typed and what it changes."""
    kept = [each for each in overrides if each.partition("=")[0] not in changes]
    return [*kept, *as_arguments(changes).split()]


def decide(
    recipe: Recipe,
    hardware: Hardware,
    *,
    config: Mapping[str, Any] | None = None,
    statistics: DataStatistics | None = None,
    tracing: Tracing = "worker",
) -> tuple[Recipe, dict[str, str]]:
    """The recipe with all that it leaves to the plan decided, and the reasons; see `auto.resolve`.

    Raises:
        UserError: If nothing fits, or as in `estimate`.
    """
    if not recipe.undecided:
        return recipe, {}
    question = Question("", (), None, config or config_of(recipe), statistics, tracing)
    return resolve(recipe, hardware, question.plan)
