"""Rows whose tokens are divided over the processes of a group, each of which computes a part of them.

To engines this is plain data parallelism: the loss is a sum over the tokens of all processes, so its gradients add up
as they do for different rows, and DDP, ZeRO and FSDP spread the model over all processes as ever. Only attention looks
beyond a part: `sequence_parallel` and `context_parallel` are two ways to let it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from toolkit.common import UserError
from toolkit.models import balance as balances
from toolkit.models.attention.backends import VARLEN

Attention = Callable[..., tuple[Any, None]]
"""An attention function of Transformers."""
_GROUP: dict[str, Any] = {}


def group_processes(way: str, size: int, apart: int = 1) -> Any:
    """Puts each `size` processes into a group that shares rows. All processes call this.

    Args:
        way: `sequence` or `context`, the key of `parallel` in the recipe.
        size: Processes of a group.
        apart: How far apart their ranks are: as many as divide layers, of which each shares with those that have the
            same parts.

    Returns:
        The group of this process.
    """
    block, rank = size * apart, dist.get_rank()
    for first in range(0, dist.get_world_size(), block):
        for part in range(apart):
            ranks = range(first + part, first + block, apart)
            made = dist.new_group(ranks)
            if rank in ranks:
                _GROUP["rows"] = made
    _GROUP["way"] = way
    return group()


def share_rows(over_parts: Callable[[Attention], Attention]) -> None:
    """Has backends that take boundaries of documents attend over whole rows where they are given parts of them.

    Args:
        over_parts: Makes attention over parts of rows of one over whole rows: `sequence_parallel.exchange` or
            `context_parallel.gather`.
    """
    from transformers import AttentionInterface
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK

    known = AttentionInterface()
    # On AMD's GPUs two backends have one build.
    for name in {*VARLEN, *FLASH_ATTN_KERNEL_FALLBACK.values()}:
        if name in known:
            AttentionInterface.register(name, over_parts(known[name]))


def group() -> Any:
    """The processes that share rows with this one."""
    return _GROUP["rows"]


def sharing() -> int:
    """How many processes share rows with this one, itself included."""
    return dist.get_world_size(group()) if _GROUP else 1


def sizes() -> dict[str, int]:
    """`sharing` by the way in which they do."""
    return {"sequence": 1, "context": 1} | ({_GROUP["way"]: sharing()} if _GROUP else {})


def share_balance(model: Any, key: str) -> None:
    """Has a mixture's model compute the balance of its routers over whole rows, not over the part of this process.

    Args:
        model: A causal language model without adapters around it.
        key: Of the recipe, for which rows are shared.

    Raises:
        UserError: If it computes that in another way than Transformers' models do.
    """
    if not hasattr(sys.modules[type(model).__module__], balances.FUNCTION):
        raise UserError(
            f"with {key} the balance loss of a {model.config.model_type} would be that of parts of rows",
            f"remove {key}",
        )
    for code in balances.modules_of(model):
        setattr(code, balances.FUNCTION, _of_rows(getattr(code, balances.FUNCTION)))


def _of_rows(balance: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(balance)
    def gathered(routed: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        # Every process scores the whole rows, and the gradients of their parts are summed over as many.
        whole = (collectives.all_gather_single_autograd(each, 0, group()) for each in routed)
        mask = balances.text_counts()
        if mask is not None:
            mask = collectives.all_gather_tensor(mask.flatten().float(), 0, group())
        with balances.of_text(mask):
            return balance(tuple(whole), *args, **kwargs)

    return gathered
