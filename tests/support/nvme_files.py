"""`cpu_engines`, with files that Python reads and writes in place of DeepSpeed's `async_io`, which needs libaio.

Reads happen as late as they may: a buffer that is used before, or given away meanwhile, shows in the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_engines
import numpy as np
import torch

_LOCKED = set[int]()


class Files:
    """DeepSpeed's `aio_handle`."""

    def __init__(self, **settings: Any) -> None:
        self._pending: list[Callable[[], None]] = []

    def async_pread(self, buffer: Any, path: str, offset: int) -> int:
        """Will read a file into a tensor; 0, as nothing has failed."""
        raw = buffer.detach().view(-1).view(torch.uint8)

        def read() -> None:
            raw.copy_(torch.from_numpy(np.fromfile(path, np.uint8, raw.numel(), offset=offset)))

        self._pending.append(read)
        return 0

    def async_pwrite(self, buffer: Any, path: str, offset: int) -> int:
        """Will write a tensor to a file."""
        assert offset == 0
        raw = buffer.detach().view(-1).view(torch.uint8).numpy()
        self._pending.append(lambda: raw.tofile(Path(path)))
        return 0

    def wait(self) -> int:
        """Does what was asked for, and says how many."""
        pending, self._pending = self._pending, []
        for each in pending:
            each()
        return len(pending)

    def new_cpu_locked_tensor(self, size: int, example: Any) -> Any:
        """A tensor of the example's dtype."""
        tensor = torch.empty(size, dtype=example.dtype)
        _LOCKED.add(tensor.untyped_storage().data_ptr())
        return tensor

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        """Python frees it."""
        _LOCKED.discard(tensor.untyped_storage().data_ptr())
        return True

    def is_pinned(self, tensor: Any) -> bool:
        """Whether it was made here; others go through buffers."""
        return tensor.untyped_storage().data_ptr() in _LOCKED


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, as `toolkit.run` does."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    from toolkit.distributed import nvme

    AsyncIOBuilder.is_compatible = lambda self, verbose=False: True
    AsyncIOBuilder.load = lambda self, verbose=True: SimpleNamespace(aio_handle=lambda **given: Files(**given))
    nvme._load_op = lambda: None
    return cpu_engines.main(arguments)
