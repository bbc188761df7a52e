"""Trains on CPU processes in 64 bits, where little is left of rounding: norms and the head's softmax are in 32.

In 32 bits Adam makes differences of 1e-6 of a weight out of gradients that are nearly zero, which hide whether two ways
to compute a step are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """What `cpu_engines` does, with parameters in 64 bits, which no recipe can ask for."""
    import cpu_engines

    from toolkit.train import model as loading
    from toolkit.train import verify

    divide = loading.divide_model

    def widened(model: Any, *parts: int) -> None:
        model.double()
        divide(model, *parts)

    loading.divide_model = widened
    loading.cast_parameters = lambda *to_what_the_recipe_says: None
    verify.verify = lambda *of_the_recipe: None
    return cpu_engines.main(arguments)
