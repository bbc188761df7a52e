"""The live objects of one training on one process, built by `setup.set_up` and passed on from there."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.data.prepare import Prepared
from toolkit.distributed.engines import Dtypes
from toolkit.distributed.layout import BatchLayout, Length, World
from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.load import ModelSource
from toolkit.recipe import Loaded, Recipe
from toolkit.report.terminal import Progress
from toolkit.train.plan_guard import PlanGuard
from toolkit.train.run_folder import RunFolder
from toolkit.train.startup import StartUp


@dataclass(frozen=True, kw_only=True)
class Session:
    """A training that is ready for its callbacks and its first step.

    Args:
        source: The model as it was before training.
        dtypes: What weights are stored, computed and saved in.
        attention: The attention backend, a key of `attention.IMPLEMENTATIONS`.
        compiled: The layers, where they are compiled.
        stop_token_ids: Ids that end an answer.
        start: See `adapters.part_of_base`.
        guard: The plan, on the first process; None where none can be made.
        hashed: Ends when the manifest names the model's files, on the first process.
        trainer: The Trainer, with the model that is trained.
        progress: The terminal; that of other processes than the first is silent.
        start_up: How long it takes until the first step has ended.
    """

    loaded: Loaded
    world: World
    source: ModelSource
    folder: RunFolder
    layout: BatchLayout
    length: Length
    dtypes: Dtypes
    attention: str
    compiled: CompiledLayers | None
    prepared: Prepared
    tokenizer: Any
    stop_token_ids: frozenset[int]
    start: dict[str, torch.Tensor]
    guard: PlanGuard | None
    hashed: Future[None] | None
    trainer: Any
    progress: Progress
    start_up: StartUp

    @property
    def recipe(self) -> Recipe:
        """The recipe that is trained."""
        return self.loaded.recipe

    @property
    def leads(self) -> bool:
        """Whether this is the process that talks to the user and writes the run folder."""
        return self.world.rank == 0

    @property
    def module(self) -> Any:
        """The Transformers or PEFT model itself, without the engine around it."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped)
