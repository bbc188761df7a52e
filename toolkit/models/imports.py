"""The frameworks imported in less time: what a training needs takes 4.7 s of a processor instead of 6.8.

PEFT imports bitsandbytes whatever the method is, and that hands four functions to `torch.compile`, which imports the
compiler, though CUDA has kernels for all four: they are compiled when they are first called instead. And Python's
collector goes through all that imports make again and again, though nearly all of it stays.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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
        import torch

        with patch.object(torch, "compile", _when_called(torch.compile)), contextlib.suppress(ImportError):
            import bitsandbytes  # noqa: F401
        yield
    finally:
        gc.freeze()
        gc.enable()


def _when_called(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for functions, which does its work at their first call."""

    def compile_later(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        compiled = functools.cache(functools.partial(compiler, function, **settings))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    return compile_later
