"""Which recipes have their layers compiled by `auto`, and what stands against it where one asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.recipe import model_configs
from toolkit.recipe.schema import Recipe

COMPILED = {
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bamba", "bert-generation", "bigbird_pegasus"),
    *("bitnet", "blenderbot-small", "bloom", "camembert", "codegen", "cohere", "cohere2", "cohere2_moe"),
    *("data2vec-text", "deepseek_v2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "glm4", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "helium", "lfm2", "llama"),
    *("mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
}
"""Kinds of decoders that `auto` compiles: on a tiny copy, layers that are alike are one graph without a break for every
length, with equal losses and gradients. Of others, Qwen 3.5 and Qwen3-Next fail, Mamba is compiled twice, Phi-MoE and
GPT-BigCode compute other numbers, and about a hundred have not been tried."""


def unfit(recipe: Recipe, config: Mapping[str, Any]) -> str:
    """Why `compile: auto` leaves the layers of a decided recipe as they are; empty where compiling them is tried.

    Args:
        config: The model's config as a dictionary; empty where it is not known.
    """
    kind = model_configs.text_config(config).get("model_type")
    if kind and kind not in COMPILED:
        return f"layers of {kind} are not known to compile as a whole"
    if recipe.objective == "seq2seq":
        return "encoder-decoders have not been measured"
    if recipe.strategy.shards_parameters:
        return f"{recipe.strategy.name} gathers weights around modules, which has not been measured"
    if recipe.activation_checkpointing.mode == "selective":
        return "selective checkpointing picks single operations, which compiled layers no longer have"
    if recipe.method.quantization != "none":
        return "quantized layers have not been measured"
    return ""
