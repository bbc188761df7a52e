"""The story of one training, first to last, on every process of the launch.

The run folder is claimed and told to all processes, which compare what they see; the session is set up; the steps are
taken; what comes out is saved, evaluated and reported. Only the first process talks to the user and writes the folder.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import logging
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.common import UserError, duration, first_line, table
from toolkit.distributed import compiled_ops
from toolkit.distributed.layout import World
from toolkit.distributed.nvme import swap_folder
from toolkit.distributed.rendezvous import Rendezvous, connect
from toolkit.files import write_atomically, write_json
from toolkit.models import device
from toolkit.models.adapters import of_twice_the_rank
from toolkit.models.load import ModelSource
from toolkit.models.sentence_files import write_modules
from toolkit.models.untouched_files import copy_untouched
from toolkit.planner.plan import UnknownSize
from toolkit.recipe import Loaded
from toolkit.recipe.model_configs import BUILTIN_MODELS
from toolkit.report.card import write_card
from toolkit.report.manifest import Measured
from toolkit.report.plan_view import energy_text
from toolkit.report.rewards import reward_text
from toolkit.report.run_page import write_report
from toolkit.report.scores import OF_MODELS, score_text
from toolkit.report.serving import next_steps
from toolkit.report.teacher import NEARNESS, nearness, nearness_text
from toolkit.report.terminal import Progress, prompts_before_after
from toolkit.seal import contents
from toolkit.train import preflight
from toolkit.train.callbacks import Meter
from toolkit.train.checkpoints.checkpoint import conversion, divides_anew, not_changed, step_of
from toolkit.train.checkpoints.save import as_saved, publish
from toolkit.train.checkpoints.saved_state import lacks_state
from toolkit.train.checkpoints.snapshots import put
from toolkit.train.checkpoints.storage import flush, flush_all, unwritable
from toolkit.train.checkpoints.unpickling import only_data
from toolkit.train.health.finite import check_weights
from toolkit.train.health.watchdog import Watchdog, beat, watching
from toolkit.train.plan_guard import measured, nvme_bytes, plan_run, ran_out
from toolkit.train.process import peak_host_bytes, prepare_process
from toolkit.train.run_folder import RunFolder, claim_together, now, status_after
from toolkit.train.selection import Chosen
from toolkit.train.session import Session
from toolkit.train.setup import Callbacks, set_up
from toolkit.train.startup import StartUp
from toolkit.train.torn_libraries import remove_torn

_log = logging.getLogger("toolkit.train")


def train(loaded: Loaded, force: bool = False, quiet: bool = False) -> None:
    """Trains a recipe: sets up, takes the steps, writes what comes out.

    Args:
        loaded: With an engine that is known, see `planner.launch.decide_for_launch`.
        force: Whether to start also what would not fit by the plan.
        quiet: Whether results, warnings and errors are all that is said.

    Example:
        >>> train(load_checked("smollm2_135m_lora_demo", ["precision=bf16", "max_steps=5"]))

    Raises:
        UserError: Any error the user can fix.
    """
    start_up = StartUp()
    start_up.ended("imports")
    world = World.from_environment()
    first = world.rank == 0
    # Whatever ends one process early is told to the others, which would wait for it.
    shown = Progress(sys.stdout if first else io.StringIO(), quiet)
    with connect(world) as rendezvous, contextlib.closing(shown) as progress:
        folder = claim_together(loaded, rendezvous)
        if folder.finished:
            progress.message(
                f"This run is finished: {folder.final}\n"
                "To train it again beside the old one, set checkpoint.resume=never or another output.name."
            )
            return
        for checkpoint, reason in folder.passed_over.items():
            _log.warning("%s %s, and is passed over", checkpoint, reason)
        with (
            folder.held() if first else contextlib.nullcontext(),
            watching(rendezvous, loaded.recipe, folder) as watchdog,
        ):
            _train(loaded, rendezvous, folder, progress, start_up, watchdog, force)


def _train(
    loaded: Loaded,
    rendezvous: Rendezvous,
    folder: RunFolder,
    progress: Progress,
    start_up: StartUp,
    watchdog: Watchdog,
    force: bool,
) -> None:
    recipe, world = loaded.recipe, rendezvous.world
    source: ModelSource | None = None
    session: Session | None = None
    try:
        if world.rank == 0:
            folder.once_accepted(lambda: write_atomically(folder.path / "recipe.yaml", loaded.to_yaml()))
        prepare_process()
        preflight.check_devices(recipe, world)
        device.set_tf32(recipe.tf32)
        for warning in preflight.check(rendezvous, recipe, folder):
            if world.rank == 0:
                _log.warning("%s", warning)
        if recipe.strategy.zero_stage:
            compiled_ops.wait_for_compilers()
        remove_torn()
        source = ModelSource.open(recipe)
        with (
            swap_folder(recipe, world, functools.partial(nvme_bytes, loaded, world, source)) as swap,
            contextlib.ExitStack() as ended,
        ):
            session = set_up(loaded, rendezvous, source, folder, swap, progress, start_up, watchdog, force)
            if served := getattr(session.trainer, "served", None):
                ended.callback(served.close)
            callbacks = Callbacks(session)
            resume_from = None if folder.is_trained else folder.resume_from
            for warning in not_changed(resume_from, recipe) if resume_from and world.rank == 0 else ():
                _log.warning("%s", warning)
            if folder.is_trained:
                progress.remark(f"{folder.final} is trained and saved; what follows is completed.")
            if resume_from and resume_from.resolve().parent != folder.checkpoints.resolve():
                progress.message(
                    f"{resume_from} is no checkpoint of this run, and is taken as checkpoint.resume says: its weights, "
                    "moments and random numbers are what training goes on from; code in it is not run. Steps 1 "
                    f"to {step_of(resume_from):,} count as taken, and this recipe's rows for them as trained on."
                )
            if resume_from and (said := conversion(resume_from, loaded, world.world_size)):
                session.trainer.converts = True
                progress.message(said)
            with only_data(resume_from), _not_collected():
                if resume_from and recipe.strategy.name == "fsdp" and divides_anew(recipe):
                    session.trainer.converts = session.trainer.converts or lacks_state(resume_from)
                session.trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
            session.trainer.saves.end(needed=callbacks.stop.stopped)
            if callbacks.stop.stopped:
                interrupted(session, callbacks)
            else:
                finish(session, callbacks)
    except BaseException as error:
        if session and isinstance(error, Exception):
            # What is written is worth waiting for; not to somebody who stops at once.
            with contextlib.suppress(Exception):
                session.trainer.saves.close()
        if world.rank == 0 and not watchdog.ends:
            _failed(folder, error)
        if source and ran_out(error):
            # What the calls that ended held is not needed any more, and planning takes memory too.
            traceback.clear_frames(error.__traceback__)
            ran, statistics = (session.loaded, session.prepared.statistics) if session else (loaded, None)
            with contextlib.suppress(UnknownSize):
                raise plan_run(ran, world, source, statistics).out_of_memory(error) from error
        if isinstance(error, Exception) and (reason := unwritable(folder.path, error)):
            raise reason from error
        raise


@contextlib.contextmanager
def _not_collected() -> Iterator[None]:
    """What is there when training begins stays, and Python's garbage collector need not look through it again: a full
    collection of a model of 1,000 modules pauses a process for 0.27 s, and in a step all processes wait for each."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _failed(folder: RunFolder, error: BaseException) -> None:
    """Notes what ended the run, also in its report. The disk may be full, and the first error must not be hidden by a
    second one."""
    reason = unwritable(folder.path, error)
    with contextlib.suppress(OSError):
        if not folder.accepted or folder.manifest().status == "finished":
            return  # It is an earlier start's.
        status = status_after(error)
        # A user's own error needs no name of a class.
        said = str(reason or error) if reason or isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if status == "interrupted":
            said = str(error) or "stopped by Ctrl-C"
        folder.end(status, error=said)
    # Who stops at once does not wait for a page, and before anything is measured another recipe may take the folder.
    if isinstance(error, Exception) and (folder.path / "metrics.jsonl").is_file():
        with contextlib.suppress(Exception):
            write_report(folder.path)


def interrupted(session: Session, callbacks: Callbacks, saved: str = "a checkpoint") -> None:
    """Notes where the run stopped and how it goes on."""
    callbacks.stop.restore()
    if not session.leads:
        return
    step, folder = session.trainer.state.global_step, session.folder
    folder.end("interrupted")
    write_report(folder.path)
    where = f"Stopped at step {step} of {session.length.total_steps}"
    if not (folder.shared or folder.final.exists()):
        session.progress.message(
            f"{where}; no checkpoint is saved, because not all nodes see {folder.path}.\n"
            "With output.dir in a folder that they share, a run that is stopped can be continued."
        )
        return
    again = "" if session.recipe.checkpoint.resume == "auto" else " with checkpoint.resume=auto"
    again += "" if folder.path == session.loaded.run_folder else f" output.name={folder.path.name}"
    session.progress.message(
        f"{where}; {saved} is saved in {folder.path}.\nThe same command{again} continues from there."
    )


def finish(session: Session, callbacks: Callbacks) -> None:
    """Saves the model, then evaluates what was saved, answers the prompts again, and writes card and report.

    A start after one that has ended in between does what is missing.
    """
    folder, meter, step = session.folder, callbacks.meter, session.trainer.state.global_step
    if callbacks.completion:
        chosen = callbacks.completion.end(session.trainer.state)
    else:
        check_weights(session, step)
        beat("saving the model")
        chosen = callbacks.selection.choose() if callbacks.selection else None
        _save_final(session, callbacks, chosen)
    if callbacks.selection and session.leads:
        callbacks.selection.clear()
    # From here on nothing can be lost, and Ctrl-C means what it always does.
    if callbacks.stop.asked():
        interrupted(session, callbacks, "the model")
        return
    callbacks.stop.restore()
    if meter:
        # Also where what follows is cut short.
        write_card(folder.final, folder.path, session.recipe, session.recipe.model.path)
    if callbacks.evaluator:
        callbacks.evaluator.finish(step, chosen)
    callbacks.samples.answer("after")
    if not meter:
        return
    # Only now: no other process waits any more.
    if session.hashed and (error := session.hashed.exception()):
        _log.warning("the model's files could not be hashed: %s", first_line(error))
    seconds = round(meter.seconds(), 1)
    folder.update_manifest(**_figures(session, meter, seconds))
    write_card(folder.final, folder.path, session.recipe, session.recipe.model.path)
    report = write_report(folder.path, status="finished", finished=now())
    folder.end("finished")
    _print_results(session, callbacks, seconds, report)


def _figures(session: Session, meter: Meter, seconds: float) -> dict[str, Any]:
    """For the manifest: what the training took; of an earlier start where this one has not measured a step."""
    before = session.folder.manifest()
    if meter.time_left.measured is None and before.measured:
        figures = before.measured.model_copy(update={"total_seconds": seconds})
    else:
        figures = Measured(
            step_seconds=meter.time_left.measured,
            save_seconds=meter.time_left.pauses.get("save"),
            total_seconds=seconds,
            tokens=meter.last.get("tokens", 0),
            energy_kwh=meter.energy.kwh,
        )
        figures = measured(session.guard.plan if session.guard else None, figures)
    peak = max(before.peak_memory_bytes or 0, peak_host_bytes())
    return {"train_seconds": seconds, "peak_memory_bytes": peak, "measured": figures}


def _save_final(session: Session, callbacks: Callbacks, chosen: Chosen | None) -> None:
    """Saves the model beside its place, moves it there as a whole, and notes what it consists of."""
    trainer, recipe, folder = session.trainer, session.recipe, session.folder
    optimizer = trainer.optimizer
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()
    weights = chosen.weights if chosen else None
    if weights is not None:
        put(trainer, weights)  # From here on it is this model that is evaluated and answers.
        as_saved(trainer, session.dtypes)
    place = folder.final.with_suffix(".partial")
    if session.leads:
        shutil.rmtree(place, ignore_errors=True)
    full = recipe.method.name == "full"
    with session.source.config_to_save(session.module) if full else contextlib.nullcontext():
        publish(trainer, place, session.dtypes, session.start, weights)
    if not callbacks.meter:
        return
    if recipe.method.name == "lora":
        # Names the base as the recipe does, not by where this machine keeps it. Only in the file: while saving, PEFT
        # would look the name up on the hub.
        file, path = place / "adapter_config.json", recipe.model.path
        config = json.loads(file.read_text(encoding="utf-8"))
        config = of_twice_the_rank(config) if session.start else config
        base = {"base_model_name_or_path": BUILTIN_MODELS.get(path, path), "revision": recipe.model.revision}
        write_json(file, config | base)
    else:
        copy_untouched(place, session.source)
    if recipe.embeds:
        write_modules(place, session.source)
    files = {name: content for name, content in contents(place).items() if name != "README.md"}
    flush_all(place)
    shutil.rmtree(folder.final, ignore_errors=True)
    place.rename(folder.final)
    flush(folder.path)
    folder.update_manifest(
        **_figures(session, callbacks.meter, round(callbacks.meter.seconds(), 1)),
        published=chosen.published if chosen else None,
        final={"step": trainer.state.global_step, "files": files},
    )


def _print_results(session: Session, callbacks: Callbacks, seconds: float, report: Path) -> None:
    folder, evaluator, step = session.folder, callbacks.evaluator, session.trainer.state.global_step
    if callbacks.samples.rows:
        print("\n" + prompts_before_after(callbacks.samples.rows, whole=str(folder.path / "samples.json")))
    rows: list[tuple[str, str]] = []
    if evaluator and evaluator.last:
        last = evaluator.last["eval_loss"]
        rewards = reward_text(evaluator.last)
        text = f"{last:.4f}"
        if perplexity := evaluator.last.get("eval_perplexity"):
            text += f" (perplexity {perplexity:.2f})"
        if evaluator.first:
            before = evaluator.first["eval_loss"]
            change = f", {(last - before) / before:+z.1%}" if before > 0 else ""
            text = f"{before:.4f} -> {text}{change}"
        rows += [("held-out before", reward_text(evaluator.first))] if rewards and evaluator.first else []
        rows.append(("held-out after", rewards) if rewards else ("held-out loss", text))
        chosen = folder.manifest().published
        if since := evaluator.rows.change(evaluator.first, evaluator.last, chosen.step if chosen else step):
            rows.append(("its change", (since.negative() if rewards else since).text()))
        nearer = nearness(evaluator.first or {})
        for key, after in nearness(evaluator.last).items():
            earlier = f"{nearness_text(key, *nearer[key])} -> " if key in nearer else ""
            rows.append((NEARNESS[key], f"{earlier}{nearness_text(key, *after)}"))
        if (accuracy := evaluator.last.get("eval_accuracy")) is not None:
            earlier = f"{evaluator.first['eval_accuracy']:.1%} -> " if evaluator.first else ""
            what = "classes told" if session.recipe.classifies else "answers preferred"
            rows.append((f"held-out {what} rightly", f"{earlier}{accuracy:.1%}"))
        for key, name in OF_MODELS.items():
            if score := score_text(evaluator.last, key):
                earlier = f"{score_text(evaluator.first, key)} -> " if evaluator.first else ""
                rows.append((f"held-out {name}", f"{earlier}{score}"))
    if callbacks.meter and callbacks.meter.last:
        rows.append(("training loss", f"{callbacks.meter.last['loss']:.4f}"))
    rows.append(("steps", f"{step}"))
    if chosen := folder.manifest().published:
        rows.append(("published", chosen.what))
    rows.append(("time", duration(seconds)))
    if callbacks.meter and callbacks.meter.energy.kwh is not None:
        rows.append(("energy", energy_text(callbacks.meter.energy.kwh)))
    rows.append(("peak memory", f"{peak_host_bytes() / 2**30:.2f} GiB (host)"))
    if torch.cuda.is_available():
        rows.append(("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (GPU)"))
    rows += [("run folder", str(folder.path)), ("model", str(folder.final)), ("report", str(report))]
    print(f"\n{table(rows, indent=2).plain}\n\n{table(next_steps(folder.path, session.recipe), indent=2).plain}")
