"""What a machine needs to compile layers. Asked before a run has chosen its engine, so nothing here imports torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def missing(device: str) -> str:
    """What this machine lacks to compile for a device; empty if nothing.

    Args:
        device: `cuda`, `rocm` or `cpu`.
    """
    # Triton compiles its launchers with a C compiler.
    compilers = [os.environ.get("CXX"), "g++", "clang++"] if device == "cpu" else [os.environ.get("CC"), "gcc", "clang"]
    if not any(name and shutil.which(name) for name in compilers):
        return f"there is no {'C++' if device == 'cpu' else 'C'} compiler ({compilers[1]})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's header files are not installed (python3-dev)"
    if device != "cpu" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""
