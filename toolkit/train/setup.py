"""Everything before the first step: data, plan, processes, model, trainer, callbacks. Runs on every process.

The order matters: what can be refused is refused before what is slow, the plan is made before TrainingArguments start
the process group, and those exist before the model is loaded, because ZeRO-3 and FSDP need them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback, set_seed

from toolkit.common import in_background
from toolkit.data.audit import Audit, DataError
from toolkit.data.prepare import Prepared, prepare
from toolkit.data.preview import render
from toolkit.data.problems import with_settings
from toolkit.data.rewards import Scorer, file_hashes
from toolkit.data.streaming import Stream
from toolkit.distributed.engines import Dtypes, dtypes
from toolkit.distributed.layout import batch_layout, run_length
from toolkit.distributed.rendezvous import Rendezvous
from toolkit.files import check_disk, write_json
from toolkit.models import attention, attention_kernels, compiled_layers, device, dropout
from toolkit.models.adapter_init import begin_with_lost, begin_with_read
from toolkit.models.adapters import add_method, cast_buffers, cast_parameters, part_of_base
from toolkit.models.cast_choice import drops_casts, keeps_casts
from toolkit.models.coverage import parameter_counts, require_quantized
from toolkit.models.heads import auto_class
from toolkit.models.load import ModelSource
from toolkit.models.parts import divide_model, require_plans
from toolkit.models.pipeline import elsewhere, split_layers
from toolkit.models.step_casts import StepCasts, drop_with_layers
from toolkit.models.teacher import check_vocabulary, load_teacher, open_teacher
from toolkit.models.tiled_mlp import tile_mlps
from toolkit.planner.build import run_folder_bytes
from toolkit.planner.notes import SLOWER
from toolkit.planner.plan import UnknownSize
from toolkit.recipe import Loaded, Recipe
from toolkit.recipe.errors import warn
from toolkit.recipe.precisions import FP8_SCALING
from toolkit.recipe.rules import warnings_of_length
from toolkit.recipe.sections import EVA_ROWS
from toolkit.report.load import Parameters
from toolkit.report.plan_text import brief_text
from toolkit.report.terminal import Progress
from toolkit.train import agreed, checkpoint, optimizer, preflight
from toolkit.train.arguments import build_arguments
from toolkit.train.batch_guard import BatchGuard
from toolkit.train.batching import collator, micro_batches, score_parts, share
from toolkit.train.callbacks import CleanStop, Evaluator, Meter, Seal
from toolkit.train.completion import Completion, source_of
from toolkit.train.expert_load import ExpertLoad
from toolkit.train.finite import Finite
from toolkit.train.late_rows import TellLate
from toolkit.train.objectives import head_of, settings_of, trainer_class, with_numbers
from toolkit.train.plan_guard import PlanGuard, plan_run
from toolkit.train.profiler import Profiler
from toolkit.train.reference import Reference
from toolkit.train.rehearsal import Rehearsal
from toolkit.train.rollouts import Asker
from toolkit.train.run_folder import RunFolder, hash_files, stages
from toolkit.train.samples import Samples
from toolkit.train.selection import EarlyStopping, Selection
from toolkit.train.served_answers import ServedAnswers, connect
from toolkit.train.session import Session
from toolkit.train.slow_disk import open_folder
from toolkit.train.staging import Saves
from toolkit.train.startup import StartUp
from toolkit.train.stragglers import Pace
from toolkit.train.unpickling import EndOfReading
from toolkit.train.verify import Verify, require_isolation
from toolkit.train.watchdog import Watchdog

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
    recipe, world = loaded.recipe, rendezvous.world
    first = world.rank == 0
    layout, types = batch_layout(recipe, world.world_size), dtypes(recipe)

    require_plans(source.config, layout.expert)
    # Architecture: asked before TrainingArguments, after which ZeRO-3 would divide every model among the processes.
    teaches = open_teacher(recipe)
    kind: Any = trainer_class(recipe)
    if not recipe.headed:
        kind = functools.partial(kind, choice=head_of(source, first))

    # Data: one process tokenises while the others wait on a file lock; no process group exists that could time out.
    kinds = attention_kernels.available(types.compute)
    backend = attention.resolve(
        recipe.model.attention, source.config.to_dict(), types.compute, kinds, recipe.parallel.shares_by, recipe.headed
    )
    require_isolation(source, backend)
    tokenizer = source.tokenizer()
    stops = source.stop_tokens(tokenizer)
    server, about_server = connect(rendezvous, recipe, tokenizer, folder.path) if recipe.rollout.server else (None, {})
    common = check_vocabulary(source, tokenizer, teaches) if teaches else 0
    prepared = _prepare(source, tokenizer, stops, folder if first else None, progress)
    source = source.labelled(prepared.classes, tokenizer)

    start_up.ended("data")
    # Plan: a run that would not fit ends here, before TrainingArguments prepare an engine and the weights load.
    guard = _checked(plan_run(loaded, world, source, prepared.statistics), folder, progress, force) if first else None
    loaded, layout = agreed.decided(loaded, layout, guard, rendezvous)
    loaded, guard, fast = open_folder(loaded, guard, rendezvous, folder, progress.message)
    compiles = recipe.compile != "off" and agreed.compiles(recipe, rendezvous, guard)
    if compiles:
        compiled_layers.prepare(device.kind())
    if recipe.model.attention == "auto":
        backend = agreed.attention_for_rows(backend, rendezvous, guard)
    split = agreed.stages_of(recipe, source, rendezvous, guard) if layout.pipeline > 1 else None
    _log.debug("attention: %s; on this machine: %s", backend, kinds)
    rows = None if isinstance(prepared.train, Stream) else len(prepared.train)
    length = run_length(recipe, rows, layout)
    liger = recipe.compile == "auto" and not compiles and device.kind() == "cuda" and agreed.has_liger(rendezvous)
    reach = agreed.reach_of(recipe, source, rendezvous)
    loaded = agreed.with_flash_attention(
        loaded, source, backend, layout, prepared.statistics, length.total_steps, rendezvous, progress
    )

    start_up.ended("plan")

    # Processes: whoever has come this far has the same data and files; TrainingArguments start the process group.
    preflight.agree(rendezvous, source, prepared.fingerprint, teaches)
    if first:
        warn(warnings_of_length(loaded, length.total_steps, length.epochs, length.warmup_steps))
    arguments = build_arguments(loaded, layout, length, folder, world, swap)
    waits = recipe.strategy.name == "ddp" and world.world_size > 1
    if waits and not reach.inside and "ddp_find_unused_parameters" not in recipe.extra.training_arguments:
        arguments.ddp_find_unused_parameters = True
    preflight.all_reduce(rendezvous, arguments.device, recipe.parallel)
    watchdog.start()
    optimizer.check_arguments(recipe, arguments, length)

    # Model: adapters are initialised at random before the trainer sets its own seed.
    set_seed(recipe.seed)
    begins, apart = source_of(source, folder), world.world_size // layout.pipeline
    away = elsewhere(auto_class(recipe.objective), begins.config, split, world.rank // apart) if split else ()
    base = begins.load(types, backend, away)
    dropout.install()
    share(layout)
    # Now all files are there. Beside all that follows: to hash gigabytes takes minutes, in which the others would wait.
    model_hash = in_background(lambda: _hashes(source, teaches)) if first else None
    require_quantized(base, recipe)
    if recipe.strategy.name == "fsdp" and types.compute != types.load:
        cast_buffers(base, types.compute)  # FSDP gathers parameters in this type, and leaves these as they are.
    if liger:
        agreed.use_liger(base, arguments.device, progress)
    new_tokens: Any = tokenizer.convert_tokens_to_ids(recipe.model.new_tokens)
    set_seed(recipe.seed)  # Some models draw numbers while they are loaded, as many as the engine lets them.
    model = add_method(base, begins.recipe, types, new_tokens=new_tokens, reach=reach)
    if reach.outside:
        progress.message(f"No text reaches {', '.join(reach.outside)}, which are not trained")
    start = part_of_base(model, begins.recipe)
    divide_model(model, layout.tensor, layout.expert, world.rank)
    if layout.tensor > 1 and types.load == "float32":
        cast_parameters(model.parameters(), types.load)  # They may have been read as they lie in their files.
    tile_mlps(model, recipe.activation_checkpointing.mlp_tiles)
    counts = Parameters(**parameter_counts(model))
    if split:
        split_layers(model, split)
    if scaling := FP8_SCALING.get(recipe.precision):
        # torchao takes a second to import.
        from toolkit.models.fp8_products import multiply_in_fp8

        inner = multiply_in_fp8(model, scaling)

    # Trainer
    train = prepared.train.divided(world.world_size) if isinstance(prepared.train, Stream) else prepared.train
    train, held_out = with_numbers(recipe, train, prepared.eval)
    # TRL turns adapters on a base of nf4 or int8 to bf16, which rounds them.
    masters = (
        [(each, each.data) for each in model.parameters() if each.requires_grad] if recipe.method.quantization else []
    )
    trainer: Any = kind(
        model=model,
        args=arguments,
        # Lists of numbers take longer to turn into tensors than the rest of a batch.
        train_dataset=train.with_format("numpy"),
        eval_dataset=held_out,
        data_collator=collator(recipe, backend, tokenizer, compiles, layout.part_of_rows(world.rank)),
        processing_class=tokenizer,
    )
    trainer.schedule = recipe.parallel.schedule
    trainer.objective, trainer.settings = recipe.objective, settings_of(recipe)
    trainer.classes = prepared.classes
    if recipe.embeds:
        trainer.embedding, trainer.pooling, trainer.group = recipe.embedding, source.pooling, layout.global_batch_size
    if recipe.writes:
        trainer.asker = Asker(recipe, tokenizer, stops, types.autocast, Scorer(recipe.rewards))
        trainer.folder = folder.path if first else None
    if recipe.reinforces:
        trainer.resumed = folder.resume_from
        if server:
            trainer.served = ServedAnswers(server, recipe, stops, folder.path, types, start)
    if teaches:
        offload = bool(recipe.distillation.teacher and recipe.distillation.teacher.offload)
        trainer.teacher = load_teacher(teaches, backend, kinds, common, arguments.device, offload)
    if layout.sharing > 1:
        score_parts(trainer, recipe.parallel.shares_by)
    trainer.saves = Saves(folder.checkpoints, recipe, world.world_size, checkpoint.trained(trainer.model), fast)
    notes = [_BALANCE] if getattr(trainer, "aux_loss_enabled", False) else []
    for parameter, value in masters:
        parameter.data = value.to(parameter.device)
    # Compiled layers make their copies themselves, in one kernel with what reads them where they can.
    if types.autocast and not compiles and keeps_casts(recipe):
        trainer.casts = StepCasts()
    if drops_casts(recipe):
        drop_with_layers(trainer.model)
    if not isinstance(prepared.train, Stream):
        trainer.batches = micro_batches(recipe, prepared.train, trainer.data_collator, layout, length.total_steps)
    if not folder.resume_from and not recipe.model.adapter:
        _begin(trainer, source, types, prepared.train)
    trainer.optimizer_cls_and_kwargs = optimizer.optimizer_class(recipe, arguments, trainer.model)
    trainer.remove_callback(PrinterCallback)
    compiled = agreed.compiled(recipe, trainer.model) if compiles else None

    hashed = None
    if model_hash:
        for note in notes:
            _log.warning("%s", note)
        if code := _rewards_hash(recipe).get("rewards.file"):
            progress.message(
                f"The reward `{recipe.rewards.function}` is code of {recipe.rewards.file} (SHA-256 {code}), which runs "
                "as you"
            )
        if scaling:
            progress.message(f"{inner:,} of {counts.base:,} parameters are multiplied in fp8, the rest in bf16")
        if recipe.method.name == "lora":
            progress.message(f"{counts.base:,} parameters: {counts.shares}")
        checkpoint.check_fits(folder.resume_from, trainer.saves.model)
        folder.describe(
            loaded,
            layout,
            {"data": prepared.fingerprint, **_adapter_hash(recipe), **_rewards_hash(recipe)}
            # What is continued must be the same before it goes on.
            | (model_hash.result() if folder.resume_from else {}),
            parameters=counts,
            notes=notes,
            started_from=stages(recipe.model.adapter),
            server=about_server,
            total_steps=length.total_steps,
        )
        hashed = in_background(lambda: folder.update_manifest(hashes=model_hash.result()))
    # What ends a process from here on, it may note in the folder.
    (folder.accepted,) = broadcast_object_list([folder.accepted])
    start_up.ended("model")
    return Session(
        loaded=loaded,
        world=world,
        source=source,
        folder=folder,
        layout=layout,
        length=length,
        dtypes=types,
        attention=backend,
        compiled=compiled,
        prepared=prepared,
        tokenizer=tokenizer,
        stop_token_ids=stops,
        start=start,
        guard=guard,
        hashed=hashed,
        trainer=trainer,
        progress=progress,
        start_up=start_up,
    )


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


def _hashes(source: ModelSource, teaches: ModelSource | None) -> dict[str, str]:
    """Of the files of the model and of its teacher, which must be the same when the run is continued."""
    hashes = {"model": hash_files(source.weight_files())}
    return hashes | ({"teacher": hash_files(teaches.weight_files())} if teaches else {})


def _adapter_hash(recipe: Recipe) -> dict[str, str]:
    """Of the adapter that the run starts from, which must be the same when it is continued."""
    if recipe.model.adapter is None:
        return {}
    return {"adapter": hash_files(Path(recipe.model.adapter).glob("adapter_*"))}


def _rewards_hash(recipe: Recipe) -> dict[str, str]:
    """Of the files of rewards, which must be the same when the run is continued."""
    return file_hashes(recipe.rewards) if recipe.reinforces else {}


def _prepare(
    source: ModelSource, tokenizer: Any, stops: frozenset[int], folder: RunFolder | None, progress: Progress
) -> Prepared:
    """Tokenised data; its audit is printed and saved, also when it ends the run."""

    def show(audit: Audit) -> None:
        if folder:
            folder.once_accepted(lambda: write_json(folder.path / "audit.json", audit.model_dump()))
            progress.message(render(audit, str(folder.path / "audit.json")))

    try:
        prepared = prepare(source.recipe, tokenizer, stops, vocab_size=source.vocab_size)
    except DataError as error:
        show(error.audit)
        raise
    show(with_settings(prepared.audit, source.recipe))
    return prepared


def _checked(guard: PlanGuard, folder: RunFolder, progress: Progress, force: bool) -> PlanGuard | None:
    """The plan, printed and kept in the run folder, for which the disk must do. No run ends for want of a plan."""
    try:
        folder.update_manifest(plan=guard.plan)
    except UnknownSize as error:
        progress.message(error.what)
        return None
    progress.message(brief_text(guard.plan).plain)
    for note in guard.plan.notes:
        # One that was left to the plan stays as the run began.
        if note.startswith(SLOWER) and "precision" not in guard.loaded.chosen:
            _log.warning("%s", note)
    if not force:
        guard.check()
    check_disk(
        folder.path,
        run_folder_bytes(guard.loaded.recipe, guard.plan.disk),
        "checkpoints and models need up to",
        "set output.dir to another disk, or lower checkpoint.save_total_limit",
    )
    return guard


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
        self.stop = CleanStop(session.trainer.accelerator, session.progress.message)
        start_up = session.start_up
        if session.leads:
            start_up.report = lambda seconds: session.folder.update_manifest(start_up=seconds)
        settings, pause = session.recipe.checkpoint, self.meter.pause if self.meter else lambda seconds: None
        self.selection = Selection(session, pause) if settings.keep_best or settings.average_last else None
        profiler = Profiler(session, self.meter.pause) if self.meter and session.recipe.logging.profile else None
        rehearsal = Rehearsal(session, pause)
        # What is not finite is noted before it ends the run.
        finite = BatchGuard(session) if session.recipe.faults.judges_steps else Finite(session)
        choosing = (self.selection, EarlyStopping(session), self.evaluator)
        watching = (experts, self.meter, finite, *choosing, self.stop, profiler, start_up, rehearsal, Pace(session))
        reference = Reference(session) if session.recipe.refers else None
        for each in (
            self.completion,
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
