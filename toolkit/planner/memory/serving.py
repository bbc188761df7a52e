"""Whether a device serves the trained model: its weights, the cache of keys and values, and one chunk of a prompt.

What a sequence keeps and the weights follow from the trace; where a model could not be traced, from its config. A
server is taken to use `_SHARE` of a device, as vLLM does by default, and to split weights and cache evenly where it
takes several.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from toolkit.planner.memory.states import stored_bytes
from toolkit.planner.plan import Served, Serving
from toolkit.planner.trace.analytic import stated
from toolkit.planner.trace.types import Shape, Trace
from toolkit.recipe import model_configs
from toolkit.recipe.schema import Method

_SHARE = 0.9
"""vLLM's default `gpu_memory_utilization`; the rest is left to the CUDA context and what else runs there."""
_CHUNK = 2048
"""Tokens of a prompt that a server computes at once (vLLM's `max_num_batched_tokens`, 2,048 by default up to 0.8)."""
_WIDTH = 2
"""Bytes of a number in 16 bits."""
_DEVICES = (1, 2, 4, 8, 16)


def serving(method: Method, config: Mapping[str, Any], trace: Trace, memory: int, context: int) -> Serving | None:
    """What a device of so many bytes serves at a context length in tokens.

    Args:
        config: The model's `config.json`.

    Returns:
        None for what keeps nothing of a sequence, or nothing that is known.
    """
    per_sequence = cache_of(config, trace, context)
    if not per_sequence:
        return None
    chunk = Shape(trace.layers, 1, min(context, _CHUNK))
    activations = max((each.activations.at(chunk) for each in trace.moments if each.phase == "evaluation"), default=0.0)
    quantized = method.quantization if method.quantization != "none" else "nf4"
    return Serving(
        context=context,
        cache=per_sequence,
        forms=[
            _served(form, _weights(trace, form, method.double_quantization), per_sequence, activations, memory)
            for form in ("16 bits", quantized)
        ],
    )


def cache_of(config: Mapping[str, Any], trace: Trace, context: int) -> int:
    """Bytes that a sequence of so many tokens keeps, in 16 bits; 0 where nothing is known."""
    caches = trace.caches
    return _cache_bytes(config, context) if caches is None else round(sum(each.at(context) for each in caches))


def _cache_bytes(config: Mapping[str, Any], context: int) -> int:
    """Keys and values of one sequence in 16 bits, if every layer attends to all tokens; 0 without attention heads.

    Heads that share keys and values (grouped or multi-query attention) share the cache; multi-head latent attention
    keeps one compressed vector and one rotary key for all heads (DeepSeek-V2, section 2.1.2), as servers do. Decoders
    that attend to an encoder keep the keys and values of a source as long as the context.
    """
    text = model_configs.text_config(config)
    heads = stated(text, "decoder_attention_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")
    hidden = stated(text, "hidden_size", "d_model", "n_embd", "dim")
    crossing = model_configs.is_encoder_decoder(config)
    decoder = stated(text, "decoder_layers", "num_decoder_layers") if crossing else None
    layers = decoder or stated(text, "num_layers", "num_hidden_layers", "n_layer", "n_layers")
    if not (heads and layers and hidden):
        return 0
    if latent := text.get("kv_lora_rank"):
        width = int(latent) + int(text.get("qk_rope_head_dim") or 0)
    else:
        shared = 1 if text.get("multi_query") and not text.get("new_decoder_architecture") else None
        shared = shared or stated(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
        width = 2 * shared * (stated(text, "head_dim", "d_kv") or hidden // heads)
    return _WIDTH * width * layers * context * (2 if crossing else 1)


def _weights(trace: Trace, form: str, double_quantization: bool) -> int:
    """Bytes of the model with its adapters merged, or with the matrices of its layers quantized and adapters beside."""
    quantized, size = form != "16 bits", 0.0
    for each in trace.tensors:
        if each.kind == "adapter":
            size += each.numel * each.count * _WIDTH * quantized
            continue
        stored = form if quantized and each.place == "layer" and len(each.shape) > 1 else "base"
        one = stored_bytes(dataclasses.replace(each, kind=stored), _WIDTH, double_quantization)  # type: ignore[arg-type]
        size += one * each.count
    return math.ceil(size) + trace.buffers


def _served(form: str, weights: int, per_sequence: int, activations: float, memory: int) -> Served:
    def room(devices: int) -> float:
        return devices * (_SHARE * memory - activations) - weights

    return Served(
        form=form,
        weights=weights,
        sequences=max(0, int(room(1) // per_sequence)),
        devices=next((count for count in _DEVICES if room(count) >= per_sequence), None),
    )
