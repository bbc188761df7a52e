"""GGUF files, which llama.cpp and what is built on it load, by llama.cpp's own converter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from toolkit.common import UserError, brief, printable
from toolkit.own_process import end_with_parent

FILE = "model.gguf"
FORMATS = ("gguf", "gguf_q8_0")
"""By the names that a user gives: weights as they are, or 8-bit integers in blocks of 32."""
_OUTTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_SCRIPT = "convert_hf_to_gguf.py"
_VARIABLE = "LLAMA_CPP"


def converter() -> Path:
    """llama.cpp's converter on this machine.

    Raises:
        UserError: If there is none.
    """
    folder = os.environ.get(_VARIABLE)
    found = str(Path(folder) / _SCRIPT) if folder else shutil.which(_SCRIPT)
    if not found or not Path(found).is_file():
        where = f"{_VARIABLE}={folder}" if folder else "the PATH"
        raise UserError(
            f"format=gguf is written by llama.cpp's {_SCRIPT}, which is not in {where}",
            f"get it with `git clone https://github.com/ggml-org/llama.cpp`, and set {_VARIABLE} to that folder",
        )
    return Path(found)


def convert(model: Path, file: Path, form: str, dtype: torch.dtype) -> None:
    """Writes the weights and the tokenizer of a folder as one GGUF file.

    Args:
        form: One of `FORMATS`.
        dtype: Of the weights.

    Raises:
        UserError: If there is no converter, or it cannot convert this model.
    """
    kind = _OUTTYPES[dtype] if form == "gguf" else form.removeprefix("gguf_")
    _run(model, file, "--outtype", kind)


def check(model: Path) -> None:
    """Has the converter write the vocabulary alone, in seconds: it needs no weights for it.

    Args:
        model: A folder with a configuration and a tokenizer.

    Raises:
        UserError: As `convert` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run(model, Path(folder) / FILE, "--vocab-only")


def lost_tokens(file: Path, tokenizer: Any) -> list[str]:
    """Tokens that were added to a tokenizer and that a file has no name for: llama.cpp would take them for text."""
    from gguf import GGUFReader, TokenType

    if not (field := GGUFReader(file).get_field("tokenizer.ggml.token_type")):
        return []  # Of a vocabulary that has no types.
    kinds = field.contents()
    added = tokenizer.added_tokens_decoder.items()
    return [str(token) for number, token in added if kinds[number : number + 1] in ([], [TokenType.UNUSED])]


def _run(model: Path, file: Path, *options: str) -> None:
    command = [sys.executable, str(converter()), str(model), "--outfile", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=end_with_parent)
    if done.returncode or not file.is_file():
        last = next((line for line in done.stderr.splitlines()[::-1] if line.strip()), f"exit code {done.returncode}")
        if missing := re.search(r"No module named '(\w+)", last):
            raise UserError(f"llama.cpp's converter needs {missing[1]}", f"run `pip install {missing[1]}`")
        raise UserError(
            f"llama.cpp's converter does not take this model: {brief(printable(last), 1)}",
            "nothing was written; a newer llama.cpp may know it, or take another format",
        )
