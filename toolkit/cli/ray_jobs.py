"""The runs of a sweep as jobs of a Ray cluster, which queues them and gives each its GPUs.

A job changes to the folder in which it was submitted and trains there, so that folder and this installation are on a
disk that all machines of the cluster share, as for Slurm.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.cli import launch
from toolkit.cli.jobs import Trial
from toolkit.cli.sweep import finished
from toolkit.common import UserError

_PATIENT = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}
"""A job that is stopped saves a checkpoint first; by default Ray kills it after three seconds."""

_RUN = "run"
"""What of a job's metadata is the folder of its run."""


def submit(found: Sequence[Trial], gpus: int | None, say: Callable[[str], None]) -> None:
    """Submits a job for each run that is neither finished nor queued or running in a job of its own.

    Args:
        gpus: Of each run.
        say: Takes a line about each run.

    Raises:
        UserError: If the GPUs are not said, a run cannot be trained on them, or no Ray cluster answers.
    """
    if gpus is None:
        raise UserError("the GPUs of Ray's machines are not known here", "say how many each run takes with --gpus")
    cluster = launch.Cluster(gpus, elsewhere=True)
    for each in found:
        launch.check(each.loaded.recipe, cluster)
    left = [each for each in found if not finished(each)]
    client = _client()
    for at, each in enumerate(found, start=1):
        what = f"run {at} of {len(found)}, {each.folder.name}"
        if each not in left:
            say(f"{what}: finished before")
            continue
        mark = {_RUN: str(each.folder.resolve())}
        known = [str(job.status) for job in client.list_jobs() if (job.metadata or {}).items() >= mark.items()]
        if states := {"PENDING", "RUNNING"} & {*known}:
            say(f"{what}: {states.pop().lower()} already")
            continue
        # Ray takes each name once.
        name = f"{each.folder.parent.name}-{each.folder.name}" + (f"-{len(known) + 1}" if known else "")
        resources = {"entrypoint_num_gpus": gpus} if gpus else {"entrypoint_num_cpus": 1}
        line = entrypoint(each, gpus)
        client.submit_job(entrypoint=line, submission_id=name, metadata=mark, runtime_env=_PATIENT, **resources)
        say(f"{what}: submitted; ray job logs --follow {name}")


def entrypoint(trial: Trial, gpus: int) -> str:
    """What a job runs, as a shell reads it."""
    words = [sys.executable, "-m", "toolkit", "launch", "--gpus", str(gpus), *trial.arguments]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"


def _client() -> Any:
    """Ray's own client, of the cluster that the environment names, or of this machine."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise UserError("--ray needs Ray, which is not installed", "pip install 'ray[default]'") from error
    where = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "http://127.0.0.1:8265"
    try:
        return JobSubmissionClient(where)
    except (ConnectionError, RuntimeError, ValueError) as error:
        problem = str(error).strip().splitlines()[0]
        raise UserError(
            f"no Ray cluster answers at {where}: {problem}",
            "start one with `ray start --head`, or set RAY_API_SERVER_ADDRESS=http://HEAD:8265",
        ) from error
