"""Everything before the first step: data, model, trainer and callbacks, as the recipe says. Runs on every process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from toolkit.common import write_json
from toolkit.data.prepare import Prepared
from toolkit.data.rows import Sample
from toolkit.distributed import (
    BatchLayout,
    Dtypes,
    Length,
)
from toolkit.recipe import Loaded, Recipe
from toolkit.report.terminal import Progress
from toolkit.train.callbacks import CleanStop, Evaluator, Meter
from toolkit.train.evaluate import answer, as_prompt
from toolkit.train.plan_guard import Forecast
from toolkit.train.run_folder import RunFolder


@dataclass
class Training:
    """A training that is set up, with its callbacks attached, on one process."""

    loaded: Loaded
    folder: RunFolder
    layout: BatchLayout
    length: Length
    dtypes: Dtypes
    attention: str
    prepared: Prepared
    tokenizer: Any
    stop_token_ids: frozenset[int]
    trainer: Any
    progress: Progress
    outlook: Forecast | None
    resume_from: Path | None = None
    samples: list[Sample] = field(default_factory=list)
    meter: Meter | None = None
    evaluator: Evaluator | None = None
    stop: CleanStop | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe that is trained."""
        return self.loaded.recipe

    @property
    def leads(self) -> bool:
        """Whether this process talks to the user and writes the run folder."""
        return bool(self.trainer.is_world_process_zero())

    @property
    def all_compute(self) -> bool:
        """Whether a forward pass, evaluation and generation too, needs all processes, because each holds a part."""
        return self.recipe.strategy.shards_parameters

    @property
    def module(self) -> Any:
        """The Transformers or PEFT model itself, without the engine around it."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped)


def answer_before(training: Training) -> None:
    """Answers the prompts with the untrained model; the answers of a continued run are read back."""
    if training.leads:
        file = training.folder.path / "samples.json"
        if training.resume_from and file.is_file():
            training.samples = [Sample(**sample) for sample in json.loads(file.read_text(encoding="utf-8"))]
        else:
            training.samples = _prompts(training)[: training.recipe.evaluation.num_prompts]
    if training.all_compute:
        box = [training.samples]
        broadcast_object_list(box)
        training.samples = box[0]
    if all(sample.before is not None for sample in training.samples):
        return
    if training.leads:
        training.progress.message(f"Answering {len(training.samples)} prompts before training")
    answer_samples(training, "before")


def _prompts(training: Training) -> list[Sample]:
    given = training.recipe.evaluation.prompts
    if not given:
        return training.prepared.samples
    audit, stops = training.prepared.audit, training.stop_token_ids
    return [
        Sample(prompt=text, input_ids=as_prompt(training.tokenizer, text, audit, stops), reference=None)
        for text in given
    ]


def answer_samples(training: Training, when: str) -> None:
    """The leading process answers; where parameters are sharded all must help it, and give the same answers."""
    if not training.samples or not (training.leads or training.all_compute):
        return
    answers = answer(
        training.module,
        training.tokenizer,
        [sample.input_ids for sample in training.samples],
        training.recipe.evaluation.max_new_tokens,
        training.stop_token_ids,
        training.dtypes.autocast,
        device=training.trainer.args.device,
    )
    for sample, text in zip(training.samples, answers, strict=True):
        setattr(sample, when, text)
    if training.leads:
        write_json(training.folder.path / "samples.json", [sample.model_dump() for sample in training.samples])
