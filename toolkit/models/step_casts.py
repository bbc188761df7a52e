"""One 16-bit copy of fp32 weights for a whole optimizer step, whatever its micro-batches and what is recomputed.

Autocast keeps the copies that it makes until the outermost `autocast` of a thread ends, and a forward pass is one: each
micro-batch, and each layer that is recomputed, would make its own. torch counts how deep it is; one level more, in
which nothing is computed, and they stay. They cost 16 bits of every trained parameter, so adapters alone are kept;
and in a pipeline, whose micro-batches on their way would have a copy each of what is not recomputed, all weights.
The alternative, 16-bit parameters whose masters lie elsewhere, would sum gradients in 16 bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from toolkit.recipe import Recipe


def keeps_casts(recipe: Recipe) -> bool:
    """Whether copies stay for a step in which there are any."""
    piped = recipe.parallel.pipeline > 1 and not recipe.activation_checkpointing.of_all_layers
    return piped or recipe.method.name == "lora"


class StepCasts:
    """Keeps autocast's copies from the first micro-batch of a step to the end of the last."""

    def __init__(self) -> None:
        self._keeping = False
        self._backward: set[int] = set()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch.

        Args:
            last: Whether the optimizer updates the weights after it, of which copies are then of no use.
        """
        if not self._keeping:
            torch.autocast_increment_nesting()
            self._keeping = True
        done = False
        try:
            yield
            done = not last
        finally:
            if not done:
                torch.autocast_decrement_nesting()
                torch.clear_autocast_cache()
                self._keeping = False

    def keep_in_backward(self, loss: torch.Tensor) -> None:
        """Has the thread of the backward pass, which is another one on a GPU, keep copies while layers are recomputed.

        It stays a level deeper for good: that thread computes nothing else, and the copies are dropped above.
        """

        def enter(gradient: torch.Tensor) -> None:
            thread = threading.get_ident()
            if thread != threading.main_thread().ident and thread not in self._backward:
                torch.autocast_increment_nesting()
                self._backward.add(thread)

        loss.register_hook(enter)
