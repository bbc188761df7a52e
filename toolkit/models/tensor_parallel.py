"""Layers whose weights are divided over processes (tensor parallelism, Shoeybi et al. 2019, arXiv:1909.08053).

Of attention and MLP each process of a group keeps some heads and some of the inner width: rows of the weights that make
them (`colwise` in Transformers' plans) and columns of those that take them back (`rowwise`). What enters is the same on
all of them, and what leaves is summed over them, so two sums of hidden states pass in each direction of a layer. What
remains are plain tensors: to DDP, and to everything else, this is a model with fewer columns. Norms, embeddings and
output head are whole on every process, and stay equal because they get equal gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from toolkit.common import UserError

_GROUP: dict[str, Any] = {}
_COLUMNS, _ROWS, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Styles of Transformers' plans. The last is of norms of single heads, of which each process has some."""


def divide_processes(size: int) -> list[Any]:
    """Puts each `size` processes of neighbouring ranks into a group that divides layers, and those that have the same
    parts into another, over which gradients are averaged. All processes call this.

    Returns:
        The groups of this process: `size` members, and as many as there are groups of that kind.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    layers = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
    replicas = [dist.new_group(range(first, world, size)) for first in range(size)]
    _GROUP["layers"], _GROUP["replicas"] = layers[rank // size], replicas[rank % size]
    return [_GROUP["layers"], _GROUP["replicas"]]


def dividing() -> int:
    """How many processes divide layers with this one, itself included."""
    return dist.get_world_size(_GROUP["layers"]) if _GROUP else 1


def replicas() -> Any:
    """The group of the processes that have the same parts as this one."""
    return _GROUP["replicas"]


def divide_layers(model: Any, size: int, index: int) -> None:
    """Keeps one process's part of each layer of a model, and has it compute with that.

    Adapters are divided with their layers: of those that give columns B, of those that take them A. The other matrix is
    whole, and every process has a part of its gradient.

    Args:
        model: A decoder with all its weights, perhaps with LoRA.
        size: Processes that divide it.
        index: Of this one among them.

    Raises:
        UserError: If the model cannot be divided so.
    """
    if size == 1:
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or {}
    remove = "remove parallel.tensor"
    if unknown := sorted({*plan.values()} - {_COLUMNS, _ROWS, _SUMMED}):
        raise UserError(
            f"parallel.tensor: Transformers divides layers of a {config.model_type} in a way that is not built here: "
            f"{', '.join(unknown)}",
            remove,
        )
    decoder = base.get_decoder()
    entrances: dict[Any, _Entrance] = {}
    found = list(_planned(decoder, plan))
    if {style for _, _, style in found} < {_COLUMNS, _ROWS}:
        raise UserError(f"parallel.tensor: Transformers has no plan to divide a {config.model_type}", remove)
    if rate := getattr(config, "attention_dropout", 0.0):
        # Heads would be dropped alike on all processes.
        raise UserError(f"parallel.tensor: this model drops out {rate:g} of its attention", remove)
    for name, module, style in found:
        if style == _SUMMED:
            _sum_gradients(module.parameters(), size)
            continue
        inner = getattr(module, "base_layer", module)
        if type(inner) is not torch.nn.Linear:
            raise UserError(f"parallel.tensor: {name} is a {type(inner).__name__}, which is not divided", remove)
        width = inner.weight.shape[0 if style == _COLUMNS else 1]
        if width % size:
            raise UserError(
                f"parallel.tensor={size} does not divide the {width:,} "
                f"{'columns' if style == _COLUMNS else 'rows'} of {name}",
                "set parallel.tensor to a number that divides the widths of every layer, or remove it",
            )
        if style == _COLUMNS:
            parent = decoder.get_submodule(name.rpartition(".")[0])
            entrance = entrances.setdefault(parent, _Entrance(parent, size))
            _divide_columns(module, inner, entrance, size, index)
        else:
            _divide_rows(module, inner, size, index)


def _planned(decoder: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Name, module and style of what a plan divides."""
    patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
    for name, module in decoder.named_modules():
        for pattern, style in patterns.items():
            if pattern.fullmatch(name):
                yield name, module, style


def _divide_columns(module: Any, inner: Any, entrance: _Entrance, size: int, index: int) -> None:
    _keep_part(inner, "weight", 0, size, index)
    if inner.bias is not None:
        _keep_part(inner, "bias", 0, size, index)
    inner.out_features //= size
    for up in getattr(module, "lora_B", {}).values():
        _keep_part(up, "weight", 0, size, index)
        up.out_features //= size
    for down in getattr(module, "lora_A", {}).values():
        _sum_gradients(down.parameters(), size)
    module.register_forward_pre_hook(entrance)


def _divide_rows(module: Any, inner: Any, size: int, index: int) -> None:
    _keep_part(inner, "weight", 1, size, index)
    inner.in_features //= size
    for down in getattr(module, "lora_A", {}).values():
        _keep_part(down, "weight", 1, size, index)
        down.in_features //= size
    for up in getattr(module, "lora_B", {}).values():
        _sum_gradients(up.parameters(), size)
    drops = getattr(module, "lora_dropout", {})
    for name, drop in drops.items():
        if getattr(drop, "p", 0):
            drops[name] = _PartOfDropout(drop.p, size, index)
    if inner.bias is not None:
        inner.forward = lambda inputs: F.linear(inputs, inner.weight)

    def leave(_: Any, __: Any, outputs: torch.Tensor) -> torch.Tensor:
        whole = _Sum.apply(outputs, size)
        return whole if inner.bias is None else whole + inner.bias.to(whole.dtype)

    module.register_forward_hook(leave)


class _Entrance:
    """Where the hidden states enter the layers of a module that give columns: all of them read the same, and its
    gradient, of which each process has a part, is summed once for all."""

    def __init__(self, parent: Any, size: int) -> None:
        self._size = size
        self._given = self._entered = None
        parent.register_forward_hook(self._leave, always_call=True)

    def __call__(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if args[0] is not self._given:
            self._given, self._entered = args[0], _SumGradient.apply(args[0], self._size)
        return (self._entered, *args[1:])

    def _leave(self, *_: Any) -> None:
        self._given = self._entered = None


class _PartOfDropout(torch.nn.Module):
    """What a process has of the dropout of a whole row of features: the numbers that decide are drawn for all of them,
    so that the processes, which draw alike, drop what one process would."""

    def __init__(self, p: float, size: int, index: int) -> None:
        super().__init__()
        self.p, self._size, self._index = p, size, index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return inputs
        width = inputs.shape[-1]
        kept = inputs.new_empty(*inputs.shape[:-1], width * self._size).bernoulli_(1 - self.p).div_(1 - self.p)
        return inputs * kept.narrow(-1, self._index * width, width)


class _Sum(torch.autograd.Function):
    """Sums over the processes that divide layers; all of them have the whole gradient of it."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, size: int) -> torch.Tensor:
        return _sum(part, size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    """The same numbers on all processes that divide layers, each of which gives a part of their gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.size), None


@torch.library.custom_op("toolkit::sum_parts", mutates_args=())
def _sum(part: torch.Tensor, size: int) -> torch.Tensor:
    """The sum over the processes that divide layers, of which there are `size`."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_GROUP["layers"])
    return total


@_sum.register_fake
def _(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


SUM = torch.ops.toolkit.sum_parts.default
"""The operation, by which a trace knows what is sent."""


def sum_over_parts(number: torch.Tensor) -> torch.Tensor:
    """The sum of what each of the processes that divide layers has of something."""
    return _sum(number, dividing())


def _sum_gradients(parameters: Any, size: int) -> None:
    """Sums the gradients of whole parameters, of which every process has a part."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: _sum(gradient, size))


def _keep_part(module: Any, name: str, dimension: int, size: int, index: int) -> None:
    whole = getattr(module, name)
    width = whole.shape[dimension] // size
    part = whole.data.narrow(dimension, index * width, width).clone(memory_format=torch.contiguous_format)
    kept = torch.nn.Parameter(part, requires_grad=whole.requires_grad)
    kept.divided = (dimension, size)  # type: ignore[attr-defined]
    setattr(module, name, kept)


def is_part(parameter: Any) -> bool:
    """Whether a process has only a part of this parameter, as the others of its group have the rest."""
    return hasattr(parameter, "divided")


def whole_shape(parameter: Any) -> torch.Size:
    """The shape of a parameter as one process would have it."""
    if not is_part(parameter):
        return parameter.shape
    dimension, size = parameter.divided
    return torch.Size(width * size if each == dimension else width for each, width in enumerate(parameter.shape))


def part_of(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """What this process has of something of a parameter's whole shape."""
    if not is_part(parameter):
        return whole
    dimension, _ = parameter.divided
    width = parameter.shape[dimension]
    return whole.narrow(dimension, dist.get_rank(_GROUP["layers"]) * width, width)


def whole_of(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """Something of a parameter's whole shape, of the parts of it. All processes of a group call this."""
    if not is_part(parameter) or part.shape != parameter.shape:
        return part
    dimension, size = parameter.divided
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=_GROUP["layers"])
    return torch.cat(parts, dimension)


def divides(model: Any) -> int:
    """Over how many processes the layers of a model really are divided, by what lies in its parameters."""
    sizes = {parameter.divided[1] for parameter in model.parameters() if is_part(parameter)}
    return max(sizes, default=1) if len(sizes) < 2 else 0
