"""One training from a checked recipe. Runs on every process of the launch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch

from toolkit.common import duration, write_json
from toolkit.distributed import World
from toolkit.distributed.nvme import swap_folder
from toolkit.distributed.rendezvous import Meeting, meet
from toolkit.models.load import count_parameters, restore_config
from toolkit.planner.plan import UnknownSize
from toolkit.recipe import Loaded
from toolkit.recipe.model_configs import BUILTIN_MODELS
from toolkit.report.card import write_card
from toolkit.report.run_page import write_report
from toolkit.report.terminal import Progress, prompts_before_after, summary
from toolkit.train.plan_guard import forecast, measured, ran_out
from toolkit.train.process import peak_host_bytes
from toolkit.train.run_folder import RunFolder, claim, now
from toolkit.train.save import publish
from toolkit.train.session import Training, answer_before, answer_samples
from toolkit.train.setup import already_finished, set_up


def train(loaded: Loaded, force: bool = False) -> None:
    """Trains a recipe: sets up, takes the steps, writes what comes out.

    Args:
        force: Whether to start also what would not fit by the plan.

    Raises:
        UserError: Whatever the user can mend.
    """
    world = World.from_environment()
    progress = Progress()
    # Whatever ends one process early is told to the others, which would wait for it.
    with meet(world) as meeting:
        folder = claim(loaded, world.world_size) if world.rank == 0 else None
        if folder and folder.finished and world.world_size == 1:
            return already_finished(folder, progress)
        for cut_off in folder.cut_off if folder else ():
            progress.message(f"{cut_off} was cut off while saving and is passed over")
        with folder.held() if folder else contextlib.nullcontext():
            _train(loaded, meeting, folder, progress, force)


def _train(loaded: Loaded, meeting: Meeting, folder: RunFolder | None, progress: Progress, force: bool) -> None:
    recipe, world = loaded.recipe, meeting.world
    try:
        with swap_folder(recipe, world, lambda: count_parameters(recipe), progress.message) as swap:
            training = set_up(loaded, meeting, folder, progress, swap, answer_before, force)
            if training is None:
                return
            training.trainer.train(resume_from_checkpoint=str(training.resume_from) if training.resume_from else None)
            if training.stop and training.stop.stopped:
                interrupted(training)
            else:
                finish(training)
    except BaseException as error:
        if folder:
            _failed(folder, error)
        if ran_out(error):
            with contextlib.suppress(UnknownSize):
                raise forecast(loaded, world, None).out_of_memory(error) from error
        raise
    finally:
        progress.close()


def _failed(folder: RunFolder, error: BaseException) -> None:
    """Notes what ended the run. The disk may be full, and the first error must not be hidden by a second one."""
    if folder.manifest().status == "finished":
        return  # The model is saved; only what comes after it was cut short.
    with contextlib.suppress(OSError):
        folder.update_manifest(status="failed", finished=now(), error=f"{type(error).__name__}: {error}")


def _save_final(training: Training) -> None:
    trainer, recipe = training.trainer, training.recipe
    optimizer = trainer.optimizer
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()
    if recipe.method.name == "full":
        restore_config(training.module, recipe)
    publish(trainer, training.folder.final, training.dtypes)
    if training.leads and recipe.method.name == "lora":
        _name_base(training.folder.final / "adapter_config.json", recipe.model.path)


def _name_base(file: Path, path: str) -> None:
    """Says which model an adapter belongs to as the recipe does, not by where this machine keeps it.

    Only in the saved file: while saving, PEFT would look the name up on the hub.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {**config, "base_model_name_or_path": BUILTIN_MODELS.get(path, path)})


def _seconds(training: Training) -> float:
    """Time of training so far, over all the sessions of a run that was continued."""
    return round(training.meter.seconds(), 1) if training.meter else 0.0


def interrupted(training: Training) -> None:
    """Notes where the run stopped and how it goes on."""
    if training.stop:
        training.stop.restore()
    if not training.leads:
        return
    step = training.trainer.state.global_step
    training.folder.update_manifest(status="interrupted", finished=now())
    write_report(training.folder.path)
    training.progress.message(
        f"Stopped at step {step} of {training.length.total_steps}; a checkpoint is saved in {training.folder.path}.\n"
        "The same command continues from there."
    )


def finish(training: Training) -> None:
    """Saves the model, then evaluates what was saved, answers the prompts again, and writes card and report."""
    trainer, folder = training.trainer, training.folder
    _save_final(training)
    if training.stop:
        # From here on nothing can be lost, and Ctrl-C means what it always does.
        training.stop.restore()
    if training.leads:
        folder.update_manifest(status="finished", finished=now(), train_seconds=_seconds(training))
    if training.evaluator:
        training.evaluator.finish(trainer.state.global_step)
    answer_samples(training, "after")
    if not training.leads:
        return
    folder.update_manifest(finished=now(), train_seconds=_seconds(training), peak_memory_bytes=peak_host_bytes())
    if meter := training.meter:
        tokens = meter.last.get("tokens", 0)
        plan = training.outlook.plan if training.outlook else None
        folder.update_manifest(measured=measured(plan, meter.time_left.measured, _seconds(training), tokens))
    write_card(folder.final, folder.path, training.recipe, training.recipe.model.path)
    report = write_report(folder.path)
    _say_results(training, report)


def _say_results(training: Training, report: Path) -> None:
    folder, evaluator = training.folder, training.evaluator
    if training.samples:
        print("\n" + prompts_before_after(training.samples))
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
    rows.append(("time", duration(_seconds(training))))
    rows.append(("peak memory", f"{peak_host_bytes() / 2**30:.2f} GiB (host)"))
    if torch.cuda.is_available():
        rows.append(("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (GPU)"))
    rows += [("run folder", str(folder.path)), ("model", str(folder.final)), ("report", str(report))]
    print("\n" + summary(rows))
