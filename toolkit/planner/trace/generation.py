"""What a model keeps of a sequence while it generates, read from the caches that its own code fills.

Configs name their kinds of layers by many keys, and the states of recurrences follow from none of them; the model's own
cache knows both. It is filled on the meta device, in 16 bits, with two short prompts, in one to two seconds.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from toolkit.models.heads import from_config
from toolkit.planner.trace.shallow import depth_of
from toolkit.planner.trace.types import Cache

_LENGTHS = (16, 32)
"""Tokens of the prompts: loops over tokens take as long as the prompt, and windows are longer."""
_DEEPEST = 400
"""Layers up to which a cache is filled: of a thousand it takes longer than all else in a trace. Released models have up
to 315 (BigLlama 3.1)."""
_OUTPUTS = ("cache", "past_key_values", "cache_params", "state", "past_buckets_states", "mems")


def kept(config: Any, objective: str, trust_remote_code: bool = False) -> tuple[Cache, ...] | None:
    """What the layers of a model keep of a sequence; those that are alike stand together.

    Args:
        config: The model's configuration object.
        objective: As in the recipe.

    Returns:
        None where the model's code needs numbers to run, or has no cache, or where it has more layers than any.
    """
    if depth_of(config) > _DEEPEST:
        return None
    # Fake tensors know the numbers that a model makes from others, but take twice as long.
    for mode, device in ((torch.device("meta"), "meta"), (FakeTensorMode(allow_non_fake_inputs=True), "cpu")):
        try:
            with mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = from_config(objective, config, trust_remote_code, dtype=torch.bfloat16).eval()
                return _kept(model, device)
        except Exception:  # A model's own code may raise anything.
            continue
    return None


def _kept(model: PreTrainedModel, device: str) -> tuple[Cache, ...]:
    short, long = _LENGTHS
    layers = filled(model, long, device)
    if rates := [layer.compress_rate for layer in layers if hasattr(layer, "compress_rate")]:
        # DeepSeek V4 keeps one entry for so many tokens; its windows are shorter than these.
        short, long = 2 * max(rates), 4 * max(rates)
        layers = filled(model, long, device)
    caches: Counter[tuple[float, float, int | None]] = Counter()
    for before, after in zip(filled(model, short, device), layers, strict=True):
        per_token = (size(after) - size(before)) / (long - short)
        # The token that attends brings its own keys and values.
        window = getattr(after, "sliding_window", None) or long
        caches[size(before) - short * per_token, per_token, window - 1 if window > long else None] += 1
    return tuple(Cache(count, *each) for each, count in caches.items() if any(each[:2]))


@torch.no_grad()
def filled(model: PreTrainedModel, length: int, device: str) -> list[Any]:
    """The caches of the layers, and what is kept beside them, after a prompt of so many tokens."""
    ids = torch.ones(1, length, dtype=torch.long, device=device)
    pair = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    outputs = model(input_ids=ids, use_cache=True, **pair)
    cache = next(outputs[name] for name in _OUTPUTS if outputs.get(name) is not None)
    parts: list[Any] = []
    for part in (cache.self_attention_cache, cache.cross_attention_cache) if pair else (cache,):
        beside = [value for name, value in getattr(part, "__dict__", {}).items() if name != "layers"]
        parts += [*part.layers, *beside] if hasattr(part, "layers") else [part]
    return parts


def size(part: Any) -> int:
    """Bytes of the tensors of numbers that a part of a cache holds."""
    tensors = {id(each): each for each in _tensors(part) if each.is_floating_point()}
    return sum(each.numel() * each.element_size() for each in tensors.values())


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, list | tuple):
        yield from chain.from_iterable(map(_tensors, part))
    elif isinstance(part, dict):
        yield from _tensors(list(part.values()))
    elif type(part).__module__.startswith("transformers") and not hasattr(part, "model_type"):
        yield from _tensors(list(vars(part).values()))
