"""How labels of encoder-decoders are scored: like those of decoders, of trained tokens alone and in chunks.

TRL's fused head knows decoders only: it calls the backbone, and would leave out what lies before or behind the head
(T5's scale, BART's bias). Here the model's own forward runs, and its head scores labels in place of returning logits,
so what lies before it stays; whether that is the whole is asked as for decoders (`head_choice`). The model's own loss,
of all logits in fp32, is not computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput

from toolkit.models.output_heads.fused_head import scoring
from toolkit.models.output_heads.output_head import OutputHead, at, from_logits


class PairHead(OutputHead):
    """The same of an encoder-decoder, whose labels are not shifted."""

    def _score(self, forward: Callable[..., Any], module: Any, labels: torch.Tensor, positions: Any) -> Any:
        following = at(labels, positions)
        if not (self.fused or self.selects):
            outputs = forward(labels=labels)
            outputs.logits = at(outputs.logits, positions)
            return from_logits(outputs, following)
        inputs = _shifted(module, labels)
        with _scoring(module, positions, following) if self.fused else _selecting(module, positions):
            outputs = forward(decoder_input_ids=inputs)
        if not self.fused:
            return from_logits(outputs, following)
        return FusedCausalLMOutput(log_probs=outputs.logits[..., 0], label_mask=torch.ones_like(following).bool())

    def plain(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {key: batch[key] for key in batch if key != "label_positions"}

    def following(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return at(batch["labels"], batch["label_positions"])


def _shifted(module: Any, labels: torch.Tensor) -> torch.Tensor:
    """The decoder's inputs, as the model itself makes them of labels."""
    if hasattr(module, "prepare_decoder_input_ids_from_labels"):
        return module.prepare_decoder_input_ids_from_labels(labels=labels)
    shift, config = sys.modules[type(module).__module__].shift_tokens_right, module.config
    return shift(labels, config.pad_token_id, config.decoder_start_token_id)


@contextmanager
def _selecting(module: Any, positions: torch.Tensor) -> Iterator[None]:
    """While this context lasts, the head gets hidden states of these positions alone."""

    def select(_: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return at(inputs[0], positions)

    handle = module.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _scoring(module: Any, positions: torch.Tensor, following: torch.Tensor) -> Iterator[None]:
    """While this context lasts, the head returns log-probabilities (1, positions, 1) of the labels."""
    hidden: list[torch.Tensor] = []

    def take(_: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        hidden.append(at(inputs[0], positions))
        return inputs[0][:1, :1]

    def score(head: Any, _: Any, __: Any) -> torch.Tensor:
        states, biases = hidden.pop(), [head.bias, bias]
        added = [_whole(each).flatten() for each in biases if each is not None]
        with scoring(following):
            log_probs, *_ = trl_utils._ChunkedLogProbFunction.apply(
                states[0], _whole(head.weight), sum(added) if added else None, following[0].clamp(min=0), 1.0,
                trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs",),
            )  # fmt: skip
        return log_probs[None, :, None]

    bias = getattr(module, "final_logits_bias", None)
    head = module.get_output_embeddings()
    with ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(take).remove)
        # Before the hooks of engines, which give up the weight again, and find in this output what is computed back.
        stack.callback(head.register_forward_hook(score, prepend=True).remove)
        if bias is not None:
            stack.callback(module.register_buffer, "final_logits_bias", bias)
            module.register_buffer("final_logits_bias", bias.new_zeros(1, 1))
        yield


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
