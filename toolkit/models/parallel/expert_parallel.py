"""Experts that are divided over processes, each of which has rows of its own (GShard, Lepikhin et al. 2020,
arXiv:2006.16668, section 3.2).

Outside the experts this is data parallelism. In each layer with experts a process sends every token to the processes
that have experts for it, once to each however many of its experts they have, with the weights of these; they return the
weighted sum of what their experts make of it. Transformers' own exchange sends a copy for each expert: of 8 over 8
processes 7 rows a token where this sends 4.7, and over 2 processes 4 where this sends 1. That all processes read the
same rows, and each computes what its experts add, would send less still, but all of attention would be computed as
often as there are processes.

What remains are plain tensors with fewer experts. DDP leaves them alone: their gradients already are those of the rows
of all processes of a group, see `train.trainers.divided_experts`. No token is dropped, because no expert has a
capacity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from toolkit.common import UserError
from toolkit.models.parallel.process_groups import neighbours

_GROUP: dict[str, Any] = {}
_DISPATCHED, _BY_EXPERT = "ep_dispatch_experts", "grouped_gemm"
"""Styles of Transformers' plans: of modules of experts, and of their parameters, whose first dimension counts them."""
_REMOVE = "remove parallel.expert"
_AT_ONCE = 16384
"""Rows that are added up at a time."""


def divide_processes(size: int) -> list[Any]:
    """Puts each `size` processes of neighbouring ranks into a group that divides experts, and those that have the same
    experts into another, over which gradients are averaged. All processes call this.

    Returns:
        The groups of this process: `size` members, and as many as there are groups of that kind.
    """
    _GROUP["experts"], _GROUP["replicas"] = neighbours(size)
    return [_GROUP["experts"], _GROUP["replicas"]]


def dividing() -> int:
    """How many processes divide experts with this one, itself included."""
    return dist.get_world_size(_GROUP["experts"]) if _GROUP else 1


def group() -> Any:
    """The processes that divide experts with this one."""
    return _GROUP["experts"]


def replicas() -> Any:
    """The group of the processes that have the same experts as this one."""
    return _GROUP["replicas"]


@dataclass(frozen=True)
class Routes:
    """Which tokens go where in one layer.

    Args:
        tokens: Of each row that is sent its token (rows,), in the order of the processes.
        sent: Rows for each process, this one included.
        received: Rows from each.
        pairs: Of rows and experts of this process that meet.
    """

    tokens: torch.Tensor
    sent: list[int]
    received: list[int]
    pairs: int


def arrives(group: Any, place: torch.device) -> bool:
    """Whether each process of the group gets what each other one sends it: as many rows as its place says, and one
    more. All of the group call this."""
    size, index = dist.get_world_size(group), dist.get_rank(group)
    sent, received = list(range(1, size + 1)), [index + 1] * size
    rows = torch.full((sum(sent), 2), float(index), device=place)
    came = _send(rows, sent, received)
    wanted = torch.arange(size, device=place).repeat_interleave(index + 1)[:, None].expand(-1, 2)
    return torch.equal(came, wanted.to(came.dtype))


class Exchange:
    """How the processes of a group tell each other what they will send.

    Args:
        size: Processes of the group.
        index: Of this one.
        each: Experts of a process.
    """

    def __init__(self, size: int, index: int, each: int) -> None:
        self.size, self.index, self.each = size, index, each

    def routes(self, experts: torch.Tensor) -> Routes:
        """Of the experts of each token (tokens, chosen). The device is waited for once."""
        owners = experts // self.each
        chosen = owners.new_zeros((len(owners), self.size)).scatter_add_(1, owners, torch.ones_like(owners))
        goes = (chosen > 0).t()
        mine = torch.stack([goes.sum(1), chosen.sum(0)], 1)
        theirs = _send(mine, [1] * self.size, [1] * self.size)
        sent, received = self.counts(experts, mine, theirs)
        rows = [count for count, _ in sent]
        tokens = torch.nonzero_static(goes, size=sum(rows))[:, 1]
        return Routes(tokens, rows, [count for count, _ in received], sum(pairs for _, pairs in received))

    def counts(self, experts: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> list[list[list[int]]]:
        """Rows, and pairs of them and experts, that go to each process, and that come from each.

        Args:
            experts: Those of each token (tokens, chosen).
            mine: What goes to each (processes, 2).
            theirs: What comes from each.
        """
        counts: list[list[list[int]]] = torch.stack([mine, theirs]).tolist()
        return counts

    def pairs(self, local: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and place (pairs,) of those of the experts of each row (rows, chosen) that this process has.

        Args:
            local: Experts as this process numbers its own, from 0 on.
            count: How many pairs there are.
        """
        row, place = torch.nonzero_static((local >= 0) & (local < self.each), size=count).unbind(1)
        return row, place


class _Dispatched:
    """The forward pass of a module of experts over the tokens of all processes of a group."""

    def __init__(self, module: Any, exchange: Exchange) -> None:
        self._forward, self._exchange = module.forward, exchange
        self.size, self.index = exchange.size, exchange.index

    def __call__(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Hidden states (tokens, width), and the experts and weights of each (tokens, chosen); returns (tokens, width).

        What is sent has the type in which experts compute.
        """
        exchange, where, kind = self._exchange, hidden.device.type, hidden.dtype
        if torch.is_autocast_enabled(where):
            hidden = hidden.to(torch.get_autocast_dtype(where))
        routes = exchange.routes(experts)
        # fp32 holds the numbers of experts exactly, and the weights of any type.
        notes = torch.cat([weights.float(), experts.float()], 1)
        rows, notes = _Sent.apply(hidden[routes.tokens], notes[routes.tokens], routes.sent, routes.received)
        rated, numbers = notes.chunk(2, 1)
        rated, local = rated.to(weights.dtype), numbers.detach().long() - exchange.index * exchange.each
        if routes.pairs:
            row, place = exchange.pairs(local, routes.pairs)
            made = self._forward(rows[row], local[row, place][:, None], rated[row, place][:, None])
        else:
            # No token meets an expert of this process. The others wait for its backward pass all the same.
            nothing = rows.sum(0, keepdim=True), local.new_zeros((1, 1)), rated[:, :1].sum(0, keepdim=True)
            row, made = local.new_empty(0), self._forward(*nothing)[:0]
        (back,) = _Sent.apply(_Summed.apply(made, row, len(rows)), routes.received, routes.sent)
        return _Summed.apply(back, routes.tokens, len(hidden)).to(kind)


class _Sent(torch.autograd.Function):
    """Rows that go to other processes, and those that come from them; gradients go back the same way.

    Arguments are tensors whose rows travel together, then how many rows go to each process, and come from each.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        *tensors, ctx.sent, ctx.received = args
        return tuple(_send(each, ctx.sent, ctx.received) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(_send(each, ctx.received, ctx.sent) if needs else None for each, needs in needed), None, None


class _Summed(torch.autograd.Function):
    """Values (n, width) added up by the rows (n,) that they belong to, of `count`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _sum_rows(values, rows, count)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradient[rows], None, None


@torch.library.custom_op("toolkit::send_rows", mutates_args=())
def _send(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """What comes from the processes that divide experts for what goes to them."""
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(came, rows.contiguous(), list(received), list(sent), group=_GROUP["experts"])
    return came


@_send.register_fake
def _(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    return rows.new_empty((sum(received), *rows.shape[1:]))


SEND = torch.ops.toolkit.send_rows.default
"""The operation, by which a trace knows what is sent."""


@torch.library.custom_op("toolkit::sum_rows", mutates_args=())
def _sum_rows(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """In fp32, of some rows at a time: a copy of all would be larger than what the experts make."""
    total = torch.zeros((count, *values.shape[1:]), dtype=torch.float32, device=values.device)
    for some, of in zip(values.split(_AT_ONCE), rows.split(_AT_ONCE), strict=True):
        total.index_add_(0, of, some.float())
    return total.to(values.dtype, copy=values.dtype != torch.float32)


@_sum_rows.register_fake
def _(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    return values.new_empty((count, *values.shape[1:]))


def plan_of(config: Any) -> dict[str, str]:
    """Transformers' plan to divide the experts of a model with this configuration.

    Raises:
        UserError: If it has none, or one that is not built here.
    """
    text = config.get_text_config()
    plan = getattr(text, "base_model_ep_plan", None) or {}
    if _DISPATCHED not in plan.values():
        raise UserError(
            f"parallel.expert: Transformers has no plan to divide the experts of a {text.model_type}", _REMOVE
        )
    if unknown := sorted({*plan.values()} - {_DISPATCHED, _BY_EXPERT}):
        raise UserError(
            f"parallel.expert: Transformers divides a {text.model_type} in a way that is not built here: "
            f"{', '.join(unknown)}",
            _REMOVE,
        )
    return plan


def divide_experts(model: Any, size: int, index: int, exchange: type[Exchange] = Exchange) -> None:
    """Keeps one process's experts of each layer of a model, and has it send tokens to the others'.

    Adapters are divided with the experts that they adapt.

    Args:
        model: A decoder with all its weights, perhaps with LoRA.
        size: Processes that divide the experts.
        index: Of this one among them.
        exchange: How they agree on what is sent.

    Raises:
        UserError: If the model's experts cannot be divided so.
    """
    if size == 1:
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    plan = plan_of(base.config)
    found = list(_planned(base.get_decoder(), plan))
    if not found:
        raise UserError(f"parallel.expert: this {base.config.model_type} has no layer with experts", _REMOVE)
    for name, module, parameters in found:
        _divide(name, module, parameters, size, index, exchange)


def _planned(decoder: Any, plan: dict[str, str]) -> Iterator[tuple[str, Any, list[str]]]:
    """Name and module of what a plan divides, adapters outermost, with the names of the parameters that it divides."""
    for pattern in (key for key, style in plan.items() if style == _DISPATCHED):
        inside = [key.removeprefix(f"{pattern}.") for key, style in plan.items() if style == _BY_EXPERT]
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, module in list(decoder.named_modules()):
            if matches.fullmatch(name):
                yield name, module, inside


def _divide(name: str, module: Any, parameters: list[str], size: int, index: int, exchange: type[Exchange]) -> None:
    wrappers: list[Any] = []
    while hasattr(inner := wrappers[-1].base_layer if wrappers else module, "base_layer"):
        wrappers.append(inner)
    held = [each for each in parameters if getattr(inner, each, None) is not None]
    plain = all(isinstance(getattr(inner, each), torch.nn.Parameter) for each in held)
    if not held or not plain or not hasattr(inner, "_is_expert_parallel"):
        raise UserError(f"parallel.expert: {name} is a {type(inner).__name__}, whose experts are not divided", _REMOVE)
    count = inner.num_experts
    if count % size:
        raise UserError(
            f"parallel.expert={size} does not divide the {count} experts of {name}",
            "set parallel.expert to a number that divides the experts of every layer, or remove it",
        )
    for each in held:
        whole = getattr(inner, each)
        _keep(inner, each, whole.shape, 0, size, index)
    for wrapper in wrappers:
        for down, up in zip(wrapper.lora_A.values(), wrapper.lora_B.values(), strict=True):
            # PEFT lays the ranks of an expert beside each other in A, and the experts of a rank in B.
            rank = down.out_features // count
            _keep(down, "weight", (count, rank, down.in_features), 0, size, index)
            _keep(up, "weight", (up.out_features, rank, count), 2, size, index)
            down.out_features = up.in_features = rank * count // size
        wrapper.num_experts = count // size
    inner.num_experts = count // size
    module.forward = _Dispatched(module, exchange(size, index, count // size))


def _keep(module: Any, name: str, view: Sequence[int], dimension: int, size: int, index: int) -> None:
    whole = getattr(module, name)
    part = ExpertPart(whole.shape, torch.Size(view), dimension, size)
    kept = torch.nn.Parameter(part.of(whole.data, index), requires_grad=whole.requires_grad)
    kept.experts = part  # type: ignore[attr-defined]
    setattr(module, name, kept)


@dataclass(frozen=True)
class ExpertPart:
    """Which part of a parameter a process has: that of its experts.

    Args:
        whole: Shape of the parameter as one process would have it.
        view: The same with a dimension that counts experts.
        dimension: That dimension.
        size: Processes that divide it.
    """

    whole: torch.Size
    view: torch.Size
    dimension: int
    size: int

    def of(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """What the process of an index has of something of the whole's shape."""
        width = self.view[self.dimension] // self.size
        part = whole.view(self.view).narrow(self.dimension, index * width, width)
        return part.clone(memory_format=torch.contiguous_format).view(self._shape())

    def _shape(self) -> list[int]:
        """Of a part: of a matrix the dimension is shorter in which the experts lie."""
        if len(self.whole) == len(self.view):
            return [each // self.size if place == self.dimension else each for place, each in enumerate(self.view)]
        rows, columns = self.whole
        return [rows // self.size, columns] if self.dimension == 0 else [rows, columns // self.size]

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, of the parts that all processes of the group have. All of them call this."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=_GROUP["experts"])
        view = [each // self.size if place == self.dimension else each for place, each in enumerate(self.view)]
        return torch.cat([each.view(view) for each in parts], self.dimension).view(self.whole)


def part_of_experts(parameter: Any) -> ExpertPart | None:
    """Which part of a parameter this process has, where experts are divided; else None."""
    return getattr(parameter, "experts", None)


def divides(model: Any) -> int:
    """Over how many processes the experts of a model really are divided, by what lies in its parameters and by where
    its modules send tokens; 0 where these contradict each other, or this process has the experts of another."""
    held = [part for each in model.parameters() if (part := part_of_experts(each))]
    sends = [forward for each in model.modules() if isinstance(forward := vars(each).get("forward"), _Dispatched)]
    sizes = {each.size for each in held} | {each.size for each in sends}
    if not sizes:
        return 1
    misplaced = bool(_GROUP) and any(each.index != dist.get_rank(group()) for each in sends)
    return 0 if len(sizes) > 1 or misplaced or not (held and sends) else sizes.pop()
