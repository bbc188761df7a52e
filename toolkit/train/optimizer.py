"""Optimizers and schedules by name: what they need, and that every argument of the recipe reaches them.

Transformers knows the classes. It passes on some arguments as text and drops the others in silence, so here the
arguments keep their types, and one that would have no effect is refused.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
from transformers import Trainer, get_scheduler

from toolkit.common import UserError
from toolkit.distributed import Length
from toolkit.recipe import Recipe

_PACKAGES = {
    "adamw_torch_4bit": ("torchao", "torchao"),
    "adamw_torch_8bit": ("torchao", "torchao"),
    "adamw_anyprecision": ("torchdistx", "git+https://github.com/pytorch/torchdistx"),
    "adamw_torch_xla": ("torch_xla", "torch_xla"),
    "adamw_torch_npu": ("torch_npu", "torch_npu"),
    "galore": ("galore_torch", "galore-torch"),
    "apollo": ("apollo_torch", "apollo-torch"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "adalomo": ("lomo_optim", "lomo-optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "schedule_free": ("schedulefree", "schedulefree"),
}
"""Start of an optimizer's name to the module it imports and what pip installs it from."""

_ON_GPU = ("paged", "adalomo", "galore_adamw_8bit")
_LOW_RANK = ("galore", "apollo")
_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
"""These update each parameter during the backward pass, so no gradient is left to accumulate or to clip."""
_PROJECTION_ARGS = {
    "galore": ("rank", "update_proj_gap", "scale", "proj_type"),
    "apollo": ("rank", "update_proj_gap", "scale", "proj_type", "proj", "scale_type"),
    "ademamix": ("beta3",),
    "paged_ademamix": ("beta3",),
}
"""Arguments that Transformers turns into something else than a keyword of the optimizer's class."""
_OWN_KEYS = {
    "lr": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "betas": "optimizer.beta1 and optimizer.beta2",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "eps": "optimizer.eps",
    "momentum": "optimizer.momentum",
}


def check_available(recipe: Recipe) -> None:
    """Whether the optimizer's package is installed and this machine can run it; before anything is loaded.

    Raises:
        UserError: If not; names the package to install.
    """
    name = recipe.optimizer.name
    for module, package in (_PACKAGES[start] for start in _PACKAGES if name.startswith(start)):
        if importlib.util.find_spec(module) is None:
            raise UserError(
                f"optimizer.name={name} needs the package {module}, which is not installed",
                f"run `pip install {package}`, or set optimizer.name=adamw",
            )
    if name.startswith(_ON_GPU) and not torch.cuda.is_available():
        raise UserError(f"optimizer.name={name} needs a GPU", "set optimizer.name=adamw or adamw_8bit")


def check_arguments(recipe: Recipe, arguments: Any, length: Length) -> None:
    """Builds optimizer and schedule for a stand-in model, so that a wrong argument is seen before the real one loads.

    Raises:
        UserError: In the optimizer's or the schedule's own words.
    """
    if recipe.optimizer.name.endswith(_IN_BACKWARD) and arguments.gradient_accumulation_steps > 1:
        raise UserError(
            f"optimizer.name={recipe.optimizer.name} cannot accumulate gradients",
            f"set batch.micro_batch_size={arguments.train_batch_size * arguments.gradient_accumulation_steps}",
        )
    if recipe.optimizer.name.endswith(_IN_BACKWARD) and arguments.world_size > 1 and recipe.strategy.name == "ddp":
        raise UserError(
            f"optimizer.name={recipe.optimizer.name} updates before the processes have averaged their gradients",
            "set optimizer.name=adamw, or launch one process",
        )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    key = "optimizer"
    try:
        kind, kwargs = optimizer_class(recipe, arguments, model)
        parameters = kwargs.pop("model", None) or kwargs.pop("params", model.parameters())
        if "optimizer_dict" not in kwargs:
            kind(parameters, **kwargs)
        key = "schedule"
        schedule = recipe.schedule
        optimizer = torch.optim.SGD(model.parameters(), lr=recipe.optimizer.learning_rate)
        get_scheduler(schedule.name, optimizer, length.warmup_steps, length.total_steps, dict(schedule.args))
    except UserError:
        raise
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        section = getattr(recipe, key)
        given = f" with {key}.args={section.args}" if section.args else ""
        raise UserError(f"{key}.name={section.name}{given} does not work: {error}", f"change {key}.args") from error


def optimizer_class(recipe: Recipe, arguments: Any, model: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizer's class and keyword arguments, as `Trainer(optimizer_cls_and_kwargs=…)` takes them.

    Args:
        arguments: TrainingArguments; their `optim_args` and `optim_target_modules` are set here.
        model: What is trained; low-rank optimizers look for its linear layers.

    Raises:
        UserError: If one of `optimizer.args` is unknown to this optimizer, or has a key of its own in the recipe.
    """
    settings = recipe.optimizer
    family = next((start for start in _PROJECTION_ARGS if settings.name.startswith(start)), "")
    projection = _PROJECTION_ARGS.get(family, ())
    arguments.optim_args = ",".join(f"{key}={settings.args[key]}" for key in projection if key in settings.args)
    if family in _LOW_RANK:
        arguments.optim_target_modules = "all-linear"
    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    known = {} if "optimizer_dict" in kwargs else inspect.signature(kind.__init__).parameters
    allowed = sorted({*projection, *known} - {"self", "params", "model", "args", "kwargs", *_OWN_KEYS})
    for key, value in settings.args.items():
        if key in _OWN_KEYS and key not in projection:
            raise UserError(f"optimizer.args.{key} has a key of its own", f"set {_OWN_KEYS[key]}")
        if key not in allowed:
            raise UserError(
                f"optimizer.args.{key}: optimizer {settings.name} has no such argument",
                f"remove it, or use one of: {', '.join(allowed) or 'none'}",
            )
        if key not in projection:
            kwargs[key] = value
    if "betas" in known and "betas" not in kwargs:
        kwargs["betas"] = (settings.beta1, settings.beta2)
        kwargs |= {"eps": settings.eps} if "eps" in known else {}
    if "momentum" in known and settings.name.endswith("sgd"):
        kwargs["momentum"] = settings.momentum
    return kind, kwargs
