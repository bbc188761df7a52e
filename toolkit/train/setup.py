"""Everything before the first step: data, model, trainer and callbacks, as the recipe says. Runs on every process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback, set_seed

from toolkit.common import UserError, write_json
from toolkit.data.audit import Audit, DataError, check_batch
from toolkit.data.collate import Collator, Seq2SeqCollator, isolates
from toolkit.data.prepare import Prepared, prepare
from toolkit.data.preview import render
from toolkit.distributed import (
    BatchLayout,
    Dtypes,
    EngineState,
    Length,
    World,
    batch_layout,
    dtypes,
    expected_state,
    fsdp_mesh,
    run_length,
)
from toolkit.distributed.rendezvous import Meeting
from toolkit.models import attention, kernels
from toolkit.models.adapters import add_method, cast_parameters, parameter_counts
from toolkit.models.load import load_config, load_model, load_tokenizer, stop_tokens, weight_files
from toolkit.planner.plan import UnknownSize
from toolkit.recipe import Loaded, Recipe
from toolkit.report.terminal import Progress
from toolkit.train import checkpoint, optimizer, preflight
from toolkit.train.arguments import build_arguments
from toolkit.train.callbacks import AtStart, CleanStop, Evaluator, Meter, Seal, StepTokens
from toolkit.train.evaluate import generated_metrics, row_lengths
from toolkit.train.plan_guard import Forecast, forecast
from toolkit.train.preflight import check_devices
from toolkit.train.process import prepare_process
from toolkit.train.run_folder import RunFolder, check_disk, describe, hash_files, now
from toolkit.train.session import Training
from toolkit.train.trainer import CausalTrainer, EncoderDecoderTrainer, FixedOrder
from toolkit.train.verify import EffectiveCheck


def set_up(
    loaded: Loaded,
    meeting: Meeting,
    folder: RunFolder | None,
    progress: Progress,
    swap: Path | None,
    at_start: Callable[[Training], None],
    force: bool = False,
) -> Training | None:
    """Everything before the first step. None when this run has been finished before.

    Args:
        meeting: All processes of the launch, before they have a process group.
        folder: The claimed run folder on the first process, None on the others.
        swap: Folder for what is offloaded to NVMe.
        at_start: Called on every process when the engine holds model and optimizer, before the first step.
        force: Whether to go on where the plan says that it will not fit.
    """
    recipe, world = loaded.recipe, meeting.world
    layout = batch_layout(recipe, world.world_size)
    prepare_process()
    check_devices(recipe, world)
    for warning in preflight.check(meeting, recipe, folder.path if folder else None):
        if world.rank == 0:
            progress.message(f"warning: {warning}")
    types = dtypes(recipe)
    backend = attention.resolve(
        recipe.model.attention, load_config(recipe).to_dict(), types.compute, kernels.available()
    )
    tokenizer = load_tokenizer(recipe)
    stops = stop_tokens(recipe, tokenizer)
    prepared = _prepare_data(recipe, tokenizer, stops, layout, folder, progress)
    outlook = _outlook(loaded, world, prepared, folder, progress, force) if world.rank == 0 else None
    preflight.agree(meeting, recipe, prepared.fingerprint)
    length = run_length(recipe, None if recipe.data.streaming else len(prepared.train), layout)
    arguments = build_arguments(loaded, layout, length, folder, world, swap)
    preflight.all_reduce(meeting, arguments.device)
    optimizer.check_arguments(recipe, arguments, length)
    folder = _shared(folder)
    arguments.output_dir = str(folder.checkpoints)
    if folder.finished:
        if world.rank == 0:
            already_finished(folder, progress)
        return None
    trainer = _trainer(recipe, types, backend, arguments, prepared, tokenizer, layout, length)
    training = Training(
        loaded, folder, layout, length, types, backend, prepared, tokenizer, stops, trainer, progress, outlook
    )  # fmt: skip
    training.resume_from = folder.resume_from
    if training.leads:
        counts = parameter_counts(trainer.model)
        check_disk(folder, recipe, counts)
        hashes = {"data": prepared.fingerprint, "model": hash_files(weight_files(recipe))}
        if training.resume_from and recipe.checkpoint.resume == "auto":
            folder.check_unchanged(hashes)
        _write_manifest(training, counts, hashes)
    _attach_callbacks(training, at_start)
    return training


def _outlook(
    loaded: Loaded, world: World, prepared: Prepared, folder: RunFolder | None, progress: Progress, force: bool
) -> Forecast | None:
    """The plan, printed; a run that would not fit ends here, before the weights load.

    No run ends for want of a plan.
    """
    try:
        outlook = forecast(loaded, world, prepared.statistics)
    except UnknownSize as error:
        progress.message(error.what)
        return None
    # A finished run keeps the plan beside its measured figures, wherever it is asked for again.
    if folder and not folder.finished:
        folder.update_manifest(plan=outlook.plan)
    progress.message(outlook.text.plain)
    if not force:
        outlook.check()
    return outlook


def _prepare_data(
    recipe: Recipe,
    tokenizer: Any,
    stops: frozenset[int],
    layout: BatchLayout,
    folder: RunFolder | None,
    progress: Progress,
) -> Prepared:
    """Tokenised data; its audit is printed and saved, also when it ends the run.

    One process tokenises while the others wait on a file lock; no process group exists yet that could time out.
    """

    def show(audit: Audit) -> None:
        if folder:
            write_json(folder.path / "audit.json", audit.model_dump())
            progress.message(render(audit))

    try:
        prepared = prepare(recipe, tokenizer, stops)
    except DataError as error:
        show(error.audit)
        raise
    show(check_batch(prepared.audit, layout.global_batch_size))
    return prepared


def _trainer(
    recipe: Recipe,
    types: Dtypes,
    backend: str,
    arguments: Any,
    prepared: Prepared,
    tokenizer: Any,
    layout: BatchLayout,
    length: Length,
) -> Any:
    """The model inside its trainer, with the order of rows of the whole run."""
    # Adapters are initialised at random before the trainer sets its own seed.
    set_seed(recipe.seed)
    kind = EncoderDecoderTrainer if recipe.objective == "seq2seq" else CausalTrainer
    trainer: Any = kind(
        model=add_method(load_model(recipe, types, backend), recipe, types),
        args=arguments,
        train_dataset=prepared.train,
        eval_dataset=prepared.eval,
        data_collator=_collator(recipe, backend, tokenizer),
        processing_class=tokenizer,
    )
    if recipe.method.name == "lora":
        # TRL turns the adapters of a quantized base to bf16; their masters are what the recipe's precision says.
        cast_parameters((each for each in trainer.model.parameters() if each.requires_grad), types.local)
    if not recipe.data.streaming:
        rows = len(prepared.train)
        trainer.order = FixedOrder(
            rows, length.total_steps * layout.global_batch_size, recipe.seed, recipe.data.shuffle
        )
    trainer.optimizer_cls_and_kwargs = optimizer.optimizer_class(recipe, arguments, trainer.model)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _attach_callbacks(training: Training, at_start: Callable[[Training], None]) -> None:
    trainer, progress = training.trainer, training.progress

    def record(state: EngineState) -> None:
        if training.leads:
            training.folder.update_manifest(effective=state)

    def start() -> None:
        if training.recipe.data.packing or training.attention in attention.VARLEN:
            _check_isolation(training)
        at_start(training)

    trainer.add_callback(EffectiveCheck(trainer, _wanted_state(training), record))
    trainer.add_callback(AtStart(start))
    if training.leads:
        training.meter = Meter(
            training.folder,
            training.length,
            progress,
            _step_tokens(training),
            training.outlook.plan.work.step_seconds.value if training.outlook else None,
            training.recipe.evaluation.every_steps if training.prepared.eval is not None else None,
        )
    training.stop = CleanStop(trainer.accelerator, progress.message if training.leads else lambda text: None)
    if training.prepared.eval is not None:
        settings = training.recipe.evaluation
        training.evaluator = Evaluator(
            lambda: _evaluate(training), settings.at_start, settings.every_steps, training.meter
        )
    seal = functools.partial(checkpoint.seal, recipe=training.recipe, world_size=training.layout.world_size)
    trainer.add_callback(Seal(trainer.accelerator, seal, training.recipe.checkpoint.save_total_limit))
    for callback in (training.meter, training.evaluator, training.stop):
        if callback is not None:
            trainer.add_callback(callback)


def _wanted_state(training: Training) -> EngineState:
    kind, _ = training.trainer.optimizer_cls_and_kwargs
    wanted = expected_state(
        training.recipe, training.layout, kind.__name__, attention.IMPLEMENTATIONS[training.attention]
    )
    if training.recipe.strategy.name == "fsdp":
        mesh = fsdp_mesh(training.recipe, World.from_environment())
        wanted.sharded_over = mesh["dp_shard_size"] if mesh else training.layout.world_size
    return wanted


def _evaluate(training: Training) -> dict[str, float]:
    """One evaluation on all processes: held-out loss and, where asked for, metrics of generated targets."""
    trainer, settings = training.trainer, training.recipe.evaluation
    batch_size = settings.batch_size or training.layout.micro_batch_size
    metrics = trainer.held_out(
        batch_size, training.progress.evaluating if training.leads else lambda batch, total: None
    )
    if settings.generation_metrics:
        metrics |= generated_metrics(
            training.module,
            training.prepared.eval,
            training.tokenizer,
            batch_size,
            trainer.accelerator,
            settings.max_new_tokens,
            settings.num_beams,
            training.stop_token_ids,
            training.dtypes.autocast,
        )
    trainer.log(dict(metrics))
    return metrics


def _shared(folder: RunFolder | None) -> RunFolder:
    """The first process's run folder, on every process."""
    box = [folder]
    if torch.distributed.is_initialized():
        broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def _check_isolation(training: Training) -> None:
    """Asks the model itself, on its device and in its precision."""
    device, backend, autocast = training.trainer.args.device, training.attention, training.dtypes.autocast
    with torch.autocast(device.type, getattr(torch, autocast)) if autocast else contextlib.nullcontext():
        isolated = isolates(training.module, "flat" if backend in attention.VARLEN else "packed", device)
    if not isolated:
        ways = ["data.packing=false"] * training.recipe.data.packing + ["model.attention=sdpa"] * (
            backend in attention.VARLEN
        )
        raise UserError(
            f"{type(training.module).__name__} with attention {backend} lets documents of a batch see each other",
            f"set {' and '.join(ways)}",
        )


def _collator(recipe: Recipe, backend: str, tokenizer: Any) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    if recipe.objective == "seq2seq":
        return Seq2SeqCollator(tokenizer.pad_token_id)
    if backend in attention.VARLEN:
        return Collator(tokenizer.pad_token_id, "flat")
    return Collator(tokenizer.pad_token_id, "packed" if recipe.data.packing else "padded")


def _step_tokens(training: Training) -> Callable[[int, int], int]:
    order, layout = training.trainer.order, training.layout
    if order is None:
        # The lengths of a stream's rows are not known beforehand: full sequences are assumed.
        return lambda first, last: (last - first) * layout.tokens_per_step
    return StepTokens(row_lengths(training.prepared.train), order, layout.global_batch_size).between


def _write_manifest(training: Training, counts: dict[str, int], hashes: dict[str, str]) -> None:
    started = training.folder.manifest().started if training.resume_from else None
    description = describe(training.loaded, training.layout, hashes)
    if started:
        description |= {"started": started, "continued": now()}
    training.folder.update_manifest(
        **description,
        parameters=counts,
        total_steps=training.length.total_steps,
        resumed_from=str(training.resume_from) if training.resume_from else None,
    )


def already_finished(folder: RunFolder, progress: Progress) -> None:
    progress.message(
        f"This run is finished: {folder.final}\n"
        "To train it again beside the old one, set checkpoint.resume=never or another output.name."
    )
