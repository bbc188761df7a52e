"""The teacher of `objective: distillation`: frozen, whole on every process whatever divides the student.

A shard would have to be gathered in each forward pass, for a model that keeps no gradients and no moments: where the
weights alone are too much for a device, `distillation.teacher.quantization` stores them in 4 or 8 bits, and
`distillation.teacher.offload` keeps them on the host.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers.integrations import deepspeed

from toolkit.common import UserError
from toolkit.distributed.engines import dtypes, teacher_dtype
from toolkit.models.attention import backends
from toolkit.models.coverage import require_quantized
from toolkit.models.load import ModelSource
from toolkit.models.losses.distillation import Logits, logits_of
from toolkit.models.output_heads.head_choice import add_output_head, choose
from toolkit.models.output_heads.output_head import HeadChoice, OutputHead
from toolkit.models.streamed_layers import stream_layers
from toolkit.recipe import Recipe, model_configs
from toolkit.recipe.distillation import Teacher as Keys
from toolkit.recipe.teaching import of_teacher

_HERE = "distillation.teacher"
_OF_MODELS = re.compile(rf"\b(?:model|method)\.({'|'.join(Keys.model_fields)})\b")
_NAMED = 5
"""Tokens that an error names."""


@dataclass(frozen=True)
class Teacher:
    """A model that is asked for its distribution.

    Args:
        model: Frozen, in evaluation mode.
        head: Its output head, which is fused.
        common: How many entries of the vocabulary it shares with the student.
    """

    model: Any
    head: OutputHead
    common: int

    def logits(self, batch: dict[str, Any]) -> Logits:
        """What its logits at the trained tokens of a batch are made of. It computes in its own type."""
        with self.alone():
            return logits_of(self.model, self.head, batch)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While this context lasts, the model may be called: neither autocast nor an engine has to do with it."""
        with torch.autocast(self.model.device.type, enabled=False), _whole():
            yield


def open_teacher(recipe: Recipe) -> ModelSource | None:
    """Locates the teacher and reads its config; None for an objective without one.

    Raises:
        UserError: If it cannot be found, or its output head cannot be applied to some tokens at a time.
    """
    teaches = of_teacher(recipe)
    if teaches is None:
        return None
    with _of_teacher():
        source = ModelSource.open(teaches)
    require_fused(choose(source.config, teaches.model.trust_remote_code), f"{_HERE}.path", source.config.model_type)
    return source


def require_fused(choice: HeadChoice, key: str, kind: str) -> None:
    """Refuses a model whose logits would have to be there for all tokens at once.

    Args:
        key: Of the recipe, which names the model.
        kind: What sort of model it is.

    Raises:
        UserError: If the fused output head is not what the model computes.
    """
    if not choice.fused:
        raise UserError(
            f"{key}: the output head of a {kind} cannot be applied to some tokens at a time ({choice.reason}), and "
            "distillation would need the logits of all tokens of both models",
            f"set {key} to a model of another architecture, or objective=sft",
        )


def check_vocabulary(student: ModelSource, tokenizer: Any, teacher: ModelSource) -> int:
    """Compares what the numbers of tokens mean to both models.

    Returns:
        How many entries of the vocabulary both have: embeddings may be filled up to different sizes.

    Raises:
        UserError: If they differ, with the tokens that do.
    """
    with _of_teacher():
        other = teacher.tokenizer()
    change = f"set {_HERE}.path to a model of the student's family, or model.path to one of the teacher's"
    own, theirs = tokenizer.get_vocab(), other.get_vocab()
    if apart := model_configs.apart(own, theirs):
        named = ", ".join(
            f"{token!r} ({own.get(token, 'none')} of the student, {theirs.get(token, 'none')} of the teacher)"
            for token in apart[:_NAMED]
        )
        raise UserError(
            f"{_HERE}.path: its tokenizer is not the student's: {len(apart):,} tokens differ, such as {named}", change
        )
    sizes = {"student": student.vocab_size, "teacher": teacher.vocab_size}
    for name, size in sizes.items():
        if size is not None and size < len(own):
            what = f"the {name} has {size:,} embeddings, and there are {len(own):,} tokens"
            raise UserError(f"{_HERE}.path: {what}", change)
    return min([size for size in sizes.values() if size] or [len(own)])


def load_teacher(
    source: ModelSource, backend: str, available: dict[str, str], common: int, place: Any, offload: bool
) -> Teacher:
    """The weights, frozen and on a device.

    Args:
        backend: The attention backend of the student, which lays out the rows for both.
        available: See `backends.resolve`.
        common: See `check_vocabulary`.
        offload: Whether layers wait on the host, see `streamed_layers`; where the device is the host, they do anyway.

    Raises:
        UserError: If it cannot be read, quantized, or attend as the student does.
    """
    recipe = source.recipe
    types = dtypes(recipe)
    unfit = backends.unfit_to_teach(source.config.to_dict(), teacher_dtype(recipe), place.type)
    if why := unfit.get(backend):
        fit = [name for name, ok in available.items() if ok == "ok" and name not in unfit]
        # Of a kernel for 16 bits.
        narrower = f"set {_HERE}.dtype=auto, or " if "in fp32" in why else ""
        raise UserError(
            f"{_HERE}.path: the teacher cannot attend as the student does, by {backend}: {why}",
            f"{narrower}set model.attention to one of: auto, {', '.join(fit)}",
        )
    with _of_teacher(), _whole():
        model: Any = source.load(types, backend)
        require_quantized(model, recipe)
    model.requires_grad_(False).eval()
    if offload and place.type != "cpu":
        stream_layers(model.to("cpu"), place, f"{_HERE}.offload")
    elif model.device != place:
        model.to(place)
    # Routers' logits serve a loss that a teacher has none of.
    text = model.config.get_text_config()
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = False
    return Teacher(model, add_output_head(model, HeadChoice()), common)


@contextlib.contextmanager
def _of_teacher() -> Iterator[None]:
    """Has errors name the teacher's keys, where the model's are meant."""
    try:
        yield
    except UserError as error:
        what, change = (_OF_MODELS.sub(rf"{_HERE}.\1", text) for text in (error.whole, error.change))
        raise UserError(what, change) from error


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Has the libraries take a model to be whole on every process: under ZeRO-3 Transformers would divide it when it is
    loaded, and TRL look for its parts, and under FSDP it would be empty on all processes but the first."""
    divides = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        with patch.dict(os.environ, ACCELERATE_USE_FSDP="false"):
            yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = divides
