"""How labels are scored: of trained tokens alone, with TRL's fused output head where that is what the model computes.

The fused head never holds all logits, but it reads the head's weight and knows scales and soft caps by some of their
names: what else a model does between its backbone and its logits (a dense layer, a cap, routers' names) it would leave
out without a word, so the model's own forward is asked (`head_choice`). Of encoder-decoders, see `pair_head`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput

from toolkit.data.encoding.encode import IGNORE
from toolkit.models.balance import leave_out_padding, of_text
from toolkit.models.output_heads.fused_head import scoring


@dataclass(frozen=True)
class HeadChoice:
    """How an architecture's labels are scored.

    Args:
        fused: Whether TRL's fused output head computes what the model's own forward does.
        balances: Whether the model's own forward has a loss for the balance of its routers.
        reason: Why the head is not the fused one.
        selects: Whether the model's own forward may be given trained positions alone.
        temperature: By what logits are divided before labels are scored.
    """

    fused: bool = True
    balances: bool = True
    reason: str = ""
    selects: bool = True
    temperature: float = 1.0


class OutputHead:
    """Scores labels for `model(..., labels=…, label_positions=…, fused_lm_head=True)`, as TRL's trainer would.

    Given `label_positions` of the collator, only these are taken from the backbone to the head. On a GPU they are
    counted on the host, so nothing waits for the device, as it would for TRL's mask. Scores then are (1, positions).

    Args:
        model: A causal language model with TRL's fused head, without adapters around it.
        choice: How labels are scored.

    Attributes:
        fused: Whether the fused head may score.
        selects: Whether the model's own forward may be given trained positions alone.
        alike: Whether the loss is a sum over all labels, each of which counts as much as the others.
        temperature: By what logits are divided before labels are scored.
        scorer: Where the fused head scores otherwise: given the labels (1, positions) of what is scored, what takes the
            place of TRL's autograd function.
    """

    scorer: Callable[[torch.Tensor], Any] | None = None

    def __init__(self, model: Any, choice: HeadChoice) -> None:
        self.fused, self.selects, self.alike, self.temperature = choice.fused, choice.selects, True, choice.temperature
        forward = model.forward
        # TRL would pick positions by a mask on GPUs, and wait for their number; here they have been picked.
        trl_utils._use_triton = lambda device: False
        leave_out_padding(model)

        # `generate` checks its arguments against the original signature.
        @functools.wraps(type(model).forward)
        def scored(
            module: Any,
            *args: Any,
            fused_lm_head: bool = False,
            labels: Any = None,
            label_positions: torch.Tensor | None = None,
            text_counts: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            if not fused_lm_head:
                return forward(*args, labels=labels, **kwargs)
            with of_text(text_counts):
                return self._score(functools.partial(forward, *args, **kwargs), module, labels, label_positions)

        model.forward = types.MethodType(scored, model)

    def _score(self, forward: Callable[..., Any], module: Any, labels: torch.Tensor, positions: Any) -> Any:
        """Scores labels of a batch, of which `forward` has got all else."""
        if positions is None:
            assert self.fused, "the model's own forward scores the positions of a collator"
            with self._scoring(module, labels[:, 1:]):
                return forward(fused_lm_head=True, labels=labels)
        # The first token of a row is never trained, so the last one of the row before has no label.
        following = at(labels.roll(-1), positions)
        if not (self.fused or self.selects):
            outputs = forward()
            outputs.logits = at(outputs.logits, positions)
            return from_logits(outputs, following, self.temperature)
        with _only(module.base_model, positions):
            if self.fused:
                with self._scoring(module, following):
                    return forward(fused_lm_head=True, shift_labels=following)
            return from_logits(forward(), following, self.temperature)

    def _scoring(self, module: Any, labels: torch.Tensor) -> Any:
        """The way in which the fused head scores these labels, while this context lasts."""
        if self.scorer:
            return patch.object(trl_utils, "_ChunkedLogProbFunction", self.scorer(labels))
        part = getattr(module.get_output_embeddings(), "vocabulary_part", None)
        return scoring(labels, self.alike, part)

    def plain(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What of a batch the model's own forward takes."""
        return {key: batch[key] for key in batch if key not in ("labels", "label_positions", "text_counts")}

    def following(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Labels (1, positions) of what is scored."""
        return at(batch["labels"].roll(-1), batch["label_positions"])


def _only(backbone: Any, positions: torch.Tensor) -> Any:
    """While this context lasts, a backbone returns hidden states of these positions of its flattened batch alone."""

    def select(_: Any, __: Any, outputs: Any) -> Any:
        outputs.last_hidden_state = at(outputs.last_hidden_state, positions)
        return outputs

    return backbone.register_forward_hook(select)


def at(each: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(1, positions, …) of a flattened (batch, seq, …)."""
    return each.flatten(0, 1).index_select(0, positions.to(each.device))[None]


def from_logits(outputs: Any, following: torch.Tensor, temperature: float = 1.0) -> FusedCausalLMOutput:
    """Scores as the fused head returns them, of the labels (1, positions) that follow each of the logits."""
    following = following.to(outputs.logits.device)
    losses = F.cross_entropy(
        outputs.logits[0].float() / temperature, following[0], ignore_index=IGNORE, reduction="none"
    )
    return FusedCausalLMOutput(
        log_probs=-losses[None],
        label_mask=following.ne(IGNORE),
        aux_loss=getattr(outputs, "aux_loss", None),
    )
