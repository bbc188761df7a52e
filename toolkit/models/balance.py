"""The balance of a mixture's routers, of text alone.

Transformers' code leaves out what a mask of attention hides. Rows that lie end to end, or that are packed, have no such
mask, as padding is a document of its own there: it would be balanced like text, all of it the same token.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

FUNCTION = "load_balancing_loss_func"
"""What Transformers' models call it."""
_COUNTS: dict[str, torch.Tensor | None] = {"text": None}


def modules_of(model: Any) -> list[Any]:
    """Modules whose `FUNCTION` a model's balance is computed by: Mixtral's where the fused head scores, and the model's
    own elsewhere, if it has one.

    Args:
        model: A causal language model without adapters around it.
    """
    from transformers.models.mixtral import modeling_mixtral

    own = sys.modules[type(model).__module__]
    return [modeling_mixtral, *([own] if own is not modeling_mixtral and hasattr(own, FUNCTION) else [])]


def leave_out_padding(model: Any) -> None:
    """Has the balance of a model's routers be that of what `of_text` says is text."""
    for code in modules_of(model):
        balance = getattr(code, FUNCTION)
        if not hasattr(balance, "leaves_out_padding"):
            setattr(code, FUNCTION, _of_text(balance))


@contextmanager
def of_text(counts: torch.Tensor | None) -> Iterator[None]:
    """While this context lasts, each position (B, L) of a model's batch counts as so many tokens of text: none of
    padding, and several where it is computed for several documents. Without counts each is one."""
    before, _COUNTS["text"] = _COUNTS["text"], counts
    try:
        yield
    finally:
        _COUNTS["text"] = before


def text_counts() -> torch.Tensor | None:
    """What `of_text` was given."""
    return _COUNTS["text"]


def _of_text(balance: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(balance)

    @functools.wraps(balance)
    def masked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("attention_mask") is None and (counts := text_counts()) is not None:
            # It multiplies what it sums by the mask, and divides by the mask's sum.
            given.arguments["attention_mask"] = counts
        return balance(*given.args, **given.kwargs)

    vars(masked)["leaves_out_padding"] = True
    return masked
