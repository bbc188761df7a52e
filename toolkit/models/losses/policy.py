"""Advantages of answers and losses of policies, as TRL 1.16 computes them for GRPO and RLOO.

A loss is one of each answer, and what their sum is divided by is one of the whole step: so it does not depend on how
the step is divided. TRL's `bnpo`, which averages over the tokens of a micro-batch, is left out for that reason; over
those of a step it is `dapo`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.models.device import sent
from toolkit.recipe.reinforcement import Policy

_SPREAD = 1e-4
"""Added to a standard deviation that is divided by; TRL's."""


def advantages(
    objective: str, settings: Policy, rewards: NDArray[np.float64], spread: float | None = None
) -> NDArray[np.float64]:
    """By how much answers are better than others to the same prompt.

    GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2, without its deviation Liu et al. 2025, arXiv:2503.20783.
    RLOO: Ahmadian et al. 2024, arXiv:2402.14740, section 3.3: the baseline of an answer is the mean of all others.

    Args:
        rewards: (prompts, answers).
        spread: Standard deviation of all rewards of the step, for `scale_rewards: batch`.

    Returns:
        (prompts, answers).
    """
    count = rewards.shape[1]
    beyond = rewards - rewards.mean(axis=1, keepdims=True)
    if objective == "rloo":
        return beyond * count / (count - 1)
    if settings.scale_rewards == "none":
        return beyond
    if settings.scale_rewards == "batch":
        assert spread is not None, "the deviation of all rewards is known"
        return beyond / (spread + _SPREAD)
    return beyond / (rewards.std(axis=1, ddof=1, keepdims=True) + _SPREAD)


def server_weights(
    objective: str, settings: Policy, before: torch.Tensor, served: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """What tokens that a server drew count in a loss of what the model in training makes of them.

    Importance weights of tokens, cut at `server_cap` (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; `token_truncate` in TRL); of RLOO, whose losses are of whole answers, those of answers.

    Args:
        before: (T,) log-probabilities of the tokens of all answers by the model that is trained, before the first step
            on them; without gradient.
        served: (T,) the same as the server drew them.

    Returns:
        (T,) weights, of RLOO the same one for all tokens of an answer.
    """
    apart = before - served
    if objective == "rloo":
        sizes = sent(counts, apart.device)
        apart = torch.stack([part.sum() for part in apart.split(counts)])
        apart = apart.repeat_interleave(sizes, output_size=len(before))
    return apart.exp().clamp(max=settings.server_cap)


@dataclass(frozen=True)
class PolicyLoss:
    """What answers (A) come to, and what there is to say of it.

    Attributes:
        losses: (A,) whose sum is divided by `divisor` of the step.
        clipped: () tokens, or of whole answers theirs, whose ratio was clipped.
        divergence: () sum over tokens of the divergence from the reference; 0 without one.
    """

    losses: torch.Tensor
    clipped: torch.Tensor
    divergence: torch.Tensor


def divisor(objective: str, settings: Policy, answers: int, tokens: int, longest: int) -> int:
    """By what the sum of a step's losses is divided.

    Args:
        answers: Of the step.
        tokens: Of all its answers.
        longest: Tokens that an answer may have.
    """
    if objective == "rloo" or settings.loss == "grpo":
        return answers
    return tokens if settings.loss == "dapo" else answers * longest


def policy_losses(
    objective: str,
    settings: Policy,
    log_probs: torch.Tensor,
    before: torch.Tensor,
    reference: torch.Tensor | None,
    gains: torch.Tensor,
    counts: list[int],
    weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """Losses of answers.

    Ratios are clipped as in PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7): of tokens, of whole answers per
    token (GSPO, Zheng et al. 2025, arXiv:2507.18071, equation 7), of RLOO of whole answers. The divergence is estimated
    as in Schulman 2020, "Approximating KL Divergence", k3.

    Args:
        objective: `grpo` or `rloo`.
        log_probs: (T,) of the tokens of all answers, one answer after the other.
        before: (T,) the same by the policy that gave the answers; without gradient.
        reference: (T,) the same by the reference, where GRPO counts the divergence from it.
        gains: (A,) advantages.
        counts: Tokens of each of the answers, at least one.
        weights: (T,) what the tokens count, where another than the policy drew them, see `server_weights`.
    """
    low, high = settings.bounds
    sizes = sent(counts, log_probs.device)

    def summed(each: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.sum() for part in each.split(counts)])

    def spread(each: torch.Tensor) -> torch.Tensor:
        return each.repeat_interleave(sizes, output_size=len(log_probs))

    log_ratios = log_probs - before
    if objective == "rloo":
        log_ratios = summed(log_ratios)
    elif settings.importance == "sequence":
        log_ratios = spread(summed(log_ratios) / sizes)
    gained = gains if objective == "rloo" else spread(gains)
    ratios = log_ratios.exp()
    losses = -torch.minimum(ratios * gained, ratios.clamp(low, high) * gained)
    clipped = ((ratios < low) & (gained < 0)) | ((ratios > high) & (gained > 0))
    if weights is not None:
        losses = losses * (weights[sizes.cumsum(0) - 1] if objective == "rloo" else weights)
    if objective == "rloo":
        return PolicyLoss(losses, (clipped * sizes).sum(), losses.new_zeros(()))
    divergence = losses.new_zeros(())
    if reference is not None:
        behind = reference - log_probs
        of_tokens = behind.exp() - behind - 1
        losses, divergence = losses + settings.beta * of_tokens, of_tokens.detach().sum()
    whole = summed(losses)
    return PolicyLoss(whole / sizes if settings.loss == "grpo" else whole, clipped.sum(), divergence)
