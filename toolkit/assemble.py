"""Everything before the first step: data, model, trainer and callbacks, as the recipe says. Runs on every process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import broadcast_object_list
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import PrinterCallback, Seq2SeqTrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig

from toolkit import attention, optimization
from toolkit.callbacks import AtStart, CleanStop, Evaluator, Meter, StepTokens
from toolkit.data.audit import Audit, DataError, check_batch, render
from toolkit.data.collate import Collator, Seq2SeqCollator, isolates
from toolkit.data.prepare import Prepared, prepare
from toolkit.errors import UserError
from toolkit.evaluate import generated_metrics, row_lengths
from toolkit.folder import RunFolder, check_disk, describe, hash_files, now, write_json
from toolkit.model import (
    add_method,
    cast_parameters,
    load_config,
    load_model,
    load_tokenizer,
    parameter_counts,
    stop_tokens,
    weight_files,
)
from toolkit.policy import (
    BatchLayout,
    Dtypes,
    Length,
    World,
    batch_layout,
    checkpoints_in_fsdp,
    dtypes,
    fsdp_dtypes,
    fsdp_mesh,
    run_length,
    training_arguments,
)
from toolkit.progress import Progress
from toolkit.recipe import Loaded, Recipe
from toolkit.trainer import CausalTrainer, EncoderDecoderTrainer, FixedOrder

# malloc.h: from which size on blocks are mapped one by one, and how much free memory is kept.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


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
    resume_from: Path | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
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


def set_up(
    loaded: Loaded,
    world: World,
    folder: RunFolder | None,
    progress: Progress,
    at_start: Callable[[Training], None],
) -> Training | None:
    """Everything before the first step. None when this run has been finished before.

    Args:
        folder: The claimed run folder on the first process, None on the others.
        at_start: Called on every process when the engine holds model and optimizer, before the first step.
    """
    recipe = loaded.recipe
    layout = batch_layout(recipe, world.world_size)
    _prepare_process()
    _check_devices(recipe, world)
    types = dtypes(recipe)
    backend = attention.resolve(recipe.model.attention, load_config(recipe).to_dict(), types.compute)
    tokenizer = load_tokenizer(recipe)
    stops = stop_tokens(recipe, tokenizer)
    prepared = _prepare_data(recipe, tokenizer, stops, layout, folder, progress)
    length = run_length(recipe, None if recipe.data.streaming else len(prepared.train), layout)
    arguments = _arguments(recipe, layout, length, folder, world)
    optimization.check_arguments(recipe, arguments, length)
    folder = _shared(folder)
    arguments.output_dir = str(folder.checkpoints)
    if folder.finished:
        if world.rank == 0:
            already_finished(folder, progress)
        return None
    trainer = _trainer(recipe, types, backend, arguments, prepared, tokenizer, layout, length)
    training = Training(
        loaded, folder, layout, length, types, backend, prepared, tokenizer, stops, trainer, progress
    )  # fmt: skip
    training.resume_from = _resume_from(recipe, folder)
    if training.leads:
        counts = parameter_counts(trainer.model)
        check_disk(folder, recipe, counts)
        hashes = {"data": prepared.fingerprint, "model": hash_files(weight_files(recipe))}
        if training.resume_from and recipe.checkpoint.resume == "auto":
            folder.check_unchanged(hashes)
        _write_manifest(training, counts, hashes)
    _attach_callbacks(training, at_start)
    return training


def _prepare_process() -> None:
    """Settings of libraries that must be made before they start working."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _use_whole_cpu()
    if not sys.stderr.isatty():
        disable_progress_bar()


def _use_whole_cpu() -> None:
    """Threads and memory for training on a CPU.

    `accelerate launch` and torchrun set OMP_NUM_THREADS=1, whatever the machine has. And glibc hands large blocks back
    to the kernel after every operation, which then clears each page anew: 12 demo steps took 31 s instead of 23.
    """
    if {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(torch.get_num_threads(), (os.cpu_count() or 1) // processes))
    with contextlib.suppress(AttributeError, OSError):  # Not every C library has it.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**26)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)


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
            write_json(folder.path / "audit.json", audit)
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
    trainer.optimizer_cls_and_kwargs = optimization.optimizer_class(recipe, arguments, trainer.model)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _attach_callbacks(training: Training, at_start: Callable[[Training], None]) -> None:
    trainer, progress = training.trainer, training.progress

    def start() -> None:
        if training.recipe.data.packing:
            _check_isolation(training)
        at_start(training)

    trainer.add_callback(AtStart(start))
    if training.leads:
        training.meter = Meter(training.folder, training.length, progress, _step_tokens(training))
    training.stop = CleanStop(trainer.accelerator, progress.message if training.leads else lambda text: None)
    if training.prepared.eval is not None:
        settings = training.recipe.evaluation
        training.evaluator = Evaluator(
            lambda: _evaluate(training), settings.at_start, settings.every_steps, training.meter
        )
    for callback in (training.meter, training.evaluator, training.stop):
        if callback is not None:
            trainer.add_callback(callback)


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


def _arguments(recipe: Recipe, layout: BatchLayout, length: Length, folder: RunFolder | None, world: World) -> Any:
    """TrainingArguments. Building them starts the process group, and it must happen before the model is loaded.

    Raises:
        UserError: If accelerate does not see all the processes that were launched.
    """
    kwargs = training_arguments(recipe, layout, length)
    cuda = torch.cuda.is_available()
    kwargs |= {
        "output_dir": str(folder.checkpoints) if folder else "unset",
        "dataloader_pin_memory": cuda,
        "use_cpu": not cuda and recipe.strategy.name in ("single", "ddp"),
    }
    if cuda:
        kwargs["tf32"] = recipe.tf32
    if folder:
        kwargs["run_name"] = folder.path.name
        if "tensorboard" in recipe.logging.trackers:
            os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder.path / "tensorboard"))
    if mesh := fsdp_mesh(recipe, world):
        kwargs["parallelism_config"] = ParallelismConfig(**mesh)
    arguments: Any
    if recipe.objective == "seq2seq":
        arguments = Seq2SeqTrainingArguments(**kwargs)
    else:
        arguments = SFTConfig(**kwargs, max_length=None, packing=False, dataset_kwargs={"skip_prepare_dataset": True})
    if arguments.world_size != world.world_size:
        raise UserError(
            f"strategy.name={recipe.strategy.name}: {world.world_size} processes were launched, and accelerate sees "
            f"{arguments.world_size} on {arguments.device}: its engines run on GPUs only",
            "set strategy.name=ddp",
        )
    if recipe.strategy.name == "fsdp":
        arguments.fsdp_plugin_args |= _fsdp_plugin(recipe)
    return arguments


def _fsdp_plugin(recipe: Recipe) -> dict[str, Any]:
    """What accelerate's FSDP plugin takes and TrainingArguments do not pass on."""
    types = {key: getattr(torch, name) if name else None for key, name in fsdp_dtypes(recipe).items()}
    plugin: dict[str, Any] = {
        "mixed_precision_policy": MixedPrecisionPolicy(**types),  # type: ignore[arg-type]
        "activation_checkpointing_offload": recipe.activation_checkpointing.mode == "offload"
        and checkpoints_in_fsdp(recipe),
    }
    if recipe.strategy.offload_param == "cpu":
        plugin["cpu_offload"] = CPUOffloadPolicy(pin_memory=recipe.strategy.pin_memory)
    return plugin


def _shared(folder: RunFolder | None) -> RunFolder:
    """The first process's run folder, on every process."""
    box = [folder]
    if torch.distributed.is_initialized():
        broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def _check_devices(recipe: Recipe, world: World) -> None:
    gpus = torch.cuda.device_count()
    if gpus > 1 and world.world_size == 1:
        command = f"accelerate launch --multi_gpu --num_processes {gpus} toolkit/run.py …"
        raise UserError(
            f"this machine has {gpus} GPUs and one process was started",
            f"launch all of them with `{command}`, or make one visible with CUDA_VISIBLE_DEVICES=0",
        )
    if recipe.precision == "fp16" and not gpus:
        raise UserError(
            "precision=fp16 needs a GPU: its loss scaling does not run on a CPU", "set precision=bf16 or fp32"
        )
    if recipe.precision == "bf16" and gpus and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{torch.cuda.get_device_name()} has no bf16", "set precision=fp16 or fp32")
    if recipe.activation_checkpointing.mode == "offload" and not gpus:
        raise UserError(
            "activation_checkpointing.mode=offload moves activations from a GPU to host memory; there is no GPU here",
            "set activation_checkpointing.mode=full",
        )
    optimization.check_available(recipe)
    for tracker in recipe.logging.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise UserError(
                f"logging.trackers: {tracker} is not installed",
                f"run `pip install {tracker}`, or remove it from the list",
            )


def _check_isolation(training: Training) -> None:
    """Asks the model itself, on its device and in its precision."""
    accelerator, backend = training.trainer.accelerator, training.attention
    with accelerator.autocast():
        isolated = isolates(training.module, "flat" if backend in attention.VARLEN else "packed", accelerator.device)
    if not isolated:
        raise UserError(
            f"data.packing: {type(training.module).__name__} with attention {backend} lets packed documents see each "
            "other",
            "set data.packing=false",
        )


def _collator(recipe: Recipe, backend: str, tokenizer: Any) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    if recipe.objective == "seq2seq":
        return Seq2SeqCollator(tokenizer.pad_token_id)
    if backend in attention.VARLEN:
        return Collator(tokenizer.pad_token_id, "flat")
    return Collator(tokenizer.pad_token_id, "packed" if recipe.data.packing else "padded")


def _resume_from(recipe: Recipe, folder: RunFolder) -> Path | None:
    wanted = recipe.checkpoint.resume
    if wanted == "never":
        return None
    return folder.newest_checkpoint() if wanted == "auto" else Path(wanted)


def _step_tokens(training: Training) -> Callable[[int, int], int]:
    order, layout = training.trainer.order, training.layout
    if order is None:
        # The lengths of a stream's rows are not known beforehand: full sequences are assumed.
        return lambda first, last: (last - first) * layout.tokens_per_step
    return StepTokens(row_lengths(training.prepared.train), order, layout.global_batch_size).between


def _write_manifest(training: Training, counts: dict[str, int], hashes: dict[str, str]) -> None:
    optimizer, _ = training.trainer.optimizer_cls_and_kwargs
    started = training.folder.manifest().get("started") if training.resume_from else None
    facts = describe(training.loaded, training.layout, hashes)
    if started:
        facts |= {"started": started, "continued": now()}
    training.folder.update_manifest(
        **facts,
        parameters=counts,
        total_steps=training.length.total_steps,
        resumed_from=str(training.resume_from) if training.resume_from else None,
        effective={
            "attention": training.attention,
            "weights": training.dtypes.load,
            "compute": training.dtypes.compute,
            "optimizer": getattr(optimizer, "__name__", str(optimizer)),
            "device": str(training.trainer.args.device),
        },
    )


def already_finished(folder: RunFolder, progress: Progress) -> None:
    progress.message(
        f"This run is finished: {folder.final}\n"
        "To train it again beside the old one, set checkpoint.resume=never or another output.name."
    )
