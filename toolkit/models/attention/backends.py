"""Attention backends by name: which there are, what a model needs of one, and the one place that decides `auto`.

Imports no torch, so that validation and plans can ask too; the kernels themselves are in `attention_kernels`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from toolkit.common import UserError
from toolkit.recipe.model_configs import attention_widths, scored_flat
from toolkit.recipe.schema import VARLEN_ATTENTION as VARLEN

IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", **{name: name for name in VARLEN}}
"""Recipe name to Transformers' `attn_implementation`."""

FLEX_BLOCK = 128
"""Tokens of a block of flex attention's masks. Shorter rows get a kernel for decoding that cannot do all shapes, and
rows that are no multiple another one than those that are: measured with torch 2.11 on an H100."""
_SOFTCAP = {"eager", "flex", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
_SINKS = {"eager", "flex"}
"""Builds of FlashAttention 3 take sinks too, but have no gradient for them."""
_HAS_SINKS = {
    *("deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"),
}
"""Kinds of models that hand their attention a learned sink per head."""
_FLEX_INSTEAD = {"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "vaultgemma"}
"""Kinds of decoders that cap logits or have sinks, for which Transformers has code for flex and none for `sdpa`."""
_NO_SDPA = {
    *("big_bird", "bigbird_pegasus", "bloom", "bros", "canine", "codegen", "convbert", "cpmant", "deberta"),
    *("deberta-v2", "deepseek_v4", "falcon_mamba", "flaubert", "flint", "fnet", "fsmt", "funnel", "gemma2", "git"),
    *("got_ocr2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4"),
    *("ibert", "inkling2_loop_text", "inkling2_text", "layoutlmv2", "layoutlmv3", "led", "lilt", "longformer"),
    *("longt5", "luke", "mamba", "mamba2", "markuplm", "megatron-bert", "mimo_v2_flash", "mpnet", "mpt", "mra"),
    *("mvp", "nllb-moe", "nystromformer", "openai-gpt", "openai_privacy_filter", "pegasus_x", "perceiver"),
    *("prophetnet", "reformer", "rembert", "roformer", "rwkv", "splinter", "squeezebert", "switch_transformers"),
    *("t5gemma", "tapas", "trocr", "vaultgemma", "xglm", "xlm", "xlnet", "xlstm", "yoso"),
}
"""Kinds of models whose Transformers code has no `scaled_dot_product_attention`."""
_NO_BOUNDARIES = {
    *("bailing_hybrid", "bamba", "bart", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small"),
    *("bloom", "blt", "codegen", "cpmant", "deepseek_vl", "falcon", "falcon_h1", "falcon_mamba", "git", "gpt_neo"),
    *("gpt_neox_japanese", "gptj", "inkling2_text", "inkling_text", "jamba", "janus", "kimi_linear", "mamba"),
    *("mamba2", "marian", "mbart", "megatron-bert", "minicpmv4_6", "mpt", "musicgen", "musicgen_melody", "mvp"),
    *("nemotron_h", "olmo_hybrid", "openai-gpt", "pegasus", "plbart", "prophetnet", "qwen2_audio", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "reformer"),
    *("rembert", "roformer", "rwkv", "stablelm", "trocr", "whisper", "xglm", "xlm", "xlnet", "xlstm", "zamba"),
    "zamba2",
}
"""Kinds of decoders whose code has its own attention, or layers without any: none reads where documents begin."""
_OTHER_LAYERS = {
    *("granitemoehybrid", "lfm2", "lfm2_moe", "lfm3", "minimax", "nemotron", "recurrent_gemma", "zaya"),
}
"""Kinds of decoders whose other layers, or whose attention, run on across the boundaries that they are given."""
_KNOWN_LAYERS = {
    *("attention", "chunked_attention", "dense", "full_attention", "mlp", "moe", "sliding_attention", "sparse"),
}
"""Kinds of layers, as configs name them, that see no further than attention does. Others, such as `linear_attention`,
`conv` and `hybrid`, carry something from token to token; what comes with new architectures may, too."""
OTHER_POSITIONS = {
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
"""Kinds of decoders that count positions on from that of padding, where those of documents are given from 0."""
_READS_MASKS = {"axk2", "deepseek_v32", "doge", "dots3_note", "dots3_note_text", "glm_moe_dsa"}
"""Kinds of decoders that choose by the mask itself which tokens are attended to."""
_BEST_FIRST = ("torch_varlen", "flash_attention_2", "sdpa", "flex", "eager", "flash_attention_3", "flash_attention_4")
"""What `auto` tries, in this order; eager attention holds all scores of a layer, which grow with the square of rows.
`torch_varlen` runs the newer FlashAttention where it is installed, which is for models that only that can serve."""
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")


def resolve(
    requested: str,
    config: Mapping[str, Any],
    compute: str,
    available: Mapping[str, str],
    shares_by: str = "",
    headed: bool = False,
    teacher: Mapping[str, str] | None = None,
) -> str:
    """The backend that will run.

    Args:
        requested: `model.attention` of the recipe.
        config: The model's config as a dictionary; may be empty.
        compute: Name of the compute dtype, e.g. `bfloat16`.
        available: Every backend with `ok`, or why it does not run, see `attention_kernels.available`. Of those that are
            left out it is not known.
        shares_by: The key of the recipe by which processes share rows; empty if they do not.
        headed: Whether the model has a head for texts or words, or gives vectors. Of encoders their rows are padded.
        teacher: Backends by which its teacher cannot attend, see `unfit_to_teach`: `auto` takes none of them.

    Returns:
        A key of `IMPLEMENTATIONS`.

    Raises:
        UserError: If the requested backend cannot run or would compute something else; says which ones can.
    """
    reasons = {
        name: unfit(name, config, compute) or "ok" if reason == "ok" else reason for name, reason in available.items()
    }
    if shares_by:
        reasons |= {name: "it does not take parts of rows" for name in reasons if name not in VARLEN}
    if headed:
        padded = ("flex",) if scored_flat(config) else (*VARLEN, "flex")
        reasons |= dict.fromkeys(padded, "its rows come end to end, and this head reads them padded")
    usable = [name for name, reason in reasons.items() if reason == "ok"]
    if shares_by and not usable:
        packages = [name for name in VARLEN if name not in available and not unfit(name, config, compute)]
        installed = f", or set model.attention to what is installed there of {', '.join(packages)}" if packages else ""
        raise UserError(
            f"{shares_by} needs attention that takes the boundaries of documents, which is none here: "
            + reasons["torch_varlen"],
            f"remove {shares_by}{installed}",
        )
    if requested == "auto":
        tried = _tried(usable, config, compute)
        both = [name for name in tried if name not in (teacher or ())]
        if tried and teacher and not both:
            raise UserError(
                "distillation.teacher.path: the teacher cannot attend by any backend that the student can: "
                + "; ".join(f"{name}: {teacher[name]}" for name in tried),
                "set distillation.teacher.path, or model.path, to a model of another architecture",
            )
        return both[0]
    if requested not in usable:
        raise UserError(
            f"model.attention={requested} cannot be used: {reasons[requested]}",
            f"set model.attention=auto or one of: {', '.join(usable)}",
        )
    return requested


def on_device(kind: str, capability: str | None, compute: str) -> dict[str, str]:
    """Every backend that runs without packages of its own, with `ok` or the reason why a device does not run it.

    Args:
        kind: `cuda`, `rocm` or `cpu`.
        capability: CUDA's compute capability, such as `9.0`. ROCm reports numbers too, of AMD's generations.
        compute: Name of the compute dtype, e.g. `bfloat16`.
    """
    ampere = kind == "cuda" and float(capability or 0) >= 8
    older = "needs an Ampere GPU or newer (compute capability 8.0)"
    flex = {"cpu": "has no backward pass on a CPU", "rocm": "ok"}.get(kind, "ok" if ampere else older)
    flash = in_16_bits(compute) or ("ok" if ampere else older)
    varlen = {"cpu": "ok", "rocm": "is not tried on AMD's GPUs"}.get(kind, flash)
    return {"eager": "ok", "sdpa": "ok", "flex": flex, "torch_varlen": varlen}


def in_16_bits(compute: str) -> str:
    """Why FlashAttention's kernels cannot compute in a dtype; empty if they can."""
    return "FlashAttention kernels compute in 16 bits; the recipe's precision is fp32" if compute == "float32" else ""


def planned(
    requested: str,
    config: Mapping[str, Any],
    compute: str,
    kind: str,
    capability: str | None,
    shares_by: str = "",
    headed: bool = False,
    teacher: Mapping[str, str] | None = None,
) -> str:
    """The backend that `resolve` will choose on a device that is not here; what else is installed there is not known.

    Args:
        kind: See `on_device`, and so `capability`. Where it is not known, what the recipe asks for is taken.
        shares_by: See `resolve`, and so `headed` and `teacher`.

    Raises:
        UserError: If what the recipe asks for cannot run there, or computes something else.
    """
    there = on_device(kind, capability, compute)
    if requested != "auto" and kind == "cuda" and capability is None:
        return requested
    flash = {"cpu": "needs a GPU", "rocm": in_16_bits(compute) or "ok"}.get(kind, there["torch_varlen"])
    if requested != "auto" or flash != "ok":
        there |= {name: flash for name in VARLEN if name not in there}
    return resolve(requested, config, compute, there, shares_by, headed, teacher)


def _tried(usable: Collection[str], config: Mapping[str, Any], compute: str) -> list[str]:
    """What `auto` may take, best first. Flex is compiled for each model, so it is for those that `sdpa` cannot serve;
    with heads as wide as Gemma's its kernels do not fit into shared memory in fp32."""
    kind = (config.get("text_config") or config).get("model_type")
    takes_flex = compute != "float32" and kind in _FLEX_INSTEAD
    return [name for name in _BEST_FIRST if name in usable and (name != "flex" or takes_flex)]


def unfit_to_teach(config: Mapping[str, Any], compute: str, kind: str) -> dict[str, str]:
    """Every backend by which a teacher cannot attend, with the reason.

    Args:
        config: The teacher's.
        compute: Name of the dtype in which the teacher computes.
        kind: See `on_device`.
    """
    whole = kind != "cpu" and compute == "float32"
    flash = "FlashAttention kernels compute in 16 bits, and the teacher in fp32" if whole else ""
    reasons = {
        name: unfit(name, config, compute, trained=False) or (flash if name in VARLEN else "")
        for name in IMPLEMENTATIONS
    }
    return {name: reason for name, reason in reasons.items() if reason}


def with_mask(config: Mapping[str, Any]) -> str:
    """The backend for generation, which pads and keeps a cache: one that reads masks and computes this model right."""
    return "eager" if unfit("sdpa", config, "float32") else "sdpa"


def unfit(name: str, config: Mapping[str, Any], compute: str, trained: bool = True) -> str:
    """Why a backend would compute something else than this model asks for; empty if it would not.

    Args:
        trained: Whether the model is; others drop nothing.
    """
    text = config.get("text_config") or config
    if text.get("attn_logit_softcapping") and name not in _SOFTCAP:
        return "this model caps its attention logits, which this backend would silently skip"
    if text.get("model_type") in _HAS_SINKS and name not in _SINKS:
        return "this model has attention sinks, which this backend would silently skip or leave untrained"
    if name == "eager" and text.get("model_type") == "falcon" and text.get("alibi"):
        return "Transformers' code of it adds this model's ALiBi to the scores twice"
    if name == "sdpa" and _NO_SDPA & {text.get("model_type"), config.get("model_type")}:
        return "Transformers has no such code for this model"
    drops = trained and any(text.get(key) for key in _ATTENTION_DROPOUT)
    if name == "flex" and drops:
        return "this model drops attention weights while training, which this backend refuses"
    if name in VARLEN:
        if text.get("is_encoder_decoder"):
            return "encoder-decoder models are not fed by document boundaries"
        if text.get("attention_chunk_size"):
            return "this model attends within chunks, which this backend would silently skip"
        if text.get("model_type") in _READS_MASKS:
            return "this model chooses by the mask which tokens are attended to, and this backend has none"
        if text.get("model_type") in _OTHER_LAYERS or not _KNOWN_LAYERS.issuperset(text.get("layer_types") or ()):
            return "this model has layers for which documents do not end at their boundaries"
        if text.get("model_type") in OTHER_POSITIONS:
            return "this model does not count the positions of a document from 0"
        if text.get("model_type") in _NO_BOUNDARIES:
            return "this model does not read where documents begin"
        # 0, so not known, where a config leaves its heads to its class, as that of Gemma 3 4B does.
        head_dim = attention_widths(config)[2]
        if head_dim > 256 or head_dim % 8:
            return f"FlashAttention kernels take head sizes up to 256 in steps of 8, this model has {head_dim}"
        if name != "flash_attention_2" and drops:
            return "this model drops attention weights while training, which this backend does not do"
    return ""
