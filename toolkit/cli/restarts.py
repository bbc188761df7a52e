"""`toolkit launch --restarts N`: a training that failed goes on in the same job, from its last whole checkpoint.

Each attempt is a launcher of its own, on each machine. torch's elastic agent can start processes again too, but treats
a wrong recipe like a dead device, and keeps the number of processes that it began with. What a process has told as an
error that the user must fix is not tried again, nor what was stopped on purpose: the exit code tells (`os.EX_TEMPFAIL`:
another start may not meet it again; or a signal).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit.cli import launch
from toolkit.cli.launch import Cluster
from toolkit.common import UserError, brief, printable
from toolkit.own_process import end_with_parent
from toolkit.planner.hardware import answering
from toolkit.recipe import Loaded
from toolkit.report.load import read_manifest, read_metrics
from toolkit.seal import read_seal
from toolkit.train.checkpoints.checkpoint import check_readable
from toolkit.train.process import take_terminal

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = tuple(128 + number for number in _SIGNALS)
"""Exit codes of what somebody has stopped."""


def run(
    loaded: Loaded, cluster: Cluster, rank: int | None, arguments: Sequence[str], restarts: int, recipes: str | None
) -> int:
    """Trains, and starts again what failed for a reason outside the recipe. Returns the last exit code.

    Args:
        restarts: How often at most. The same failure at the same step twice in a row ends it too.
        recipes: The user's recipes folder.

    Raises:
        UserError: As `launch.line`; if the recipe would begin anew each time; if it cannot go on with the GPUs left.
    """
    launch.check_resume(loaded.recipe, "a training that is restarted")
    folder, gpus = loaded.run_folder, launch.gpu_names()
    group, before = Group(), None
    for number in itertools.count(1):
        status = group.run(launch.line(cluster, rank, arguments), launch.variables(cluster), number - 1)
        if group.stopped or not _may_pass(status) or read_manifest(folder)[0].status == "finished":
            return status
        failed = (_last_step(folder), status)
        what = f"{_reason(folder, status)} after step {failed[0]}"
        if failed == before or number > restarts:
            why = "twice in a row" if failed == before else f"and all {restarts} restarts are used up"
            raise _GivenUp(status, f"not started again: {what}, {why}")
        before, checkpoint = failed, _newest(folder)
        cluster, with_fewer = _with_gpus_left(loaded, cluster, gpus, checkpoint, recipes)
        place = checkpoint or "the beginning, as no checkpoint was saved"
        print(printable(f"restart {number} of {restarts}{with_fewer}: {what}; from {place}"), file=sys.stderr)
    raise AssertionError("endless")


class _GivenUp(UserError):
    """The last failure, with its exit code."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what, "what was printed before says more; the same command tries again")
        self.exit_code = status


class Group:
    """The processes that a command starts.

    Attributes:
        stopped: The exit code of what was stopped so, if somebody has stopped them; otherwise 0.
    """

    def __init__(self) -> None:
        self.stopped = 0
        self._running: list[subprocess.Popen[bytes]] = []
        self._told: set[subprocess.Popen[bytes]] = set()
        for number in _SIGNALS:
            # `nohup` has SIGHUP ignored, also by what is started.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._stop)

    def run(self, line: Sequence[str], variables: dict[str, str], restarts: int) -> int:
        """The exit code of a launcher, as shells count it; that of a stop, if it came before the start."""
        if self.stopped:
            return self.stopped
        process = self.start(line, variables, restarts)
        status = process.wait()
        self.forget(process)
        return status if status >= 0 else 128 - status

    def start(
        self, line: Sequence[str], variables: dict[str, str], restarts: int, **streams: Any
    ) -> subprocess.Popen[bytes]:
        """A launcher that is at work.

        Args:
            streams: As `Popen` takes them, where it is not to have this process's.
        """
        take_terminal()
        environment = {**os.environ, **variables, "TOOLKIT_RESTARTS": str(restarts)}
        process = subprocess.Popen(line, env=environment, preexec_fn=end_with_parent, **streams)
        self._running.append(process)
        if self.stopped and process not in self._told:  # It was stopped while it came into being.
            process.send_signal(self.stopped - 128)
        return process

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Forgets a process that has ended."""
        self._running.remove(process)
        self._told.discard(process)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = 128 + number
        # A terminal sends Ctrl-C to all of its processes itself.
        if number != signal.SIGINT:
            for process in self._running:
                self._told.add(process)
                process.send_signal(number)


def _may_pass(status: int) -> bool:
    return status == os.EX_TEMPFAIL or (status > 128 and status not in STOPPED)


def _reason(folder: Path, status: int) -> str:
    if status - 128 in {*signal.Signals}:  # 255 is what ssh ends with, and `exit -1`.
        return f"a process was ended by {signal.Signals(status - 128).name}"
    manifest = read_manifest(folder)[0]
    told = (manifest.error or "").splitlines()
    return (
        brief(told[0], columns=100)
        if told and manifest.status == "failed"
        else f"a process failed with exit code {status}"
    )


def _last_step(folder: Path) -> int:
    rows = read_metrics(folder / "metrics.jsonl")[0]
    return int(rows[-1]["step"]) if rows else 0


def _newest(folder: Path) -> Path | None:
    """The newest sealed checkpoint. Its content is verified when it is read; what is damaged is passed over there."""
    sealed = [(seal["step"], file) for file in folder.glob("checkpoints/checkpoint-*") if (seal := read_seal(file))]
    return max(sealed)[1] if sealed else None


def _with_gpus_left(
    loaded: Loaded, cluster: Cluster, gpus: Sequence[str], checkpoint: Path | None, recipes: str | None
) -> tuple[Cluster, str]:
    """The machine with as many of the GPUs that still answer as can go on, and what to say of it."""
    left = answering(gpus)
    if not gpus or cluster.nodes > 1:
        return cluster, ""
    if len(left) < len(gpus):
        # The driver numbers them as they are plugged in.
        os.environ |= {"CUDA_VISIBLE_DEVICES": ",".join(left), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if len(left) >= cluster.gpus:
        return cluster, ""
    what, change = f"{len(left)} of {cluster.gpus} GPUs still answer", "look at the driver's log (dmesg)"
    for number in range(1, len(left) + 1)[::-1]:
        smaller = dataclasses.replace(cluster, gpus=number)
        try:
            launch.check(loaded.recipe, smaller, recipes)
            if checkpoint and loaded.recipe.knows_engine:
                check_readable(checkpoint, loaded, number)
            return smaller, f", on {number} of {cluster.gpus} GPUs"
        except UserError as error:
            if number == len(left):
                what, change = f"{what}: {error.what}", error.change
    raise UserError(what, change)
