"""One stage of a pipeline as torch's schedules call it (`torch.distributed.pipelining`, torch 2.13).

torch takes every micro-batch to have the shapes of the first. Here each has its own: all processes of a pipeline read
the same rows, so each knows what the one before sends it. Places for what is received are made when they are needed and
dropped when they are read, so that as many are there as there are micro-batches on their way, not as a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from toolkit.distributed.stages import runs_as
from toolkit.models.parallel.pipeline import Chain, pipeline_group

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}
"""By `parallel.schedule` of the recipe."""


@dataclass(frozen=True)
class Sent:
    """What a stage hands on, whatever the micro-batch: hidden states and, of mixtures, scores of all routers so far.

    Args:
        dtype: Of hidden states.
        width: Of hidden states.
        routers: How many there are up to here; 0 where their balance is not trained.
        experts: That each of them scores.
        scores: Type of the scores.
    """

    dtype: torch.dtype
    width: int
    routers: int = 0
    experts: int = 0
    scores: torch.dtype = torch.float32

    @classmethod
    def of(cls, outputs: Sequence[torch.Tensor]) -> Sent:
        """Of what a stage has returned."""
        hidden, *routed = outputs
        about = (routed[0].shape[0], routed[0].shape[-1], routed[0].dtype) if routed else ()
        return cls(hidden.dtype, hidden.shape[-1], *about)

    def names(self) -> tuple[Any, ...]:
        """The same as names and numbers, which processes tell each other: while a checkpoint is read nothing else is
        taken out of pickles."""
        kinds = (str(each).removeprefix("torch.") for each in (self.dtype, self.scores))
        return *kinds, self.width, self.routers, self.experts

    @classmethod
    def named(cls, names: tuple[Any, ...]) -> Sent:
        """Of `names`."""
        dtype, scores, width, routers, experts = names
        return cls(getattr(torch, dtype), width, routers, experts, getattr(torch, scores))

    def like(self, batch: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Places for that of a micro-batch of so many rows of so many tokens."""
        hidden = torch.empty(batch, tokens, self.width, dtype=self.dtype, device=device)
        if not self.routers:
            return (hidden,)
        return hidden, torch.empty(self.routers, batch * tokens, self.experts, dtype=self.scores, device=device)


class Whole(torch.nn.Module):
    """A stage's own modules, and how they are called.

    Args:
        compute: Takes a micro-batch and what the stage before has sent; returns what is handed on, or the loss.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], compute: Callable[..., Any]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(modules)
        self._compute = compute

    def forward(self, *received: torch.Tensor, batch: Any) -> Any:
        return self._compute(batch, *received)


class Stage(PipelineStage):
    """A stage whose micro-batches have shapes of their own.

    Args:
        received: What the stage before sends; None of the first.
        sends: What this one does; of the last a loss.
    """

    def __init__(
        self, module: Whole, index: int, count: int, device: torch.device, received: Sent | None, sends: Sent | None
    ) -> None:
        example = received.like(1, 1, device) if received else ()
        loss = (torch.zeros((), device=device),)
        outputs = sends.like(1, 1, device) if sends else loss
        super().__init__(
            module, index, count, device,
            input_args=tuple(each.requires_grad_() for each in example),
            output_args=tuple(each.requires_grad_() for each in outputs),
            group=pipeline_group(),
        )  # fmt: skip
        self._received, self._sends = received, sends
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares every micro-batch with the example.
        self._runtime_validate = False
        self.batches: list[dict[str, Any]] = []
        """The micro-batches of the step."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        # Named so that torch finds no tensor in it: their gradients are asked of what is received alone.
        kwargs = {"batch": _Named(self.batches[fwd_chunk_id])}
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info.get(bwd_chunk_id, ())):
            info.buffer = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._make_places(self.args_recv_info[fwd_chunk_id], self._received, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        self._make_places(self.grad_recv_info.get(bwd_chunk_id, ()), self._sends, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_places(self, infos: Sequence[Any], sent: Sent | None, number: int) -> None:
        if sent is None:
            return
        for info, place in zip(infos, sent.like(*shape_of(self.batches[number]), self.device), strict=True):
            info.buffer = place


class _Named:
    """What torch passes on as it is."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch


def shape_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens of each."""
    rows, tokens = batch["input_ids"].shape
    return rows, tokens


def schedule_of(name: str, stages: Sequence[Stage], chain: Chain, micro_batches: int) -> Any:
    """A schedule of torch's for the stages of this process."""
    kind = SCHEDULES[runs_as(name, len(chain.split.layers), micro_batches)]
    given: Any = stages[0] if name in ("gpipe", "1f1b") else list(stages)
    # The loss of a micro-batch is divided by what all of them train already.
    return kind(given, micro_batches, loss_fn=lambda output, target: output, scale_grads=False)
