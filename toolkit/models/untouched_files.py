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
        folder: It has the tokenizer already.
        source: The `ModelSource` that training started from.
    """
    if "gguf_file" in source.location:
        return
    for name in (*_PROCESSORS, *(() if source.recipe.model.tokenizer else _SENTENCEPIECE)):
        if file := source.file(name):
            shutil.copyfile(file, folder / name)
            if name == "processor_config.json":
                _leave_template(folder / name)
            elif name in _SENTENCEPIECE:
                _list_added_tokens(folder)


def _leave_template(file: Path) -> None:
    """A processor would take its own template before the one beside it, which was trained with."""
    content = json.loads(file.read_text(encoding="utf-8-sig"))
    if content.pop("chat_template", None) is not None:
        _write(file, content)


def _list_added_tokens(folder: Path) -> None:
    """A converter that reads a SentencePiece vocabulary looks here for the tokens that it lacks, and not in
    `tokenizer.json`. Of tokenizers that have such a file, Transformers no longer writes the list."""
    tokenizer, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not tokenizer.is_file():
        return
    added = json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]
    content = json.loads(settings.read_text(encoding="utf-8"))
    _write(settings, content | {"added_tokens_decoder": {str(token.pop("id")): token for token in added}})


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
