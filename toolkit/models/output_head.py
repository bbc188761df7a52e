"""How labels are scored: of trained tokens alone, with TRL's fused output head where that is what the model computes.

The fused head never holds all logits, but it reads the head's weight and knows scales and soft caps by some of their
names: what else a model does between its backbone and its logits (a dense layer, a cap, routers' names) it would leave
out without a word. So the model's own forward is asked too, twice: on a tiny copy before anything is loaded, in fp32,
which the plan needs; and on the first rows in the run's precision, before step 1. A list of names would be out of date.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from toolkit.data.collate import Collator
from toolkit.data.encode import IGNORE
from toolkit.models.cpu_head import scored_on_cpu
from toolkit.models.tiny import VOCABULARY, tiny_model

_TOLERANCE = 1e-5
"""Of log-probabilities in fp32, for each unit of the largest logit: equal heads differ by a tenth of it."""


@dataclass(frozen=True)
class HeadChoice:
    """How an architecture's labels are scored.

    Args:
        fused: Whether TRL's fused output head computes what the model's own forward does.
        balances: Whether the model's own forward has a loss for the balance of its routers.
        reason: Why the head is not the fused one.
        selects: Whether the model's own forward may be given trained positions alone.
    """

    fused: bool = True
    balances: bool = True
    reason: str = ""
    selects: bool = True


def choose(config: Any, trust_remote_code: bool = False) -> HeadChoice:
    """Compares both ways of scoring on a tiny copy of an architecture.

    Args:
        config: The model's configuration object; it is not changed.

    Returns:
        The fused head also where no tiny copy can be made: a run compares again.
    """
    return _choose(_Hashed(config, config.to_json_string()), trust_remote_code)


def asks_routers(config: Any) -> bool:
    """Whether TRL's trainer adds a loss for the balance of routers to a model with this configuration."""
    text = config.get_text_config()
    return hasattr(text, "output_router_logits") and bool(getattr(text, "router_aux_loss_coef", 0.0))


@dataclass(frozen=True)
class _Hashed:
    config: Any
    text: str

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.text == other.text


@functools.lru_cache
def _choose(hashed: _Hashed, trust_remote_code: bool) -> HeadChoice:
    config = copy.deepcopy(hashed.config)
    routers = asks_routers(config)
    if routers:
        config.get_text_config().output_router_logits = True
    try:
        model = tiny_model(config, "sft", trust_remote_code)
        _widen(model)
        batch = _batch()
        with torch.no_grad():
            own = model(**{key: batch[key] for key in ("input_ids", "attention_mask")}, use_cache=False)
    except Exception:  # A model's own code may raise anything for sizes that do not fit together.
        return HeadChoice()
    balances = not routers or getattr(own, "aux_loss", None) is not None
    if not balances:
        config.get_text_config().output_router_logits = model.config.get_text_config().output_router_logits = False
    head = add_output_head(model, HeadChoice())
    difference, reason = compare(model, batch, head, torch.float32, fused=True)
    selects = compare(model, batch, head, torch.float32, fused=False)[0] <= 1
    return HeadChoice(difference <= 1, balances, reason, selects)


def _widen(model: Any) -> None:
    """Logits as large as a trained model's: caps and scales would not show on small ones."""
    head = model.get_output_embeddings()
    if head is not None:
        with torch.no_grad():
            head.weight.mul_(10 / (head.weight.std() * head.weight.shape[1] ** 0.5))


def _batch() -> dict[str, torch.Tensor]:
    """Two rows of different lengths, of which the beginning is not trained."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY - 8, (2, 24), generator=generator).tolist()
    rows = [ids[0], ids[1][:-6]]
    return Collator(0, "padded")([{"input_ids": row, "labels": [IGNORE] * 3 + row[3:]} for row in rows])


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
    """

    def __init__(self, model: Any, choice: HeadChoice) -> None:
        self.fused, self.selects = choice.fused, choice.selects
        forward = model.forward
        # TRL would pick positions by a mask on GPUs, and wait for their number; here they have been picked.
        trl_utils._use_triton = lambda device: False

        # `generate` checks its arguments against the original signature.
        @functools.wraps(type(model).forward)
        def scored(
            module: Any,
            *args: Any,
            fused_lm_head: bool = False,
            labels: Any = None,
            label_positions: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            if not fused_lm_head:
                return forward(*args, labels=labels, **kwargs)
            if label_positions is None:
                assert self.fused, "the model's own forward scores the positions of a collator"
                with scored_on_cpu(labels[:, 1:]):
                    return forward(*args, fused_lm_head=True, labels=labels, **kwargs)
            # The first token of a row is never trained, so the last one of the row before has no label.
            following = _at(labels.roll(-1), label_positions)
            if not (self.fused or self.selects):
                outputs = forward(*args, **kwargs)
                outputs.logits = _at(outputs.logits, label_positions)
                return _from_logits(outputs, following)
            with _only(module.base_model, label_positions):
                if self.fused:
                    with scored_on_cpu(following):
                        return forward(*args, fused_lm_head=True, shift_labels=following, **kwargs)
                return _from_logits(forward(*args, **kwargs), following)

        model.forward = types.MethodType(scored, model)


def _only(backbone: Any, positions: torch.Tensor) -> Any:
    """While this context lasts, a backbone returns hidden states of these positions of its flattened batch alone."""

    def select(_: Any, __: Any, outputs: Any) -> Any:
        outputs.last_hidden_state = _at(outputs.last_hidden_state, positions)
        return outputs

    return backbone.register_forward_hook(select)


def _at(each: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(1, positions, …) of a flattened (batch, seq, …)."""
    return each.flatten(0, 1).index_select(0, positions.to(each.device))[None]


def add_output_head(model: Any, choice: HeadChoice) -> OutputHead:
    """Gives a model both ways of scoring."""
    add_fused_lm_head(model)
    return OutputHead(model, choice)


def _from_logits(outputs: Any, following: torch.Tensor) -> FusedCausalLMOutput:
    """Scores as the fused head returns them, of the labels (1, positions) that follow each of the logits."""
    following = following.to(outputs.logits.device)
    losses = F.cross_entropy(outputs.logits[0].float(), following[0], ignore_index=IGNORE, reduction="none")
    return FusedCausalLMOutput(
        log_probs=-losses[None],
        label_mask=following.ne(IGNORE),
        aux_loss=getattr(outputs, "aux_loss", None),
    )


def compare(
    model: Any, batch: Mapping[str, Any], head: OutputHead, compute: torch.dtype, fused: bool
) -> tuple[float, str]:
    """How far a way of scoring trained positions alone is from the model's own forward on a batch, in evaluation mode.

    If an engine has sharded the model, every process must call this.

    Args:
        model: The model that is called, with an engine around it or not.
        batch: Tensors of the collator.
        compute: What matrix products are computed in.
        fused: Of the fused head, or of the model's own forward.

    Returns:
        Mean distance of log-probabilities (or of the routers' losses, if that is larger) as a multiple of what
        rounding explains, and how it shows. Infinite if scoring fails.
    """
    inputs = {key: batch[key] for key in batch if key not in ("labels", "label_positions")} | {"use_cache": False}
    was_training, before = model.training, vars(head).copy()
    model.eval()
    try:
        with torch.no_grad():
            own = model(**inputs)
            largest = own.logits.abs().max().item()
            own.logits = _at(own.logits, batch["label_positions"])
            wanted = _from_logits(own, _at(batch["labels"].roll(-1), batch["label_positions"]))
            head.fused, head.selects = fused, not fused
            try:
                scored = model(**batch, use_cache=False, fused_lm_head=True)
                distance = (scored.log_probs - wanted.log_probs)[wanted.label_mask].abs().mean().item()
            except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                return float("inf"), f"it fails with {type(error).__name__}: {error}"
    finally:
        vars(head).update(before)
        model.train(was_training)
    rounding = _rounding(compute, own.logits.device) * max(1.0, largest)
    reason = f"log-probabilities differ by {distance:.2g} on average"
    if scored.aux_loss is not None and wanted.aux_loss is not None:
        of_routers = (scored.aux_loss - wanted.aux_loss).abs().item()
        if of_routers > distance:
            distance, reason = of_routers, f"the routers' losses differ by {of_routers:.2g}"
    equal = distance <= rounding  # Also False for what is not a number.
    return (distance / rounding if equal else max(distance / rounding, 2.0)), "" if equal else reason


def _rounding(compute: torch.dtype, device: torch.device) -> float:
    if compute != torch.float32:
        return torch.finfo(compute).eps
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return 2**-10 if tf32 else _TOLERANCE
