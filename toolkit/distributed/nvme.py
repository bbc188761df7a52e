"""Offloading to NVMe: the op that reads and writes, free space, and a folder for each launch."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import Timeout

from toolkit.cache import locked
from toolkit.common import UserError
from toolkit.distributed import compiled_ops
from toolkit.distributed.layout import World
from toolkit.files import check_disk
from toolkit.recipe import Recipe


@contextlib.contextmanager
def swap_folder(recipe: Recipe, world: World, need: Callable[[], int]) -> Iterator[Path | None]:
    """A new folder below `strategy.nvme_path` for this launch on this node, removed afterwards; None if not needed.

    DeepSpeed empties the folders it is given, so two runs must never share one; inside, it makes one per process.

    Args:
        need: Bytes of this node that go there, by the plan; called only if something does.

    Raises:
        UserError: If the folder cannot be written, is too small, or the op cannot be compiled.
    """
    strategy = recipe.strategy
    if not strategy.uses_nvme:
        yield None
        return
    root = Path(str(strategy.nvme_path))
    # The processes of a node share their launcher; other nodes, and containers, may share the drive. A process without
    # a launcher is the child of a shell, which may start others.
    run = f"{os.getppid()}-{os.environ.get('MASTER_PORT', '')}" if world.local_world_size > 1 else os.getpid()
    folder = root / f"toolkit-{socket.gethostname()}-{os.geteuid()}-{run}"
    try:
        (folder / f"rank{world.rank}").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"strategy.nvme_path: {folder} cannot be written: {error.strerror}", "set it to a folder on a local drive"
        ) from error
    with contextlib.ExitStack() as stack:
        if world.local_rank == 0:
            try:
                stack.enter_context(locked(folder / ".lock", timeout=0))
            except Timeout:
                change = "wait for it, or set strategy.nvme_path to another folder"
                raise UserError(f"strategy.nvme_path: another run uses {folder}", change) from None
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            remove_abandoned(root, "toolkit-*", spared=folder.name)
            check_disk(
                root,
                need(),
                "this node's share of what is offloaded to strategy.nvme_path takes",
                "free space, name a larger drive, offload to cpu, or use more nodes",
            )
        _load_op()
        if strategy.offload_param == "nvme":
            from toolkit.distributed.swap_buffers import managed

            stack.enter_context(managed())
        yield folder


def remove_abandoned(root: Path, pattern: str, spared: str) -> None:
    """Removes folders of this user's launches that were killed: nobody holds their lock any more.

    Args:
        pattern: Of their names.
        spared: Of the names of those that stay; empty if none does.
    """
    for folder in root.glob(pattern):
        # A stranger's may not be looked into.
        with contextlib.suppress(Timeout, OSError):
            if spared and folder.match(spared):
                continue
            if folder.lstat().st_uid == os.geteuid() and (folder / ".lock").is_file():
                with locked(folder / ".lock", timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)


def _load_op() -> None:
    """Compiles DeepSpeed's `async_io` at first use."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder: Any = AsyncIOBuilder()
    if not builder.is_compatible():
        raise UserError(
            "offloading to NVMe needs libaio and a C++ compiler, to build DeepSpeed's async_io",
            "run `apt install libaio-dev g++` (libaio-devel gcc-c++ on Fedora and RHEL), or offload to cpu",
        )
    compiled_ops.load(builder, "install libaio's headers and a C++ compiler, or offload to cpu")
