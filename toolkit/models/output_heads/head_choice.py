"""Which output head scores labels: the model's own forward is asked, twice.

On a tiny copy before anything is loaded, in fp32, which the plan needs; and on the first rows in the run's precision,
before step 1. A list of the models for which a fused head is right would be out of date.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import add_fused_lm_head

from toolkit.data.batching.collate import Collator
from toolkit.data.encoding.encode import IGNORE
from toolkit.models.balance import of_text
from toolkit.models.output_heads.output_head import HeadChoice, OutputHead, at, from_logits
from toolkit.models.output_heads.pair_head import PairHead
from toolkit.models.tiny import VOCABULARY, tiny_model

_TOLERANCE = 1e-5
"""Of log-probabilities in fp32, for each unit of the largest logit: equal heads differ by a tenth of it."""


def choose(config: Any, trust_remote_code: bool = False, objective: str = "sft") -> HeadChoice:
    """Compares both ways of scoring on a tiny copy of an architecture.

    Args:
        config: The model's configuration object; it is not changed.
        objective: As in a recipe.

    Returns:
        The fused head also where no tiny copy can be made: a run compares again.
    """
    return _choose(_Hashed(config, config.to_json_string()), trust_remote_code, objective)


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
def _choose(hashed: _Hashed, trust_remote_code: bool, objective: str) -> HeadChoice:
    config = copy.deepcopy(hashed.config)
    routers = objective != "seq2seq" and asks_routers(config)
    if routers:
        config.get_text_config().output_router_logits = True
    try:
        model = tiny_model(config, objective, trust_remote_code)
        _widen(model)
        batch = _batch(objective)
        labels = ("labels",) if objective == "seq2seq" else ()
        with torch.no_grad():
            read = {key: batch[key] for key in ("input_ids", "attention_mask", *labels) if key in batch}
            own = model(**read, use_cache=False)
    except Exception:  # A model's own code may raise anything for sizes that do not fit together.
        return HeadChoice()
    balances = not routers or getattr(own, "aux_loss", None) is not None
    if not balances:
        config.get_text_config().output_router_logits = model.config.get_text_config().output_router_logits = False
    head = add_output_head(model, HeadChoice(), objective)
    difference, reason = compare(model, batch, head, torch.float32, fused=True)
    selects = compare(model, batch, head, torch.float32, fused=False)[0] <= 1
    return HeadChoice(difference <= 1, balances, reason, selects)


def _widen(model: Any) -> None:
    """Logits as large as a trained model's: caps and scales would not show on small ones."""
    head = model.get_output_embeddings()
    if head is not None:
        with torch.no_grad():
            head.weight.mul_(10 / (head.weight.std() * head.weight.shape[1] ** 0.5))


def _batch(objective: str) -> dict[str, torch.Tensor]:
    """Two rows of different lengths, of which the beginning is not trained, or two pairs of different lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY - 8, (2, 24), generator=generator).tolist()
    rows = [ids[0], ids[1][:-6]]
    if objective == "seq2seq":
        return Collator(0, "pairs")([{"input_ids": row, "labels": row[7:]} for row in rows])
    return Collator(0, "padded")([{"input_ids": row, "labels": [IGNORE] * 3 + row[3:]} for row in rows])


def add_output_head(model: Any, choice: HeadChoice, objective: str = "sft") -> OutputHead:
    """Gives a model both ways of scoring."""
    if objective == "seq2seq":
        return PairHead(model, choice)
    add_fused_lm_head(model, temperature=choice.temperature)
    return OutputHead(model, choice)


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
    inputs, following = head.plain(batch) | {"use_cache": False}, head.following(batch)
    was_training, before = model.training, vars(head).copy()
    model.eval()
    try:
        with torch.no_grad():
            with of_text(batch.get("text_counts")):
                own = model(**inputs)
            largest = own.logits.abs().max().item()
            own.logits = at(own.logits, batch["label_positions"])
            wanted = from_logits(own, following, head.temperature)
            head.fused, head.selects = fused, not fused
            try:
                scored = model(**{**batch, "use_cache": False}, fused_lm_head=True)
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
