"""One micro-batch through a shallow model: forward, backward, the same again on top of gradients, and an evaluation."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import convert_outputs_to_fp32
from bitsandbytes.functional import QuantState
from torch.nn import functional as F
from trl.trainer.utils import add_fused_lm_head

from toolkit.distributed.engines import checkpointing_kwargs
from toolkit.models.attention.attention_kernels import keep_attention
from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.losses.embedding import pooled
from toolkit.models.output_heads import fused_head
from toolkit.models.output_heads.head_choice import asks_routers
from toolkit.models.output_heads.head_chunk import head_chunk
from toolkit.models.output_heads.output_head import HeadChoice, OutputHead
from toolkit.models.output_heads.pair_head import PairHead
from toolkit.models.step_casts import drop_with_layers
from toolkit.models.tiled_mlp import tile_mlps
from toolkit.planner.trace.setting import Setting
from toolkit.planner.trace.shallow import Shallow
from toolkit.planner.trace.tracker import CompiledTracker, Timeline, Tracker
from toolkit.planner.trace.types import CHUNK
from toolkit.recipe.heads import EMBEDDING, HEADED
from toolkit.recipe.sections import ActivationCheckpointing

ENCODER_PLACES = ("encoder_first", "encoder_last")
"""First and last layers of an encoder that is as deep as the decoder; of any other all is `embeddings`."""
_PLACES = ("first_layer", "last_layer")


@dataclass(frozen=True)
class Micro:
    """What was seen in one shape.

    Args:
        timelines: `forward`, `backward`, the same with `+` where gradients of an earlier micro-batch exist, and
            `evaluation`.
        boundary: Bytes of the hidden states between two layers.
        paddings: Sizes of the dimensions of all tensors that were padded, before and after.
    """

    timelines: dict[str, Timeline]
    boundary: int
    paddings: set[tuple[int, int]]


def run(
    shallow: Shallow,
    setting: Setting,
    choice: HeadChoice,
    fake: Any,
    batch: int,
    length: int,
    period: int = 1,
    deadline: float = math.inf,
    compiled: CompiledLayers | None = None,
) -> Micro:
    """Takes a micro-batch of `batch` sequences of `length` tokens through the model.

    Args:
        choice: How labels are scored.
        fake: The mode in which tensors are made.
        period: So many layers at either end stand for those between them.
        deadline: See `Tracker`.
        compiled: Compiles the layers, where they are.
    """
    model = shallow.model
    _prepare(shallow, setting, choice, compiled)
    with fake:
        inputs = _inputs(setting, batch, length)
        if setting.objective in HEADED:
            del inputs["labels"]
        else:
            inputs["label_positions"] = torch.zeros(batch * length, dtype=torch.long)
        persistent = [*model.parameters(), *model.buffers(), *_quantization_state(model), *inputs.values()]
        # Heads of an objective's own score all at once.
        chunk = chunk_of(shallow, setting)
        chunk = chunk if batch * length > chunk and setting.objective not in HEADED else 0
        kind = CompiledTracker if compiled else Tracker
        tracker = kind(persistent, model.parameters(), setting.device == "cuda", chunk, deadline)
        timelines: dict[str, Timeline] = {}
        with _watched(shallow, tracker, period), patch.object(fused_head, "chunks", tracker.chunks), tracker:
            for suffix in ("", "+"):
                timelines[f"forward{suffix}"] = tracker.begin()
                tracker.place = "embeddings"
                loss = _loss(shallow, setting, inputs)
                timelines[f"backward{suffix}"] = tracker.begin()
                loss.backward()
                del loss
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        tracker.forget(parameter.grad)
            model.eval()
            timelines["evaluation"] = tracker.begin()
            tracker.place = "embeddings"
            with torch.no_grad():
                _nll(shallow, setting, inputs)
            model.train()
        for parameter in model.parameters():
            parameter.grad = None
    return Micro(timelines, tracker.boundary, tracker.paddings)


def chunk_of(shallow: Shallow, setting: Setting) -> int:
    """Tokens that the output head of a vocabulary works on at a time."""
    if setting.objective in HEADED:
        return CHUNK
    itemsize = getattr(torch, setting.autocast or setting.local).itemsize
    return head_chunk(len(shallow.base.get_output_embeddings().weight), itemsize, setting.device == "cpu")


def _prepare(shallow: Shallow, setting: Setting, choice: HeadChoice, compiled: CompiledLayers | None) -> None:
    """What the trainers do to a model before they train it."""
    model, base = shallow.model, shallow.base
    if getattr(base, "_toolkit_prepared", False):
        return
    base._toolkit_prepared = True
    base.config.use_cache = False
    if setting.checkpointing not in ("none", "elementwise"):
        settings = ActivationCheckpointing(mode=setting.checkpointing, every_n_layers=setting.every_n_layers)  # type: ignore[arg-type]
        kwargs = checkpointing_kwargs(settings)
        if setting.checkpointing == "selective":
            keep_attention(base)
        if model is not base:
            model.enable_input_require_grads()
        every = kwargs.pop("every_n_layers", 1)
        offload = kwargs.pop("offload", False)
        kwargs.pop("selective", None)
        base.activation_checkpointing_enable(kwargs, every_n_layers=every, offload=offload)
    tile_mlps(base, setting.mlp_tiles)
    if setting.drops_casts:
        drop_with_layers(base)
    if setting.objective == "seq2seq":
        PairHead(base, choice)
    elif setting.objective not in HEADED:
        if asks_routers(base.config):
            base.config.get_text_config().output_router_logits = choice.balances
        # With what TRL has it compute beside: a little more than the trainers ask for.
        add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
        OutputHead(base, choice)
    if compiled:
        compiled.add(model)
    if setting.autocast:
        # As accelerate's `prepare_model` does.
        forward = torch.autocast("cpu", getattr(torch, setting.autocast))(model.forward)
        model.forward = convert_outputs_to_fp32(forward)


def _inputs(setting: Setting, batch: int, length: int) -> dict[str, Any]:
    """A batch as the toolkit's collators make it; the numbers do not matter.

    Documents that the collator lays end to end stand in rows here: attention works within each of them.
    """
    ids = torch.zeros((batch, length), dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": torch.zeros_like(ids)}
    if setting.masked:
        inputs["attention_mask"] = torch.ones_like(ids)
        # Transformers drops a mask that hides nothing.
        inputs["attention_mask"][:, -1] = 0
    if setting.layout in ("packed", "flat"):
        inputs["position_ids"] = torch.zeros_like(ids)
    return inputs


def _loss(shallow: Shallow, setting: Setting, inputs: dict[str, Any]) -> torch.Tensor:
    """The loss as the toolkit's trainers form it."""
    total, count, auxiliary = _nll(shallow, setting, inputs)
    if setting.objective == "seq2seq":
        return total / count
    loss = total / count.clamp(min=1)
    return loss if auxiliary is None else loss + 0.001 * auxiliary


def _nll(shallow: Shallow, setting: Setting, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Sum over the tokens, their number, and a mixture of experts' own loss."""
    if setting.objective == EMBEDDING:
        hidden = shallow.model(**inputs).last_hidden_state
        vectors = pooled(hidden, torch.ones_like(inputs["input_ids"]), "mean")
        return vectors.sum(), vectors.new_tensor(float(len(vectors))), None
    if setting.objective in HEADED:
        logits = shallow.model(**inputs).logits.float().flatten(0, -2)
        losses = F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long), reduction="none")
        return losses.sum(), logits.new_tensor(float(len(losses))), None
    outputs = shallow.model(**inputs, use_cache=False, fused_lm_head=True)
    return (-outputs.log_probs).sum(), outputs.label_mask.sum(), getattr(outputs, "aux_loss", None)


@contextlib.contextmanager
def _watched(shallow: Shallow, tracker: Tracker, period: int) -> Iterator[None]:
    """Tells the tracker where the pass is, and which gradients are done."""
    handles: list[Any] = []
    last = len(shallow.layers) - 1

    def enter(index: int, first_place: str, last_place: str) -> str:
        return first_place if index < period else last_place if index > last - period else "layer"

    def before(index: int, places: tuple[str, str], module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        tracker.boundary = hidden.nbytes
        tracker.place = enter(index, *places)
        if hidden.requires_grad and index == 0:
            hidden.register_hook(lambda grad: setattr(tracker, "place", "embeddings"))

    def after(index: int, places: tuple[str, str], module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: setattr(tracker, "place", enter(index, *places)))
        if index == last:
            tracker.place = "head" if places == _PLACES else "embeddings"

    for layers, places in ((shallow.encoder, ENCODER_PLACES), (shallow.layers, _PLACES)):
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(functools.partial(before, index, places), with_kwargs=True))
            handles.append(layer.register_forward_hook(functools.partial(after, index, places)))

    def made(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # T5 gives parameters to autograd that end up without.
            tracker.move(parameter.grad, "gradients")

    for parameter in shallow.model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(made))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _quantization_state(model: Any) -> Iterator[torch.Tensor]:
    """Scales beside quantized weights, which are no parameters."""
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        while isinstance(state, QuantState):
            yield from (each for each in (state.absmax, state.code, state.offset) if isinstance(each, torch.Tensor))
            state = state.state2 if state.nested else None
        if hasattr(module, "state") and getattr(module.state, "CB", None) is not None:
            yield from (module.state.CB, module.state.SCB)
