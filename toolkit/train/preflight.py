"""Before anything slow: can this machine run the recipe, and do all processes see the same things and each other?

Versions, code, recipe, data, model files and folders are compared over the rendezvous store, which takes a second; what
differs is named by rank and host. Without it, a node with another version trains something else, or hangs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.cache import cache_dir, writable
from toolkit.common import UserError, bytes_text
from toolkit.distributed import exchanges
from toolkit.distributed.device_limits import check_device, check_engine
from toolkit.distributed.exchanges import Exchange
from toolkit.distributed.layout import World
from toolkit.distributed.rendezvous import Rendezvous, SharedError, Values
from toolkit.models import compilers, device
from toolkit.models.load import ModelSource
from toolkit.models.parallel import expert_parallel
from toolkit.models.parallel.layer_sums import divide_processes, replicas
from toolkit.models.parallel.pipeline import alike_group, chain_processes, hand_on
from toolkit.models.parallel.shared_rows import group_processes
from toolkit.planner.hardware import driver_version
from toolkit.recipe import Recipe
from toolkit.recipe.parallel import Parallel
from toolkit.recipe.precisions import FP8_SCALING
from toolkit.train import optimizer
from toolkit.train.identity import flat
from toolkit.train.run_folder import RunFolder, hash_files, versions

_log = logging.getLogger("toolkit.train")

CLOCK_SKEW_SECONDS = 5.0
"""Clocks further apart make logs and file times of nodes hard to compare; training does not mind, so it is told."""
LOW_DISK_BYTES = 2**30
"""With less, a warning. What checkpoints need is compared with the disk once the model's size is known."""
VISIBLE_SECONDS = 3.0
"""Network file systems may show a new file to other nodes only after a moment."""
_PROBE_BYTES = 2**20


def check(rendezvous: Rendezvous, recipe: Recipe, folder: RunFolder) -> list[str]:
    """Compares versions, recipe, devices, clocks and disks of all processes, before anything slow begins, and notes
    whether they share the run folder.

    Returns:
        What does not stop training but should be known.

    Raises:
        UserError: On every process, if they differ or one is missing; names ranks and hosts.
    """
    if rendezvous.alone:
        return []
    world = rendezvous.world
    # What only the first process reads may differ.
    values = recipe.model_dump(mode="json", exclude={"description", "output"})
    settings = {key: json.dumps(value, sort_keys=True) for key, value in flat(values)}
    # By this file beside the run folder other nodes recognise it.
    with _probe(folder.path.parent) if world.rank == 0 else contextlib.nullcontext() as marker:
        before = time.time()
        first = rendezvous.exchange(
            "clock", None, lambda _: {"marker": marker and Path(marker.name).name, "time": time.time()}
        )
        state = {
            "same": {"number of processes": world.world_size, **_versions(), **settings},
            "alike": _hardware(world),
            # The first clock was read between the two moments.
            "skew": max(0.0, before - first["time"], first["time"] - time.time()),
            "places": _places(folder.path.parent / first["marker"]) if world.local_rank == 0 else {},
        }
        saves = recipe.checkpoint.saves
        found = rendezvous.exchange("state", state, lambda states: _judge(states, saves, rendezvous.name))
    warnings, folder.shared = found
    return list(warnings)


def agree(rendezvous: Rendezvous, source: ModelSource, data: str, teacher: ModelSource | None = None) -> None:
    """Waits for all processes, however long they tokenise, and compares their data and the models' files.

    What follows must be starting the process group and `all_reduce`.

    Args:
        data: Fingerprint of the prepared data.

    Raises:
        UserError: On every process, if they differ or one has gone.
    """
    if rendezvous.alone:
        return
    identity = {"data (fingerprint)": data, "model files": _model_files(source.weight_files())}
    if teacher:
        identity["the teacher's files"] = _model_files(teacher.weight_files())
    rendezvous.exchange("agree", identity, lambda identities: _require_same(identities, rendezvous.name))
    rendezvous.begin_group()


def all_reduce(rendezvous: Rendezvous, device: torch.device, parallel: Parallel | None = None) -> None:
    """Sums numbers over all processes, tries what each of the groups that training will use does, and ends the
    rendezvous.

    What hangs in the communication library cannot be interrupted: after a time-out, processes that wait say which ones
    are missing and end themselves.

    Args:
        parallel: What is divided beside rows; the groups for it are made here.

    Raises:
        UserError: On every process, if a result is wrong.
    """
    if rendezvous.alone:
        return
    wrong = []
    tried: list[tuple[str, Callable[[], Any], Exchange]] = [("the first all-reduce", lambda: None, exchanges.sums)]
    for what, make, exchange in [*tried, *_of_groups(parallel or Parallel())]:
        rendezvous.comes_to(what)
        if not exchange(make(), device):
            wrong.append(what)
        rendezvous.has_done()

    def judge(found: Values) -> None:
        if bad := {rank: whats[0] for rank, whats in found.items() if whats}:
            first = next(iter(bad.values()))
            ranks = [rank for rank, what in bad.items() if what == first]
            raise SharedError(f"{rendezvous.name(*ranks)} got a wrong result of {first}", "check those devices")

    rendezvous.exchange("sum", wrong, judge)
    rendezvous.close()


def _of_groups(parallel: Parallel) -> Iterator[tuple[str, Callable[[], Any], Exchange]]:
    """What processes do in their groups, how a process gets to its group, and a small example of it."""
    if key := parallel.shares_by:
        way = key.rpartition(".")[2]
        what = "the exchange of heads" if way == "sequence" else "the gathering of keys and values"
        exchange = exchanges.parts if way == "sequence" else exchanges.gathering
        yield f"{what} ({key})", lambda: group_processes(way, parallel.sharing, parallel.tensor), exchange
    if parallel.tensor > 1:

        def divide() -> Any:
            layers, _ = divide_processes(parallel.tensor)
            return layers

        yield "the sum over divided layers (parallel.tensor)", divide, exchanges.sums
        yield "the sum over processes with the same parts (parallel.tensor)", replicas, exchanges.sums
    if parallel.expert > 1:

        def share_experts() -> Any:
            experts, _ = expert_parallel.divide_processes(parallel.expert)
            return experts

        yield "sending tokens to experts (parallel.expert)", share_experts, expert_parallel.arrives
        yield "the sum over processes with the same experts (parallel.expert)", expert_parallel.replicas, exchanges.sums
    if parallel.pipeline > 1:

        def link() -> Any:
            chain, _ = chain_processes(parallel.pipeline)
            return chain

        yield "handing hidden states on and back (parallel.pipeline)", link, hand_on
        yield "the sum over processes with the same stages (parallel.pipeline)", alike_group, exchanges.sums


def differences(states: Mapping[int, Mapping[str, Any]], name: Callable[..., str]) -> list[str]:
    """One line for every key whose value is not the same on all ranks: the values, and who has which."""
    lines = []
    for key in dict.fromkeys(key for state in states.values() for key in state):
        holders: dict[str, list[int]] = {}
        for rank, state in states.items():
            holders.setdefault(str(state.get(key, "missing")), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{key} is " + " but ".join(f"{value} on {name(*ranks)}" for value, ranks in holders.items()))
    return lines


def _require_same(states: Values, name: Callable[..., str]) -> None:
    if different := differences(states, name):
        raise SharedError(
            f"the processes do not match: {'; '.join(different)}",
            "give every node the same code, packages, files and command",
        )


def _judge(states: Values, saves: bool, name: Callable[..., str]) -> tuple[list[str], bool]:
    """What should be known, and whether all see the run folder."""
    _require_same({rank: state["same"] for rank, state in states.items()}, name)
    warnings = differences({rank: state["alike"] for rank, state in states.items()}, name)
    hidden = []
    for rank, state in states.items():
        if state["skew"] > CLOCK_SKEW_SECONDS:
            warnings.append(f"the clock of {name(rank)} is {state['skew']:.0f} s off")
        for key, place in state["places"].items():
            if place is None:
                hidden.append(rank)
            elif place["error"]:
                raise SharedError(
                    f"{name(rank)} cannot write to {place['path']}: {place['error']}",
                    f"make it writable there or free space, or set {key} to another folder",
                )
            elif place["free"] < LOW_DISK_BYTES:
                warnings.append(f"{name(rank)} has {bytes_text(place['free'])} of disk left in {place['path']}")
    if hidden and saves:
        raise SharedError(
            f"output.dir: {name(*hidden)} does not see the run folder of {name(0)}; every process writes its part of a "
            "checkpoint there",
            "set output.dir to a folder that all nodes share, or save no checkpoints: checkpoint.save_steps=null and "
            "checkpoint.save_epochs=null",
        )
    return warnings, not hidden


def _versions() -> dict[str, str]:
    code = hash_files(Path(__file__).parent.parent.rglob("*.py"))
    environment = {"python": platform.python_version(), **versions(), "toolkit's code": code, "device": "cpu"}
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        environment |= {"device": "cuda", "CUDA": str(torch.version.cuda), "NCCL": nccl}
    return environment


def _hardware(world: World) -> dict[str, str]:
    """What may differ between devices that train together: the slowest decides the speed."""
    if not torch.cuda.is_available():
        return {}
    return {
        "GPU": torch.cuda.get_device_name(world.local_rank % torch.cuda.device_count()),
        "number of GPUs": str(torch.cuda.device_count()),
        "driver": driver_version(),
    }


def _places(marker: Path) -> dict[str, Any]:
    """The folders a node writes to, tried. None for an output folder that is not the first process's."""
    end = time.monotonic() + VISIBLE_SECONDS
    while not (seen := marker.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    cache = writable(cache_dir() / "any").parent
    return {"output.dir": _try(marker.parent) if seen else None, "TOOLKIT_CACHE": _try(cache)}


def _probe(folder: Path) -> Any:
    return tempfile.NamedTemporaryFile(prefix=".preflight-", dir=folder)


def _try(folder: Path) -> dict[str, Any]:
    error = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _probe(folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as problem:
        error = problem.strerror or str(problem)
    free = 0 if error else shutil.disk_usage(folder).free
    return {"path": str(folder), "error": error, "free": free}


def _model_files(files: list[Path]) -> str:
    """Identity of the model's files, from a few bytes of each: every process asks, and weights are large."""
    # In the hub's cache the commit names the content, also of files that are not downloaded yet.
    snapshots = {file.parent.name for file in files if file.parent.parent.name == "snapshots"}
    if snapshots:
        return ", ".join(sorted(snapshots))
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(_PROBE_BYTES)
            stream.seek(max(0, size - _PROBE_BYTES))
            digest.update(f"{file.name} {size} ".encode() + head + stream.read(_PROBE_BYTES))
    return digest.hexdigest()[:16]


def check_devices(recipe: Recipe, world: World) -> None:
    """Refuses what this machine cannot run, before anything is loaded.

    Raises:
        UserError: Naming the setting to change, or what to install.
    """
    gpus = torch.cuda.device_count()
    if gpus > 1 and world.world_size == 1:
        raise UserError(
            f"this machine has {gpus} GPUs and one process was started",
            f"start all of them with `toolkit launch recipe=… --gpus {gpus}`, or make one visible with "
            "CUDA_VISIBLE_DEVICES=0",
        )
    if why := device.without_kernels():
        raise UserError(
            f"nothing runs on {device.name()}: {why}",
            "install a build of torch that has them: of several for the same version, those for older CUDA keep older "
            "GPUs (https://pytorch.org/get-started/locally)",
        )
    takes_fp16 = bool(gpus) or not recipe.strategy.zero_stage or recipe.precision != "fp16" or _deepspeed_takes_fp16()
    check_device(recipe, device.kind(), device.capability(), device.name(), takes_fp16)
    check_engine(recipe, device.kind(), world.world_size)
    if recipe.activation_checkpointing.mode == "elementwise" and (lacks := compilers.missing(device.kind())):
        raise UserError(
            f"activation_checkpointing.mode=elementwise is done by compiled layers, and on this machine {lacks}",
            "install it, or set activation_checkpointing.mode=full",
        )
    if recipe.precision in FP8_SCALING:
        if importlib.util.find_spec("torchao") is None:
            raise UserError(f"precision={recipe.precision}: torchao is not installed", "run `pip install torchao`")
        if not gpus:
            _log.warning(
                "precision=%s: a CPU rounds to fp8 and is slower by it; set precision=%s",
                recipe.precision,
                recipe.in_bf16,
            )
    optimizer.check_available(recipe)
    for tracker in recipe.logging.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise UserError(
                f"logging.trackers: {tracker} is not installed",
                f"run `pip install {tracker}`, or remove it from the list",
            )


def _deepspeed_takes_fp16() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())
