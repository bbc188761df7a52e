"""What a run takes over from the one that its folder holds, before its recipe is decided."""

from __future__ import annotations

from pathlib import Path

from toolkit.cache import LOCK
from toolkit.recipe import Loaded, files
from toolkit.recipe.precisions import PRECISIONS

MANIFEST = "manifest.json"
ALSO_CHANGED = ", or what prepares it: tokenizer, chat template, version of this toolkit"
"""Of a hash of data, which follows from these, too."""
GO_ON = "the same command goes on from the newest whole checkpoint, with checkpoint.resume=auto (the default)"
RESERVED = ".reserved"
"""A file that makes room for a last word where the disk is full when the run ends."""


def used(path: Path) -> bool:
    """Whether a folder holds results: an attempt that failed before its first step leaves none."""
    if not path.is_dir():
        return path.exists()
    own = {"recipe.yaml", MANIFEST, "audit.json", "reference.safetensors", "stacks", LOCK, RESERVED}
    left = (file for file in path.iterdir() if file.name not in own and file.suffix != ".partial")
    # Libraries make the folder of the checkpoints before anything is refused.
    return any(not file.is_dir() or any(file.iterdir()) for file in left)


def as_begun(loaded: Loaded) -> Loaded:
    """With `precision: auto` as the run in its folder began: on another machine, or by another measurement of this one,
    another type may be the fastest, and the run would be a different one."""
    folder = loaded.run_folder
    if loaded.recipe.precision != "auto" or loaded.recipe.checkpoint.resume == "never" or not used(folder):
        return loaded
    try:
        begun = files.read(folder / "recipe.yaml").values.get("precision")
    except OSError:
        return loaded
    if begun not in PRECISIONS:
        return loaded
    return loaded.decided(loaded.recipe.with_values({"precision": begun}), {"precision": f"{begun}: as this run began"})
