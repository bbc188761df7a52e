"""Compiles what is repeated: the forward pass of each layer, in place, so that its element-wise work is fused.

Layers of a kind share one graph, which is compiled in seconds where the whole model takes minutes. Names of parameters,
hooks of engines, adapters and checkpointing stay around the compiled code as they were. Only what is trained is
compiled: evaluation and generation have modes, shapes and caches of their own, for which it would be done again.

A graph is divided into its forward and backward pass by a minimum cut: what the backward pass can compute from other
tensors within its own kernels is not kept for it. torch leaves out what a matrix product of the backward pass reads,
such as the result of a norm or of an activation function, as that has to be written to memory once more. Told to
recompute it all the same, it keeps a third less, and still repeats no product and no attention.

What is compiled is kept on disk, so that the next run starts with it. torch keeps no graph with a function whose
gradient is our own unless it is told that a graph's code, of which that function's is a part, says all there is.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as partitioning
import torch._inductor.config as inductor
from transformers.utils import output_capturing

from toolkit.common import in_background
from toolkit.models import dropout
from toolkit.models.grouped_adapters import group_adapters
from toolkit.models.layers import layers_of

_KEPT_FOR_SPEED = ("ban_recompute_materialized_backward", "ban_recompute_used_far_apart")
"""What torch keeps although it could be computed again: what products of the backward pass read, and what is made of a
tensor after a product that reads it too, such as the dropped-out inputs of adapters."""
_DROPOUT = {"toolkit.models.dropout.dropout": hashlib.sha256(inspect.getsource(dropout).encode()).hexdigest()}
"""What graphs call by its name, with its code, without which torch's cache would not know of a change in it."""
_VARIANTS = 8
"""Graphs of a kind of layer: with and without a mask, of one row and of several. So many torch allows a function, which
here serves all kinds: those beyond would run as they are, and keep all that the plan takes for fused."""


class CompiledLayers:
    """The layers of a model, compiled when they are first called.

    Args:
        models: As `add` takes.
        backend: Of `torch.compile`, or its name.
        elementwise: Whether all element-wise work is computed again in the backward pass that can be.
        draws_alike: Whether dropout draws as in layers that are not compiled, which run where there are no gradients.

    Attributes:
        layers: How many there are.
        graphs: How many have been compiled. One for all layers that are alike; more where a layer's code cannot be one
            graph, or where it depends on more than the sizes of a batch.
    """

    def __init__(
        self,
        *models: torch.nn.Module,
        backend: str | Callable[..., Any] = "inductor",
        elementwise: bool = False,
        draws_alike: bool = False,
    ) -> None:
        self.graphs = self.layers = 0
        self._backend, self._elementwise, self._draws_alike = backend, elementwise, draws_alike
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        for model in models:
            self.add(model)

    def add(self, model: torch.nn.Module) -> None:
        """Has the layers of a Transformers or PEFT model compiled, before engines wrap it; it is changed in place.
        Layers of another model that are alike share their graphs."""
        layers = layers_of(model)
        self.layers += len(layers)
        kinds = {tuple((name, each.shape) for name, each in layer.named_parameters()) for layer in layers}
        for layer in layers:
            layer.forward = self._forward(layer, _VARIANTS * len(kinds))

    def _forward(self, layer: Any, most: int) -> Callable[..., Any]:
        whole = layer.forward
        # Transformers checkpoints within `forward`; what that recomputes is compiled, checkpointing itself is not.
        own = type(layer).forward.__wrapped__
        if own not in self._compiled:
            # From the first graph on for any size: batches differ, packed ones too.
            self._compiled[own] = _configured(torch.compile(own, backend=self._compile, dynamic=True), most)
        compiled = functools.partial(self._compiled[own], layer)

        def collecting(keys: Collection[str], *args: Any, **kwargs: Any) -> Any:
            with _collecting(keys):
                return compiled(*args, **kwargs)

        @functools.wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (layer.training and torch.is_grad_enabled()):
                return whole(*args, **kwargs)
            if args and not args[0].requires_grad:
                # Behind frozen embeddings the first layer alone would have a graph without this gradient.
                args = (args[0].detach().requires_grad_(), *args[1:])
            collecting_same = functools.partial(collecting, _collected())
            if layer.gradient_checkpointing and layer.training:
                return layer._gradient_checkpointing_func(functools.partial(collecting_same, **kwargs), *args)
            return collecting_same(*args, **kwargs)

        vars(forward)["elementwise"] = self._elementwise
        return forward

    def _compile(self, graph: Any, inputs: Any) -> Any:
        group_adapters(graph)
        # Here graphs are divided. torch's cache of them knows these settings: they are a part of its keys.
        division = dict.fromkeys(_KEPT_FOR_SPEED, not self._elementwise)
        with (
            partitioning.patch(division | {"autograd_cache_allow_custom_autograd_functions": True}),
            inductor.patch(unsafe_marked_cacheable_functions=_DROPOUT, fallback_random=self._draws_alike),
        ):
            compiled = torch._dynamo.lookup_backend(self._backend)(graph, inputs)
        self.graphs += 1
        return compiled


def _collected() -> tuple[str, ...]:
    """What Transformers collects within layers, such as the scores of routers."""
    keys = tuple(output_capturing._active_collector.get() or ())
    # Its first entry is what the first layer is given.
    return () if "hidden_states" in keys else keys


@contextmanager
def _collecting(keys: Collection[str]) -> Iterator[None]:
    """Has compiled code collect into lists of one layer, whose graph then is that of all others.

    Transformers finds what it collects into by a variable of the thread, at which a graph would end; and a layer that
    is computed again, when nobody collects any more, would be another graph.
    """
    if not keys:
        yield
        return
    active = output_capturing._active_collector
    whole, own = active.get(), {key: list[torch.Tensor]() for key in keys}
    before = active.compiling, active.global_var
    active.compiling, active.global_var = True, own
    try:
        yield
    finally:
        active.compiling, active.global_var = before
    for key in own if whole else ():
        whole[key] += own[key]


def compiled(model: torch.nn.Module) -> bool:
    """Whether the layers of a model are compiled when they are called."""
    layers = layers_of(model)
    return bool(layers) and all("forward" in vars(layer) for layer in layers)


def recomputes_elementwise(model: torch.nn.Module) -> bool:
    """Whether the layers of a model are compiled so that they compute element-wise work again in the backward pass."""
    return compiled(model) and all(layer.forward.elementwise for layer in layers_of(model))


def prepare(device: str) -> None:
    """Begins what compiling needs and does by waiting, so that it is done by the time layers are called.

    On x86 torch starts six processes, one after another, to learn which vector instructions can be used: 0.8 s.

    Args:
        device: `cuda`, `rocm` or `cpu`.
    """
    if device == "cpu":
        in_background(importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list)


def _configured(function: Callable[..., Any], most: int) -> Callable[..., Any]:
    """Calls it without what torch's compiler would do by itself and costs a second compilation, or an error; with so
    many graphs at most."""
    dynamo = torch._dynamo.config.patch(
        # Constants such as the scale of attention would become inputs, and the graph be compiled anew without them.
        specialize_float=True,
        # Splits graphs at the buckets of DDP, which are larger than a layer.
        optimize_ddp=False,
        # What cannot be compiled runs as it is.
        suppress_errors=True,
        recompile_limit=most,
    )
    # Rows as long as the hidden states are wide would be taken to be so always.
    shapes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    return dynamo(shapes(function))
