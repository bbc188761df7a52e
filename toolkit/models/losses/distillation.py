"""What a student learns of a teacher: a divergence of both models' next-token distributions, token by token.

The teacher's layers run once over a batch, under no gradient; of its hidden states those of trained tokens are kept.
Its head is applied to as many of them at a time as the student's, so that neither model's logits are there for all
tokens. TRL's fused head says for both models what logits are made of (caps and scales among them): in its autograd
function's place stands what takes the teacher's, and then what compares them with the student's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.models.output_heads.output_head import OutputHead
from toolkit.recipe.distillation import Distillation

FIGURES = ("kl", "agreement", "cross_entropy")
"""What is told of each trained token, whatever the loss: the divergence KL(teacher || student) in nats at a temperature
of 1, whether both models find the same next token likeliest, and minus the log-probability of the label."""


@dataclass(frozen=True)
class Logits:
    """What logits (N, V) are made of.

    Args:
        hidden: (N, H) hidden states.
        weight: (V, H) of the output head.
        bias: (V), if it has one.
        softcap: The largest size of a logit, if they are capped.
        scale: By what they are multiplied.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float

    def at(self, rows: slice, common: int) -> torch.Tensor:
        """(rows, common) in fp32: of some tokens, for the first entries of the vocabulary."""
        logits = torch.mm(self.hidden[rows], self.weight[:common].to(self.hidden.dtype).t())
        if self.bias is not None:
            logits = logits + self.bias[:common]
        logits = logits.float() * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class _Taking:
    """Takes the place of TRL's autograd function: keeps what it would have made logits of."""

    logits: Logits

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        self.logits = Logits(hidden, weight, bias, softcap, scale)
        return hidden.new_zeros(len(hidden)), None, None, None, None


def logits_of(model: Any, head: OutputHead, batch: dict[str, Any]) -> Logits:
    """What a model's logits at the trained tokens of a batch are made of.

    Args:
        head: The model's, which is fused.
        batch: Of a collator, with `label_positions`.
    """
    taking = _Taking()
    head.scorer = lambda labels: taking
    try:
        with torch.no_grad():
            model(**{**batch, "use_cache": False}, fused_lm_head=True)
    finally:
        head.scorer = None
    return taking.logits


class Divergence:
    """The criterion of `fused_head` by which a student is scored.

    Of a teacher's distribution t and a student's s, both of logits divided by `temperature`, and β = `beta`:

    - β = 0: KL(t || s), the sum of t (log t - log s) over the vocabulary;
    - β = 1: KL(s || t);
    - else β KL(t || m) + (1 - β) KL(s || m) with m = β t + (1 - β) s, the generalised Jensen-Shannon divergence
      (Agarwal et al. 2024, arXiv:2306.13649, section 2). It goes to 0 with β, and with 1 - β: divided by that, it goes
      to the first two.

    The loss is (1 - w) times that and w = `ce_share` times the cross-entropy of the label. Its gradient by the
    student's logits, divided by the temperature, is s - t for β = 0, and else (1 - β) s (r - KL(s || m)) with
    r = log s - log m; for β = 1 with t in the place of m and 1 in that of 1 - β.

    Args:
        common: How many entries of the vocabulary both models have; the rest only fills up embeddings.

    Attributes:
        figures: (N, 3) in fp32, of every token what `FIGURES` names.
    """

    def __init__(self, settings: Distillation, teacher: Logits, common: int) -> None:
        self._settings, self._teacher, self._common = settings, teacher, common
        self.figures = torch.zeros(len(teacher.hidden), len(FIGURES), device=teacher.hidden.device)

    def __call__(
        self, rows: slice, logits: torch.Tensor, labels: torch.Tensor, wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `fused_head.Criterion`."""
        settings, common = self._settings, self._common
        # The student's forward pass, within which this is called, may compute in fewer bits than the teacher.
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            known, own = self._teacher.at(rows, common), logits[:, :common]
            self.figures[rows, 1] = known.argmax(1).eq(own.argmax(1)).float()
            whole = logits.log_softmax(1)
            surprise = -whole.gather(1, labels)[:, 0]
            self.figures[rows, 2] = surprise
            teacher, student = known.log_softmax(1), whole if common == logits.shape[1] else own.log_softmax(1)
            as_told = settings.beta == 0 and settings.temperature == 1
            if not as_told:
                self.figures[rows, 0] = _kl(teacher, student)
            if settings.temperature != 1:
                teacher, student = ((each / settings.temperature).log_softmax(1) for each in (known, own))
            losses, gradient = divergence(settings.beta, teacher, student, wanted)
            if as_told:
                self.figures[rows, 0] = losses
            if settings.ce_share:
                losses = (1 - settings.ce_share) * losses + settings.ce_share * surprise
            if gradient is None:
                return -losses, None
            gradient.mul_((1 - settings.ce_share) / settings.temperature)
            if common < logits.shape[1]:
                gradient = torch.nn.functional.pad(gradient, (0, logits.shape[1] - common))
            if settings.ce_share:
                gradient.add_(whole.exp_(), alpha=settings.ce_share)
                gradient.scatter_add_(1, labels, torch.full_like(labels, -settings.ce_share, dtype=gradient.dtype))
            return -losses, gradient


def divergence(
    beta: float, teacher: torch.Tensor, student: torch.Tensor, wanted: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The divergence (N) of two distributions, see `Divergence`, and its gradient (N, V) by what the student's is the
    softmax of.

    Args:
        teacher: (N, V) log-probabilities.
        student: (N, V) log-probabilities.
        wanted: Whether the gradient is.
    """
    if beta == 0:
        return _kl(teacher, student), student.exp().sub_(teacher.exp()) if wanted else None
    mixed = teacher
    if beta < 1:
        mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    share, behind = (1.0 if beta == 1 else 1 - beta), student - mixed
    probabilities = student.exp()
    of_student = (probabilities * behind).sum(1)
    losses = of_student if beta == 1 else beta * _kl(teacher, mixed) + share * of_student
    gradient = behind.sub_(of_student[:, None]).mul_(probabilities).mul_(share) if wanted else None
    return losses, gradient


def _kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(one || other) (N) of log-probabilities (N, V)."""
    return (one.exp() * (one - other)).sum(1)
