"""The files by which a model's processor prepares images, sounds and videos: training on text leaves them as they are,
and what it makes takes images only with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def copy_processors(folder: Path, source: Any) -> None:
    """Copies them beside a whole model.

    Args:
        source: The `ModelSource` that training started from.
    """
    for name in _FILES:
        if "gguf_file" not in source.location and (file := source.file(name)):
            shutil.copyfile(file, folder / name)
