"""`accelerate launch` without its report: `python -m toolkit.cli.start`, with the same arguments.

A process that trains by itself is started as accelerate would, but without accelerate, which imports torch for that:
two seconds of a processor, and 0.2 GB beside the training for as long as it lasts.

A training process that fails says why. Accelerate then ends in a stack trace of its own, and torch's elastic agent in a
page about each process, so the reason scrolls away. Both are cut: a process that was ended by a signal, and so could
say nothing, gets a line. The exit code is that of the process.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from toolkit.own_process import end_with_parent

_KILLED = "the kernel does that when the host's memory is full, and a batch system at its limits: look at their logs"
_CRASHED = "look at what it printed last; `toolkit doctor` tests devices and kernels"
_OTHERS_SECONDS = 30.0
"""How long the agent of a machine whose processes have ended waits for those of others, by default ten times as long.
All end together; an agent that was told to stop itself never says that it has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Launches as `accelerate launch` does, and returns the exit code of the process that failed first.

    Args:
        arguments: Those of `accelerate launch`; where they begin with the script, or `-m` and a module, it is started
            as a process by itself.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _with_accelerate(arguments) if arguments[0].startswith("--") else _by_itself(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _by_itself(arguments: Sequence[str]) -> int:
    # What accelerate says to a process that it starts alone.
    said = {"OMP_NUM_THREADS": "1", **os.environ, "ACCELERATE_USE_CPU": "False", "ACCELERATE_MIXED_PRECISION": "no"}
    training = subprocess.Popen([sys.executable, *arguments], env=said, preexec_fn=end_with_parent)
    # Who stops the launcher waits for what the training still saves.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if not _ignored(number):
            signal.signal(number, lambda number, frame: training.send_signal(number))
    try:
        return _ended("the training", training.wait())
    except KeyboardInterrupt:
        # Without a terminal's foreground the training heard Ctrl-C too, or not; it counts both as one.
        training.send_signal(signal.SIGTERM)
        status = training.wait()
        return status if status >= 0 else 128 + signal.SIGINT


def _with_accelerate(arguments: Sequence[str]) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Elastic's modules are imported by now, and each has set a level of its own.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    wait = functools.partialmethod(LocalElasticAgent.__init__, exit_barrier_timeout=_OTHERS_SECONDS)
    LocalElasticAgent.__init__ = wait  # type: ignore[method-assign, assignment]
    options = launch_command_parser().parse_args(arguments)
    if _ignored(signal.SIGHUP):
        options.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"  # Torch's agent would take it back from `nohup`.
    if os.environ.get("TOOLKIT_RESTARTS", "0") != "0" and options.machine_rank:
        _await_others(options)
    try:
        launch_command(options)
    except subprocess.CalledProcessError as error:
        return _ended("the training", error.returncode)
    except ChildFailedError as error:
        # The reason is one that says what to change, else one that was killed; others miss them, and may end first.
        told = [each for each in error.failures.items() if each[1].exitcode in (1, 2)]
        killed = [each for each in error.failures.items() if each[1].exitcode < 0]
        rank, failure = [*told, *killed, error.get_first_failure()][0]
        return _ended(f"rank {rank} (pid {failure.pid})", failure.exitcode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


def _await_others(options: argparse.Namespace) -> None:
    """Of several machines, one may notice long after another that a training has failed: in an evaluation, say."""
    from toolkit.distributed.previous_attempt import await_end

    width = int(options.num_processes) // int(options.num_machines)
    ranks = range(int(options.machine_rank) * width, (int(options.machine_rank) + 1) * width)
    await_end(
        options.main_process_ip,
        int(options.main_process_port),
        ranks,
        lambda text: print(text, file=sys.stderr, flush=True),
    )


def _ended(who: str, status: int) -> int:
    """The exit code, as shells count it, of a process that ended with this status."""
    if status >= 0:
        return status
    # Most real-time signals have no name.
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    change = _KILLED if name in ("SIGKILL", "SIGTERM") else _CRASHED
    print(f"error: {who} was ended by {name}\n  {change}", file=sys.stderr)
    return 128 - status


if __name__ == "__main__":
    sys.exit(main())
