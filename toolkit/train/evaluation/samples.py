"""What the model answers to a few prompts before and after training, kept in `samples.json`."""

from __future__ import annotations

import json
import logging
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from toolkit.common import count_text
from toolkit.data.rows import Sample
from toolkit.files import read_file, set_aside, write_json
from toolkit.train.evaluation.evaluate import CannotGenerate, as_prompt, session_answers
from toolkit.train.evaluation.untrained import untrained_answers
from toolkit.train.health.watchdog import beat
from toolkit.train.session import Session

_log = logging.getLogger("toolkit.train")


class Samples(TrainerCallback):
    """Answers the prompts before the first step, and after training when it is asked to.

    The first process answers. Where parameters are divided a forward pass needs all processes: then each gives the same
    answers. Those before training are read back when a run is continued: no other model than the one that training
    began with can give them, and a prompt that was not asked then has none.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._file = session.folder.path / "samples.json"
        parallel = session.recipe.parallel
        self._together = session.recipe.strategy.shards_parameters or parallel.divides or parallel.pipeline > 1
        self.rows: list[Sample] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session = self._session
        if session.leads:
            self.rows = _prompts(session)[: session.recipe.evaluation.num_prompts]
            given = self._read_back() if state.global_step and self._file.is_file() else {}
            for row in self.rows:
                row.before = given.get(tuple(row.input_ids))
        if self._together:
            box = [self.rows]
            broadcast_object_list(box)
            self.rows = box[0]
        if self.rows and not state.global_step:
            _log.info("Answering %s before training", count_text(len(self.rows), "prompt"))
            self.answer("before")

    def _read_back(self) -> dict[tuple[int, ...], str | None]:
        """The answers before training, by what was read."""
        try:
            found = [Sample(**row) for row in json.loads(read_file(self._file))]
        except (OSError, ValueError, TypeError) as error:
            kept = set_aside(self._file, error).name
            _log.warning("%s cannot be read and is kept as %s: answers before training are lost", self._file, kept)
            return {}
        return {tuple(row.input_ids): row.before for row in found}

    def answer(self, when: str) -> None:
        """Notes the model's answers as those `before` or `after` training."""
        session = self._session
        if not self.rows or not (session.leads or self._together):
            return
        beat("answering the prompts", together=self._together)
        prompts = [row.input_ids for row in self.rows]
        try:
            if when == "before":
                answers = untrained_answers(session, prompts, self._together)
            else:
                answers = session_answers(session, prompts)
        except CannotGenerate as error:
            self.rows = []
            _log.warning("no prompts are answered: %s", error.what)
            return
        for row, text in zip(self.rows, answers, strict=True):
            setattr(row, when, text)
        if session.leads:
            write_json(self._file, [row.model_dump() for row in self.rows])


def _prompts(session: Session) -> list[Sample]:
    """The recipe's prompts, else sources of held-out rows with their references."""
    given = session.recipe.evaluation.prompts
    if not given:
        return session.prepared.samples
    audit, stops = session.prepared.audit, session.stop_token_ids
    settings = session.recipe.data.chat_template_kwargs
    return [
        Sample(prompt=text, input_ids=as_prompt(session.tokenizer, text, audit, stops, settings), reference=None)
        for text in given
    ]
