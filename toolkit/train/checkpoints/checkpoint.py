"""Checkpoints of every engine: which one a run goes on from, and what can continue from it."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.common import UserError
from toolkit.files import UNANSWERED
from toolkit.models.parallel.parts import whole_shape
from toolkit.models.parallel.pipeline import chain
from toolkit.recipe import Loaded, Recipe
from toolkit.recipe.libraries import flat
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.seal import UNREAD, fault, read_seal, unread
from toolkit.train.checkpoints.storage import unanswered

_log = logging.getLogger("toolkit.train")
_IN_STATE = {"learning_rate", "weight_decay", "beta1", "beta2", "eps", "momentum"}
"""Of the optimizer, what its saved state holds."""


def trained(model: Any) -> dict[str, Any]:
    """Which weights a model trains, as a checkpoint is sealed with it: the same for every engine."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if own := chain():
        shapes = sorted((name, [*shape]) for name, shape in own.sizes.items())
    else:
        shapes = sorted(
            (name, [*getattr(each, "ds_shape", whole_shape(each))])
            for name, each in model.named_parameters()
            if each.requires_grad
        )
    number = sum(math.prod(shape) for _, shape in shapes)
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return {"architecture": type(base).__name__, "trained": number, "shapes": digest}


def check_fits(checkpoint: Path | None, model: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model's weights.

    Args:
        checkpoint: From which a run is to go on, if from any.
        model: What `trained` says of its model.

    Raises:
        UserError: Naming both.
    """
    saved = read_seal(checkpoint) if checkpoint else {}
    if saved.get("shapes", model["shapes"]) != model["shapes"]:
        one, other = (f"{each['trained']:,} weights of a {each['architecture']}" for each in (saved, model))
        raise UserError(
            f"{checkpoint} holds {one}, the recipe trains {other if one != other else 'others of as many'}",
            "set model and method as the checkpoint was trained, or name another one with checkpoint.resume",
        )


def record(step: int, loaded: Loaded, world_size: int, model: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint is sealed with, beside its files.

    Args:
        model: What `trained` says of it.
    """
    recipe = loaded.recipe
    state = {"method": recipe.method.name, "optimizer": _in_state(recipe)}
    state["kept_by"] = recipe.optimizer.model_dump(include={"name", "args"})
    return {"step": step, **model, **state, **writer(loaded, world_size)}


def rotate(folder: Path, step: int, limit: int | None) -> None:
    """Keeps the newest checkpoints of a folder, by their steps: a clock may be wrong.

    Args:
        step: Of the one that was just completed. Those of later steps are of a past that is trained anew, or damaged,
            and go first.
        limit: How many stay; None for all.
    """
    order = sorted(folder.glob("checkpoint-*"), key=lambda each: (_number(each) <= step, _number(each)), reverse=True)
    for checkpoint in order[limit:] if limit else ():
        shutil.rmtree(checkpoint, ignore_errors=True)


_LAID_OUT_BY = {"parameter_alignment": False, "sub_group_size": 10**9}
"""DeepSpeed's settings by which ZeRO lays parameters end to end, and what they are unless a recipe or a launcher's file
says otherwise. The first is of stages 1 and 2, the other of 3. Read as laid out otherwise, numbers are others'."""


def writer(loaded: Loaded, world_size: int) -> dict[str, Any]:
    """Who writes the checkpoints of a run: settings of the strategy that decide their form, and processes."""
    recipe = loaded.recipe
    strategy = recipe.strategy
    written_by: dict[str, Any] = {"strategy": strategy.name}
    if strategy.name == "fsdp":
        written_by["state_dict_type"] = strategy.state_dict_type
    if strategy.zero_stage:
        written_by["offload_optimizer"] = strategy.offload_optimizer
        passed = flat(recipe.extra.deepspeed) | dict(loaded.taken_over)
        name = "sub_group_size" if strategy.zero_stage == 3 else "parameter_alignment"
        value = passed.get(f"zero_optimization.{name}", _LAID_OUT_BY[name])
        written_by |= {name: value} if value != _LAID_OUT_BY[name] else {}
    if recipe.parallel.tensor > 1:
        written_by["tensor"] = recipe.parallel.tensor
    if recipe.parallel.expert > 1:
        written_by["expert"] = recipe.parallel.expert
    if recipe.parallel.pipeline > 1:
        written_by["pipeline"] = recipe.parallel.pipeline
    return {**written_by, "world_size": world_size}


def newest(folder: Path, needed: bool = False) -> tuple[Path | None, dict[Path, str]]:
    """The newest whole checkpoint of a folder, and why later ones are passed over.

    Args:
        needed: Whether a run would begin anew without one, and delete what is there.

    Raises:
        UserError: If there is none only because a disk does not answer now, and one is needed.
    """
    passed_over: dict[Path, str] = {}
    error: OSError | None = None
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=_number, reverse=True):
        try:
            reason = fault(checkpoint, UNANSWERED)
        except OSError as failure:
            error, reason = failure, unread(failure)
        if not reason:
            return checkpoint, passed_over
        passed_over[checkpoint] = reason
    if error and needed:
        raise unanswered(error)
    return None, passed_over


def keep_unread(passed_over: Mapping[Path, str]) -> None:
    """Renames checkpoints that `newest` could not read, so that those that are saved now neither replace nor delete
    them.

    Raises:
        UserError: If one cannot be renamed.
    """
    for checkpoint in may_be_whole(passed_over):
        kept = next(
            place
            for number in itertools.count(1)
            if not (place := checkpoint.with_name(f"unread-{checkpoint.name}{f'-{number}' * (number > 1)}")).exists()
        )
        try:
            checkpoint.rename(kept)
        except OSError as error:
            raise UserError(
                f"{checkpoint} may be whole, and cannot be kept as {kept.name}: {error.strerror}",
                "move it away, or wait until the disk answers: training would replace or delete it",
            ) from error
        _log.warning("%s may be whole, and is kept as %s", checkpoint, kept)


def may_be_whole(passed_over: Mapping[Path, str]) -> dict[Path, str]:
    """Of the checkpoints that `newest` passed over, those that it could not read."""
    return {
        checkpoint: reason
        for checkpoint, reason in passed_over.items()
        if reason.startswith(UNREAD) and _number(checkpoint) >= 0
    }


def step_of(checkpoint: Path) -> int:
    """The optimizer step at which a whole checkpoint was saved."""
    return int(read_seal(checkpoint)["step"])


def check_named(checkpoint: Path, recipe: Recipe) -> None:
    """Refuses a checkpoint that the user named and that this recipe cannot continue.

    Raises:
        UserError: If it is cut off or damaged, holds another method's weights or another optimizer's state, or has no
            step left to take.
    """
    what = f"checkpoint.resume={checkpoint}"
    if reason := fault(checkpoint):
        # A run, or the model in it, may be named for its checkpoints.
        for folder in (checkpoint, checkpoint / "checkpoints", checkpoint.parent / "checkpoints"):
            if meant := newest(folder)[0]:
                raise UserError(f"{what} is no checkpoint", f"set checkpoint.resume={meant} for the newest of this run")
        raise UserError(f"{what} {reason}", "name another checkpoint of a run of this toolkit")
    method = read_seal(checkpoint)["method"]
    if method != recipe.method.name:
        kinds = {"lora": "an adapter", "full": "a full model"}
        raise UserError(
            f"{what} holds {kinds[method]}, the recipe trains {kinds[recipe.method.name]}",
            "set method.name as the checkpoint was trained",
        )
    kept_by = read_seal(checkpoint).get("kept_by", {})
    if kept_by and _state(**kept_by) != _state(recipe.optimizer.name, recipe.optimizer.args):
        then, now = _named(**kept_by), _named(recipe.optimizer.name, recipe.optimizer.args)
        raise UserError(
            f"{what} holds the state of {then}, with which {now} cannot go on",
            "set the optimizer as the checkpoint was trained, or begin anew from a final model: model.path",
        )
    steps = recipe.schedule.max_steps
    if steps is not None and steps <= step_of(checkpoint):
        raise UserError(
            f"{what} is at step {step_of(checkpoint)} already, schedule.max_steps is {steps}",
            "raise schedule.max_steps",
        )


def _state(name: str, args: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for optimizers that go on with each other's state, of which their arguments are a part."""
    return *(OPTIMIZERS[name].state if name in OPTIMIZERS else (name,)), dict(args)


def _named(name: str, args: Mapping[str, Any]) -> str:
    said = " ".join(f"optimizer.args.{key}={value}" for key, value in args.items())
    return f"optimizer.name={name} {said}".rstrip()


def check_readable(checkpoint: Path, loaded: Loaded, world_size: int) -> None:
    """Refuses a checkpoint that the launched strategy and processes can neither read as it is nor divide anew.

    Raises:
        UserError: Naming who wrote it, who would read it, and why that cannot be.
    """
    saved, now, recipe = read_seal(checkpoint), writer(loaded, world_size), loaded.recipe
    if _form(saved) == _form(now):
        return
    reason = ""
    if "nvme" in (saved.get("offload_optimizer"), now.get("offload_optimizer"), recipe.strategy.offload_param):
        reason = "what lies on NVMe drives is read where it was written"
    elif not divides_anew(recipe):
        reason = f"optimizer.name={recipe.optimizer.traits.name} keeps what cannot be divided otherwise than it was"
    if reason:
        raise UserError(
            f"{checkpoint} was saved by {_described(saved)}; {_described(now)} cannot read it: {reason}",
            f"continue with {_described(saved)}, or start anew beside it with checkpoint.resume=never",
        )


def divides_anew(recipe: Recipe) -> bool:
    """Whether what the optimizer keeps can be divided otherwise than it was."""
    return recipe.optimizer.traits.divisible


def conversion(checkpoint: Path, loaded: Loaded, world_size: int) -> str:
    """What is said of a checkpoint whose state the launched strategy and processes divide anew; empty where they read
    it as it is."""
    saved, now = read_seal(checkpoint), writer(loaded, world_size)
    if _reads(now, saved):
        return ""
    return f"{checkpoint.name} was saved by {_described(saved)}: its state is divided anew for {_described(now)}"


def not_changed(checkpoint: Path, recipe: Recipe) -> list[str]:
    """What the recipe says otherwise of the optimizer than the checkpoint, whose state brings its own back."""
    now = _in_state(recipe)
    # Earlier seals have no momentum where the recipe stated none.
    saved = {key: value for key, value in read_seal(checkpoint).get("optimizer", now).items() if value is not None}
    return [
        f"optimizer.{key}={value:g} has no effect: {checkpoint.name} goes on with {saved[key]:g}. "
        "checkpoint.resume=never begins anew"
        for key, value in now.items()
        if saved.get(key, value) != value
    ]


def _in_state(recipe: Recipe) -> dict[str, Any]:
    """Settings that an optimizer's saved state brings back, as they act."""
    optimizer = recipe.optimizer
    return {**optimizer.model_dump(include=_IN_STATE), "momentum": optimizer.stated_momentum}


def _reads(now: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether an engine reads as it is what was saved; parts and stages are taken out of whole ones, but for ZeRO's."""
    of_whole = ("expert", "pipeline", *([] if now["strategy"].startswith("zero") else ["tensor"]))
    return _form(saved) == _form(now) and now.keys().isdisjoint(of_whole)


def _form(writer: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for those who read each other's checkpoints."""
    strategy = writer["strategy"]
    if strategy == "fsdp":
        return strategy, writer["state_dict_type"]
    if strategy.startswith("zero"):
        # Every process reads back the part it wrote. Stages 1 and 2 divide the optimizer's state in the same way.
        parts = writer.get("tensor", 1)
        laid_out = [writer.get(name) for name in _LAID_OUT_BY]
        return strategy == "zero3", writer["offload_optimizer"] == "nvme", parts, writer["world_size"], *laid_out
    return ("whole",)


def _described(writer: Mapping[str, Any]) -> str:
    settings = f"strategy.name={writer['strategy']}"
    if "state_dict_type" in writer:
        settings += f" strategy.state_dict_type={writer['state_dict_type']}"
    if writer.get("offload_optimizer", "none") != "none":
        settings += f" strategy.offload_optimizer={writer['offload_optimizer']}"
    for key in ("tensor", "expert", "pipeline"):
        settings += f" parallel.{key}={writer[key]}" if key in writer else ""
    for name in _LAID_OUT_BY:
        settings += f" extra.deepspeed.zero_optimization.{name}={json.dumps(writer[name])}" if name in writer else ""
    number = writer["world_size"]
    return f"{settings} on {number} process" + ("es" if number > 1 else "")


def _number(checkpoint: Path) -> int:
    """The step in a checkpoint's name, which is there also where its seal is not."""
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdecimal() else -1
