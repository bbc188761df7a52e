"""One process of a training: checks recipe and launch, sets the environment, trains, and ends with an exit code.

What engines and libraries read from the environment is set before they are imported, so nothing imports torch before
`toolkit.train.train` does. A user's error is printed in full by the first process and in a line by the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import logging
import os
import sys
from collections.abc import Sequence

from toolkit.common import UserError, bytes_text, given_up, in_a_line, panicked
from toolkit.data.reading import hub
from toolkit.distributed.environment import environment
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import World
from toolkit.files import ALSO_OF_SOCKETS, UNANSWERED
from toolkit.hub_cache import use_own
from toolkit.models.imports import import_deepspeed, quick_imports
from toolkit.output import add_help, add_verbosity, open_streams, quiet_libraries, start_logging
from toolkit.recipe import split_arguments
from toolkit.recipe.errors import as_text
from toolkit.recipe.hydra_habits import refuse_flags
from toolkit.recipe.problem import warn
from toolkit.recipe.rules import load_checked
from toolkit.recipe.show import keys_text
from toolkit.train.continued import GO_ON, as_begun
from toolkit.train.process import (
    Terminated,
    ahead_of_launcher,
    leave_process_group,
    stop_with_launcher,
    tell,
    told_to_stop,
)

_log = logging.getLogger("toolkit.train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the recipe and the launch, then trains. Returns 0, 1 for a failed run, 2 for a wrong recipe."""
    stop_with_launcher()
    open_streams()
    world = World()
    try:
        world = World.from_environment()
        parser = argparse.ArgumentParser(
            prog="run.py",
            usage="run.py recipe=NAME key=value … [--recipes DIR] [--force] [--verbose | --quiet]",
            add_help=False,
            allow_abbrev=False,
        )
        add_help(parser, keys_text)
        parser.add_argument("--recipes", metavar="DIR", help="the folder of your recipes (default: ./recipes)")
        parser.add_argument("--force", action="store_true", help="also run what would not fit by the plan")
        # Of the `deepspeed` launcher, which says it in the environment too.
        parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
        add_verbosity(parser)
        arguments = sys.argv[1:] if arguments is None else arguments
        refuse_flags(arguments)
        options, rest = parser.parse_known_args(arguments)
        start_logging(options, first=world.rank == 0)
        loaded = as_begun(load_checked(*split_arguments(rest), options.recipes))
        if world.rank == 0:
            warn(loaded.warnings)
        use_own(loaded.recipe.repositories)
        if not loaded.recipe.knows_engine:
            from toolkit.planner.launch import decide_for_launch

            loaded = decide_for_launch(loaded, world, options.recipes)
        launch = check_launch(loaded.recipe, world, os.environ)
        loaded = dataclasses.replace(loaded, taken_over=launch.taken_over)
        for line in launch.lines():
            _log.info("%s", line)
        if loaded.extra:
            passed = ", ".join(f"{key}={as_text(value)}" for key, value in loaded.extra.items())
            _log.info("passed to the libraries: %s", passed)
        for key, value in environment(loaded.recipe, world, os.environ).items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        quiet_libraries()
        hub.ask_for(*loaded.recipe.repositories)
        if not options.force:
            _check_host_memory(world.local_world_size)
        # Only now: these imports take seconds and read the environment.
        with quick_imports():
            from toolkit.train.train import train

            if loaded.recipe.strategy.zero_stage:
                import_deepspeed()

        with told_to_stop(), ahead_of_launcher():
            train(loaded, options.force, options.quiet)
    except UserError as error:
        tell(error, world)
        return error.exit_code
    except OSError as error:
        if error.errno in UNANSWERED and (error.filename or error.errno not in ALSO_OF_SOCKETS):
            what = f"{error.filename or 'a file'} cannot be used: its disk does not answer ({error.strerror})"
            tell(UserError(what, f"see that it is mounted; {GO_ON}"), world)
            return 1
        if error.errno != errno.ENOSPC:
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        change = f"set output.dir to a larger disk, lower checkpoint.save_total_limit, or free space; {GO_ON}"
        tell(UserError(f"the disk is full{where}", change), world)
        return 1
    except KeyboardInterrupt as error:
        print(f"stopped at once; {GO_ON}, if one was saved", file=sys.stderr)
        return error.exit_code if isinstance(error, Terminated) else 130
    except MemoryError as error:  # Also of what would have been said of one.
        change = "raise the limit on it, start fewer processes, or set batch.micro_batch_size=1"
        tell(UserError(f"the host's memory is used up: {in_a_line(error)}", change), world)
        return 1
    except BaseException as error:
        if not panicked(error):
            raise
        tell(given_up(error), world)
        return 1
    finally:
        leave_process_group()
    return 0


def _check_host_memory(processes: int) -> None:
    """Refuses what no plan would live to refuse: over a limit on memory, importing the frameworks gets it killed."""
    # Not needed to say what is wrong with a recipe.
    from toolkit.planner.hardware.host_memory import host_memory
    from toolkit.planner.memory.host import CPU_PROCESS

    usable, least = host_memory(processes), processes * CPU_PROCESS
    if usable.limit and usable.bytes < least:
        raise UserError(
            f"{processes} process{'es take' if processes > 1 else ' takes'} {bytes_text(least)} of host RAM before any "
            f"model is loaded; {usable.limit} leaves {bytes_text(usable.bytes)}",
            "raise that limit, or start fewer processes; --force tries all the same",
        )
