"""Keeps the losses of held-out rows in the run folder, for comparisons row by row; see `report.held_out_rows`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from toolkit.data.reward_files import file_hashes
from toolkit.files import read_file, set_aside, write_atomically
from toolkit.recipe import Recipe
from toolkit.report.held_out_rows import FILE, Estimate, HeldOutRows
from toolkit.train.checkpoints.storage import unwritable
from toolkit.train.selection import evaluations_by
from toolkit.train.session import Session

_log = logging.getLogger("toolkit.train")
_AT_A_TIME = 1000
"""Rows that are hashed."""
_STATE = "Comparable"


class Comparable(TrainerCallback):
    """Has evaluations count only on the same held-out rows. To come before all that compares them.

    A checkpoint that is named may be of a run with others, and brings that one's evaluations along.

    Args:
        rows: What knows the own ones; the first process asks.
    """

    def __init__(self, session: Session, rows: RowLosses) -> None:
        self._session, self._rows = session, rows

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        own = before = state.stateful_callbacks.get(_STATE)
        # A run's own checkpoints are of its rows, or it is refused.
        named = self._session.recipe.checkpoint.resume not in ("auto", "never")
        if self._session.leads and (named or before is None):
            own = {"measured": self._rows.measured}
        if named:
            (own,) = broadcast_object_list([own])
        if named and before not in (None, own):
            state.log_history = [row for row in state.log_history if "eval_loss" not in row]
            if self._session.leads:
                _log.warning(
                    "the evaluations up to step %d are of other held-out rows, or of a loss that is made otherwise: "
                    "none of them counts",
                    state.global_step,
                )
        if own:
            state.stateful_callbacks[_STATE] = own  # Checkpoints keep it.


class RowLosses:
    """Those of the evaluation before training, of the newest one, and of the one whose model would be published.

    Only the process that talks to the user has them.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._file = session, session.folder.path / FILE

    def keep(self, step: int, rows: list[list[float]] | None) -> None:
        """Notes an evaluation, and drops those that nothing will be compared with."""
        if rows is None:
            return
        state, best = self._session.trainer.state, self._session.recipe.checkpoint.keep_best
        values = evaluations_by(state, best) if best else {}
        kept = {0, step, max(values, key=lambda each: values[each], default=step)}
        sums, counts = rows
        size = -(-len(self._session.trainer.eval_dataset) // len(counts))
        found = HeldOutRows(measured=self.measured, joined=size, counts=counts, sums={})
        try:
            before = self._read()
            if before and (before.measured, before.counts) == (found.measured, found.counts) and step:
                found.sums = {each: before.sums[each] for each in sorted(before.sums) if each in kept}
            found.sums[step] = sums
            write_atomically(self._file, found.model_dump_json() + "\n")
        except OSError as error:
            # Training goes on where the disk is full or does not answer, and comparisons do without.
            if not unwritable(self._file.parent, error, writing=True):
                raise

    def change(self, before: Mapping[str, Any] | None, after: Mapping[str, Any], step: int) -> Estimate | None:
        """Of the loss from an evaluation before training to one after a step; None where it is not known row by row."""
        rows = None
        with contextlib.suppress(OSError):  # Of a disk that does not answer.
            rows = self._read()
        if not (rows and before and step):
            return None
        own = rows.of({**after, "step": step})
        return own and own.since(rows.of({**before, "step": 0}))

    @functools.cached_property
    def measured(self) -> str:
        """Of which rows they are, see the function."""
        return measured(self._session.recipe, self._session.trainer.eval_dataset)

    def _read(self) -> HeldOutRows | None:
        """What an earlier evaluation has left, of this start or of one before."""
        try:
            return HeldOutRows.model_validate_json(read_file(self._file))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be read and is kept as %s", self._file, set_aside(self._file, error).name)
            return None


def measured(recipe: Recipe, rows: Any) -> str:
    """A hash of rows as they are trained, and of all but a model that their losses are made of."""
    content: dict[str, Any] = {"objective": recipe.objective}
    if recipe.prefers:
        # The reference is what the model was.
        content |= {"preference": recipe.preference, "model": recipe.model}
    if recipe.distills:
        content["distillation"] = {**recipe.distillation.model_dump(mode="json"), "on_policy": None}
    if recipe.reinforces:
        content |= {"rewards": recipe.rewards, "files": file_hashes(recipe.rewards)}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode())
    for part in rows.with_format("arrow").iter(_AT_A_TIME):
        # `row` counts the training rows as well.
        for name in sorted({*part.column_names} - {"row"}):
            digest.update(name.encode())
            _hash(digest, part[name])
    return digest.hexdigest()[:32]


def _plain(section: Any) -> Any:
    return section.model_dump(mode="json")


def _hash(digest: Any, column: pa.ChunkedArray) -> None:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        digest.update(pc.list_value_length(column).to_numpy().tobytes())
        _hash(digest, pc.list_flatten(column))
    elif pa.types.is_primitive(column.type):
        digest.update(column.to_numpy().tobytes())
    else:
        digest.update(json.dumps(column.to_pylist(), default=str).encode())
