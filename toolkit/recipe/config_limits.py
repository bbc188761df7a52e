"""What a model's `config.json` must hold before anything is built from it.

Transformers takes most values as they come: what cannot be then fails deep in the model's code, takes minutes or trains
a model that learns nothing of positions. Keys of models with code of their own mean what that code says, so only sizes
are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.common import UserError

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk", "moe_top_k")
"""How many experts of a layer a token meets."""
_SIZE_KEYS = (
    *("hidden_size", "vocab_size", "head_dim", "num_attention_heads"),
    *("decoder_layers", "encoder_layers", "num_decoder_layers"),
)
_MOST_LAYERS, _MOST_TOKENS, _LARGEST_SIZE = 1_000, 1_000_000, 10**8
"""More than the deepest and the widest released models have, and those with the largest vocabulary: 901,629 (XLM-V). A
plan builds every layer and goes through the vocabulary, both in outline."""
_MOST_EXPERTS = 100_000
"""Released models have up to 16,384 (Doge)."""
_MOST_KEYS, _MOST_BYTES = 1_000, 2**23
"""Of a config and of its `text_config`, and of the file. Released ones have about a hundred, and a few hundred
kilobytes where they list modules or labels. Transformers goes through all of them again for every module."""
_ROPE_TYPES = (
    *("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"),
    # Names of some models, and older ones.
    *("axial", "deepseek_yarn", "mrope", "ntk_alpha", "su", "xdrope"),
)
"""Kinds of rotary embeddings that Transformers 5.23 has."""
_ROPE_NUMBERS = {
    **dict.fromkeys(("rope_theta", "original_max_position_embeddings"), 1e15),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), 1e6),
    "partial_rotary_factor": 1.0,
    "attention_factor": 1e6,
}
"""Their settings that are numbers above 0, and the largest: far more than any model has."""
_ROPE_LISTS = ("short_factor", "long_factor")


MARKED = " begins with a byte order mark, which JSON must not: save it as UTF-8 without one"


def has_mark(file: Path) -> bool:
    """Whether a file begins with the mark that some editors put there, and at which the libraries end."""
    with file.open("rb") as content:
        return content.read(3) == b"\xef\xbb\xbf"


def read_config(file: Path) -> dict[str, Any]:
    """The config in a file.

    Raises:
        UserError: It is not valid JSON, or something in it is not what it must be; names the key.
    """
    change = "correct the file, or set model.path to another model"
    try:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise _Wrong(f" has {size:,} bytes, which no model's config has: at most {_MOST_BYTES:,}")
        if has_mark(file):
            raise _Wrong(MARKED)
        try:
            config = json.loads(file.read_text(encoding="utf-8"), object_hook=_float)
        except (ValueError, RecursionError) as error:
            raise _Wrong(f" is not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise _Wrong(" holds no object, as a model's config is")
        text = config.get("text_config") or config
        if not isinstance(text, dict):
            raise _Wrong(f": text_config is {_shown(text)}, not an object")
        for part in (config, text):
            _check_sizes(part, (*LAYER_KEYS, *_SIZE_KEYS, *(POSITION_KEYS if part is text else ())))
            if not config.get("auto_map"):
                _check_experts(part)
                _check_rope(part)
    except _Wrong as wrong:
        raise UserError(f"{file}{wrong}", change) from None
    return config


class _Wrong(Exception):
    """Something in the file, without its name."""


def _check_sizes(part: Mapping[str, Any], keys: Iterable[str]) -> None:
    if len(part) > _MOST_KEYS:
        what = f" has {len(part):,} keys, such as {_shown(list(part)[-1])}"
        raise _Wrong(f"{what}, which no model's config has: at most {_MOST_KEYS:,}")
    for key in keys:
        value = part.get(key)
        if value == 0 and key == "head_dim" and type(value) is int:  # Of GLM-5, whose heads have two sizes.
            continue
        if value is not None and (type(value) is not int or (value < 1 and key not in POSITION_KEYS)):
            raise _Wrong(f": {key} is {_shown(value)}, not a whole number above 0")
        most = _MOST_LAYERS if "layer" in key else _MOST_TOKENS if key == "vocab_size" else _LARGEST_SIZE
        if value is not None and value > most and key not in POSITION_KEYS:
            raise _Wrong(f": {key} is {_shown(value)}, which no model has: at most {most:,}")


def _check_experts(part: Mapping[str, Any]) -> None:
    """Dense models of an architecture with experts state 0 of them, and some models a number for each layer."""
    most = 0
    for key in EXPERT_KEYS:
        value = part.get(key)
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            if type(number) is not int or number < 0:
                raise _Wrong(f": {key} is {_shown(value)}, not a whole number of experts")
            if number > _MOST_EXPERTS:
                raise _Wrong(f": {key} is {_shown(value)}, which no model has: at most {_MOST_EXPERTS:,}")
            most = max(most, number)
    for key in CHOSEN_KEYS:
        chosen = part.get(key)
        for number in chosen if isinstance(chosen, list) else [] if chosen is None or most < 2 else [chosen]:
            if type(number) is not int or not 1 <= number <= most:
                raise _Wrong(f": {key} is {_shown(chosen)}, not a whole number from 1 to {most:,}, the experts")


def _check_rope(part: Mapping[str, Any]) -> None:
    for where, settings in _rope(part):
        kind = settings.get("rope_type", settings.get("type", "default"))
        if where and kind not in _ROPE_TYPES:
            raise _Wrong(f": the rope_type of {where} is {_shown(kind)}, none of {', '.join(_ROPE_TYPES)}")
        of = f"{where}." if where else ""
        for key, most in _ROPE_NUMBERS.items():
            value = settings.get(key)
            if value is not None and not _within(value, most):
                raise _Wrong(f": {of}{key} is {_shown(value)}, not a number above 0 and up to {most:g}")
        for key in _ROPE_LISTS:
            factors = settings.get(key)
            if factors is None:
                continue
            if not (isinstance(factors, list) and factors and all(_within(each, 1e6) for each in factors)):
                raise _Wrong(f": {of}{key} is {_shown(factors)}, not a list of numbers above 0 and up to 1e+06")


def _rope(part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where rotary embeddings are set, and how: beside other keys, and in sections, some of which have one for each
    kind of layer."""
    yield "", {key: value for key, value in part.items() if key in ("rope_theta", "partial_rotary_factor")}
    for name in ("rope_scaling", "rope_parameters"):
        section = part.get(name)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise _Wrong(f": {name} is {_shown(section)}, not an object")
        inside = {key: value for key, value in section.items() if isinstance(value, dict)}
        yield name, {key: value for key, value in section.items() if key not in inside}
        yield from ((f"{name}.{key}", value) for key, value in inside.items())


def _within(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 < value <= most  # NaN is not, nor what no float holds


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _float(part: dict[str, Any]) -> Any:
    """What JSON has no word for, as Transformers writes it: `{"__float__": "Infinity"}`."""
    return float(part["__float__"]) if part.keys() == {"__float__"} else part
