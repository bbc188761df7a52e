"""The tokens that a model's files say it begins, ends and pads with."""

from __future__ import annotations

from typing import Any

from transformers.trainer_utils import align_special_tokens


def take_tokens(model: Any, tokenizer: Any) -> None:
    """Has a model's configs name the tokenizer's tokens, so that its answers end where those of the training rows do.

    All else that its generation config says stays as it was published, though Transformers refuses to save a part of
    that in a config that was changed: a temperature or top-p without `do_sample`, which many older models have.
    """
    align_special_tokens(model, tokenizer)
    if (config := getattr(model, "generation_config", None)) is not None:
        config._original_object_hash = hash(config)
