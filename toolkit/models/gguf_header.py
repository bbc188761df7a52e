"""What Transformers leaves out of the header of a GGUF file, so that it would make another model of it.

Transformers 5.23 passes over how positions are scaled, which Llama 3.1 and Gemma 3 are, and takes some widths for those
of the first model of an architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from toolkit.common import UserError

_WIDTHS = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Of a header's keys, behind the architecture, those of configs."""
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_POSITIONS = 8192
_FACTORS = "rope_freqs.weight"
"""By what llama.cpp divides each frequency; of a header that has it, it is all that says how Llama 3 scales them."""
_GEMMAS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""How many layers those have whose queries are scaled otherwise, which no header says: llama.cpp tells them by that."""


def complete(config: Any, file: Path) -> None:
    """Puts into the configuration that was read from a file what is missing there.

    Raises:
        UserError: Positions are scaled in a way that cannot be told to Transformers.
    """
    metadata, names = read_gguf_metadata(str(file))
    stated = {key.partition(".")[2]: value for key, value in metadata.items()}
    for key, name in _WIDTHS.items():
        if hasattr(config, name) and isinstance(stated.get(key), int):
            setattr(config, name, stated[key])
    if layers := _GEMMAS_OF_27B.get(config.model_type):
        wide = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = wide if config.num_hidden_layers == layers else config.head_dim
    if not (rope := getattr(config, "rope_parameters", None)):
        return
    # Of models that slide over rows in some layers, only the others are scaled.
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] != "default":
        return
    kind, positions = stated.get("rope.scaling.type", "none"), stated.get("rope.scaling.original_context_length")
    if _FACTORS in names:
        rope |= _as_llama3(config, rope["rope_theta"], file)
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": stated["rope.scaling.factor"]}
        rope |= {"original_max_position_embeddings": positions} if kind == "yarn" and positions else {}
    elif kind != "none" or any(name.startswith("rope_factors_") for name in names):
        raise UserError(
            f"model.path: {file} scales positions as {kind if kind != 'none' else 'longrope'}, which Transformers "
            "does not read from GGUF files",
            "set model.path to the model's safetensors",
        )


def _as_llama3(config: Any, theta: float, file: Path) -> dict[str, Any]:
    """The settings that give the frequencies of a file, as all published ones of Llama 3.1 and later do.

    Raises:
        UserError: None of these do.
    """
    from gguf import GGUFReader

    factors = next(torch.tensor(each.data) for each in GGUFReader(file).tensors if each.name == _FACTORS)
    found = _LLAMA3 | {"factor": factors.max().item(), "original_max_position_embeddings": _LLAMA3_POSITIONS}
    plain = 1 / theta ** (torch.arange(0, 2 * len(factors), 2) / (2 * len(factors)))
    trial = type(config)(**config.to_dict() | {"rope_parameters": {"rope_theta": theta, **found}})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, "cpu")
    if not torch.allclose(plain / factors, scaled, rtol=1e-3, atol=0):
        raise UserError(
            f"model.path: {file} scales positions by factors of its own ({_FACTORS}), which Transformers does not read "
            "from GGUF files",
            "set model.path to the model's safetensors",
        )
    return found
