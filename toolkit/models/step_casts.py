"""Autocast's 16-bit copies of fp32 weights: one for a whole optimizer step, or none that outlives its layer.

Autocast keeps the copies that it makes until the outermost `autocast` of a thread ends, and a forward pass is one: each
micro-batch, and each layer that is recomputed, would make its own. torch counts how deep it is; one level more, in
which nothing is computed, and they stay: of few parameters, see `cast_choice.keeps_casts`. The alternative, 16-bit
parameters whose masters lie elsewhere, would sum gradients in 16 bits.

Of all parameters they are many, and with layers that are recomputed no copy is read once its layer is done. Autocast
is then told to forget them, layer by layer. Having it make none that it keeps (`cache_enabled=False`) would do the same
for training, but accelerate's `autocast` is also around what is generated: there every token would cast all weights
anew, which moves four times the bytes. So would each tile of an MLP in `tiled_mlp`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


def drop_with_layers(model: torch.nn.Module) -> None:
    """Has autocast forget its copies whenever a layer is done in training; the model is changed in place.

    What is evaluated keeps them until its forward pass ends, and what is generated until the last token. Gradients of a
    weight that several layers share are summed in fp32; those of a copy that they shared would be in 16 bits.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_hook(_drop)


def _drop(layer: torch.nn.Module, *_: Any) -> None:
    if layer.training:
        torch.clear_autocast_cache()


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
