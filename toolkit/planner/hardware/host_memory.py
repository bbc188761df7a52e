"""How much of a host's memory a run may use: the machine's, or what a limit on it leaves, whichever is least."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_RLIMITS = (
    ("ulimit -v", resource.getrlimit(resource.RLIMIT_AS)[0], 7 * 2**28),
    ("ulimit -d", resource.getrlimit(resource.RLIMIT_DATA)[0], 2**27),
)
"""Limits of one process, as its shell set them, and the bytes that they count of it and that it never touches:
libraries, stacks, arenas. Measured on a CPU: ZeRO-2, planned with 1.40 GiB, has 3.00 GiB of addresses and runs with
1.14 GiB of data."""
_SLURM = {"SLURM_MEM_PER_CPU": "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_GPU": "SLURM_GPUS_ON_NODE"}


@dataclass(frozen=True)
class HostMemory:
    """What the processes of a run may use together on one host.

    Args:
        bytes: How much.
        limit: What keeps it below what the machine has, such as `ulimit -v`; empty where nothing does.
    """

    bytes: int
    limit: str = ""


def host_memory(processes: int = 1, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> HostMemory:
    """The least of the machine's memory, the limits of its control groups, those of processes, and Slurm's.

    Args:
        processes: Of the run on this host, of which each has its own limits of a process.
        root: Where `proc` and `sys` are.
    """
    limits = [*_of_groups(root), *_of_processes(processes), *_of_slurm(environment)]
    return min([HostMemory(psutil.virtual_memory().total), *limits], key=lambda each: each.bytes)


def _of_groups(root: Path) -> Iterator[HostMemory]:
    """Limits of this process's control groups, of version 2 and 1, and of those around them.

    A container may show its own group as the root, by a path that only the host has: then that is what is found.
    """
    groups = root / "sys" / "fs" / "cgroup"
    lines = [line.split(":", 2) for line in read_text(root / "proc" / "self" / "cgroup").splitlines()]
    kinds = (
        ([groups, groups / "unified"], "memory.max", lambda controllers: not controllers),
        ([groups / "memory"], "memory.limit_in_bytes", lambda controllers: "memory" in controllers.split(",")),
    )
    for mounts, name, is_own in kinds:
        path = next((PurePosixPath(path) for _, controllers, path in lines if is_own(controllers)), PurePosixPath("/"))
        for mount in mounts:
            for group in (path, *path.parents):
                text = read_text(mount / str(group).lstrip("/") / name)
                if text.isdigit():  # `max` is no limit.
                    yield HostMemory(int(text), f"{name} of the control group {group}")


def _of_processes(processes: int) -> Iterator[HostMemory]:
    for name, limit, untouched in _RLIMITS:
        if limit != resource.RLIM_INFINITY:
            yield HostMemory(max(limit - untouched, 0) * processes, f"`{name}`")


def _of_slurm(environment: Mapping[str, str]) -> Iterator[HostMemory]:
    """What a job asked for, in MiB; 0 stands for all of the node."""
    asked = {"SLURM_MEM_PER_NODE": environment.get("SLURM_MEM_PER_NODE", "")}
    for name, count in _SLURM.items():
        each, number = environment.get(name, ""), environment.get(count, "")
        asked[name] = str(int(each) * int(number)) if each.isdigit() and number.isdigit() else ""
    yield from (HostMemory(int(text) * 2**20, name) for name, text in asked.items() if text.isdigit() and int(text))


def read_text(file: Path) -> str:
    """Content of a file of the system's; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
