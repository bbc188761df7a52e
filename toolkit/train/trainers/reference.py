"""The reference of DPO and KTO: what the model itself says before its first step, of both answers of every row, once.

It is taken by the engine's own evaluation pass, so that it costs no memory beside the training. Of adapters that begin
by adding nothing it is the base; of those that are trained on, and of full fine-tuning, the weights as they were, which
TRL keeps a second copy of. The log-probabilities belong to the run and lie in its folder, where a start that goes on
from a checkpoint finds them: its weights have moved. Other runs from the same weights on the same pairs take them from
the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast, broadcast_object_list
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from transformers import TrainerCallback

from toolkit.cache import cache_dir, find, keep
from toolkit.common import UserError, content_hash
from toolkit.files import write_atomically
from toolkit.models import device
from toolkit.models.parallel.layer_sums import dividing
from toolkit.train.evaluation.evaluate import batches_of, before_training
from toolkit.train.evaluation.untrained import beginning
from toolkit.train.session import Session

FILE = "reference.safetensors"
"""In the run folder: `log_probs` (rows, 2), training rows before those held out; zero of rows that no step comes to."""


class Reference(TrainerCallback):
    """Has the trainer know the reference's log-probabilities before the first evaluation."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session, trainer = self._session, self._session.trainer
        own, key, lacking, lost = session.folder.path / FILE, "", 0, ("", "")
        stored: torch.Tensor | None = None
        if session.leads:
            key = _key(session)
            cached = find(cache_dir() / "reference" / f"{key}.safetensors")
            places, known = [own, cached], {"key": key}
            if state.global_step > 0 or session.folder.is_trained:
                # The model is no reference any more: it is that of the run which began, here or where it was saved.
                begun = [each.parents[1] / FILE for each in (session.folder.resume_from,) if each]
                places, known, key = [own, *begun], {"data": session.prepared.fingerprint}, ""
            found = ((place, _read(place, known)) for place in places)
            from_place, stored = next(((place, each) for place, each in found if each is not None), (None, None))
            key = key or ("begun" if stored is not None else "")
            lost = _lost(places[-1]) if not key else lost
            lacking = 0 if stored is None else _lacking(session, stored, state.global_step)
        shape = None if stored is None else list(stored.shape)
        key, shape, lacking, lost = broadcast_object_list([key, shape, lacking, lost])
        if not key:
            raise UserError(*lost)
        if lacking:
            raise UserError(
                f"the run that is continued began as one that comes to fewer rows, and its {FILE} lacks what the "
                f"reference says of {lacking:,} that this one comes to",
                "set schedule, batch, data and seed as it began, or start anew: checkpoint.resume=never",
            )
        if shape is None:
            log_probs = _computed(session)
        else:
            log_probs = torch.zeros(shape, dtype=torch.float64) if stored is None else stored
            log_probs = broadcast(log_probs.to(args.device)) if trainer.accelerator.num_processes > 1 else log_probs
        trainer.reference = log_probs.to(args.device)
        if session.leads and from_place != own:
            metadata = {"key": key, "data": session.prepared.fingerprint}
            content = save({"log_probs": log_probs.cpu().contiguous()}, metadata)
            write_atomically(own, content)
            if stored is None:
                with contextlib.suppress(OSError):  # The run has its own.
                    keep(cached, content)


def _key(session: Session) -> str:
    """A hash of what the log-probabilities follow from: weights, how they are stored and computed with, and rows."""
    if session.hashed:
        session.hashed.exception()  # Ended; whether it could is said elsewhere.
    content = {
        # Without the hash of the weights nothing is the same.
        **(beginning(session) or {"weights": secrets.token_hex()}),
        "data": session.prepared.fingerprint,
        "drawn": hashlib.sha256(_drawn(session).tobytes()).hexdigest(),
        "device": device.kind(),
    }
    return content_hash(content)[:32]


def _drawn(session: Session, step: int = 0) -> NDArray[np.int64]:
    """The training rows that the run comes to after a step; a short one need not know of all."""
    batches = session.trainer.batches
    size = batches.global_batch_size
    return np.unique(batches.order.between(step * size, session.length.total_steps * size))


def _lacking(session: Session, stored: torch.Tensor, step: int) -> int:
    """Of how many rows that the run comes to after a step nothing is stored, as of a shorter run that began it."""
    return int((stored[torch.from_numpy(_drawn(session, step))] == 0).all(1).sum())


def _read(file: Path, known: dict[str, str]) -> torch.Tensor | None:
    """What a file holds; None if it is not there, damaged, or of other weights or rows than those that are known."""
    try:
        with safe_open(file, "pt") as stored:
            if known.items() <= (stored.metadata() or {}).items():
                return stored.get_tensor("log_probs")
    except Exception:  # The library has no kind of error of its own.
        pass
    return None


def _lost(begun: Path) -> tuple[str, str]:
    """What to say where the run that began has no reference of these rows, and what to change.

    Args:
        begun: The file of that run.
    """
    if _read(begun, {}) is not None:
        return (
            f"{begun} is the reference of other rows: what the model that training began with says of this recipe's "
            "is not known",
            "set data as that run has it, or begin a new one from its final model, with model.path or model.adapter",
        )
    return (
        f"{begun} is gone or damaged: with which log-probabilities the run compares is not known any more",
        "restore it, or start anew: checkpoint.resume=never",
    )


def _computed(session: Session) -> torch.Tensor:
    """(rows, 2) log-probabilities of both answers of all rows, on all processes."""
    trainer = session.trainer
    datasets = [trainer.train_dataset.select(_drawn(session))]
    datasets += [trainer.eval_dataset] if trainer.eval_dataset is not None else []
    rows, scored = len(trainer.train_dataset) + sum(map(len, datasets[1:])), sum(map(len, datasets))
    what = "pairs" if session.recipe.pairs else "answers"
    session.progress.remark(f"Scoring {scored:,} {what} once by the model as it is, which is the reference")
    table = torch.zeros(rows, 2, dtype=torch.float64, device=trainer.args.device)
    size = session.recipe.evaluation.batch_size or session.layout.micro_batch_size
    with before_training(session):
        for dataset in datasets:
            for inputs, is_own, _ in batches_of(trainer, dataset, size, session.progress.evaluating):
                log_probs, _, _ = trainer.answers(trainer.model_wrapped, inputs)
                if is_own:
                    table[inputs["rows"]] = log_probs
    reduced: torch.Tensor = trainer.accelerator.reduce(table, reduction="sum") / dividing()
    return reduced
