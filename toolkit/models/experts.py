"""Mixtures of experts: their grouped matrix products take part in autocast.

torch's autocast does not know `grouped_mm`, and Transformers casts the rows to the type of the weights. Over fp32
masters the experts, which are nearly all of a mixture, would compute in fp32 without a word. Casting their weights
costs a 16-bit copy of one layer's experts at a time, as autocast itself does for other layers.
"""

from __future__ import annotations

import functools
import inspect

import torch
from transformers.integrations import moe


def autocast_grouped_products() -> None:
    """Has Transformers' grouped products of experts follow autocast, where it is on."""
    products = inspect.unwrap(moe._grouped_mm)

    @functools.wraps(products)
    def cast(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Rows (S, K) sorted by expert, weights (E, K, N), and the end of each expert's rows (E,); returns (S, N)."""
        where = input.device.type
        if torch.is_autocast_enabled(where):
            dtype = torch.get_autocast_dtype(where)
            input, weight = input.to(dtype), weight.to(dtype)
        return products(input, weight, offs)

    moe._grouped_mm = cast
