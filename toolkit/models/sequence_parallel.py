"""Attention over rows whose tokens are divided over processes (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Every process computes its part of the tokens; before attention the processes of a group exchange these parts for heads,
so that each attends with its share of the heads over the whole row, and after it the other way round. To engines this
is plain data parallelism: the loss is a sum over the tokens of all processes, so its gradients add up as they do for
different rows, and DDP, ZeRO and FSDP spread the model over all processes as ever.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from toolkit.common import UserError
from toolkit.models.attention import VARLEN

_GROUP: dict[str, Any] = {}
_BALANCE = "load_balancing_loss_func"


def share_rows(size: int) -> None:
    """Puts each `size` processes of neighbouring ranks into a group that shares rows. All processes call this.

    From then on backends that take boundaries of documents attend over whole rows where they are given parts of them.
    """
    from transformers import AttentionInterface

    groups = [dist.new_group(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    _GROUP["rows"] = groups[dist.get_rank() // size]
    known = AttentionInterface()
    for name in VARLEN:
        if name in known:
            AttentionInterface.register(name, exchange(known[name]))


def share_balance(model: Any) -> None:
    """Has a mixture's model compute the balance of its routers over whole rows, not over the part of this process.

    Args:
        model: A causal language model without adapters around it.

    Raises:
        UserError: If it computes that in another way than Transformers' models do.
    """
    from transformers.models.mixtral import modeling_mixtral

    # Theirs for all mixtures is Mixtral's where the fused head scores, and the model's own elsewhere.
    own = sys.modules[type(model).__module__]
    if not hasattr(own, _BALANCE):
        raise UserError(
            f"with parallel.sequence the balance loss of a {model.config.model_type} would be that of parts of rows",
            "remove parallel.sequence",
        )
    for code in {modeling_mixtral, own}:
        setattr(code, _BALANCE, _of_rows(getattr(code, _BALANCE)))


def _of_rows(balance: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(balance)
    def gathered(routed: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        # Every process scores the whole rows, and the gradients of their parts are summed over as many.
        whole = (collectives.all_gather_single_autograd(each, 0, _GROUP["rows"]) for each in routed)
        return balance(tuple(whole), *args, **kwargs)

    return gathered


def sharing() -> int:
    """How many processes share rows with this one, itself included."""
    return dist.get_world_size(_GROUP["rows"]) if _GROUP else 1


def exchange(attend: Callable[..., tuple[Any, None]]) -> Callable[..., tuple[Any, None]]:
    """An attention function of Transformers that works on parts of rows, of one that takes boundaries of documents."""

    @functools.wraps(attend)
    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, row_tokens: int | None = None, **kwargs: Any
    ) -> tuple[Any, None]:
        if row_tokens is None:
            return attend(module, query, key, value, mask, **kwargs)
        size = sharing()
        if query.shape[1] % size:
            # Of layers that differ, no config says it before.
            raise UserError(
                f"parallel.sequence={size} does not divide the {query.shape[1]} attention heads of a layer",
                "remove parallel.sequence, or set it to a number that divides the heads of every layer",
            )
        # Heads that share a key go together; where there are fewer keys than processes, copies of them go to several.
        copies = size // math.gcd(key.shape[1], size)
        if copies > 1:
            key, value = (each.repeat_interleave(copies, 1) for each in (key, value))
        query, key, value = (_to_heads(each, size) for each in (query, key, value))
        out, _ = attend(module, query, key, value, mask, **kwargs)
        return _to_tokens(out, size), None

    return attention


def _to_heads(part: torch.Tensor, size: int) -> torch.Tensor:
    """(1, heads / size, tokens, width) of (1, heads, tokens / size, width)."""
    _, heads, tokens, width = part.shape
    mine = _all_to_all(part[0].unflatten(0, (size, heads // size)))
    # (process, heads / size, tokens / size, width): processes lie in the order of their tokens.
    return mine.transpose(0, 1).reshape(1, heads // size, size * tokens, width)


def _to_tokens(part: torch.Tensor, size: int) -> torch.Tensor:
    """(1, tokens / size, heads, width) of (1, tokens, heads / size, width)."""
    _, tokens, heads, width = part.shape
    mine = _all_to_all(part[0].unflatten(0, (size, tokens // size)))
    # (process, tokens / size, heads / size, width): processes lie in the order of their heads.
    return mine.transpose(0, 1).reshape(1, tokens // size, size * heads, width)


@torch.library.custom_op("toolkit::all_to_all", mutates_args=())
def _all_to_all(parts: torch.Tensor) -> torch.Tensor:
    """The k-th of these parts goes to the k-th process, from which the k-th of the result comes.

    An operation of its own, so that compilers leave it whole.
    """
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=_GROUP["rows"])
    return received


@_all_to_all.register_fake
def _(parts: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


# Gradients go back the way that the parts came.
_all_to_all.register_autograd(lambda ctx, gradient: _all_to_all(gradient))
