"""What a training is and the live objects of one of its processes, built by `setup.set_up` and passed on from there."""

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
from toolkit.models.parallel.pipeline import Split
from toolkit.models.reach import Reach
from toolkit.recipe import Loaded, Recipe
from toolkit.report.terminal import Progress
from toolkit.train.checkpoints.fast_folder import FastFolder
from toolkit.train.plan_guard import PlanGuard
from toolkit.train.run_folder import RunFolder
from toolkit.train.startup import StartUp
from toolkit.train.vllm_server import Server


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A training that all processes agree on.

    Args:
        source: The model as it was before training.
        dtypes: What weights are stored, computed and saved in.
        trainer_class: What makes the trainer.
        attention: The attention backend, a key of `attention.IMPLEMENTATIONS`.
        kernels: See `attention_kernels.available`.
        compiles: Whether the layers are compiled.
        liger: Whether Liger's kernels compute parts of them.
        reach: What of the model text reaches.
        split: How a pipeline's layers are cut into stages.
        teacher: The model that is learnt from, if there is one.
        common_tokens: How many tokens it has in common with the model.
        stop_token_ids: Ids that end an answer.
        guard: The plan, on the first process; None where none can be made.
        fast: Where saves go first, if the run folder's disk is slow.
        server: What generates answers for all processes, if not the model itself.
        about_server: What the manifest says of it.
    """

    loaded: Loaded
    world: World
    source: ModelSource
    folder: RunFolder
    layout: BatchLayout
    length: Length
    dtypes: Dtypes
    trainer_class: Any
    attention: str
    kernels: dict[str, str]
    compiles: bool
    liger: bool
    reach: Reach
    split: Split | None
    teacher: ModelSource | None
    common_tokens: int
    prepared: Prepared
    tokenizer: Any
    stop_token_ids: frozenset[int]
    guard: PlanGuard | None
    fast: FastFolder | None
    server: Server | None
    about_server: dict[str, str]

    @property
    def recipe(self) -> Recipe:
        """The recipe that is trained."""
        return self.loaded.recipe

    @property
    def leads(self) -> bool:
        """Whether this is the process that talks to the user and writes the run folder."""
        return self.world.rank == 0


@dataclass(frozen=True, kw_only=True)
class Session(Decided):
    """A training that is ready for its callbacks and its first step.

    Args:
        compiled: The layers, where they are compiled.
        start: See `adapter_init.begin_with_base`.
        hashed: Ends when the manifest names the model's files, on the first process.
        trainer: The Trainer, with the model that is trained.
        progress: The terminal; that of other processes than the first is silent.
        start_up: How long it takes until the first step has ended.
    """

    compiled: CompiledLayers | None
    start: dict[str, torch.Tensor]
    hashed: Future[None] | None
    trainer: Any
    progress: Progress
    start_up: StartUp

    @property
    def module(self) -> Any:
        """The Transformers or PEFT model itself, without the engine around it."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped)
