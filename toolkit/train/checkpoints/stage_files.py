"""What is saved of a model whose layers are spread over processes: all of it, as one process would save it, so that any
number of processes goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from toolkit.models.parallel.pipeline import Chain, chain, gathered, piped, pipeline_group


def whole_parameters(model: Any, own: Chain) -> dict[str, torch.Tensor]:
    """What is saved of a model whose stages are spread: all of it, or its adapters, in host memory of the first
    process; nothing on the others. All processes call this."""
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    adapter, parameters = hasattr(model, "peft_config"), dict(model.named_parameters())
    second = set(getattr(model, "all_tied_weights_keys", None) or ())
    held = {
        name: each
        for name, each in model.state_dict().items()
        if name not in second and (not adapter or name in trained or name not in parameters)
    }
    state = gathered(held)
    order = {name: number for number, name in enumerate(own.state)}
    return {name: state[name] for name in sorted(state, key=lambda name: order[name])}


@contextmanager
def naming_adapters() -> Iterator[None]:
    """Has PEFT save what the whole model trains: by itself it leaves out what belongs to layers of other processes.
    Without a pipeline nothing changes."""
    own = chain()
    if own is None:
        yield
        return
    from peft import peft_model

    aliases, original = own.aliases, peft_model.get_peft_model_state_dict
    peft_model.get_peft_model_state_dict = lambda model, state_dict, **settings: {
        aliases[name]: each for name, each in state_dict.items() if name in aliases
    }
    try:
        yield
    finally:
        peft_model.get_peft_model_state_dict = original


def whole_groups(groups: list[list[str]], own: Chain) -> list[list[str]]:
    """Names of the parameters of each group of the optimizer, those of all stages in the order of the whole model. All
    processes call this."""
    every: list[Any] = [None] * piped()
    dist.all_gather_object(every, [[own.name(name) for name in names] for names in groups], group=pipeline_group())
    order = {name: number for number, name in enumerate(own.sizes)}
    together = [{name for each in every for name in each[number]} for number in range(len(groups))]
    return [sorted(names, key=lambda name: order[name]) for names in together]


def whole_optimizer(optimizer: Any, model: Any, own: Chain) -> dict[str, Any]:
    """An optimizer's state as one process would have it, in host memory of the first process; nothing on the others."""
    names = {parameter: own.name(name) for name, parameter in model.named_parameters()}
    saved = optimizer.state_dict()
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    groups = whole_groups([[names[each] for each in group["params"]] for group in optimizer.param_groups], own)
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        for kind, value in saved["state"].get(number, {}).items():
            key = f"{numbers[names[parameter]]} {kind}"
            if torch.is_tensor(value) and value.ndim:
                tensors[key] = value
            else:
                others[key] = value.cpu() if torch.is_tensor(value) else value
    every: list[Any] = [None] * piped()
    dist.all_gather_object(every, others, group=pipeline_group())
    held: dict[str, Any] = dict(gathered(tensors))
    for each in every:
        held |= each
    state: dict[int, dict[str, Any]] = {}
    for key, value in held.items():
        number_of, _, kind = key.partition(" ")
        state.setdefault(int(number_of), {})[kind] = value
    settings = [
        {**group, "params": [numbers[name] for name in names_of]}
        for group, names_of in zip(saved["param_groups"], groups, strict=True)
    ]
    return {**saved, "state": dict(sorted(state.items())), "param_groups": settings}
