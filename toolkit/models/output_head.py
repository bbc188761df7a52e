"""How labels are scored: with TRL's fused output head where that is what the model computes, else from all logits.

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
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from toolkit.data.encode import IGNORE
from toolkit.models.tiny import VOCABULARY, tiny_model

FUSED_OUTPUTS = ("log_probs", "entropy", "is_top1")
"""What TRL's trainer has its fused head compute."""
_TOLERANCE = 1e-5
"""Of log-probabilities in fp32, for each unit of the largest logit: equal heads differ by a tenth of it."""


@dataclass(frozen=True)
class HeadChoice:
    """How an architecture's labels are scored.

    Args:
        fused: Whether TRL's fused output head computes what the model's own forward does.
        balances: Whether the model's own forward has a loss for the balance of its routers.
        reason: Why the head is not the fused one.
    """

    fused: bool = True
    balances: bool = True
    reason: str = ""


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
            own = model(**batch, use_cache=False)
    except Exception:  # A model's own code may raise anything for sizes that do not fit together.
        return HeadChoice()
    balances = not routers or getattr(own, "aux_loss", None) is not None
    if not balances:
        config.get_text_config().output_router_logits = model.config.get_text_config().output_router_logits = False
    difference, reason = compare(model, batch, add_output_head(model, fused=True), torch.float32)
    return HeadChoice(difference <= 1, balances, reason)


def _widen(model: Any) -> None:
    """Logits as large as a trained model's: caps and scales would not show on small ones."""
    head = model.get_output_embeddings()
    if head is not None:
        with torch.no_grad():
            head.weight.mul_(10 / (head.weight.std() * head.weight.shape[1] ** 0.5))


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY - 8, (2, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


class OutputHead:
    """Scores labels for `model(..., labels=…, fused_lm_head=True)`, which TRL's trainer calls.

    Args:
        model: A causal language model with TRL's fused head, without adapters around it.
        fused: Whether the fused head scores; may be changed at any time.
    """

    def __init__(self, model: Any, fused: bool) -> None:
        self.fused = fused
        forward = model.forward

        # `generate` checks its arguments against the original signature.
        @functools.wraps(type(model).forward)
        def scored(module: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
            if self.fused or not fused_lm_head:
                return forward(*args, fused_lm_head=fused_lm_head, labels=labels, **kwargs)
            return _from_logits(forward(*args, **kwargs), labels)

        model.forward = types.MethodType(scored, model)


def add_output_head(model: Any, fused: bool) -> OutputHead:
    """Gives a model both ways of scoring, as TRL's trainer and ours do."""
    add_fused_lm_head(model, outputs=FUSED_OUTPUTS)
    return OutputHead(model, fused)


def _from_logits(outputs: Any, labels: torch.Tensor) -> Any:
    """The scores (batch, seq - 1) that the fused head returns. Entropy, of which only a metric is made, would take as
    much memory as the logits once more."""
    logits = outputs.logits
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORE).to(logits.device)
    losses = F.cross_entropy(logits.float().flatten(0, 1), following.flatten(), ignore_index=IGNORE, reduction="none")
    return FusedCausalLMOutput(
        log_probs=-losses.view(following.shape)[:, :-1],
        entropy=losses.new_tensor(float("nan")),
        is_top1=(logits.detach().argmax(-1) == following)[:, :-1],
        label_mask=following[:, :-1].ne(IGNORE),
        aux_loss=getattr(outputs, "aux_loss", None),
    )


def compare(model: Any, batch: Mapping[str, Any], head: OutputHead, compute: torch.dtype) -> tuple[float, str]:
    """How far the fused head is from the model's own forward on a batch, in evaluation mode.

    If an engine has sharded the model, every process must call this.

    Args:
        model: The model that is called, with an engine around it or not.
        batch: Tensors of the collator; every token is scored, whatever its label.
        compute: What matrix products are computed in.

    Returns:
        Mean distance of log-probabilities (or of the routers' losses, if that is larger) as a multiple of what
        rounding explains, and how it shows. Infinite if the fused head fails.
    """
    inputs = {key: value for key, value in batch.items() if key != "labels"} | {"use_cache": False}
    labels = batch["input_ids"].masked_fill(batch.get("attention_mask", batch["input_ids"].new_ones(())) == 0, IGNORE)
    was_training, was_fused = model.training, head.fused
    model.eval()
    try:
        with torch.no_grad():
            own = model(**inputs)
            logits = own.logits.float()
            wanted = _from_logits(own, labels)
            head.fused = True
            try:
                scored = model(**inputs, labels=labels, fused_lm_head=True)
            except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                return float("inf"), f"it fails with {type(error).__name__}: {error}"
    finally:
        head.fused = was_fused
        model.train(was_training)
    rounding = _rounding(compute, logits.device) * max(1.0, logits.abs().max().item())
    count = wanted.label_mask.sum().clamp(min=1)
    distance = ((scored.log_probs - wanted.log_probs).abs().sum() / count).item()
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
