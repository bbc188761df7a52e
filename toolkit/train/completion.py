"""What is left to do for a run that ended after its model was saved: the same evaluation, answers, card and report.

The published model is loaded in place of the one that training begins with, as the recipe's engine holds it, and no
step is taken. It is the same model for the same figures, but for rounding where adapters had moved the base.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from toolkit.models.load import ModelSource
from toolkit.recipe.adapter import start_from
from toolkit.recipe.sections import MOVES_BASE
from toolkit.report.load import read_metrics
from toolkit.train.checkpoints.save import as_saved
from toolkit.train.run_folder import RunFolder
from toolkit.train.selection import Chosen, metrics_of
from toolkit.train.session import Session


def source_of(source: ModelSource, folder: RunFolder) -> ModelSource:
    """Where the weights come from that a session begins with."""
    if not folder.is_trained:
        return source
    recipe, final = source.recipe, str(folder.final)
    if recipe.method.name == "full":
        return ModelSource.open(
            recipe.with_values({"model.path": final, "model.gguf_file": None, "model.revision": None})
        )
    # What was taken out of the base is part of the adapter by now.
    begun = {"method.init_lora_weights": "default"} if recipe.method.init_lora_weights in MOVES_BASE else {}
    started = start_from(recipe.with_values({"model.adapter": final, **begun}), {})[0]
    if recipe.headed:  # What PEFT trains of a head, it names itself.
        started = started.with_values({"method.modules_to_save": recipe.method.modules_to_save})
    return dataclasses.replace(source, recipe=started)


class Completion(TrainerCallback):
    """Has training be over before its first step, with the evaluations that it had. To come before all others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._manifest = session.folder.manifest()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._manifest.final, "it is noted before anything is left to be completed"
        box: list[Any] = [self._evaluations(self._manifest.final.step) if self._session.leads else None]
        broadcast_object_list(box)
        state.global_step, state.log_history = self._manifest.final.step, box[0]
        control.should_training_stop = True

    def end(self, state: Any) -> Chosen | None:
        """Has the model compute as it did when it was saved; returns what `Selection.choose` had chosen then."""
        as_saved(self._session.trainer, self._session.dtypes)
        published = self._manifest.published
        if not published:
            return None
        best = self._session.recipe.checkpoint.keep_best
        rows = [row for row in state.log_history if row["step"] == published.step and best in row]
        return Chosen(published, metrics_of(rows[-1]) if rows else None, None)

    def _evaluations(self, end: int) -> list[dict[str, Any]]:
        """Those in training. One after the last step is among them only if it was due; later ones are made anew."""
        checkpoint, every = self._session.recipe.checkpoint, self._session.recipe.evaluation.every_steps
        due = every and (end % every == 0 or checkpoint.keep_best)
        rows = read_metrics(self._session.folder.path / "metrics.jsonl")[1]
        return [row for row in rows if row["step"] < end or due]
