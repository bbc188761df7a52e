"""Which recipes have their layers compiled: what stands against it, and whether a machine can.

Imports no torch, so that plans can ask too; the compiling itself is in `compiled_layers`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.recipe import Recipe

_NOT_ALIKE: frozenset[str] = frozenset()
"""Kinds of models whose layers become more than one graph each, or compute something else, when they are compiled."""


def unfit(recipe: Recipe, config: Mapping[str, Any]) -> str:
    """Why `compile: auto` leaves the layers of a decided recipe as they are; empty where compiling them is tried.

    Args:
        config: The model's config as a dictionary; may be empty.
    """
    text = config.get("text_config") or config
    if text.get("model_type") in _NOT_ALIKE:
        return f"layers of {text['model_type']} do not compile as a whole"
    if recipe.objective == "seq2seq":
        return "encoder-decoders have not been measured"
    if recipe.strategy.shards_parameters:
        return f"{recipe.strategy.name} gathers weights around modules, which has not been measured"
    if recipe.activation_checkpointing.mode == "selective":
        return "selective checkpointing picks single operations, which compiled layers no longer have"
    if recipe.method.quantization != "none":
        return "quantized layers have not been measured"
    return ""


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
