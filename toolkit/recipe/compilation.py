"""Which models' layers are known to compile, and why others cannot when a recipe asks for it.

`tests/models/test_compiled_layers.py` finds out on tiny copies: it compiles if layers that are alike are one graph
without a break, for rows of every length, with equal losses and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.recipe import model_configs
from toolkit.recipe.schema import Recipe
from toolkit.recipe.sections import Method

_DECODERS = {
    "yes": """
        afmoe apertus arcee aria_text axk1 axk2 bamba bart beam bert bert-generation big_bird bigbird_pegasus
        biogpt bitnet blenderbot blenderbot-small bloom blt camembert codegen cohere cohere2 cohere2_moe cwm
        data2vec-text deepseek_v2 deepseek_v3 deepseek_v32 doge dots1 dots3_note_text electra emu3 ernie
        ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text exaone4 exaone_moe falcon flex_olmo flint fuyu gemma gemma2
        gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4
        glm4_moe glm4_moe_lite glm4v_text glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss
        gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text
        hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm3 iquestcoder
        jais2 kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text marian mbart megatron-bert mellum
        mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mistral4
        mistral_large4_text mixtral mllama modernbert-decoder moshi moss_transcribe_diarize mpt mvp nanochat
        nemotron nemotron_h olmo olmo2 olmo3 olmoe opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart
        prophetnet qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text
        roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3 solar_open stablelm starcoder2 trocr
        vaultgemma whisper xglm xlm-roberta xlm-roberta-xl youtu zamba2 zaya
    """,
    "breaks": "jetmoe longcat_flash xmod",
    "recompiles": """
        bailing_hybrid deepseek_v4 diffllama falcon_mamba jamba kimi_linear mamba olmo_hybrid recurrent_gemma rembert
        rwkv xlstm
    """,
    "fails": "mamba2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next",
    "unmarked": "ctrl gpt_neox_japanese openai-gpt xlm",
}
_ENCODER_DECODERS = {
    "yes": """
        bart bigbird_pegasus blenderbot blenderbot-small m2m_100 mbart mt5 mvp nllb-moe pegasus pegasus_x plbart
        prophetnet seamless_m4t seamless_m4t_v2 t5 t5gemma t5gemma2 umt5
    """,
    "breaks": "led switch_transformers",
    "fails": "longt5",
}
"""Names of architectures by what came of it, as the page docs/models.md shows."""
_AGAINST = {
    "yes": "",
    "breaks": "the code of {kind}'s layers cannot be one graph",
    "recompiles": "{kind}'s layers are compiled again for each layer or length of rows",
    "fails": "compiling the layers of {kind} ends in an error",
    "unmarked": "Transformers does not mark the layers of {kind} as such",
    "untried": "layers of {kind} have not been tried",
}


def outcome(config: Mapping[str, Any], objective: str) -> str:
    """What came of compiling the layers of a model: `yes`, why not in a word, or `untried`.

    Args:
        config: The model's config as a dictionary.
    """
    kinds = {each.get("model_type") for each in (config, model_configs.text_config(config))}
    outcomes = _ENCODER_DECODERS if objective == "seq2seq" else _DECODERS
    return next((word for word, names in outcomes.items() if kinds & set(names.split())), "untried")


def unfit(recipe: Recipe, config: Mapping[str, Any]) -> str:
    """Why `compile: auto` leaves the layers of a decided recipe as they are; empty where compiling them is tried.

    Args:
        config: The model's config as a dictionary; empty where it is not known.
    """
    kind = model_configs.text_config(config).get("model_type")
    if kind and (against := _AGAINST[outcome(config, recipe.objective)]):
        return against.format(kind=kind)
    if recipe.strategy.shards_parameters:
        return f"{recipe.strategy.name} gathers weights around modules, which has not been measured"
    if recipe.parallel.tensor > 1:
        return "layers that processes divide have not been compiled"
    if recipe.parallel.expert > 1:
        return "layers whose tokens travel between processes have not been compiled"
    if recipe.parallel.pipeline > 1:
        return "layers that are spread over processes have not been compiled"
    if recipe.activation_checkpointing.mode == "selective":
        return "selective checkpointing picks single operations, which compiled layers no longer have"
    if recipe.activation_checkpointing.mlp_tiles > 1:
        return "layers with MLPs in tiles have not been compiled"
    if recipe.method.quantization not in ("none", "nf4", "fp8"):
        return f"layers quantized to {recipe.method.quantization} have not been measured"
    if recipe.method.quantization != "none" and model_configs.fused_experts(config):
        return "each layer has code of its own to restore quantized experts, and would be compiled by itself"
    if recipe.method.use_dora:
        return "the code of DoRA cannot be one graph with a layer's"
    if recipe.method.name == "lora" and _adapts_parameters(recipe.method, config):
        return "the code of adapters for experts, or for single parameters, cannot be one graph with a layer's"
    return ""


def _adapts_parameters(method: Method, config: Mapping[str, Any]) -> bool:
    return bool(method.target_parameters) or model_configs.adapts_experts(method.target_modules, config)
