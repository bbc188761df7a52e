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

COMPILED = {
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bamba", "bert-generation", "bigbird_pegasus"),
    *("bitnet", "blenderbot-small", "bloom", "camembert", "cohere", "cohere2", "data2vec-text", "deepseek_v2"),
    *("deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite"),
    *("llama", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
}
"""Kinds of decoders that `auto` compiles: on a tiny copy, layers that are alike are one graph without a break for every
length, with equal losses and gradients. Of others, Qwen 3.5 and Qwen3-Next fail, and Mamba is compiled twice."""


def unfit(recipe: Recipe, config: Mapping[str, Any]) -> str:
    """Why `compile: auto` leaves the layers of a decided recipe as they are; empty where compiling them is tried.

    Args:
        config: The model's config as a dictionary; may be empty.
    """
    text = config.get("text_config") or config
    if text.get("model_type") not in COMPILED:
        return f"layers of {text.get('model_type', 'this model')} are not known to compile as a whole"
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
