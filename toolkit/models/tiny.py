"""A model of the same architecture, small enough to be built and run in a fraction of a second.

Weights cannot tell how a model computes its logits or whether it can be traced; its code can, and that depends on the
config alone. So a question about an architecture is answered by its own code on a copy with few and narrow layers.
Sizes are known by the names that configs give them; what else makes an architecture special stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.integrations import deepspeed as zero

from toolkit.models.heads import from_config, pin

VOCABULARY = 128
_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16
_TOKENS = 64

_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("encoder_hash_byte_group_vocab", "entity_vocab_size"), VOCABULARY),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "max_window_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "dim_model", "hidden_dim", "lru_width", "embedding_dim"), _HIDDEN
    ),
    **dict.fromkeys(("embedding_size", "emb_dim", "word_embed_proj_dim", "hidden_size_global"), _HIDDEN),
    # Zamba attends over the hidden states and the embeddings beside them.
    "attention_hidden_size": 2 * _HIDDEN,
    "attention_head_dim": 2 * _HEAD_DIM,
    **dict.fromkeys(("num_attention_heads", "num_attention_heads_per_layer", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "global_head_dim", "dim_head", "d_head", "d_kv", "mamba_headdim"), _HEAD_DIM),
    **dict.fromkeys(("kv_channels", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"), _HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "d_ff", "ffn_dim", "n_inner", "dim_ff"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "num_encoder_ffn_dim", "ffn_hidden_size"), 128),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "mamba_d_ssm"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "q_lora_rank", "qk_head_dim"), 32),
    **dict.fromkeys(("mamba_n_heads", "rotary_dim"), 8),
    "mamba_d_head": _HEAD_DIM,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("original_max_position_embeddings", "max_target_positions", "max_source_positions"), 128),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), 16),
}
"""The largest that each size may be."""
_KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "num_global_key_value_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")


def tiny_model(
    config: Any, objective: str, trust_remote_code: bool = False, attention: str | None = None
) -> PreTrainedModel:
    """A random model of an architecture, in fp32 on the CPU.

    Args:
        config: The model's configuration object; it is not changed.
        objective: As in the recipe: whether it is a causal language model or an encoder-decoder.
        attention: Transformers' name of an implementation; by default what the architecture takes by itself.

    Raises:
        Exception: Whatever the model's own code raises for sizes that do not fit together.
    """
    small = type(config)(**shrink(config.to_dict()))
    if trust_remote_code:
        pin(small, getattr(config, "_commit_hash", None), objective)
    with by_itself(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = from_config(
            objective, small, trust_remote_code, dtype=torch.float32, attn_implementation=attention
        )
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases of zero and gains of one would hide what they do.
                parameter.add_(0.05 * torch.randn_like(parameter))
    for each in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        each.use_cache = False  # Of hybrid models with layers of one kind alone, Transformers can make none.
        if hasattr(each, "rescale_every"):
            each.rescale_every = 0  # As it is trained.
    return model.eval()


def text_batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A row of text for a tiny model, in pairs for an encoder-decoder."""
    ids = torch.arange(_TOKENS)[None] % (VOCABULARY - 8) + 4
    return {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """Models that are made and run in it are whole and on the CPU, whatever is set for those that are trained: ZeRO-3
    would divide each that Transformers makes, plans put theirs on `meta`."""
    current = zero._hf_deepspeed_config_weak_ref and zero._hf_deepspeed_config_weak_ref()
    zero.unset_hf_deepspeed_config()
    try:
        with _disable_current_modes(), torch.device("cpu"):
            yield
    finally:
        if current is not None:
            zero.set_hf_deepspeed_config(current)


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with two to four layers, one of each kind, and narrow widths.

    Args:
        config: Content of a `config.json`; those of its parts are shrunk too.
    """
    small: dict[str, Any] = {}
    depth = next((config[key] for key in _LAYERS if isinstance(config.get(key), int)), 0)
    layers = _one_of_each_kind(config, depth)
    for key, value in config.items():
        if key == "per_layer_config" and value:
            value = {new: shrink(value[old]) for new, old in enumerate(layers) if old in value}
        elif isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
            value = shrink(value)
        elif key in _LAYERS and value == depth:
            value = len(layers)
        elif key in _KV_HEADS and value:
            heads = config.get("num_attention_heads") or config.get("n_head") or value
            value = _HEADS if value == heads else min(value, _HEADS // 2)
        elif key in _SIZES and type(value) is int:
            value = min(value, _SIZES[key])
        elif key == "attention_types":  # GPT-Neo's: kinds, and how often they are repeated.
            value = [[kinds, 1] for kinds, _ in value]
        elif isinstance(value, list) and not key.endswith("_token_id"):
            value = _of_layers(value, layers, depth, _SIZES.get(key))
        elif key.endswith("_token_id") and isinstance(value, int):
            value = value if value < VOCABULARY else VOCABULARY - 1
        # What is not stated follows from what is.
        if value is not None:
            small[key] = value
    for key in ("rope_parameters", "rope_scaling"):
        if (rope := small.get(key)) and rope.get("mrope_section"):
            small[key] = {
                **rope,
                "mrope_section": _narrowed(rope["mrope_section"], _head_dim(small) / _head_dim(config)),
            }
    if {"expand", "num_heads", "head_dim"} <= small.keys():  # Mamba-2, whose heads divide the expanded width.
        small["num_heads"] = small["expand"] * _HIDDEN // _HEAD_DIM
    rope, nope = small.get("qk_rope_head_dim"), small.get("qk_nope_head_dim")
    if rope and nope and config.get("head_dim") not in (None, config["qk_rope_head_dim"]):
        small["head_dim"] = rope + nope
    return small


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _narrowed(sections: list[int], by: float) -> list[int]:
    """Parts of a head that get their angles from time, height and width, as parts of a smaller one."""
    ends = [round(by * sum(sections[: count + 1])) for count in range(len(sections))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _one_of_each_kind(config: Mapping[str, Any], depth: int) -> list[int]:
    """Layers of which each differs from those before it in what the config lists for every layer: two to four."""
    own = config.get("per_layer_config") or {}
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == depth]
    kinds = [repr([*(value[layer] for value in lists), own.get(layer)]) for layer in range(depth)]
    first = [layer for layer, kind in enumerate(kinds) if kinds.index(kind) == layer][:4]
    return first if len(first) > 1 else list(range(min(depth, 2)))


def _of_layers(value: list[Any], layers: list[int], depth: int, largest: int | None) -> list[Any]:
    """What a list says of some layers, if it has an entry for each layer or names some of them by number."""
    if depth < 2 or not value:
        return value
    if len(value) == depth:
        return [min(value[layer], largest) if largest else value[layer] for layer in layers]
    if all(type(each) is int and 0 <= each < depth for each in value) and sorted(set(value)) == value:
        return [new for new, old in enumerate(layers) if old in value]
    return value
