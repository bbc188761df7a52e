"""Layers whose weights are divided over processes (tensor parallelism, Shoeybi et al. 2019, arXiv:1909.08053).

Of attention and MLP each process of a group keeps some heads and some of the inner width: rows of the weights that make
them (`colwise` in Transformers' plans) and columns of those that take them back (`rowwise`). What enters is the same on
all of them, and what leaves is summed over them, so two sums of hidden states pass in each direction of a layer. What
remains are plain tensors: to DDP, and to everything else, this is a model with fewer columns. Of embeddings and output
head each has some of the vocabulary: what they find of tokens is summed, and of logits only three figures of each token
are (`fused_head`). Norms of hidden states are whole on every process, and stay equal because they get equal gradients.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import activations

from toolkit.common import UserError
from toolkit.models.parallel.layer_sums import Join, Sum, SumGradient, layer_group, sum_of_parts

_COLUMNS, _ROWS, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_FUSED, _OF_FUSED = "colwise_gather_output", "rowwise_split_input"
"""Styles of Transformers' plans. The third is of norms of single heads, of which each process has some. The last two
are of projections that are several in one, and of what takes those: Transformers joins their outputs, here each process
has its part of every one of the several."""
_SEVERAL = ("qkv_proj", "gate_up_proj")
"""Names of such projections."""


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
    if unknown := sorted(
        {
            style
            for key, style in plan.items()
            if style not in (_COLUMNS, _ROWS, _SUMMED, _OF_FUSED)
            and not (style == _FUSED and key.rpartition(".")[2] in _SEVERAL)
        }
    ):
        raise UserError(
            f"parallel.tensor: Transformers divides layers of a {config.model_type} in a way that is not built here: "
            f"{', '.join(unknown)}",
            remove,
        )
    decoder = base.get_decoder()
    entrances: dict[Any, _Entrance] = {}
    found = list(_planned(decoder, plan))
    if {style.partition("_")[0] for _, _, style in found} < {_COLUMNS, _ROWS}:
        raise UserError(f"parallel.tensor: Transformers has no plan to divide a {config.model_type}", remove)
    if rate := getattr(config, "attention_dropout", 0.0):
        # Heads would be dropped alike on all processes.
        raise UserError(f"parallel.tensor: this model drops out {rate:g} of its attention", remove)
    if any(getattr(config, "activation_sparsity_pattern", None) or ()):
        what = "keeps the largest of the inner activations of an MLP, which a part of them does not tell"
        raise UserError(f"parallel.tensor: this model {what}", remove)
    for name, module, style in found:
        if style == _SUMMED:
            _sum_gradients(module.parameters(), size)
            continue
        inner = getattr(module, "base_layer", module)
        if type(inner) is not torch.nn.Linear:
            raise UserError(f"parallel.tensor: {name} is a {type(inner).__name__}, which is not divided", remove)
        columns = style in (_COLUMNS, _FUSED)
        parent = decoder.get_submodule(name.rpartition(".")[0])
        width = inner.weight.shape[0 if columns else 1]
        blocks = _blocks(name, parent, width) if style == _FUSED else (width,)
        units = [_units(name, block, parent, "column" if columns else "row") for block in blocks]
        if undivided := [f"{count:,} {unit}{'s' * (count > 1)}" for count, unit in units if count % size]:
            raise UserError(
                f"parallel.tensor={size} does not divide the {undivided[0]} of {name}",
                "set parallel.tensor to a number that divides heads and widths of every layer, or remove it",
            )
        if columns:
            if parent not in entrances:
                entrances[parent] = _Entrance(parent, size)
            _divide_columns(module, inner, entrances[parent], size, index, blocks)
            if len(blocks) > 2:
                _tell_heads(parent, size)
        else:
            _divide_rows(module, inner, size, index)
    planned = {parameter for _, module, _ in found for parameter in module.parameters()}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, _, style in found if style != _SUMMED):
        _divide_rest(parent, decoder.get_submodule(parent), planned, size, index)
    _divide_vocabulary(base, size, index)


def _divide_rest(where: str, parent: Any, planned: Set[Any], size: int, index: int) -> None:
    """Divides what a module with divided layers has beside them that plans leave out: norms of single heads, with one
    weight for all heads (Phi) or one for each (Command R+), and activation functions that are trained (Apertus). They
    read what a process has of heads and inner width, so each process has a part of the gradient of what is whole.

    Raises:
        UserError: If it has anything else.
    """
    head = getattr(parent, "head_dim", None)
    for name, parameter in list(parent.named_parameters()):
        path, _, own = name.rpartition(".")
        module = parent.get_submodule(path)
        is_norm = type(module).__name__.endswith("Norm")
        if parameter in planned:
            continue
        if is_norm and parameter.shape[1:] == (head,):
            _keep_part(module, own, 0, size, index)
        elif (is_norm and parameter.shape == (head,)) or type(module).__module__ == activations.__name__:
            _sum_gradients([parameter], size)
        else:
            raise UserError(
                f"parallel.tensor: {where}.{name} lies beside layers that are divided, and how it is to be divided is "
                "not known",
                "remove parallel.tensor",
            )


def _divide_vocabulary(base: Any, size: int, index: int) -> None:
    """Leaves embeddings and head whole where they are of kinds that others wrap, as PEFT does where it trains them, or
    where the processes do not divide their rows."""
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    plain = type(head) is torch.nn.Linear and isinstance(embeddings, torch.nn.Embedding)
    if not plain or len(head.weight) != len(embeddings.weight) or len(head.weight) % size or embeddings.max_norm:
        return
    tied = head.weight is embeddings.weight
    _keep_part(embeddings, "weight", 0, size, index)
    if tied:
        head.weight = embeddings.weight
    else:
        _keep_part(head, "weight", 0, size, index)
    if head.bias is not None:
        _keep_part(head, "bias", 0, size, index)
    head.out_features //= size
    embeddings.num_embeddings //= size
    part = head.vocabulary_part = Part(index * embeddings.num_embeddings, embeddings.num_embeddings)
    if (pad := embeddings.padding_idx) is not None:
        embeddings.padding_idx = pad - part.first if 0 <= pad - part.first < part.rows else None
    _Lookup(embeddings, part, size)
    head.register_forward_pre_hook(lambda _, args: (SumGradient.apply(args[0], size), *args[1:]))
    head.register_forward_hook(lambda _, __, logits: Join.apply(logits, size, index))


@dataclass(frozen=True)
class Part:
    """Rows `first` to `first + rows` of a vocabulary."""

    first: int
    rows: int


class _Lookup:
    """Embeddings of which a process has some rows: what it lacks is zero, and summed with what others find."""

    def __init__(self, embeddings: Any, part: Part, size: int) -> None:
        self._part, self._size = part, size
        self._lacking: torch.Tensor | None = None
        embeddings.register_forward_pre_hook(self._enter)
        embeddings.register_forward_hook(self._leave)

    def _enter(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = args[0] - self._part.first
        self._lacking = (own < 0) | (own >= self._part.rows)
        return (own.masked_fill(self._lacking, 0), *args[1:])

    def _leave(self, _: Any, __: Any, found: torch.Tensor) -> torch.Tensor:
        lacking, self._lacking = self._lacking, None
        assert lacking is not None
        return Sum.apply(found.masked_fill(lacking[..., None], 0), self._size)


def _blocks(name: str, parent: Any, width: int) -> tuple[int, ...]:
    """Columns of each of the projections that are in one."""
    if name.endswith("gate_up_proj"):
        return width // 2, width // 2
    size = parent.head_dim
    shared = parent.num_key_value_heads * size
    return width - 2 * shared, shared, shared


def _units(name: str, width: int, parent: Any, otherwise: str) -> tuple[int, str]:
    """How many of what a projection gives or takes that is not to be cut: heads, of which recipes' rules do not know
    where a config leaves them to its class; not those of a gate, which has a column for each head (Laguna)."""
    head, own = getattr(parent, "head_dim", None), name.rpartition(".")[2]
    if head and width % head == 0 and own.startswith(("q", "k", "v", "o")):
        return width // head, "head"
    return width, otherwise


def _tell_heads(attention: Any, size: int) -> None:
    """Tells a module that takes queries, keys and values apart how many it has of each."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= size
    attention.num_key_value_heads //= size


def _planned(decoder: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Name, module and style of what a plan divides."""
    patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
    for name, module in decoder.named_modules():
        for pattern, style in patterns.items():
            if pattern.fullmatch(name):
                yield name, module, style


def _divide_columns(
    module: Any, inner: Any, entrance: _Entrance, size: int, index: int, blocks: tuple[int, ...]
) -> None:
    _keep_part(inner, "weight", 0, size, index, blocks)
    if inner.bias is not None:
        _keep_part(inner, "bias", 0, size, index, blocks)
    inner.out_features //= size
    for up in getattr(module, "lora_B", {}).values():
        _keep_part(up, "weight", 0, size, index, blocks)
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
        whole = Sum.apply(outputs, size)
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
            self._given, self._entered = args[0], SumGradient.apply(args[0], self._size)
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
        kept = F.dropout(inputs.new_ones(*inputs.shape[:-1], width * self._size), self.p)
        part = kept.narrow(-1, self._index * width, width)
        return torch.where(part != 0, inputs * (1 / (1 - self.p)), 0.0)


def _sum_gradients(parameters: Iterable[Any], size: int) -> None:
    """Sums the gradients of whole parameters, of which every process has a part."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.partial = True
            parameter.register_hook(lambda gradient: sum_of_parts(gradient, size))


def _keep_part(
    module: Any, name: str, dimension: int, size: int, index: int, blocks: tuple[int, ...] | None = None
) -> None:
    whole = getattr(module, name)
    divided = Share(dimension, size, index, blocks or (whole.shape[dimension],))
    part = divided.of(whole.data).clone(memory_format=torch.contiguous_format)
    kept = torch.nn.Parameter(part, requires_grad=whole.requires_grad)
    kept.divided = divided  # type: ignore[attr-defined]
    setattr(module, name, kept)


@dataclass(frozen=True)
class Share:
    """How a parameter is divided, and which part this process has.

    Args:
        blocks: Widths of what lies side by side in the dimension that is divided, each of which is by itself.
    """

    dimension: int
    size: int
    index: int
    blocks: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of something of the whole shape."""
        parts = [each.chunk(self.size, self.dimension)[self.index] for each in whole.split(self.blocks, self.dimension)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole of all parts, in order."""
        widths = [block // self.size for block in self.blocks]
        split = [part.split(widths, self.dimension) for part in parts]
        return torch.cat([each[block] for block in range(len(widths)) for each in split], self.dimension)


def is_part(parameter: Any) -> bool:
    """Whether a process has only a part of this parameter, as the others of its group have the rest."""
    return hasattr(parameter, "divided")


def is_partial(parameter: Any) -> bool:
    """Whether a process has a part of the gradient of this parameter, which is whole."""
    return hasattr(parameter, "partial")


def whole_shape(parameter: Any) -> torch.Size:
    """The shape of a parameter as one process would have it."""
    if not is_part(parameter):
        return parameter.shape
    divided = parameter.divided
    return torch.Size(
        width * divided.size if each == divided.dimension else width for each, width in enumerate(parameter.shape)
    )


def part_of(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """What this process has of something of a parameter's whole shape."""
    part: torch.Tensor = parameter.divided.of(whole) if is_part(parameter) else whole
    return part


def whole_of(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """Something of a parameter's whole shape, of the parts of it. All processes of a group call this."""
    if not is_part(parameter) or part.shape != parameter.shape:
        return part
    parts = [torch.empty_like(part) for _ in range(parameter.divided.size)]
    dist.all_gather(parts, part.contiguous(), group=layer_group())
    whole: torch.Tensor = parameter.divided.join(parts)
    return whole
