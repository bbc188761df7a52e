"""Keeps checkpoints from running code while engines read them.

DeepSpeed's files and the metadata of torch's distributed checkpoints are pickles, and a pickle may call any function of
any module. The engines read them with code of their own, so Python's audit event for what a pickle names is watched: it
is something that checkpoints are made of, or reading ends. `weights_only=True` does the same for what is read with it.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from toolkit.common import UserError

_NAMES = {
    "collections": {"OrderedDict"},
    "deepspeed.runtime.fp16.loss_scaler": {"DynamicLossScaler", "LossScaler"},
    "deepspeed.runtime.zero.config": {"ZeroStageEnum"},
    "deepspeed.utils.tensor_fragment": {"fragment_address"},
    "pathlib": {"Path", "PosixPath"},
    "torch": {
        "Size",
        "Tensor",
        "device",
        *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
    },
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch._utils": {"_rebuild_parameter", "_rebuild_tensor_v2"},
    "torch.distributed._state_dict_utils": {"_TensorInfo"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    # What processes tell each other of what they read, or of why they could not.
    "builtins": {
        name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, Exception)
    },
    "toolkit.common": {"UserError"},
    "torch.distributed.checkpoint.api": {"CheckpointException"},
    "torch.distributed.checkpoint.planner": {"LoadItemType", "LoadPlan", "ReadItem"},
    "traceback": {"FrameSummary", "StackSummary"},
    "torch.nn.parameter": {"Parameter"},
    "torch.serialization": {"_get_layout"},
    # Reads a pickle inside of a pickle, which is watched like the one around it.
    "torch.storage": {"_load_from_bytes"},
}
"""What checkpoints of all engines name, by module. None of it does more than make the data that it is given."""
_read: list[Path] = []
"""The checkpoint that is being read, if one is."""
_refused: list[UserError] = []
"""Why reading it ended."""


@contextlib.contextmanager
def only_data(checkpoint: Path | None) -> Iterator[None]:
    """Lets pickles name nothing that could run code, until training begins or this ends.

    Args:
        checkpoint: What is read meanwhile; None if nothing is.

    Raises:
        UserError: Where something reads a pickle that names anything else; it names the checkpoint and the function.
    """
    if checkpoint:
        _watch_pickles()
        _read.append(checkpoint)
    try:
        yield
    except Exception as error:
        # Engines put what one process raises into errors of their own.
        if _refused:
            raise _refused.pop() from error
        raise
    finally:
        _read.clear()


class EndOfReading(TrainerCallback):
    """Training begins: its checkpoint is read. To come before callbacks that have processes tell each other objects."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _read.clear()


@functools.cache
def _watch_pickles() -> None:
    """Hooks stay as long as the process."""
    sys.addaudithook(_watch)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "pickle.find_class" or not _read:
        return
    module, name = arguments
    if name not in _NAMES.get(module, ()):
        refusal = UserError(
            f"{_read[0]} names {module}.{name}, which no checkpoint of this toolkit is made of and which might run "
            "code; it is not read any further",
            "continue from a checkpoint that was made by a run of this toolkit, or begin anew with "
            "checkpoint.resume=never",
        )
        _refused[:] = [refusal]
        raise refusal
