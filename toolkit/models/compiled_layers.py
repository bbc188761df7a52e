"""Compiles what is repeated: the forward pass of each layer, in place, so that its element-wise work is fused.

Layers of a kind share one graph, which is compiled in seconds where the whole model takes minutes. Names of parameters,
hooks of engines, adapters and checkpointing stay around the compiled code as they were. Only what is trained is
compiled: evaluation and generation have modes, shapes and caches of their own, for which it would be done again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.common import in_background


class CompiledLayers:
    """The layers of a model, compiled when they are first called.

    Args:
        models: As `add` takes.
        backend: Of `torch.compile`.

    Attributes:
        layers: How many there are.
        graphs: How many have been compiled. One for all layers that are alike; more where a layer's code cannot be one
            graph, or where it depends on more than the sizes of a batch.
    """

    def __init__(self, *models: torch.nn.Module, backend: str = "inductor") -> None:
        self.graphs = self.layers = 0
        self._backend = backend
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        for model in models:
            self.add(model)

    def add(self, model: torch.nn.Module) -> None:
        """Has the layers of a Transformers or PEFT model compiled, before engines wrap it; it is changed in place.
        Layers of another model that are alike share their graphs."""
        layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
        self.layers += len(layers)
        for layer in layers:
            layer.forward = self._forward(layer)

    def _forward(self, layer: Any) -> Callable[..., Any]:
        whole = layer.forward
        # Transformers checkpoints within `forward`; what that recomputes is compiled, checkpointing itself is not.
        own = type(layer).forward.__wrapped__
        if own not in self._compiled:
            # From the first graph on for any size: batches differ, packed ones too.
            self._compiled[own] = _configured(torch.compile(own, backend=self._compile, dynamic=True))
        compiled = functools.partial(self._compiled[own], layer)

        @functools.wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (layer.training and torch.is_grad_enabled()):
                return whole(*args, **kwargs)
            if args and not args[0].requires_grad:
                # Behind frozen embeddings the first layer alone would have a graph without this gradient.
                args = (args[0].detach().requires_grad_(), *args[1:])
            if layer.gradient_checkpointing and layer.training:
                return layer._gradient_checkpointing_func(functools.partial(compiled, **kwargs), *args)
            return compiled(*args, **kwargs)

        return forward

    def _compile(self, graph: Any, inputs: Any) -> Any:
        compiled = torch._dynamo.lookup_backend(self._backend)(graph, inputs)
        self.graphs += 1
        return compiled


def compiled(model: torch.nn.Module) -> bool:
    """Whether the layers of a model are compiled when they are called."""
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    return bool(layers) and all("forward" in vars(layer) for layer in layers)


def prepare(device: str) -> None:
    """Begins what compiling needs and does by waiting, so that it is done by the time layers are called.

    On x86 torch starts six processes, one after another, to learn which vector instructions can be used: 0.8 s.

    Args:
        device: `cuda`, `rocm` or `cpu`.
    """
    if device == "cpu":
        in_background(importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list)


def missing(device: str) -> str:
    """What this machine lacks to compile for a device; empty if nothing.

    Args:
        device: `cuda`, `rocm` or `cpu`.
    """
    # Triton compiles its launchers with a C compiler.
    compilers = [os.environ.get("CXX"), "g++", "clang++"] if device == "cpu" else [os.environ.get("CC"), "gcc", "clang"]
    if not any(name and shutil.which(name) for name in compilers):
        return f"there is no {'C++' if device == 'cpu' else 'C'} compiler ({compilers[1]})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's header files are not installed (python3-dev)"
    if device != "cpu" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def _configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls it without what torch's compiler would do by itself and costs a second compilation, or an error."""
    dynamo = torch._dynamo.config.patch(
        # Constants such as the scale of attention would become inputs, and the graph be compiled anew without them.
        specialize_float=True,
        # Splits graphs at the buckets of DDP, which are larger than a layer.
        optimize_ddp=False,
        # What cannot be compiled runs as it is.
        suppress_errors=True,
    )
    # Rows as long as the hidden states are wide would be taken to be so always.
    shapes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    return dynamo(shapes(function))
