"""Adapters are cast to 16 bits once in a step, which changes no number."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from small import place_with, set_up
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from toolkit.models.step_casts import StepCasts

SETTINGS = ("method=lora", "precision=bf16", "max_steps=3", "batch.micro_batch_size=2")

place = place_with("llama")


class Casts(TorchDispatchMode):
    """Counts the copies of some tensors in 16 bits."""

    def __init__(self, watched: Any) -> None:
        super().__init__()
        self.count, self._watched = 0, {id(each) for each in watched}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and id(args[0]) in self._watched
        return func(*args, **(kwargs or {}))


class Steps(TrainerCallback):
    """What steps log, and the copies that each makes."""

    def __init__(self, casts: Casts) -> None:
        self.logged: list[tuple[float, float]] = []
        self.copies: list[int] = []
        self._casts = casts

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.copies.append(-self._casts.count)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.copies[-1] += self._casts.count

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.logged.append((logs["loss"], logs["grad_norm"]))


def train(kept: bool, *overrides: str) -> tuple[int, Steps]:
    """The number of trained parameters, and what the steps of a training did."""
    trainer = set_up(*SETTINGS, "method.lora_dropout=0.1", *overrides, f"output.name=run_{kept}").trainer
    assert trainer.casts
    trainer.casts = trainer.casts if kept else None
    adapters = [each for each in trainer.model.parameters() if each.requires_grad]
    with Casts(adapters) as casts:
        steps = Steps(casts)
        trainer.add_callback(steps)
        trainer.train()
    return len(adapters), steps


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_an_adapter_is_cast_once_in_a_step(checkpointing: str) -> None:
    adapters, kept = train(True, f"activation_checkpointing={checkpointing}")
    _, plain = train(False, f"activation_checkpointing={checkpointing}")
    assert kept.logged == plain.logged and len(kept.logged) == 3
    assert kept.copies == [adapters] * 3
    # Two micro-batches, and once more for what is recomputed.
    assert plain.copies == [2 * adapters * (2 if checkpointing == "full" else 1)] * 3


@pytest.mark.parametrize("override", ["precision=fp32", "method=full", "compile=layers"])
def test_nothing_is_kept_that_is_large_or_not_cast(override: str) -> None:
    assert set_up(*SETTINGS, override).trainer.casts is None


def cast(weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.linear(torch.ones(1, 2), weight)


def test_an_error_in_a_micro_batch_leaves_no_stale_copy() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ZeroDivisionError), StepCasts().micro_batch(last=False):
        cast(weight)
        raise ZeroDivisionError
    with torch.no_grad():
        weight.mul_(3)
    assert cast(weight).tolist() == [[6, 6]]


def test_a_backward_pass_in_another_thread_drops_no_copies() -> None:
    """As on a GPU, where layers are recomputed in autograd's own thread."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    casts, step = StepCasts(), [False, True]
    with Casts([weight]) as seen:
        for last in step:
            with casts.micro_batch(last):
                loss = torch.utils.checkpoint.checkpoint(cast, weight, use_reentrant=False).sum()
                casts.keep_in_backward(loss)
                # The counter is of this thread, as copies of the other would be dropped with its `autocast`.
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
    assert seen.count == 1
    assert weight.grad is not None and weight.grad.tolist() == [[2, 2], [2, 2]]
    with torch.no_grad():
        weight.mul_(3)
    assert cast(weight).tolist() == [[6, 6]]
