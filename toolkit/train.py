"""One training from a checked recipe: data, model, trainer, run folder. Runs on every process of the launch."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback, Seq2SeqTrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig

from toolkit import attention
from toolkit.callbacks import CleanStop, Evaluator, Meter, StepTokens, peak_host_bytes
from toolkit.card import write_card
from toolkit.data.audit import check_batch, render
from toolkit.data.collate import Collator, Seq2SeqCollator, isolates
from toolkit.data.prepare import Prepared, prepare
from toolkit.errors import UserError
from toolkit.evaluate import answer, as_prompt, generated_metrics
from toolkit.folder import RunFolder, check_disk, claim, describe, now, write_json
from toolkit.model import (
    add_method,
    load_config,
    load_model,
    load_tokenizer,
    locate,
    parameter_counts,
    stop_tokens,
)
from toolkit.policy import BatchLayout, Length, World, batch_layout, dtypes, run_length, training_arguments
from toolkit.progress import Progress, duration, prompts_before_after, summary
from toolkit.recipe import Loaded, Recipe
from toolkit.report import write_report
from toolkit.trainer import CausalTrainer, EncoderDecoderTrainer, FixedOrder


@dataclass
class Training:
    """A training that is set up and ready for its first step."""

    loaded: Loaded
    folder: RunFolder
    prepared: Prepared
    tokenizer: Any
    trainer: Any
    length: Length
    meter: Meter | None
    evaluator: Evaluator | None
    stop: CleanStop
    stop_token_ids: frozenset[int]
    resume_from: Path | None
    progress: Progress

    @property
    def leads(self) -> bool:
        """Whether this process talks to the user and writes the run folder."""
        return bool(self.trainer.is_world_process_zero())


def train(loaded: Loaded) -> None:
    """Trains a recipe: sets up, takes the steps, writes what comes out.

    Raises:
        UserError: Whatever the user can mend.
    """
    world = World.from_environment()
    progress = Progress()
    folder = claim(loaded) if world.rank == 0 else None
    if folder and folder.finished and world.world_size == 1:
        return _already_finished(folder, progress)
    training = set_up(loaded, world, folder, progress)
    if training is None:
        return
    samples = _samples_before(training)
    training.trainer.train(resume_from_checkpoint=str(training.resume_from) if training.resume_from else None)
    if training.stop.stopped:
        return _interrupted(training)
    finish(training, samples)


def set_up(loaded: Loaded, world: World, folder: RunFolder | None, progress: Progress) -> Training | None:
    """Everything before the first step. None when this run has been finished before.

    Args:
        folder: The claimed run folder on the first process, None on the others.
    """
    recipe = loaded.recipe
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not sys.stderr.isatty():
        disable_progress_bar()
    layout = batch_layout(recipe, world.world_size)
    _check_devices(recipe, world)
    types = dtypes(recipe)
    config = load_config(recipe)
    backend = attention.resolve(recipe.model.attention, config.to_dict(), types.compute)
    tokenizer = load_tokenizer(recipe)
    stops = stop_tokens(recipe, tokenizer)
    # One process tokenises while the others wait on a file lock; no process group exists yet that could time out.
    prepared = prepare(recipe, tokenizer, stops)
    audit = check_batch(prepared.audit, layout.global_batch_size)
    if folder:
        write_json(folder.path / "audit.json", audit)
        progress.message(render(audit))
    rows = None if recipe.data.streaming else len(prepared.train)
    length = run_length(recipe, rows, layout)
    arguments = _arguments(recipe, layout, length, folder)
    folder = _shared(folder)
    arguments.output_dir = str(folder.checkpoints)
    if folder.finished:
        if world.rank == 0:
            _already_finished(folder, progress)
        return None
    # Adapters are initialised at random before the trainer sets its own seed.
    set_seed(recipe.seed)
    model = add_method(load_model(recipe, types, backend), recipe, types)
    collate = _collator(recipe, backend, tokenizer)
    kind = EncoderDecoderTrainer if recipe.objective == "seq2seq" else CausalTrainer
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=prepared.train,
        eval_dataset=prepared.eval,
        data_collator=collate,
        processing_class=tokenizer,
    )
    if recipe.data.packing:
        _check_isolation(trainer, backend)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad and recipe.method.name == "lora":
            # TRL turns the adapters of a quantized base to bf16; their masters are what the recipe's precision says.
            parameter.data = parameter.data.to(getattr(torch, types.adapter))
    order = None
    if rows:
        order = FixedOrder(rows, length.total_steps * layout.global_batch_size, recipe.seed, recipe.data.shuffle)
    trainer.order = order
    trainer.remove_callback(PrinterCallback)
    leads = trainer.is_world_process_zero()
    counts = parameter_counts(trainer.model)
    resume_from = _resume_from(recipe, folder)
    if leads:
        check_disk(folder, recipe, counts, recipe.method.name == "full")
        _write_manifest(loaded, folder, layout, length, prepared, counts, backend, types, trainer, resume_from)
    meter = Meter(folder, length, progress, _step_tokens(prepared, order, layout)) if leads else None
    stop = CleanStop(trainer.accelerator, progress.message if leads else lambda text: None)
    evaluator = _evaluator(recipe, prepared, trainer, tokenizer, layout, meter, progress, stops, types.autocast)
    for callback in (meter, evaluator, stop):
        if callback is not None:
            trainer.add_callback(callback)
    return Training(
        loaded, folder, prepared, tokenizer, trainer, length, meter, evaluator, stop, stops, resume_from, progress
    )


def finish(training: Training, samples: list[dict[str, Any]]) -> None:
    """Evaluates, answers the prompts again, saves the model, writes card and report, and says where all is."""
    trainer, folder, recipe = training.trainer, training.folder, training.loaded.recipe
    if training.evaluator:
        training.evaluator.finish(trainer.state.global_step)
    _save_final(training)
    if not training.leads:
        return
    _write_samples(training, samples, "after")
    folder.update_manifest(
        status="finished", finished=now(), train_seconds=_seconds(folder), peak_memory_bytes=peak_host_bytes()
    )
    write_card(folder.final, folder.path, recipe, recipe.model.path)
    report = write_report(folder.path)
    training.progress.close()
    _say_results(training, samples, report)


def _arguments(recipe: Recipe, layout: BatchLayout, length: Length, folder: RunFolder | None) -> Any:
    """TrainingArguments. Building them starts the process group, and it must happen before the model is loaded."""
    kwargs = training_arguments(recipe, layout, length)
    cuda = torch.cuda.is_available()
    kwargs |= {"output_dir": str(folder.checkpoints) if folder else "unset", "dataloader_pin_memory": cuda, "use_cpu": not cuda}
    if cuda:
        kwargs["tf32"] = recipe.tf32
    if recipe.objective == "seq2seq":
        return Seq2SeqTrainingArguments(**kwargs)
    return SFTConfig(**kwargs, max_length=None, packing=False, dataset_kwargs={"skip_prepare_dataset": True})


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
        raise UserError("precision=fp16 needs a GPU: its loss scaling does not run on a CPU", "set precision=bf16 or fp32")
    if recipe.precision == "bf16" and gpus and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{torch.cuda.get_device_name()} has no bf16", "set precision=fp16 or fp32")
    if recipe.optimizer.name.startswith("paged") and not gpus:
        raise UserError(
            f"optimizer.name={recipe.optimizer.name} pages between GPU and host memory and needs a GPU",
            f"set optimizer.name={recipe.optimizer.name.removeprefix('paged_')}",
        )


def _check_isolation(trainer: Any, backend: str) -> None:
    """Asks the model itself, on its device and in its precision, and before an engine shards it."""
    with trainer.accelerator.autocast():
        isolated = isolates(trainer.model, "flat" if backend in attention.VARLEN else "packed")
    if not isolated:
        name = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
        raise UserError(
            f"data.packing: {name} with attention {backend} lets packed documents see each other",
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


def _step_tokens(prepared: Prepared, order: FixedOrder | None, layout: BatchLayout) -> Callable[[int, int], int]:
    if order is None:
        # The lengths of a stream's rows are not known beforehand: full sequences are assumed.
        return lambda first, last: (last - first) * layout.tokens_per_step
    return StepTokens(row_lengths(prepared.train), order, layout.global_batch_size).between


def row_lengths(dataset: Any) -> np.ndarray:
    """(num_rows,) tokens of each row, read from Arrow's offsets without decoding the rows."""
    import pyarrow.compute as pc

    table = dataset.with_format("arrow")[:]
    return np.asarray(pc.list_value_length(table["input_ids"]))


def _evaluator(
    recipe: Recipe,
    prepared: Prepared,
    trainer: Any,
    tokenizer: Any,
    layout: BatchLayout,
    meter: Meter | None,
    progress: Progress,
    stops: frozenset[int],
    autocast: str | None,
) -> Evaluator | None:
    if prepared.eval is None:
        return None
    settings = recipe.evaluation
    batch_size = settings.batch_size or layout.micro_batch_size

    def evaluate() -> dict[str, float]:
        metrics = trainer.held_out(batch_size, progress.evaluating if meter else lambda batch, total: None)
        if settings.generation_metrics:
            model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
            metrics |= generated_metrics(
                model, prepared.eval, trainer.data_collator, tokenizer, batch_size, trainer.accelerator,
                settings.max_new_tokens, settings.num_beams, stops, autocast,
            )  # fmt: skip
        trainer.log(dict(metrics))
        return metrics

    return Evaluator(evaluate, settings.at_start, settings.every_steps, meter)


def _write_manifest(
    loaded: Loaded,
    folder: RunFolder,
    layout: BatchLayout,
    length: Length,
    prepared: Prepared,
    counts: dict[str, int],
    backend: str,
    types: Any,
    trainer: Any,
    resume_from: Path | None,
) -> None:
    where = Path(locate(loaded.recipe)["pretrained_model_name_or_path"])
    weights = [file for pattern in ("*.safetensors", "*.gguf", "*.bin", "config.json") for file in where.glob(pattern)]
    optimizer, _ = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    folder.update_manifest(
        **describe(loaded, layout, prepared.fingerprint, weights),
        parameters=counts,
        total_steps=length.total_steps,
        resumed_from=str(resume_from) if resume_from else None,
        effective={
            "attention": backend,
            "weights": types.load,
            "compute": types.compute,
            "optimizer": getattr(optimizer, "__name__", str(optimizer)),
            "device": str(trainer.args.device),
        },
    )


def _samples_before(training: Training) -> list[dict[str, Any]]:
    """The prompts with the untrained model's answers; read back when a run is continued."""
    if not training.leads:
        return []
    file = training.folder.path / "samples.json"
    if training.resume_from and file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    settings = training.loaded.recipe.evaluation
    samples = [dict(sample) for sample in _prompts(training)][: settings.num_prompts]
    if samples:
        training.progress.message(f"Answering {len(samples)} prompts before training")
    _write_samples(training, samples, "before")
    return samples


def _prompts(training: Training) -> list[dict[str, Any]]:
    given = training.loaded.recipe.evaluation.prompts
    if not given:
        return list(training.prepared.samples)
    return [{"prompt": text, "input_ids": as_prompt(training.tokenizer, text), "reference": None} for text in given]


def _write_samples(training: Training, samples: list[dict[str, Any]], when: str) -> None:
    if not samples:
        return
    model = training.trainer.accelerator.unwrap_model(training.trainer.model)
    answers = answer(
        model,
        training.tokenizer,
        [sample["input_ids"] for sample in samples],
        training.loaded.recipe.evaluation.max_new_tokens,
        training.stop_token_ids,
        dtypes(training.loaded.recipe).autocast,
    )
    for sample, text in zip(samples, answers, strict=True):
        sample[when] = text
    shown = [{key: value for key, value in sample.items() if key != "input_text"} for sample in samples]
    write_json(training.folder.path / "samples.json", shown)


def _save_final(training: Training) -> None:
    trainer, recipe = training.trainer, training.loaded.recipe
    if recipe.method.name == "full":
        # The masters have done their work; the model is published in the precision it computes in.
        trainer.accelerator.unwrap_model(trainer.model).to(getattr(torch, dtypes(recipe).export))
    trainer.save_model(str(training.folder.final))


def _seconds(folder: RunFolder) -> float | None:
    started = folder.manifest().get("started")
    if not started:
        return None
    return round((datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(started)).total_seconds(), 1)


def _interrupted(training: Training) -> None:
    if not training.leads:
        return
    step = training.trainer.state.global_step
    training.folder.update_manifest(status="interrupted", finished=now())
    write_report(training.folder.path)
    training.progress.close()
    training.progress.message(
        f"Stopped at step {step} of {training.length.total_steps}; a checkpoint is saved in {training.folder.path}.\n"
        "The same command continues from there."
    )


def _already_finished(folder: RunFolder, progress: Progress) -> None:
    progress.message(
        f"This run is finished: {folder.final}\n"
        "To train it again beside the old one, set checkpoint.resume=never or another output.name."
    )


def _say_results(training: Training, samples: list[dict[str, Any]], report: Path) -> None:
    folder, evaluator = training.folder, training.evaluator
    if samples:
        print("\n" + prompts_before_after(samples))
    rows: list[tuple[str, str]] = []
    if evaluator and evaluator.last:
        last = evaluator.last["eval_loss"]
        text = f"{last:.4f} (perplexity {evaluator.last['eval_perplexity']:.2f})"
        if evaluator.first:
            before = evaluator.first["eval_loss"]
            text = f"{before:.4f} -> {text}, {(last - before) / before:+.1%}"
        rows.append(("held-out loss", text))
    if training.meter and training.meter.last:
        rows.append(("training loss", f"{training.meter.last['loss']:.4f}"))
    rows.append(("steps", f"{training.trainer.state.global_step}"))
    rows.append(("time", duration(_seconds(folder) or 0)))
    rows.append(("peak memory", f"{peak_host_bytes() / 2**30:.2f} GiB (host)"))
    if torch.cuda.is_available():
        rows.append(("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (GPU)"))
    rows += [("run folder", str(folder.path)), ("model", str(folder.final)), ("report", str(report))]
    print("\n" + summary(rows))

