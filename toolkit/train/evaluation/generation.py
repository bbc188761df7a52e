"""What surrounds Transformers' `generate`, so that a model that is being trained writes as it was trained to read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.pytorch_utils import move_to_device

from toolkit.models.attention.backends import IMPLEMENTATIONS, OTHER_POSITIONS, with_mask
from toolkit.models.tiny import by_itself, tiny_model

Sample = Callable[[torch.Tensor, int], dict[str, Any]]
"""Arguments of `generate` by which some rows of a batch get further tokens: of the rows' numbers and of how many tokens
their answers have."""
_KEPT = (
    *("bos_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("cache_implementation", "cache_config"),
)
"""What is kept of a generation config: how answers begin, tokens that are no text, and the cache."""
LEAST = 3
"""Tokens to which prompts are padded whose first ones are read apart: of a single token, recurrent layers take it that
it is none of padding."""
_ASKED = ([[*range(5, 25)], [30, 31], [*range(5, 25)]], [[*range(5, 25)]] * 2, [[0, 30, 31], [40], [40]])
"""Prompts for a tiny model: padded, without padding, for which some take another way, and short ones."""
_ROUNDED = 1e-4
"""Share of the largest logit that rounding may change in fp32."""
_BY_LONGEST = {"longrope", "dynamic"}
"""Kinds of rotary angles that go by the longest row of a batch."""
_log = logging.getLogger(__name__)
_OF_BEAMS = ("early_stopping", "length_penalty")
"""How several beams are compared, which is no matter of one."""


@contextmanager
def without_defaults(model: Any, num_beams: int) -> Iterator[None]:
    """Without what a model's generation config asks of answers: penalties for words that come again, least lengths, an
    end at the limit, or how many of the likeliest tokens are drawn from. They were chosen for the model as it was
    published, and would change what was trained; an end at the limit would count as the model's own."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    holders = [each for each in (model, base) if getattr(each, "generation_config", None) is not None]
    kept = [each.generation_config for each in holders]
    names = (*_KEPT, *(_OF_BEAMS if num_beams > 1 else ()))
    for each, config in zip(holders, kept, strict=True):
        given = {name: getattr(config, name, None) for name in names}
        each.generation_config = GenerationConfig(**{name: value for name, value in given.items() if value is not None})
    try:
        yield
    finally:
        for each, config in zip(holders, kept, strict=True):
            each.generation_config = config


@contextmanager
def own_positions(model: Any) -> Iterator[None]:
    """RoBERTa and its kin count positions on from that of padding, as they do in training; `generate` counts from 0."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.model_type not in OTHER_POSITIONS:
        yield
        return

    def count_on(_: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"] + base.config.pad_token_id + 1
        return args, kwargs

    hook = base.register_forward_pre_hook(count_on, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def inputs_on(model: Any, device: torch.device) -> Iterator[None]:
    """Has every forward pass take its inputs on a device. `generate` moves them to where the parameters are, which
    under FSDP's offload is the host, though units compute on the GPU."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hook = base.register_forward_pre_hook(
        lambda _, args, kwargs: (move_to_device(args, device), move_to_device(kwargs, device)), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def reading_masks(model: Any) -> Iterator[None]:
    """While this context lasts, attention reads masks. Generation pads on the left and keeps a cache, which
    document-boundary backends do not read; flex attention has no kernel for prompts shorter than a block."""
    trained_with = model.config._attn_implementation
    if trained_with in (IMPLEMENTATIONS["eager"], IMPLEMENTATIONS["sdpa"]):
        yield
        return
    model.set_attn_implementation(IMPLEMENTATIONS[with_mask(model.config.to_dict())])
    try:
        yield
    finally:
        model.set_attn_implementation(trained_with)


def reads_once(config: Any, objective: str, trust_remote_code: bool = False) -> bool:
    """Whether an architecture continues from a cached prompt as if it had read it anew, which a tiny copy is asked.

    Not those whose prompts attend in both directions, nor those of which `generate` returns no cache. Nor those whose
    rotary angles go by the longest row of a batch: they would change for the others once it has left.

    Args:
        config: The model's configuration object.
        objective: As in the recipe.
    """
    if config.is_encoder_decoder or _BY_LONGEST & {*_rope_types(config.get_text_config().to_dict())}:
        return False
    try:
        model: Any = tiny_model(config, objective, trust_remote_code)
        with by_itself(), torch.no_grad(), reading_masks(model), own_positions(model), without_defaults(model, 1):
            return all(_goes_on(model, prompts) for prompts in _ASKED)
    except Exception as error:  # A model's own code may raise anything for sizes that do not fit together.
        _log.debug("prompts are read with each of their answers: %s", error)
        return False


def _rope_types(values: Any) -> Iterator[str]:
    """Every `rope_type` in a config."""
    if isinstance(values, dict):
        yield from (value for key, value in values.items() if key == "rope_type" and isinstance(value, str))
        for each in values.values():
            yield from _rope_types(each)


def _goes_on(model: Any, prompts: Sequence[list[int]]) -> bool:
    width = max(map(len, prompts))
    ids = torch.tensor([[3] * (width - len(each)) + each for each in prompts])
    batch = {"input_ids": ids, "attention_mask": (ids != 3).long()}
    reading = {"use_cache": True, "pad_token_id": 3, "synced_gpus": False}
    anew, once = (
        model.generate(
            **batch, **reading, past_key_values=cache,
            max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True,
        ).logits
        for cache in (None, read_once(model, prompts, batch, **reading))
    )  # fmt: skip
    apart = max(float((each - other).abs().max()) for each, other in zip(anew, once, strict=True))
    return apart <= _ROUNDED * float(anew[0].abs().max())


def read_once(model: Any, prompts: Sequence[list[int]], batch: dict[str, torch.Tensor], **arguments: Any) -> Any:
    """Reads each distinct prompt once, except for its last token, from which `generate` continues. For architectures
    that `reads_once` says this of.

    Args:
        prompts: As they are asked, with repetitions.
        batch: The same as `generate` takes them, (prompts, tokens) each, padded on the left to `LEAST` at least.
        arguments: Others of `generate` that concern how a model reads.

    Returns:
        Transformers' cache, with a copy for each answer.
    """
    numbers: dict[tuple[int, ...], int] = {}
    places = [numbers.setdefault(tuple(each), len(numbers)) for each in prompts]
    firsts = [places.index(number) for number in range(len(numbers))]
    with _unwarned_of_padding():
        cache = model.generate(
            **{name: values[firsts, :-1] for name, values in batch.items()},
            **arguments,
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
        ).past_key_values
    _select_rows(model, cache, torch.tensor(places, device=batch["input_ids"].device))
    return cache


@contextmanager
def _unwarned_of_padding() -> Iterator[None]:
    """Without Transformers' warning of padding on the right: without its last token, a prompt of one is all padding."""
    logger = logging.getLogger("transformers.generation.utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "right-padding" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _select_rows(model: Any, cache: Any, rows: torch.Tensor) -> None:
    """Leaves some rows of a cache, or copies them."""
    cache.reorder_cache(rows)
    # Vision-language models keep by how much their positions are off in a batch, which has been another one.
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


class _HalfEnded(StoppingCriteria):
    """Ends a generation once half of its answers have ended.

    Args:
        stops: Tokens that end an answer.
        ended: (answers,), of those that have; filled in.
    """

    def __init__(self, stops: torch.Tensor, ended: torch.Tensor) -> None:
        self._stops, self._ended = stops, ended

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._ended |= torch.isin(input_ids[:, -1], self._stops)
        return (2 * self._ended.sum() >= len(self._ended)).expand(len(self._ended))


def write(
    model: Any,
    batch: dict[str, torch.Tensor],
    cache: Any,
    longest: int,
    sample: Sample,
    *,
    eos_token_id: list[int] | None,
    pad_token_id: int,
    **arguments: Any,
) -> torch.Tensor:
    """Answers to prompts that `read_once` has read. Whenever half of them have ended, the others go on without them.

    Args:
        batch: See `read_once`.
        cache: What it gave.
        longest: Tokens of an answer at most.
        arguments: Others of `generate`.

    Returns:
        (prompts, longest) token ids, filled up with padding.
    """
    ids, mask = batch["input_ids"], batch["attention_mask"]
    asked, rows = ids.shape[1], torch.arange(len(ids), device=ids.device)
    answers = ids.new_full((len(ids), longest), pad_token_id)
    stops = ids.new_tensor(eos_token_id or [])
    while len(rows):
        written, ended = ids.shape[1] - asked, torch.zeros_like(rows, dtype=torch.bool)
        ids = model.generate(
            input_ids=ids,
            attention_mask=torch.nn.functional.pad(mask[rows], (0, written), value=1),
            past_key_values=cache,
            max_new_tokens=longest - written,
            stopping_criteria=StoppingCriteriaList([_HalfEnded(stops, ended)]),
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            **arguments,
            **sample(rows, written),
        )
        answers[rows, : ids.shape[1] - asked] = ids[:, asked:]
        going = torch.nonzero(~ended)[:, 0] if ids.shape[1] - asked < longest else rows[:0]
        ids, rows = ids[going], rows[going]
        _select_rows(model, cache, going)
    return answers
