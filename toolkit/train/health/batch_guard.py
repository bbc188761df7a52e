"""Judges each batch by its loss and gradients before its update, and leaves out the update of one that is bad.

All processes judge the same numbers, so all leave out the same update: weights, moments and learning rate stay as they
were, as where the loss is scaled and gradients overflow. The engines' own way of doing that is used, which every part
of theirs knows: accelerate's sign that a step was skipped, and DeepSpeed's overflow.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections import deque
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from toolkit.train.health.bad_batches import FILE, keep_until, save_batches
from toolkit.train.health.finite import ended
from toolkit.train.session import Session

_log = logging.getLogger("toolkit.train")
_STATE = "BatchGuard"
_OVERFLOWS = ("_overflow_check_and_loss_scale_update", "check_overflow")


class BatchGuard(TrainerCallback):
    """Skips bad batches, or ends the run with them, as the recipe's `faults` say.

    Attributes:
        norm: Of the gradients of this step; None under DeepSpeed, which looks for itself whether they are finite.
    """

    norm: Any = None

    def __init__(self, session: Session) -> None:
        self._session, self._faults = session, session.recipe.faults
        self._losses: list[torch.Tensor] = []
        self._means: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor | None] = []
        self._loss = 0.0
        # What is wrong with the batch of this step, what that leads to, and why it ends the run.
        self._wrong, self._leads_to, self._ends = "", "stop", ""
        self._window: deque[float] = deque(maxlen=self._faults.spike_window)
        self._skipped: list[int] = []
        # This process's share of the losses that were not logged yet, of steps that were taken and that were not.
        self._unlogged: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        session.trainer.guard = self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._session.trainer
        # Checkpoints keep it, so that what is judged after one does not depend on whether the run was interrupted.
        kept = state.stateful_callbacks.setdefault(_STATE, {})
        self._window.extend(kept.get("losses", []))
        self._skipped = list(kept.get("skipped", []))
        if trainer.is_deepspeed_enabled:
            self._guard_zero(trainer.model_wrapped.optimizer)
        else:
            self._guard_accelerated(trainer.optimizer)
        if self._session.leads:
            keep_until(self._session.folder.path / FILE, state.global_step)
            if self._skipped:
                self._session.folder.update_manifest(skipped_steps=self._skipped)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for each in (self._losses, self._means, self._tokens):
            each.clear()
        self._wrong = ""
        if state.global_step == self._session.trainer._globalstep_last_logged:
            self._unlogged = ([], [])
            # What is not finite is not taken away by subtracting it.
            self._session.trainer._tr_loss.zero_()

    def scored(self, loss: torch.Tensor, mean: torch.Tensor, input_ids: torch.Tensor | None) -> None:
        """Notes a micro-batch: its share of the step's loss, its own mean loss per token, and its tokens, which are
        read of streams alone."""
        self._losses.append(loss)
        self._means.append(mean)
        self._tokens.append(input_ids)

    def tell(self, micro_batches: int, group: Any) -> None:
        """Has all processes of a pipeline know what the one with the last stage has scored of a step."""
        figures = torch.zeros(2, micro_batches, device=self._session.trainer.args.device)
        if self._losses:
            figures = torch.stack([torch.stack(each).float() for each in (self._losses, self._means)])
        torch.distributed.all_reduce(figures, group=group)
        self._losses, self._means = (list(each.unbind()) for each in figures)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, step = self._session.trainer, state.global_step
        own = torch.stack(self._losses).sum()
        taken, left_out = self._unlogged
        (left_out if self._wrong else taken).append(own)
        if left_out:
            # The mean that is logged is that of the steps that were taken, and of others only where there are none.
            steps = step - trainer._globalstep_last_logged
            trainer._tr_loss = torch.stack(taken or left_out).mean() * steps
        if not self._wrong:
            self._window.append(self._loss)
        else:
            self._note(step)
        state.stateful_callbacks[_STATE] = {"losses": list(self._window), "skipped": self._skipped}
        control.should_log = control.should_log or bool(self._ends)
        trainer.row_at_once = True  # The device has been waited for.

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # Only now: the metrics show the step.
        if self._ends and logs and "loss" in logs:
            raise ended(self._session, self._ends)

    def _judge(self) -> None:
        """Looks at the loss, alike on all processes."""
        faults, window = self._faults, self._window
        share = torch.stack(self._losses).sum().float()
        self._loss = loss = self._session.trainer.accelerator.reduce(share, reduction="mean").item()
        if not math.isfinite(loss):
            self._wrong, self._leads_to = f"the loss became {loss}", faults.on_nan
        elif faults.on_spike != "ignore" and len(window) >= max(2, faults.spike_window // 2):
            mean, deviation = statistics.fmean(window), statistics.stdev(window)
            if loss > mean + faults.spike_sigmas * deviation:
                self._wrong = f"the loss rose to {loss:.4g}, from {mean:.4g} ± {deviation:.2g} before"
                self._leads_to = faults.on_spike

    def _guard_accelerated(self, optimizer: Any) -> None:
        """One process, DDP, FSDP: `optimizer` is accelerate's wrapper."""
        original = optimizer.step

        @functools.wraps(original)  # With the sign that torch's schedules leave on it.
        def step(closure: Any = None) -> None:
            self._judge()
            norm = float(self.norm.full_tensor() if isinstance(self.norm, DTensor) else self.norm)
            # Where the loss is scaled, the scaler skips gradients that overflow.
            if not (self._wrong or optimizer.scaler or math.isfinite(norm)):
                self._wrong, self._leads_to = f"the gradients' norm became {norm}", self._faults.on_nan
            optimizer._is_overflow = bool(self._wrong)
            if not self._wrong:
                original(closure)

        optimizer.step = step

    def _guard_zero(self, optimizer: Any) -> None:
        """`optimizer` is DeepSpeed's, which divides the recipe's among the processes and drops gradients that overflow.

        ZeRO-3 asks a method of its own whether they do, ZeRO-2 another if it is told to, ZeRO-1 in bf16 only a norm.
        """
        original = optimizer.step
        asked = next((name for name in _OVERFLOWS if hasattr(optimizer, name)), "")

        def or_bad(*args: Any, **kwargs: Any) -> bool:
            overflows(*args, **kwargs)
            optimizer.overflow = optimizer.overflow or bool(self._wrong)
            return bool(optimizer.overflow)

        def step(closure: Any = None) -> None:
            self._judge()
            if self._wrong and not asked:
                optimizer.overflow = True
                optimizer.clear_hp_grads()
                optimizer.clear_lp_grads()
                return
            original(closure)
            if optimizer.overflow and not self._wrong and self._session.recipe.precision != "fp16":
                self._wrong, self._leads_to = "the gradients became infinite or no numbers", self._faults.on_nan

        if asked:
            overflows = getattr(optimizer, asked)
            setattr(optimizer, asked, or_bad)
            optimizer.check_grad_overflow = True
        optimizer.step = step

    def _note(self, step: int) -> None:
        """Saves the batch, and says so."""
        session, most, wrong = self._session, self._faults.max_skips, f"at step {step} {self._wrong}"
        if self._leads_to == "stop":
            self._ends = wrong
        elif len(self._skipped) >= most:
            self._ends = f"{wrong}, and faults.max_skips={most} batches were skipped before"
        else:
            self._skipped.append(step)
        means = gather_object([torch.stack(self._means).tolist()])
        tokens = (
            None
            if session.trainer.batches
            else gather_object([[each.tolist() for each in self._tokens if each is not None]])
        )
        if session.leads:
            save_batches(session, [step], wrong, "ended the run" if self._ends else "skipped", means, tokens)
            session.folder.update_manifest(skipped_steps=self._skipped)
            if not self._ends:
                _log.warning("%s: its batch is skipped; %s has the rows", wrong, session.folder.path / FILE)
