"""The run folder: claimed by one run, locked while it trains, described by a manifest.

A folder is never shared by two different runs: what decides the weights is hashed, so the same command continues and
another one is refused with the keys that differ. The manifest holds what is needed to understand and repeat a run.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import itertools
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from filelock import Timeout
from pydantic import TypeAdapter

from toolkit.cache import LOCK, is_held, locked
from toolkit.common import UserError
from toolkit.distributed.layout import BatchLayout
from toolkit.distributed.rendezvous import Rendezvous
from toolkit.files import UNANSWERED, not_writable, remove_partial, set_aside, write_json
from toolkit.recipe import Loaded
from toolkit.recipe.teaching import of_teacher
from toolkit.report.load import read_manifest
from toolkit.report.manifest import Manifest
from toolkit.seal import damage
from toolkit.train.checkpoints import checkpoint
from toolkit.train.checkpoints.fast_folder import take_left
from toolkit.train.checkpoints.left_parts import LeftParts
from toolkit.train.checkpoints.sealing import Take, aside, complete_left, is_left
from toolkit.train.continued import ALSO_CHANGED, MANIFEST, RESERVED, used
from toolkit.train.identity import differences_of, recipe_hash

_PACKAGES = (
    *("accelerate-toolkit", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "bitsandbytes"),
    *("datasets", "hydra-core", "omegaconf", "pydantic", "tokenizers", "safetensors", "flash-attn"),
    *("flash-attn-3", "flash-attn-4"),
)
_WRITING = threading.Lock()


@dataclass
class RunFolder:
    """A run's folder on disk. What an earlier start left in it stays as it is until this one is accepted.

    Args:
        path: The folder.
        finished: Whether this very run has already been completed there.
        resume_from: The checkpoint from which training continues; the final model, where only what follows its saving
            is missing.
        passed_over: Later checkpoints, and a manifest, from which it does not continue, and why.
        accepted: Whether nothing of an earlier start is there, or this one has been accepted (by `describe`).
        shared: Whether all processes see it (by `preflight.check`).
    """

    path: Path
    finished: bool = False
    resume_from: Path | None = None
    passed_over: Mapping[Path, str] = field(default_factory=dict)
    accepted: bool = True
    shared: bool = True

    def __post_init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    @property
    def final(self) -> Path:
        """The trained model or adapter."""
        return self.path / "final"

    @property
    def is_trained(self) -> bool:
        """Whether the final model is there, and only what follows its saving is missing."""
        return self.resume_from == self.final

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def kept_bytes(self) -> int:
        """Of checkpoints and models that are there already, and make room for others."""
        staying = checkpoint.may_be_whole(self.passed_over)
        checkpoints = (each for each in self.checkpoints.glob("checkpoint-*") if each not in staying)
        places = (*checkpoints, self.path / "snapshots", self.final)
        return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other processes from training in this folder. The lock goes with the process, however it ends.

        Raises:
            UserError: If another process is training here.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / LOCK, timeout=1))  # Who looks whether it runs has it a moment.
            except Timeout:
                raise UserError(
                    f"another process is training in {self.path} right now",
                    "wait for it, or set output.name to a new name",
                ) from None
            yield

    def describe(self, loaded: Loaded, layout: BatchLayout, hashes: Mapping[str, str], **values: Any) -> None:
        """Notes in the manifest how the run was started: command, versions, git commit, hashes, hardware.

        Args:
            hashes: Of `data` and, where it is known already, of `model`.
            values: What else is to be noted.

        Raises:
            UserError: If it continues on other data or another model than it began with; names what has changed.
        """
        before = self.manifest() if self.resume_from else Manifest()
        if loaded.recipe.checkpoint.resume == "auto":
            for kind, after in hashes.items():
                if (then := before.hashes.get(kind, after)) != after:
                    also = ALSO_CHANGED if kind == "data" else ""
                    raise UserError(
                        f"the {kind} of {self.path} changed since the run began{also} ({then} then, {after} now)",
                        "restore it, or start anew: output.name=NEW, or checkpoint.resume=never",
                    )
        if before.started:
            values["continued"] = now()
        skipped = before.skipped_steps
        if skipped and self.resume_from and not self.is_trained:  # Others are taken again.
            skipped = [step for step in skipped if step <= checkpoint.step_of(self.resume_from)]
        checkpoint.keep_unread(self.passed_over)
        self.accepted = True
        if (self.path / MANIFEST) in self.passed_over:
            set_aside(self.path / MANIFEST)
        with _WRITING:
            remove_partial(self.path)
        while self._waiting:
            self._waiting.pop(0)()
        self.update_manifest(
            name=self.path.name,
            command=" ".join(["python", shlex.join(sys.argv)]),
            working_folder=os.getcwd(),
            started=before.started or now(),
            restarts=int(os.environ.get("TOOLKIT_RESTARTS", 0)),
            finished=None,
            status="running",
            error=None,
            versions={"python": platform.python_version(), **versions()},
            git=_git(),
            hardware=_hardware(),
            saved_by=checkpoint.writer(loaded, layout.world_size),
            chosen=dict(loaded.chosen),
            taken_over=dict(loaded.taken_over),
            extra=loaded.extra,
            hashes={"recipe": recipe_hash(loaded.recipe), **hashes},
            batch=layout,
            resumed_from=str(self.resume_from) if self.resume_from else None,
            skipped_steps=skipped,
            **values,
        )
        (self.path / RESERVED).write_bytes(bytes(2**16))

    def end(self, status: str, **values: Any) -> None:
        """Notes how the run ended, and when; also where the disk is full by now."""
        (self.path / RESERVED).unlink(missing_ok=True)
        self.update_manifest(status=status, finished=now(), **values)

    def once_accepted(self, write: Callable[[], None]) -> None:
        """Has something written into the folder, now or when this run is accepted."""
        if self.accepted:
            write()
        else:
            self._waiting.append(write)

    def update_manifest(self, **values: Any) -> None:
        """Merges values, see `Manifest`, into `manifest.json`, once the run is accepted; from any thread."""
        self.once_accepted(lambda: self._merge(values))

    def _merge(self, values: dict[str, Any]) -> None:
        with _WRITING:
            before = self.manifest().model_dump()
            values["hashes"] = before.get("hashes", {}) | values.get("hashes", {})
            write_json(self.path / MANIFEST, Manifest.model_validate(before | values).model_dump(mode="json"))

    def manifest(self) -> Manifest:
        """Content of `manifest.json`; empty if there is none, or it is damaged.

        Raises:
            OSError: If its disk does not answer: what cannot be read now may be whole, and must not be replaced.
        """
        return read_manifest(self.path, UNANSWERED)[0]


def claim(loaded: Loaded, world_size: int, take: Take = take_left) -> RunFolder:
    """Finds or makes the folder of this run. Nothing of another run is ever overwritten.

    Args:
        take: Copies what a killed run had taken in into fast folders.

    Raises:
        UserError: If the folder holds another run or foreign files, is trained in, or cannot be written; or if training
            cannot continue from its newest checkpoint, or from the one that is named.
    """
    resume = loaded.recipe.checkpoint.resume
    named = Path(resume) if resume not in ("auto", "never") else None
    teaches = of_teacher(loaded.recipe)
    for model in (loaded.recipe.model.path, loaded.recipe.model.adapter or "", teaches.model.path if teaches else ""):
        check_final(model)
    if named:
        checkpoint.check_named(named, loaded.recipe)
    path = loaded.run_folder
    if resume == "never":
        numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
        places = itertools.chain([path], numbered)
        path = next(place for place in places if not (used(place) or is_held(place / LOCK)))
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, not a run folder", "set output.dir or output.name")
    folder = RunFolder(path)
    manifest = folder.manifest()
    if manifest.status != "finished" and (path / LOCK).is_file():
        with folder.held():  # Another one that is about to end still saves from where this one should go on.
            pass
        manifest = folder.manifest()
    damaged: dict[Path, str] = {}
    if used(path) or manifest.final:
        recipe, differences = manifest.hashes.get("recipe"), differences_of(path, loaded)
        if recipe is None:
            if differences is None or not (path / MANIFEST).is_file():
                raise UserError(f"{path} holds files that are no run", "set output.name to a new name")
            damaged = {path / MANIFEST: "cannot be read"}
        if differences if recipe is None else recipe != recipe_hash(loaded.recipe):
            if differences is None:
                differences = ["its content (the folder has no readable recipe.yaml)"]
            raise UserError(
                f"{path} holds another run; this recipe differs in {', '.join(differences) or 'nothing but the code'}",
                "set output.name to a new name, or checkpoint.resume=never for a numbered folder beside it",
            )
        finished = manifest.status == "finished"
        if finished or manifest.final:
            if not (reason := damage_of(folder.final)):
                return RunFolder(path, finished, None if finished else folder.final, accepted=finished)
            damaged[folder.final] = reason
    if is_left(folder.checkpoints):
        with folder.held():
            complete_left(folder.checkpoints, loaded.recipe, take)
    newest, passed_over = checkpoint.newest(folder.checkpoints, needed=not named)
    if folder.final in damaged and not newest:
        raise UserError(
            f"training is over, but {folder.final} {damaged[folder.final]}, and no checkpoint is left to go on from",
            "restore it, or train again beside it with checkpoint.resume=never",
        )
    if start := named or newest:
        checkpoint.check_readable(start, loaded, world_size)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        why = not_writable(path) or error.strerror
        raise UserError(f"{path} cannot be written: {why}", "set output.dir to a folder you own") from error
    return RunFolder(
        path,
        accepted=not (named or used(path)),
        resume_from=start,
        passed_over=damaged | (checkpoint.may_be_whole(passed_over) if named else passed_over),
    )


def claim_together(loaded: Loaded, rendezvous: Rendezvous) -> RunFolder:
    """Claims the folder on the first process; all get the same folder, or hear why there is none.

    Raises:
        UserError: As `claim` does, on every process.
    """
    world, kind = rendezvous.world, TypeAdapter(RunFolder)
    parts = LeftParts(rendezvous, loaded.recipe, aside(RunFolder(loaded.run_folder).checkpoints))
    claimed = None if world.rank else kind.dump_python(claim(loaded, world.world_size, parts.take), mode="json")
    parts.attend()
    return kind.validate_python(rendezvous.exchange("folder", claimed, lambda values: values[0]))


def damage_of(final: Path) -> str:
    """What is wrong with a run's final model, for a sentence that begins with its name; empty if it is as its run wrote
    it."""
    noted = read_manifest(final.parent)[0].final
    return damage(final, noted.files) if noted else "has no record of its files"


def check_final(model: str) -> None:
    """Refuses a model or an adapter that a run has published and that is not as it was written; others pass.

    Args:
        model: A folder, or any other name of a model.

    Raises:
        UserError: Naming the files.
    """
    final = Path(model)
    if final.name == "final" and read_manifest(final.parent)[0].final and (reason := damage_of(final)):
        raise UserError(f"{final} {reason}", "the recipe of its run writes it anew, from the last checkpoint")


def status_after(error: BaseException) -> str:
    """How a run has ended by an error, which may be another process's: somebody has stopped it, or it failed."""
    stopped = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 0) > 128
    return "interrupted" if stopped else "failed"


def stages(adapter: str | None) -> list[str]:
    """The adapters that led to this one, and itself; as far as each one's run folder still tells."""
    if adapter is None:
        return []
    return [*read_manifest(Path(adapter).parent)[0].started_from, adapter]


def versions() -> dict[str, str]:
    """Installed versions of the libraries that decide a run's numbers."""
    installed = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def now() -> str:
    """The time, in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def hash_files(files: Iterable[Path]) -> str:
    """Hash of the content of files. A hub's cached blob is named by its own hash, so it is not read again."""
    digest = hashlib.sha256()
    for file in sorted(files):
        blob = file.resolve()
        digest.update(os.fsencode(file.name))
        if file.is_symlink() and len(blob.name) == 64:
            digest.update(os.fsencode(blob.name))
        else:
            with blob.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _git() -> dict[str, Any] | None:
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(dirty.stdout.strip())}


def _hardware() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "device": "cuda" if gpus else "cpu",
        "cpu": platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    }
