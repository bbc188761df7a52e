"""Losses of objectives that prefer one answer to another, each of one pair, or of one judged answer, by itself.

What is known of a pair are log-probabilities: of its chosen and its rejected answer, by the model in training and, for
DPO, by the reference. A loss of a pair never reads another pair, so that the mean over a batch does not depend on how
the batch is divided; of TRL's losses those that sort or average within a micro-batch (`aot`, `sft`) are left out for
that reason, the latter for a likelihood per token of each pair. Formulas are written as TRL 1.16 computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid, relu, sigmoid

from toolkit.recipe.preference import Preference

Loss = Callable[[Preference, torch.Tensor, torch.Tensor], torch.Tensor]


def _sigmoid(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Rafailov et al. 2023, arXiv:2305.18290, equation 7."""
    return -logsigmoid(settings.beta * (chosen - rejected))


def _hinge(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """SLiC, Zhao et al. 2023, arXiv:2305.10425, with the margin in rewards, as in RSO (Liu et al. 2023)."""
    return relu(1 - settings.beta * (chosen - rejected))


def _ipo(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Azar et al. 2023, arXiv:2310.12036, equation 17, per token as its authors told TRL; beta is their τ."""
    return (chosen - rejected - 1 / (2 * settings.beta)) ** 2


def _robust(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Ray Chowdhury et al. 2024, arXiv:2403.00409, equation 8."""
    wrong, difference = settings.label_smoothing, settings.beta * (chosen - rejected)
    return (-(1 - wrong) * logsigmoid(difference) + wrong * logsigmoid(-difference)) / (1 - 2 * wrong)


def _exo_pair(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Ji et al. 2024, arXiv:2402.00856, equation 16: the reverse divergence from labels that are smoothed."""
    wrong, difference = settings.label_smoothing, settings.beta * (chosen - rejected)
    return sigmoid(difference) * (logsigmoid(difference) - math.log1p(-wrong)) + sigmoid(-difference) * (
        logsigmoid(-difference) - math.log(wrong)
    )


def _nca_pair(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Chen et al. 2024, arXiv:2402.05369, of two answers."""
    chosen, rejected = settings.beta * chosen, settings.beta * rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _bco_pair(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Jung et al. 2024, arXiv:2404.04656, of two answers, without the shift of rewards by their mean."""
    return -logsigmoid(settings.beta * chosen) - logsigmoid(-settings.beta * rejected)


def _sppo_hard(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Wu et al. 2024, arXiv:2405.00675, equation 4.7, where the chosen answer always wins."""
    return (chosen - 0.5 / settings.beta) ** 2 + (rejected + 0.5 / settings.beta) ** 2


def _apo_zero(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7: for chosen answers better than the model's."""
    return 1 - sigmoid(settings.beta * chosen) + sigmoid(settings.beta * rejected)


def _apo_down(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The same, equation 8: for chosen answers that are worse."""
    return sigmoid(settings.beta * chosen) + 1 - sigmoid(settings.beta * (chosen - rejected))


_OF_DPO: dict[str, Loss] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
"""`preference.loss`, of the logarithms of how much likelier than for the reference the answers are."""


def _cpo(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Xu et al. 2024, arXiv:2401.08417, equation 4: DPO without a reference."""
    wrong, difference = settings.label_smoothing, settings.beta * (chosen - rejected)
    return -(1 - wrong) * logsigmoid(difference) - wrong * logsigmoid(-difference)


def _simpo(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Meng et al. 2024, arXiv:2405.14734, equation 6."""
    return -logsigmoid(settings.beta * (chosen - rejected) - settings.margin)


def _orpo(settings: Preference, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Hong et al. 2024, arXiv:2403.07691, equation 7: the ratio of the odds, weighed by λ."""
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -settings.beta * logsigmoid(odds)


_WITHOUT_REFERENCE: dict[str, Loss] = {"cpo": _cpo, "simpo": _simpo, "orpo": _orpo}
_PER_TOKEN = ("simpo", "orpo")


def _log1mexp(value: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(value)) of values below 0 (Mächler 2012, "Accurately computing log(1 - exp(-|a|))"); an answer that
    is certain has no odds, so that the largest value stops short of 0."""
    value = value.clamp(max=-torch.finfo(torch.float32).eps)
    return torch.where(value > -math.log(2), torch.log(-torch.expm1(value)), torch.log1p(-value.exp()))


def pair_losses(
    objective: str,
    settings: Preference,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of pairs, and the rewards of their answers.

    Args:
        objective: One of `recipe.preference.PAIRED`.
        log_probs: (pairs, 2) sums over the tokens of the chosen and of the rejected answer.
        tokens: (pairs, 2) how many tokens these are.
        reference: (pairs, 2) the same sums by the reference; of DPO alone.

    Returns:
        (pairs,) losses; (pairs, 2) rewards, which carry no gradient: beta times the log-probability, for DPO beyond the
        reference's, per token where the loss is. Of ORPO, whose beta weighs the loss, the log-probability per token.
    """
    scores = log_probs
    if objective == "dpo":
        assert reference is not None, "DPO compares with a reference"
        scores = log_probs - reference
        loss = _OF_DPO[settings.loss]
    else:
        loss = _WITHOUT_REFERENCE[objective]
    scores = scores / tokens if _per_token(objective, settings) else scores
    losses = loss(settings, scores[:, 0], scores[:, 1])
    if settings.sft_weight:
        # Per token of each pair, as in Pang et al. 2024, arXiv:2404.19733, equation 1.
        losses = losses - settings.sft_weight * log_probs[:, 0] / tokens[:, 0]
    return losses, (scores if objective == "orpo" else settings.beta * scores).detach()


def reward_scale(objective: str, settings: Preference, tokens: torch.Tensor) -> torch.Tensor:
    """(pairs, 2) what one nat of log-probability is of a reward of `pair_losses`."""
    beta = 1.0 if objective == "orpo" else settings.beta
    return beta / (tokens if _per_token(objective, settings) else torch.ones_like(tokens))


def _per_token(objective: str, settings: Preference) -> bool:
    """Whether a loss compares means over tokens, and not sums."""
    if objective == "dpo":
        return settings.length_normalized or settings.loss == "ipo"
    return objective in _PER_TOKEN


def reward_losses(settings: Preference, rewards: torch.Tensor) -> torch.Tensor:
    """Losses of pairs by what a reward model gives their answers: Bradley-Terry, as in Ouyang et al. 2022,
    arXiv:2203.02155, equation 1, with a margin as in Llama 2 (arXiv:2307.09288, equation 2).

    Args:
        rewards: (pairs, 2) of the chosen and of the rejected answer.

    Returns:
        (pairs,) losses.
    """
    losses = -logsigmoid(rewards[:, 0] - rewards[:, 1] - settings.margin)
    if settings.center_rewards:
        losses = losses + settings.center_rewards * rewards.sum(1).square()
    return losses


def judged_losses(
    settings: Preference, gains: torch.Tensor, desirable: torch.Tensor, divergence: torch.Tensor
) -> torch.Tensor:
    """Losses of answers that are judged one by one: Ethayarajh et al. 2024, arXiv:2402.01306, equation 7.

    Args:
        gains: (answers,) logarithms of how much likelier than for the reference they are.
        desirable: (answers,) which are good.
        divergence: () how far the model has moved from the reference, at least 0; carries no gradient.

    Returns:
        (answers,) losses, each from 0 to the weight of its kind.
    """
    lead = settings.beta * (gains - divergence)
    good, bad = settings.desirable_weight * sigmoid(-lead), settings.undesirable_weight * sigmoid(lead)
    return torch.where(desirable, good, bad)
