"""The frameworks imported in less time: what a training needs takes 4.7 s of a processor instead of 6.8.

PEFT imports bitsandbytes whatever the method is, and that hands four functions to `torch.compile`, which imports the
compiler, though CUDA has kernels for all four; DeepSpeed's engine does the same with three of Muon, whatever the
optimizer is. They are compiled when they are first called instead. And Python's collector goes through all that imports
make again and again, though nearly all of it stays.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within it the frameworks are imported for the first time; what they leave is never looked through again."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        with _compiling_later(), contextlib.suppress(ImportError):
            import bitsandbytes  # noqa: F401
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_deepspeed() -> None:
    """Imports DeepSpeed and what its engine would import when it begins, which takes a second less like this."""
    with _compiling_later():
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _compiling_later() -> Any:
    import torch

    return patch.object(torch, "compile", _when_called(torch.compile))


def _when_called(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for functions, which does its work at their first call."""

    def compile_later(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        compiled = functools.cache(functools.partial(compiler, function, **settings))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    return compile_later
