"""Optimizers and schedules by name: what they need, and that every argument of the recipe reaches them.

Transformers knows the classes. It passes on some arguments as text and drops the others in silence, so here the
arguments keep their types, and one that would have no effect is refused.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch._functorch import config as functorch
from transformers import Trainer, get_scheduler

from toolkit.common import UserError
from toolkit.distributed.layout import Length
from toolkit.recipe import Recipe
from toolkit.train.muon import Muon, hidden_matrices


def check_available(recipe: Recipe) -> None:
    """Whether the optimizer's package is installed and this machine can run it; before anything is loaded.

    Raises:
        UserError: If not; names the package to install.
    """
    traits = recipe.optimizer.traits
    if importlib.util.find_spec(traits.module) is None:
        raise UserError(
            f"optimizer.name={traits.name} needs the package {traits.module}, which is not installed",
            f"run `pip install {traits.package}`, or set optimizer.name=adamw",
        )


def check_arguments(recipe: Recipe, arguments: Any, length: Length) -> None:
    """Builds optimizer and schedule for a stand-in model, so that a wrong argument is seen before the real one loads.

    Raises:
        UserError: In the optimizer's or the schedule's own words.
    """
    in_backward, what = recipe.optimizer.traits.in_backward, f"optimizer.name={recipe.optimizer.name}"
    if in_backward and arguments.gradient_accumulation_steps > 1:
        raise UserError(
            f"{what} cannot accumulate gradients",
            f"set batch.micro_batch_size={arguments.train_batch_size * arguments.gradient_accumulation_steps}",
        )
    if in_backward and arguments.world_size > 1 and recipe.strategy.name == "ddp":
        raise UserError(
            f"{what} updates before the processes have averaged their gradients",
            "set optimizer.name=adamw, or launch one process",
        )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    key = "optimizer"
    try:
        kind, kwargs = optimizer_class(recipe, arguments, model)
        parameters = kwargs.pop("model", None) or kwargs.pop("params", [{"params": [*model.parameters()]}])
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
    settings, traits = recipe.optimizer, recipe.optimizer.traits
    arguments.optim_args = ",".join(f"{key}={settings.args[key]}" for key in traits.args if key in settings.args)
    if traits.rank:
        arguments.optim_target_modules = "all-linear"
    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    if traits.module == "torchao" and recipe.strategy.name == "fsdp":
        kind = type(kind.__name__, (_TracedAnew, kind), {})
    if traits.family == "muon":
        kind, kwargs = Muon, {**kwargs, "matrices": hidden_matrices(model)}
    if recipe.method.loraplus_lr_ratio:
        kwargs["params"] = _loraplus_groups(recipe, model)
    known = inspect.signature(kind.__init__).parameters
    ours = {"self", "params", "model", "matrices", "args", "kwargs"}
    allowed = sorted(key for key in {*traits.args, *known} - ours if not traits.key_of(key))
    for key, value in settings.args.items():
        if own := traits.key_of(key):
            raise UserError(f"optimizer.args.{key} has a key of its own", f"set {own}")
        if key not in allowed:
            raise UserError(
                f"optimizer.args.{key}: optimizer {settings.name} has no such argument",
                f"remove it, or use one of: {', '.join(allowed) or 'none'}",
            )
        if key not in traits.args:
            kwargs[key] = value
    if "betas" in known and "betas" not in kwargs:
        kwargs["betas"] = (settings.beta1, settings.beta2)
        kwargs |= {"eps": settings.eps} if "eps" in known else {}
    if traits.momentum is not None:
        kwargs["momentum"] = settings.stated_momentum
    if traits.module == "grokadamw":
        kind = type(kind.__name__, (_HasItsState, kind), {})
    if traits.rank:
        if not any(each.requires_grad for group in kwargs["params"] if "rank" in group for each in group["params"]):
            raise UserError(
                f"optimizer.name={settings.name} projects the gradients of torch's linear layers, and none of "
                f"{type(model).__name__} is trained: it would save nothing",
                "set optimizer.name=adamw_8bit",
            )
        kind = type(kind.__name__, (_SavesProjectors, kind), {})
    if traits.layerwise:
        kind = type(kind.__name__, (_InBackward, kind), {})
    return kind, kwargs


class _TracedAnew:
    """Of an optimizer that compiles its step: takes no graph from torch's cache of traced ones. That knows a sharded
    tensor by its whole shape alone, not by what this process has of it nor by how many bits that is kept in, so another
    process's graph, or another optimizer's, would be taken for the own one and fail. Kernels are cached as ever."""

    def step(self, closure: Any = None) -> Any:
        with functorch.patch(enable_autograd_cache=False):
            return super().step(closure)  # type: ignore[misc]


class _HasItsState:
    """Of an optimizer that keeps state in its groups, by parameters that no checkpoint finds again: has that be the
    state which torch saves by their numbers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._share()

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        for group in saved["param_groups"]:
            del group["state"]
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)  # type: ignore[misc]
        self._share()

    def _share(self) -> None:
        for group in self.param_groups:  # type: ignore[attr-defined]
            group["state"] = self.state  # type: ignore[attr-defined]


class _SavesProjectors:
    """Of an optimizer that keeps an object for each projected gradient beside tensors: its state dicts hold what is in
    these objects. Checkpoints are read as plain data, and torch moves no tensors in objects to a parameter's device."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()  # type: ignore[misc]
        state = {}
        for key, values in saved["state"].items():
            state[key] = values
            if projector := values.get("projector"):
                state[key] = values | {"projector": {"class": type(projector).__name__, **vars(projector)}}
        return saved | {"state": state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        state = {key: {**values} for key, values in saved["state"].items()}
        # Apart, as torch would take texts among them for sequences of tensors.
        held = {key: {**values.pop("projector")} for key, values in state.items() if "projector" in values}
        super().load_state_dict(saved | {"state": state})  # type: ignore[misc]
        keys = (key for group in saved["param_groups"] for key in group["params"])
        parameters, classes = dict(zip(keys, updated_by(self), strict=True)), self._projectors()
        for key, values in held.items():
            projector: Any = object.__new__(classes[values.pop("class")])
            vars(projector).update(send_to_device(values, parameters[key].device))
            self.state[parameters[key]]["projector"] = projector  # type: ignore[attr-defined]

    @classmethod
    def _projectors(cls) -> dict[str, type]:
        """Classes of such objects by name: those that the module of the optimizer itself uses."""
        kind = cls.__mro__[cls.__mro__.index(_SavesProjectors) + 1]
        module = vars(sys.modules[kind.__module__])
        return {name: each for name, each in module.items() if isinstance(each, type) and name.endswith("Projector")}


class _InBackward:
    """Of an optimizer: updates each parameter as soon as its gradient is there, and frees that.

    Transformers has an optimizer for each parameter instead, which it gives neither the betas of the recipe nor a
    schedule, and whose state is in no checkpoint.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in updated_by(self):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: torch.Tensor) -> None:
        super().step()  # type: ignore[misc]  # No other has a gradient by now.
        parameter.grad = None

    def step(self, closure: None = None) -> None:
        """Nothing is left to update."""


def _loraplus_groups(recipe: Recipe, model: Any) -> list[dict[str, Any]]:
    """Groups of trained parameters: the second matrices of adapters have a learning rate of their own."""
    decayed = set(decayed_parameters(model))
    groups: dict[tuple[bool, bool], list[Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((".lora_B." in name, name in decayed), []).append(parameter)
    rate, ratio, decay = (
        recipe.optimizer.learning_rate,
        recipe.method.loraplus_lr_ratio or 1,
        recipe.optimizer.weight_decay,
    )
    return [
        {"params": parameters, "lr": rate * (ratio if second else 1), "weight_decay": decay if decays else 0.0}
        for (second, decays), parameters in groups.items()
    ]


def decayed_parameters(model: Any) -> list[str]:
    """Names of the parameters that weight decay is for: those that Transformers chooses, which leaves out biases and
    most norms, less the norms that it knows neither by their names nor as torch's own, such as Mamba's `norm_f`."""
    norms = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
        for name, _ in module.named_parameters(recurse=False)
    }
    chosen = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    return [name for name in chosen if name not in norms]


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that updates, under the wrappers of accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def updated_by(optimizer: Any) -> list[torch.Tensor]:
    """What an optimizer updates, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def not_updated(trained: list[Any], updated: list[Any]) -> int:
    """How many trained parameters the optimizer does not have, and so would never move."""
    return len({id(parameter) for parameter in trained} - {id(parameter) for parameter in updated})


def moments_of(optimizer: Any) -> list[torch.Tensor]:
    """Tensors of the optimizer's state as large as what they belong to: not its step counts."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim and value.numel() > 1]
