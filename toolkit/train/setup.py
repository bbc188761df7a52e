"""Everything before the first step: data, plan, processes, model, trainer, callbacks. Runs on every process.

The order matters: what can be refused is refused before what is slow, the plan is made before TrainingArguments start
the process group, and those exist before the model is loaded, because ZeRO-3 and FSDP need them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PrinterCallback, TrainingArguments

from toolkit.common import in_background
from toolkit.data.reward_files import file_hashes
from toolkit.data.rewards import Scorer
from toolkit.data.streaming import Stream
from toolkit.distributed.engines import Dtypes
from toolkit.distributed.rendezvous import Rendezvous
from toolkit.models.adapter_init import begin_with_lost, begin_with_read
from toolkit.models.attention import varlen
from toolkit.models.cast_choice import drops_casts, keeps_casts
from toolkit.models.load import ModelSource
from toolkit.models.step_casts import StepCasts, drop_with_layers
from toolkit.models.teacher import load_teacher
from toolkit.recipe import Loaded, Recipe, prefixes
from toolkit.recipe.problem import warn
from toolkit.recipe.rules import warnings_of_length
from toolkit.recipe.sections import EVA_ROWS
from toolkit.report.terminal import Progress
from toolkit.train import agreed, optimizer, preflight
from toolkit.train.arguments import build_arguments
from toolkit.train.batching import collator, micro_batches, score_parts
from toolkit.train.callbacks import CleanStop, Evaluator, Meter, Seal
from toolkit.train.checkpoints import checkpoint
from toolkit.train.checkpoints.staging import Saves
from toolkit.train.checkpoints.unpickling import EndOfReading
from toolkit.train.completion import Completion
from toolkit.train.decide import decide
from toolkit.train.evaluation.generation import reads_once
from toolkit.train.evaluation.row_losses import Comparable
from toolkit.train.evaluation.samples import Samples
from toolkit.train.expert_load import ExpertLoad
from toolkit.train.health.batch_guard import BatchGuard
from toolkit.train.health.finite import Finite, Overflows
from toolkit.train.health.stragglers import Pace
from toolkit.train.health.watchdog import Watchdog
from toolkit.train.model import TrainedModel, load_model
from toolkit.train.profiler import Profiler
from toolkit.train.rehearsal import Rehearsal
from toolkit.train.run_folder import RunFolder, hash_files, stages
from toolkit.train.selection import EarlyStopping, Selection
from toolkit.train.session import Decided, Session
from toolkit.train.startup import StartUp
from toolkit.train.trainers.late_rows import TellLate
from toolkit.train.trainers.objectives import settings_of, with_numbers
from toolkit.train.trainers.reference import Reference
from toolkit.train.trainers.rollouts import Asker
from toolkit.train.trainers.served_answers import ServedAnswers
from toolkit.train.verify import Verify

_log = logging.getLogger("toolkit.train")

_BALANCE = (
    "the training loss includes the routers' balance loss, which is one of each micro-batch: it depends on "
    "batch.micro_batch_size, packing and the number of processes; the held-out loss does not include it"
)


def set_up(
    loaded: Loaded,
    rendezvous: Rendezvous,
    source: ModelSource,
    folder: RunFolder,
    swap: Path | None,
    progress: Progress,
    start_up: StartUp,
    watchdog: Watchdog,
    force: bool = False,
) -> Session:
    """Builds the session of a training.

    Args:
        rendezvous: All processes of the launch, before they have a process group.
        swap: Folder for what is offloaded to NVMe.
        watchdog: Started when the processes have a process group.
        force: Whether to go on where the plan says that it will not fit.

    Raises:
        UserError: Any error the user can fix.
    """
    decided = decide(loaded, rendezvous, source, folder, progress, start_up, force)
    with contextlib.ExitStack() as refused:
        if decided.fast:
            refused.callback(decided.fast.remove)
        arguments = _form_group(decided, rendezvous, swap, watchdog)
        trained = load_model(decided, arguments, progress)
        trainer = _trainer(decided, arguments, trained)
        compiled = agreed.compiled(decided.recipe, trainer.model) if decided.compiles else None
        hashed = _note(decided, trained, trainer, progress) if decided.leads else None
        # What ends a process from here on, it may note in the folder.
        (folder.accepted,) = broadcast_object_list([folder.accepted])
        refused.pop_all()
    start_up.ended("model")
    return Session(
        **vars(decided),
        compiled=compiled,
        start=trained.start,
        hashed=hashed,
        trainer=trainer,
        progress=progress,
        start_up=start_up,
    )


def _form_group(decided: Decided, rendezvous: Rendezvous, swap: Path | None, watchdog: Watchdog) -> TrainingArguments:
    """The trainer's arguments, which start the process group: whoever has come this far has the same data and files."""
    recipe, length, world = decided.recipe, decided.length, decided.world
    preflight.agree(rendezvous, decided.source, decided.prepared.fingerprint, decided.teacher)
    if decided.leads:
        warn(warnings_of_length(decided.loaded, length.total_steps, length.epochs, length.warmup_steps))
    arguments = build_arguments(decided.loaded, decided.layout, length, decided.folder, world, swap)
    waits = recipe.strategy.name == "ddp" and world.world_size > 1
    if waits and not decided.reach.inside and "ddp_find_unused_parameters" not in recipe.extra.training_arguments:
        arguments.ddp_find_unused_parameters = True
    preflight.all_reduce(rendezvous, arguments.device, recipe.parallel)
    watchdog.start()
    optimizer.check_arguments(recipe, arguments, length)
    return arguments


def _trainer(decided: Decided, arguments: TrainingArguments, trained: TrainedModel) -> Any:
    """The trainer, with all that it takes from the recipe beside its arguments."""
    recipe, types, layout, folder = decided.recipe, decided.dtypes, decided.layout, decided.folder
    world, prepared, tokenizer, compiles = decided.world, decided.prepared, decided.tokenizer, decided.compiles
    train = prepared.train.divided(world.world_size) if isinstance(prepared.train, Stream) else prepared.train
    train, held_out = with_numbers(recipe, train, prepared.eval)
    shares = _shares(decided, arguments.device)
    # TRL turns adapters on a base of nf4 or int8 to bf16, which rounds them.
    adapters = [each for each in trained.model.parameters() if each.requires_grad] if recipe.method.quantization else []
    masters = [(each, each.data) for each in adapters]
    trainer: Any = decided.trainer_class(
        model=trained.model,
        args=arguments,
        # Lists of numbers take longer to turn into tensors than the rest of a batch.
        train_dataset=train.with_format("numpy"),
        eval_dataset=held_out,
        data_collator=collator(
            recipe, decided.attention, tokenizer, compiles, layout.part_of_rows(world.rank), shares=shares
        ),
        processing_class=tokenizer,
    )
    trainer.schedule = recipe.parallel.schedule
    trainer.objective, trainer.settings = recipe.objective, settings_of(recipe)
    trainer.classes = prepared.classes
    if recipe.embeds:
        trainer.embedding, trainer.pooling = recipe.embedding, decided.source.pooling
        trainer.group = layout.global_batch_size
    if recipe.writes:
        stops, scorer = decided.stop_token_ids, Scorer(recipe.rewards)
        # Processes that compute together have to read as often.
        once = not decided.server and all(
            gather_object([reads_once(decided.source.config, recipe.objective, recipe.model.trust_remote_code)])
        )
        trainer.asker = Asker(recipe, tokenizer, stops, types.autocast, scorer, reads_once=once)
        trainer.folder = folder.path if decided.leads else None
    if recipe.reinforces:
        trainer.resumed = folder.resume_from
        if decided.server:
            trainer.served = ServedAnswers(
                decided.server, recipe, decided.stop_token_ids, folder.path, types, trained.start
            )
    if decided.teacher:
        offload = bool(recipe.distillation.teacher and recipe.distillation.teacher.offload)
        trainer.teacher = load_teacher(
            decided.teacher, decided.attention, decided.kernels, decided.common_tokens, arguments.device, offload
        )
    if layout.sharing > 1:
        score_parts(trainer, recipe.parallel.shares_by)
    model = checkpoint.trained(trainer.model)
    trainer.saves = Saves(folder.checkpoints, decided.loaded, world, model, decided.fast)
    for parameter, value in masters:
        parameter.data = value.to(parameter.device)
    # Compiled layers make their copies themselves, in one kernel with what reads them where they can.
    if types.autocast and not compiles and keeps_casts(recipe):
        trainer.casts = StepCasts()
    if drops_casts(recipe):
        drop_with_layers(trainer.model)
    if not isinstance(prepared.train, Stream):
        steps = decided.length.total_steps
        trainer.batches = micro_batches(recipe, prepared.train, trainer.data_collator, layout, steps)
    if not folder.resume_from and not recipe.model.adapter:
        _begin(trainer, decided.source, types, prepared.train)
    trainer.optimizer_cls_and_kwargs = optimizer.optimizer_class(recipe, arguments, trainer.model)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _shares(decided: Decided, place: torch.device) -> bool:
    """Whether beginnings that documents have in common are computed once: where there are any, as far as the rows are
    known, and this device's kernels can."""
    counted, rows = decided.prepared.statistics, decided.layout.micro_batch_size
    if counted and not counted.begins_alike(rows):
        return False
    if not prefixes.are_shared(decided.recipe, decided.source.config.to_dict(), decided.attention):
        return False
    can = varlen.continues(place, getattr(torch, decided.dtypes.compute))
    if not can and decided.leads:
        _log.warning("what rows begin with alike is computed for each: attention here takes no fewer queries than keys")
    return can


def _begin(trainer: Any, source: ModelSource, types: Dtypes, train: Any) -> None:
    """Begins adapters by the weights or rows themselves, alike on all processes, before an engine copies them."""
    way, first = source.recipe.method.init_lora_weights, trainer.is_world_process_zero()
    if way == "loftq":
        begin_with_lost(trainer.model, source, types)
    if way != "eva":
        return
    rows: Iterable[Any] = train
    if trainer.batches:
        order = trainer.batches.order
        rows = (train[int(number)] for number in order.between(0, min(order.num_rows, EVA_ROWS)))
    if trainer.model.device != trainer.args.device:  # ZeRO would move what was read from GGUF files later.
        trainer.model.to(trainer.args.device)
    batches = (trainer._prepare_inputs(trainer.data_collator([row])) for row in rows)
    with trainer.accelerator.autocast():
        without = begin_with_read(trainer.model, batches, lambda batch: trainer.score(trainer.model, batch))
    if without and first:
        _log.warning(
            "method.init_lora_weights=eva: %d layers read fewer trained tokens than they have ranks, and begin as by "
            "default",
            without,
        )


def _note(decided: Decided, trained: TrainedModel, trainer: Any, progress: Progress) -> Future[None]:
    """What the first process says and writes of a run that is about to begin.

    Returns:
        Ends when the manifest names the model's files.
    """
    recipe, folder, counts = decided.recipe, decided.folder, trained.parameters
    assert trained.hashes, "of the first process"
    hashes, notes = trained.hashes, [_BALANCE] if getattr(trainer, "aux_loss_enabled", False) else []
    for note in notes:
        _log.warning("%s", note)
    if code := _rewards_hash(recipe).get("rewards.file"):
        progress.message(
            f"The reward `{recipe.rewards.function}` is code of {recipe.rewards.file} (SHA-256 {code}), which runs "
            "as you"
        )
    if trained.in_fp8:
        progress.remark(f"{trained.in_fp8:,} of {counts.base:,} parameters are multiplied in fp8, the rest in bf16")
    if recipe.method.name == "lora":
        progress.remark(f"{counts.base:,} parameters: {counts.shares}")
    checkpoint.check_fits(folder.resume_from, trainer.saves.model)
    loaded = decided.loaded
    if recipe.embeds and recipe.embedding.pooling == "auto":
        loaded = loaded.decided(loaded.recipe, {**loaded.chosen, "embedding.pooling": decided.source.pooling})
    folder.describe(
        loaded,
        decided.layout,
        {"data": decided.prepared.fingerprint, **_adapter_hash(recipe), **_rewards_hash(recipe)}
        # What is continued must be the same before it goes on.
        | (hashes.result() if folder.resume_from else {}),
        parameters=counts,
        notes=notes,
        started_from=stages(recipe.model.adapter),
        server=decided.about_server,
        total_steps=decided.length.total_steps,
    )
    return in_background(lambda: folder.update_manifest(hashes=hashes.result()))


def _adapter_hash(recipe: Recipe) -> dict[str, str]:
    """Of the adapter that the run starts from, which must be the same when it is continued."""
    if recipe.model.adapter is None:
        return {}
    return {"adapter": hash_files(Path(recipe.model.adapter).glob("adapter_*"))}


def _rewards_hash(recipe: Recipe) -> dict[str, str]:
    """Of the files of rewards, which must be the same when the run is continued."""
    return file_hashes(recipe.rewards) if recipe.reinforces else {}


class Callbacks:
    """What happens around the steps of a training and is asked for its results afterwards.

    The trainer calls them in the order in which it is given them: first what may end the run.
    """

    def __init__(self, session: Session) -> None:
        self.completion = Completion(session) if session.folder.is_trained else None
        self.samples = Samples(session)
        experts = ExpertLoad(session)
        self.meter = Meter(session, experts.row) if session.leads else None
        self.evaluator = Evaluator(session, self.meter) if session.prepared.eval is not None else None
        self.stop = CleanStop(session.trainer.accelerator, session.progress.message, session.folder.shared)
        start_up = session.start_up
        if session.leads:
            start_up.report = lambda seconds: session.folder.update_manifest(start_up=seconds)
        settings, pause = session.recipe.checkpoint, self.meter.pause if self.meter else lambda seconds: None
        self.selection = Selection(session, pause) if settings.keep_best or settings.average_last else None
        profiler = Profiler(session, self.meter.pause) if self.meter and session.recipe.logging.profile else None
        rehearsal = Rehearsal(session, pause)
        # What is not finite is noted before it ends the run.
        finite = BatchGuard(session) if session.recipe.faults.judges_steps else Finite(session)
        half = session.recipe.precision == "fp16"
        judging = (finite, Overflows(session, lambda: self.stop.stopped) if half else None)
        choosing = (self.selection, EarlyStopping(session), self.evaluator)
        watching = (experts, self.meter, *judging, *choosing, self.stop, profiler, start_up, rehearsal, Pace(session))
        reference = Reference(session) if session.recipe.refers else None
        for each in (
            self.completion,
            Comparable(session, self.evaluator.rows) if self.evaluator else None,
            TellLate(session.trainer),
            EndOfReading(),
            Verify(session),
            reference,
            self.samples,
            Seal(session),
            *watching,
        ):
            if each is not None:
                session.trainer.add_callback(each)
