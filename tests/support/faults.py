"""Trainings to which something happens at the end of a step: `FAULTS="STEP RANK NAME …"` in the environment, by lines.

A fault is real: signals are sent, limits are set, files are removed. `NAME` is a function below.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import write_recipe
from ranks import Ranks
from tiny import chat_rows, tiny_model

from toolkit.seal import read_seal
from toolkit.train import checkpoint

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
FAST = ("single", "zero2")
"""Engines whose faults `make test` tries."""


def home(folder: Path) -> Path:
    """A user's folder with a tiny model, rows, and the recipe `small`."""
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(40)), encoding="utf-8")
    write_recipe(folder, "small", RECIPE)
    return folder


def engines() -> list[object]:
    """All engines, as a test's parameters."""
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.matrix) for name in ENGINES]


def run(ranks: Ranks, home: Path, engine: str, name: str, faults: str = "", *own: str) -> tuple[Path, int, str]:
    """A run to which `faults` happen: its folder, its exit code, and what it said."""
    processes, settings = ENGINES[engine]
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

    rank = int(os.environ.get("RANK", "0"))
    lines = [line.split() for line in os.environ.get("FAULTS", "").splitlines()]
    faults = {(int(step), name): values for step, of, name, *values in lines if of in ("all", str(rank))}

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


def _limit_files(session: Any, size: str) -> None:
    """Files may be no larger, as on a disk with so little room; `-1` lifts it."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), hard))


def _delete(session: Any) -> None:
    shutil.rmtree(session.folder.path)


def _hang(session: Any) -> None:
    time.sleep(3600)


def _wait(session: Any, file: str) -> None:
    """Until a file is there."""
    while not Path(file).exists():
        time.sleep(0.01)


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


FAULTS: dict[str, Callable[..., None]] = {
    **{
        "kill": _kill,
        "signal": _signal,
        "limit": _limit_files,
        "delete": _delete,
        "hang": _hang,
        "wait": _wait,
        "flip": _flip,
    }
}
