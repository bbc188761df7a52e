"""Ends a run whose loss, gradients or weights are no numbers any more: no later step brings them back.

Loss and gradients are known where they are logged. The weights are looked at before a checkpoint counts and before the
final model is saved, so that neither holds a model that is none; a look is one sum over the trained parameters.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import TrainerCallback

from toolkit.common import UserError
from toolkit.train.checkpoints.checkpoint import newest
from toolkit.train.health.bad_batches import FILE, keep_until, save_batches
from toolkit.train.session import Session

_log = logging.getLogger("toolkit.train")
_OVERFLOWS = "Overflows"


class Finite(TrainerCallback):
    """Ends the run with the first loss or norm of gradients that is logged and not finite."""

    def __init__(self, session: Session) -> None:
        self._session, self._logged = session, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._logged = state.global_step
        if self._session.leads:
            keep_until(self._session.folder.path / FILE, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # DeepSpeed leaves out updates by gradients that are not finite whatever the precision, and no later step shows
        # it: the norm of this one must be logged.
        trainer = self._session.trainer
        if self._session.recipe.precision != "fp16" and trainer.accelerator.optimizer_step_was_skipped:
            control.should_log = trainer.row_at_once = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for key, name in (("loss", "loss"), ("grad_norm", "gradients' norm")):
            value = (logs or {}).get(key)
            # Steps whose gradients overflow are skipped where the loss is scaled.
            skipped = key == "grad_norm" and self._session.recipe.precision == "fp16"
            if value is not None and not (skipped or math.isfinite(value)):
                before = state.global_step - self._logged - 1
                among = f" or one of the {before} before it" if before else ""
                what = f"at step {state.global_step}{among} the {name} became {value}"
                if self._session.leads:
                    steps = list(range(self._logged + 1, state.global_step + 1))
                    save_batches(self._session, steps, what, "ended the run")
                raise ended(self._session, what)
        if logs and "loss" in logs:
            self._logged = state.global_step


class Overflows(TrainerCallback):
    """Under fp16: notes the steps without an update, because their scaled gradients overflowed, and ends a run that no
    scale of the loss helps or that has taken no step at all.

    Args:
        stopped: Whether the run was asked to stop, and will go on.
    """

    def __init__(self, session: Session, stopped: Callable[[], bool]) -> None:
        self._session, self._stopped = session, stopped
        self._skipped: list[int] = []
        self._ends = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._skipped = list(state.stateful_callbacks.setdefault(_OVERFLOWS, {}).get("skipped", []))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._session.trainer
        if not trainer.accelerator.optimizer_step_was_skipped:
            return
        self._skipped.append(state.global_step)
        state.stateful_callbacks[_OVERFLOWS] = {"skipped": self._skipped}
        if _is_least_scale(trainer):
            self._ends = f"at step {state.global_step} gradients overflowed in fp16 at the least scale of the loss"
            control.should_log = trainer.row_at_once = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # Only now: the metrics show the step.
        if self._ends and logs and "loss" in logs:
            self._tell()
            raise ended(self._session, self._ends)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._skipped:
            return
        self._tell()
        if len(self._skipped) == state.global_step and not self._stopped():
            what = f"gradients overflowed in fp16 in all {state.global_step} steps, none of which updated a weight"
            raise ended(self._session, what, _lower_scale(self._session.trainer))

    def _tell(self) -> None:
        session, count = self._session, len(self._skipped)
        if session.leads:
            session.folder.update_manifest(skipped_steps=self._skipped)
            steps = f"{count} step{'s' * (count > 1)} of {session.trainer.state.global_step}"
            _log.warning("%s made no update, because gradients overflowed in fp16; manifest.json lists them", steps)


def _is_least_scale(trainer: Any) -> bool:
    """Whether the loss is scaled as little as it ever is."""
    if not trainer.is_deepspeed_enabled:
        # torch's scale goes on towards zero, but below 1 it keeps nothing from overflowing that fp32 would hold.
        return trainer.accelerator.scaler.get_scale() <= 1
    scaler = trainer.model_wrapped.optimizer.loss_scaler
    return scaler.dynamic and scaler.cur_scale <= scaler.min_scale


def _lower_scale(trainer: Any) -> str:
    """How a scale of the loss is come to that nothing overflows by."""
    if not trainer.is_deepspeed_enabled:
        return "train for more steps: the scale of the loss falls with each that overflows"
    if (scaler := trainer.model_wrapped.optimizer.loss_scaler).dynamic:
        return (
            "train for more steps, as the scale of the loss falls with those that overflow, or begin with a lower "
            "one (extra.deepspeed.fp16.initial_scale_power=8)"
        )
    return f"set extra.deepspeed.fp16.loss_scale below {scaler.cur_scale:g}, or to 0, by which one is sought"


def check_weights(session: Session, step: int) -> None:
    """Refuses a model with trained weights that are not finite. All processes must call it, and all hear of it.

    Raises:
        UserError: With what to change, and the last good checkpoint.
    """
    accelerator = session.trainer.accelerator
    finite = are_finite(session.module.parameters(), session.world.rank)
    broken = torch.tensor([float(not finite)], device=accelerator.device)
    if accelerator.reduce(broken, reduction="sum").item():
        raise ended(session, f"after step {step} trained weights are not finite")


def are_finite(parameters: Iterable[Any], rank: int = 0) -> bool:
    """Whether what a process holds of the trained ones is.

    ZeRO-3 keeps equal parts beside a tensor that is empty while they are not gathered. Where they do not divide, the
    last ones end in memory that nobody has written, and that may hold anything.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            swapper = getattr(parameter, "nvme_swapper", None)
            with swapper.present(parameter) if swapper else contextlib.nullcontext():
                # Anything that is not finite stays so in a sum, and weights are far from the largest numbers.
                if not torch.isfinite(_part(parameter, rank).sum(dtype=torch.float32)):
                    return False
    return True


def _part(parameter: Any, rank: int) -> torch.Tensor:
    if hasattr(parameter, "ds_tensor") and not parameter.numel():
        return parameter.ds_tensor[: max(0, parameter.ds_numel - rank * parameter.ds_tensor.ds_numel)]
    part = parameter.detach()
    return part.to_local() if hasattr(part, "to_local") else part


def ended(session: Session, what: str, change: str = "") -> UserError:
    """What to say of a run whose numbers have ended it.

    Args:
        change: Where the learning rate and what else scales an update is not what it is about.
    """
    with contextlib.suppress(Exception):
        session.trainer.saves.settled()  # The newest one may be on its way.
    recipe, (last, _) = session.recipe, newest(session.folder.checkpoints)
    changes = [change or f"set optimizer.learning_rate below {recipe.optimizer.learning_rate:g}"]
    if recipe.precision == "fp16":
        changes.append("precision=bf16 or fp32")
    if not (change or recipe.optimizer.max_grad_norm or recipe.optimizer.traits.in_backward):
        changes.append("optimizer.max_grad_norm=1")
    if recipe.optimizer.args and not change:
        changes.append("other optimizer.args")
    saved = session.folder.path / FILE
    if saved.is_file():
        changes.append(f"look at the rows in {saved}")
        if recipe.faults.on_nan == "stop":
            changes.append("faults.on_nan=skip if they are to blame")
    return UserError(
        f"{what}; no model is saved from here on" + (f", {last} is the last good checkpoint" if last else ""),
        f"{', or '.join(changes)}; with checkpoint.resume=never it begins anew",
    )
