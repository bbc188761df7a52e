"""Attention over shared rows by gathering keys and values (Llama Team 2024, arXiv:2407.21783, section 3.3.2).

Every process keeps its queries and gathers the keys and values of the whole row, so the model's heads need not divide.
A row is cut into twice as many chunks as there are processes, of which a process has one from the front and, as far
from it, one from the end: under a causal mask all then attend to equally many keys.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import _functional_collectives as collectives

from toolkit.models.attention.attention_kernels import to_compute
from toolkit.models.parallel.shared_rows import Attention, group, sharing


def gather(attend: Attention) -> Attention:
    """An attention function of Transformers that works on parts of rows, of one that takes boundaries of documents."""

    @functools.wraps(attend)
    def attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        row_chunks: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        if row_chunks is None:
            return attend(module, query, key, value, mask, **kwargs)
        return _over_chunks(attend, module, query, key, value, mask, row_chunks, kwargs), None

    return attention


@torch.compiler.disable
def _over_chunks(
    attend: Attention,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    chunks: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Of each chunk the attention to all keys of its documents up to its end, where causal kernels align both.

    Compilers leave it as it is, for they do not know what is dropped here until the backward pass.

    Args:
        query: (1, heads, tokens / size, width); key and value may have fewer heads.
        chunks: See `PartCollator`.

    Returns:
        (1, tokens / size, heads, width).
    """
    query, key, value = to_compute(query, key, value)
    # (tokens / size, heads, width)
    parts = [each[0].transpose(0, 1).contiguous() for each in (key, value)]
    with _Dropped(parts) as dropped:
        wholes = dropped.gathered()
        out, begin = [], 0
        for chunk in chunks:
            documents = dict(chunk)
            seen, tokens = slice(documents.pop("first"), documents.pop("end")), documents.pop("tokens")
            given = (each[seen].transpose(0, 1)[None] for each in wholes)
            mine = query[:, :, begin : begin + tokens]
            out.append(attend(module, mine, *given, mask, **{**kwargs, **documents})[0])
            begin += tokens
        return torch.cat(out, 1)


class _Dropped(contextlib.ExitStack):
    """Keeps for the backward pass only this process's parts of what it gathers in here, and gathers it once more then.

    Otherwise every layer would keep the keys and values of the whole row. Where something else already decides what is
    kept, as activation checkpointing does, that is left to it.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._parts = parts
        self._places: dict[int, int] = {}
        self._saved: Counter[int] = Counter()
        self._read: Counter[int] = Counter()
        self._again: dict[int, torch.Tensor] = {}

    def __enter__(self) -> _Dropped:
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        return self

    def gathered(self) -> list[torch.Tensor]:
        """What belongs to the parts: (tokens, heads, width) each."""
        wholes = [_all_gather(part) for part in self._parts]
        # Not by their addresses, which tensors have none of while a model is traced.
        self._places = {each.untyped_storage()._cdata: place for place, each in enumerate(wholes)}
        self._parts = [part.detach() for part in self._parts]
        return wholes

    def _pack(self, tensor: torch.Tensor) -> Any:
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None:
            return tensor
        self._saved[place] += 1
        return place, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        place, *strided = packed
        if place not in self._again:
            self._again[place] = _all_gather(self._parts[place])
        whole = self._again[place]
        self._read[place] += 1
        if self._read[place] == self._saved[place]:
            del self._again[place], self._read[place]
        return whole.as_strided(*strided)


@torch.library.custom_op("toolkit::all_gather", mutates_args=())
def _all_gather(part: torch.Tensor) -> torch.Tensor:
    """(tokens, …) in the order of the row, of (tokens / size, …): a chunk of the front and one of the end."""
    received = collectives.wait_tensor(collectives.all_gather_single(part.contiguous(), 0, group()))
    fronts, ends = received.unflatten(0, (sharing(), 2, -1)).unbind(1)
    return torch.cat([fronts, ends.flip(0)]).flatten(0, 1)


@torch.library.custom_op("toolkit::reduce_scatter", mutates_args=())
def _reduce_scatter(whole: torch.Tensor) -> torch.Tensor:
    """(tokens / size, …): this process's part, in the order of `_all_gather`, of the sum over all processes."""
    fronts, ends = whole.unflatten(0, (2, sharing(), -1)).unbind(0)
    parts = torch.stack([fronts, ends.flip(0)], 1).flatten(0, 2)
    return collectives.wait_tensor(collectives.reduce_scatter_single(parts, "sum", 0, group()))


GATHER = torch.ops.toolkit.all_gather.default
"""The operation, by which a trace knows what is gathered."""


@_all_gather.register_fake
def _(part: torch.Tensor) -> torch.Tensor:
    return part.new_empty(part.shape[0] * sharing(), *part.shape[1:])


@_reduce_scatter.register_fake
def _(whole: torch.Tensor) -> torch.Tensor:
    return whole.new_empty(whole.shape[0] // sharing(), *whole.shape[1:])


_all_gather.register_autograd(lambda ctx, gradient: _reduce_scatter(gradient))
