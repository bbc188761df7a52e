"""Trains a recipe: `accelerate launch toolkit/run.py recipe=NAME key=value …`.

Also runs under torchrun, under srun, as plain `python toolkit/run.py` and as `python -m toolkit.run`.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# As a script, this file's folder comes first on the path and its modules would shadow others of the same name.
_HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.getcwd()) != _HERE]
if str(Path(_HERE).parent) not in sys.path:
    sys.path.insert(0, str(Path(_HERE).parent))

from toolkit.errors import UserError  # noqa: E402
from toolkit.policy import World, check_launch, environment  # noqa: E402
from toolkit.recipe import split_arguments  # noqa: E402
from toolkit.rules import load_checked  # noqa: E402
from toolkit.terminal import ahead_of_launcher, quiet_libraries  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the recipe and the launch, then trains. Returns 0, 1 for a failed run, 2 for a wrong recipe."""
    world = World()
    try:
        world = World.from_environment()
        parser = argparse.ArgumentParser(
            prog="run.py", usage="run.py recipe=NAME key=value … [--recipes DIR] [--force]"
        )
        parser.add_argument("--recipes", metavar="DIR", help="the folder of your recipes (default: ./recipes)")
        parser.add_argument("--force", action="store_true", help="also run what would not fit by the plan")
        options, rest = parser.parse_known_args(arguments)
        loaded = load_checked(*split_arguments(rest), options.recipes)
        if loaded.recipe.undecided:
            from toolkit.plan.here import decided

            loaded = decided(loaded, world, options.recipes)
        check_launch(loaded.recipe, world)
        for key, value in environment(loaded.recipe, world).items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        quiet_libraries()
        # Only now: these imports take seconds and read the environment.
        from toolkit.train import train

        with ahead_of_launcher():
            train(loaded, options.force)
    except UserError as error:
        if world.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        else:
            print(f"error on process {world.rank}: {error.what}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        print(
            f"error: the disk is full{where}\n  set output.dir to a larger disk, lower checkpoint.save_total_limit, "
            "or free space; the same command goes on from the newest complete checkpoint",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("stopped at once; the same command goes on from the newest checkpoint, if one was saved", file=sys.stderr)
        return 130
    finally:
        _leave_process_group()
    return 0


def _leave_process_group() -> None:
    """A process group left open makes a correct run end with a non-zero exit code."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(status: int) -> NoReturn:
    """Ends the process with all that Python does at its end, except taking the interpreter apart.

    Threads of libraries that still run in C++ code then abort the process ("terminate called without an active
    exception"), now and then, after a run that was right.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
