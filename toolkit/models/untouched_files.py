"""Files of a model that training leaves as they are, and without which what it makes could do less."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""By which images, sounds and videos are prepared."""
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
"""From which llama.cpp's converter reads the vocabulary of Gemma, Phi 3, T5 and others. Transformers saves its own form
of it alone."""


def copy_untouched(folder: Path, source: Any) -> None:
    """Copies them beside a whole model.

    Args:
        source: The `ModelSource` that training started from.
    """
    if "gguf_file" in source.location:
        return
    for name in (*_PROCESSORS, *(() if source.recipe.model.tokenizer else _SENTENCEPIECE)):
        if file := source.file(name):
            shutil.copyfile(file, folder / name)
            if name == "processor_config.json":
                _leave_template(folder / name)


def _leave_template(file: Path) -> None:
    """A processor would take its own template before the one beside it, which was trained with."""
    content = json.loads(file.read_text(encoding="utf-8-sig"))
    if content.pop("chat_template", None) is not None:
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
