"""One training from a checked recipe. Runs on every process of the launch."""

from __future__ import annotations

import contextlib

from toolkit.assemble import already_finished, set_up
from toolkit.folder import RunFolder, claim, now
from toolkit.forecast import forecast, ran_out
from toolkit.meeting import Meeting, meet
from toolkit.model import count_parameters
from toolkit.nvme import swap_folder
from toolkit.plan.formulas import UnknownSize
from toolkit.policy import World
from toolkit.progress import Progress
from toolkit.recipe import Loaded
from toolkit.results import answer_before, finish, interrupted


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
    if folder.manifest().get("status") == "finished":
        return  # The model is saved; only what comes after it was cut short.
    with contextlib.suppress(OSError):
        folder.update_manifest(status="failed", finished=now(), error=f"{type(error).__name__}: {error}")
