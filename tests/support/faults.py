"""Trainings to which something happens at the end of a step: `FAULTS="STEP RANK NAME …"` in the environment, by lines.

A fault is real: signals are sent, limits are set, files are removed. `NAME` is a function below.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import write_jsonl, write_recipe
from ranks import Ranks
from tiny import chat_rows, tiny_model

from toolkit.seal import read_seal
from toolkit.train.checkpoints import checkpoint

RECIPE = """
description: A training whose saves fail
model: {path: llama}
data: {sources: [chat.jsonl], eval_split: 0.1}
precision: fp32
schedule: {max_steps: 6}
batch: {seq_len: 128, global_batch_size: 4, micro_batch_size: 2}
evaluation: {num_prompts: 0}
checkpoint: {save_steps: 2}
"""
ENGINES = {
    "single": (1, []),
    "ddp": (2, []),
    "zero2": (2, ["strategy.name=zero2"]),
    "zero3": (2, ["strategy.name=zero3"]),
    "fsdp": (2, ["strategy.name=fsdp"]),
    "fsdp_full": (2, ["strategy.name=fsdp", "strategy.state_dict_type=full"]),
}
DIVISIONS = {
    "tensor": (2, ["model.path=deep", "parallel.tensor=2"]),
    "tensor_fsdp": (4, ["model.path=deep", "parallel.tensor=2", "strategy.name=fsdp"]),
    "sequence": (2, ["parallel.sequence=2"]),
    "context": (2, ["parallel.context=2"]),
    "pipeline": (2, ["model.path=deep", "parallel.pipeline=2"]),
    "zero_bubble": (2, ["model.path=deep", "parallel.pipeline=2", "parallel.schedule=zero_bubble"]),
    "expert": (2, ["model.path=mixture", "parallel.expert=2"]),
}
"""Trainings of which several processes divide more than rows."""
FAST = ("single", "zero2")
"""Engines whose faults `make test` tries."""


def home(folder: Path) -> Path:
    """A user's folder with tiny models, rows, and the recipe `small`."""
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "deep", kv_heads=2, layers=4)
    tiny_model("Qwen/Qwen3-30B-A3B", folder / "mixture")
    write_jsonl(folder / "chat.jsonl", chat_rows(40))
    write_recipe(folder, "small", RECIPE)
    return folder


def engines() -> list[object]:
    """All engines and divisions, as a test's parameters."""
    every = (*ENGINES, *DIVISIONS)
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.matrix) for name in every]


def run(
    ranks: Ranks, home: Path, engine: str, name: str, faults: str = "", *own: str, processes: int = 0
) -> tuple[Path, int, str]:
    """A run to which `faults` happen: its folder, its exit code, and what it said."""
    usual, settings = {**ENGINES, **DIVISIONS}[engine]
    if processes == 1 < usual and engine in DIVISIONS:
        settings = [each for each in settings if each.startswith("model.")]
    processes = processes or usual
    arguments = ["recipe=small", *settings, *own, f"output.name={name}"]
    done = ranks.run(home, *arguments, processes=processes, entry="faults", FAULTS=faults, timeout=60)
    return home / "runs" / name, done.returncode, done.stdout + " ".join(done.stderr.split())


def saved(folder: Path) -> dict[int, str]:
    """Steps of the checkpoints that are there, each with what its seal says of it."""
    places = sorted((folder / "checkpoints").glob("checkpoint-*"))
    assert all(checkpoint.newest(folder / "checkpoints")[0] for _ in places)
    return {checkpoint.step_of(place): read_seal(place)["strategy"] for place in places}


def main(arguments: Sequence[str]) -> int:
    """Trains, with the faults that `FAULTS` names, on the engines of `cpu_engines`."""
    import cpu_engines
    from transformers import TrainerCallback

    from toolkit.train import setup

    rank, last = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) - 1
    lines = [line.split() for line in os.environ.get("FAULTS", "").splitlines()]
    here = {"all", str(rank)} | ({"last"} if rank == last else set())
    faults = {(int(step), name): values for step, of, name, *values in lines if of in here}

    class Happens(TrainerCallback):
        def __init__(self, session: Any) -> None:
            self.session = session

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for (step, name), values in faults.items():
                if step == state.global_step + 1:
                    FAULTS[name](self.session, *values)

    build = setup.Callbacks.__init__

    def with_faults(self: Any, session: Any) -> None:
        build(self, session)
        session.trainer.add_callback(Happens(session))

    setup.Callbacks.__init__ = with_faults  # type: ignore[method-assign]
    return cpu_engines.main(arguments)


def _kill(session: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _signal(session: Any, name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def _signal_in_save(session: Any, name: str) -> None:
    """When a part of the next checkpoint is written, and only then."""
    import torch

    save = torch.save

    def save_and_signal(*args: Any, **kwargs: Any) -> None:
        torch.save = save
        save(*args, **kwargs)
        _signal(session, name)

    torch.save = save_and_signal


def _signal_in_evaluation(session: Any, name: str) -> None:
    """Where the first rows of the next evaluation enter the model."""

    def signal_once(module: Any, args: Any) -> None:
        if not module.training:
            hook.remove()
            _signal(session, name)

    model = session.module
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hook = base.model.register_forward_pre_hook(signal_once)


def _limit_files(session: Any, size: str) -> None:
    """Files may be no larger, as on a disk with so little room; `-1` lifts it."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), hard))


def _delete(session: Any) -> None:
    while session.folder.path.exists():  # A checkpoint may be on its way, or be going.
        shutil.rmtree(session.folder.path, ignore_errors=True)


def _hang(session: Any) -> None:
    time.sleep(3600)


def _wait(session: Any, file: str) -> None:
    """Until a file is there."""
    while not Path(file).exists():
        time.sleep(0.01)


def _hold(session: Any, file: str) -> None:
    """Copies of checkpoints, and models that are kept, are not written before a file is there."""
    from toolkit.train.checkpoints import snapshots

    def later(call: Callable[..., Any]) -> Callable[..., Any]:
        def called_later(*args: Any, **kwargs: Any) -> Any:
            _wait(session, file)
            return call(*args, **kwargs)

        return called_later

    shutil.copyfile, snapshots.write = later(shutil.copyfile), later(snapshots.write)


def _release(session: Any, file: str) -> None:
    """Lets them begin; notes which checkpoints are there by then, and which step begins."""
    folders = (session.folder.checkpoints.glob("checkpoint-*"), (session.folder.path / "snapshots").glob("*"))
    there = sorted(place.name for folder in folders for place in folder)
    Path(file).write_text(json.dumps([session.trainer.state.global_step + 1, there]), encoding="utf-8")


def _fill(session: Any, times: str) -> None:
    """So many copies of checkpoints meet a full disk."""
    copy, left = shutil.copyfile, iter(range(int(times)))

    def copy_to_full(source: Any, target: Any, **kwargs: Any) -> Any:
        return copy(source, target if next(left, None) is None else "/dev/full", **kwargs)

    shutil.copyfile = copy_to_full


def _flip(session: Any, name: str) -> None:
    """One bit in the middle of each file of this name that `torch.save` writes from now on."""
    import torch

    save = torch.save

    def save_and_flip(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        save(content, file, *args, **kwargs)
        if Path(file).name == name:
            data = bytearray(Path(file).read_bytes())
            data[len(data) // 2] ^= 1
            Path(file).write_bytes(data)

    torch.save = save_and_flip  # type: ignore[assignment]


def _kill_in_save(session: Any) -> None:
    """When a part of the next checkpoint is written."""
    import torch

    save = torch.save

    def save_and_die(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        _kill(session)

    torch.save = save_and_die


def _lock_out(session: Any) -> None:
    """The run folder is read-only, also to a superuser."""
    for place in (session.folder.path, *session.folder.path.glob("*")):
        with suppress(FileNotFoundError):
            place.chmod(0o555 if place.is_dir() else 0o444)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    libc.capget(header, sets)
    # Those to go round the modes of files: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
    sets[0] &= ~0b110
    libc.capset(header, sets)


def _age(session: Any) -> None:
    """The clock was a day ahead when the first checkpoint was saved."""
    ahead = time.time() + 86400
    os.utime(min(session.folder.checkpoints.glob("checkpoint-*")), (ahead, ahead))


def _scale(session: Any, factor: str) -> None:
    """What layers of this process hand on in the next step is wrong by a factor."""
    model = session.module
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def scaled(module: Any, args: Any, output: Any) -> Any:
        if session.trainer.state.global_step == step:
            output.last_hidden_state = output.last_hidden_state * float(factor)
        else:
            hook.remove()
        return output

    step = session.trainer.state.global_step
    hook = base.model.register_forward_hook(scaled)


def _limit_memory(session: Any) -> None:
    """No process may take more than it has, and it takes more."""
    import psutil

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**20, hard))
    held = []
    while True:  # What was freed before is taken first.
        held.append(bytearray(2**24))


GROUPS = Path("/sys/fs/cgroup")


def make_group(name: str) -> Path | None:
    """A control group for memory, of whichever version this machine has; None where none may be made."""
    place = (GROUPS / "memory" if (GROUPS / "memory").is_dir() else GROUPS) / name
    try:
        place.mkdir()
    except OSError:
        return None
    if any((place / limit).is_file() for limit in LIMITS):
        return place
    place.rmdir()
    return None


LIMITS = ("memory.limit_in_bytes", "memory.max")
"""Of versions 1 and 2."""


def _limit_group(session: Any) -> None:
    """The process's control group has less memory left than it takes now, and the kernel kills it."""
    group = make_group(f"toolkit_fault_{os.getpid()}")
    assert group, "a test that cannot make groups is skipped"
    # What it holds already stays counted where it was.
    next(group / limit for limit in LIMITS if (group / limit).is_file()).write_text(str(2**24))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    held = b"x" * 2**27
    raise AssertionError(f"{len(held)} bytes were taken of fewer")


def remove_groups() -> None:
    """Those of processes that were killed."""
    for group in GROUPS.glob("**/toolkit_fault_*"):
        group.rmdir()


FAULTS: dict[str, Callable[..., None]] = {
    **{
        "kill": _kill,
        "signal": _signal,
        "signal_in_save": _signal_in_save,
        "signal_in_evaluation": _signal_in_evaluation,
        "limit": _limit_files,
        "delete": _delete,
        "hang": _hang,
        "wait": _wait,
        **{"flip": _flip, "kill_in_save": _kill_in_save, "lock_out": _lock_out, "age": _age, "scale": _scale},
        **{"hold": _hold, "release": _release, "fill": _fill},
        **{"limit_memory": _limit_memory, "limit_group": _limit_group},
    }
}
