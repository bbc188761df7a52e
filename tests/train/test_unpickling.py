"""While a checkpoint is read, pickles may only name what checkpoints are made of."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch.distributed.checkpoint.metadata import MetadataIndex

from toolkit.common import UserError
from toolkit.train.checkpoints.unpickling import EndOfReading, only_data


class Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def in_a_file_of_torch(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save({"state": value}, stream)
    return stream.getvalue()


def read_by_torch(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def nested(value: Any) -> bytes:
    """A tensor's storage as a pickle inside of the pickle."""
    return pickle.dumps(Calls(torch.storage._load_from_bytes, in_a_file_of_torch(value)))


WAYS = {
    "pickle": (pickle.dumps, pickle.loads),
    "torch": (in_a_file_of_torch, read_by_torch),
    "nested": (nested, pickle.loads),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, torch.load, torch.hub.load, __import__])
def test_a_pickle_that_calls_something_is_refused(tmp_path: Path, function: Any, way: str) -> None:
    write, read = WAYS[way]
    data = write(Calls(function, str(tmp_path / "made")))
    with only_data(Path("runs/a/checkpoint-3")), pytest.raises(UserError, match="runs/a/checkpoint-3 names") as refused:
        read(data)
    assert not (tmp_path / "made").exists() and "checkpoint.resume=never" in refused.value.change


@pytest.mark.parametrize("way", WAYS)
def test_what_engines_save_is_read(way: str) -> None:
    write, read = WAYS[way]
    state = OrderedDict(
        weight=torch.arange(3.0).bfloat16(), parameter=torch.nn.Parameter(torch.ones(2)), dtype=torch.float16,
        scaler=DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 2, False, torch.float16),
        index=MetadataIndex("a"), size=torch.Size([2]), place=Path("a"),
    )  # fmt: skip
    with only_data(Path("checkpoint-3")):
        back = read(write(state))
    back = back.get("state", back) if isinstance(back, dict) else back
    assert list(back) == list(state) and torch.equal(back["weight"], state["weight"]) and back["index"].fqn == "a"


def test_the_refusal_is_what_the_user_reads_whatever_an_engine_makes_of_it() -> None:
    def read() -> None:
        try:
            pickle.loads(pickle.dumps(Calls(eval, "1")))
        except UserError as error:
            raise RuntimeError("rank 0 failed") from error

    with pytest.raises(UserError, match=r"names builtins\.eval"), only_data(Path("checkpoint-3")):
        read()
    with pytest.raises(RuntimeError), only_data(Path("checkpoint-3")):
        raise RuntimeError


def test_nothing_is_watched_before_and_after(tmp_path: Path) -> None:
    data = pickle.dumps(Calls(os.mkdir, str(tmp_path / "made")))
    with only_data(None):
        pickle.loads(data)
    (tmp_path / "made").rmdir()
    with only_data(Path("checkpoint-3")):
        EndOfReading().on_train_begin(None, None, None)
        pickle.loads(data)
    (tmp_path / "made").rmdir()
    with pytest.raises(KeyError), only_data(Path("checkpoint-3")):
        raise KeyError
    pickle.loads(data)
    assert (tmp_path / "made").is_dir()
