"""Advantages and losses of policies against their formulas, written out."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.models.losses.policy import advantages, divisor, policy_losses, server_weights
from toolkit.recipe.reinforcement import Policy

REWARDS = [[1.0, 0.0, 2.0, 0.5], [0.25, 0.25, 0.25, 0.25]]
COUNTS = [3, 1, 4]
GAINS = [1.5, -0.5, -2.0]


def drawn(seed: int) -> torch.Tensor:
    return -torch.rand(sum(COUNTS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 0.1


def by_answer(values: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in values.split(COUNTS)]


def test_advantages_of_grpo() -> None:
    for scale in ("group", "batch", "none"):
        spread = statistics.stdev([each for group in REWARDS for each in group])
        found = advantages("grpo", Policy(scale_rewards=scale), np.array(REWARDS), spread)
        for group, row in zip(REWARDS, found, strict=True):
            divided = {"group": statistics.stdev(group) + 1e-4, "batch": spread + 1e-4, "none": 1.0}[scale]
            assert row == pytest.approx([(each - statistics.fmean(group)) / divided for each in group])


def test_advantages_of_rloo_leave_the_answer_itself_out() -> None:
    found = advantages("rloo", Policy(), np.array(REWARDS))
    for group, row in zip(REWARDS, found, strict=True):
        others = [statistics.fmean(group[:at] + group[at + 1 :]) for at in range(len(group))]
        assert row == pytest.approx([each - other for each, other in zip(group, others, strict=True)])


def test_what_the_losses_of_a_step_are_divided_by() -> None:
    def of(objective: str, loss: Any = "dapo") -> int:
        return divisor(objective, Policy(loss=loss), answers=8, tokens=100, longest=32)

    assert [of("grpo"), of("grpo", "grpo"), of("grpo", "dr_grpo"), of("rloo")] == [100, 8, 256, 8]


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_losses_of_grpo(loss: Any, importance: Any, beta: float) -> None:
    settings = Policy(loss=loss, importance=importance, beta=beta, epsilon=0.1, epsilon_high=0.3)
    now, before, reference = drawn(1), drawn(2), drawn(3)
    found = policy_losses(
        "grpo", settings, now, before, reference if beta else None, torch.tensor(GAINS, dtype=torch.float64), COUNTS
    )
    wanted, clipped, divergence = [], 0, 0.0
    for gain, new, old, ref in zip(GAINS, by_answer(now), by_answer(before), by_answer(reference), strict=True):
        whole = math.exp(sum(one - other for one, other in zip(new, old, strict=True)) / len(new))
        total = 0.0
        for one, other, known in zip(new, old, ref, strict=True):
            ratio = math.exp(one - other) if importance == "token" else whole
            total -= min(ratio * gain, min(max(ratio, 0.9), 1.3) * gain)
            clipped += (ratio < 0.9 and gain < 0) or (ratio > 1.3 and gain > 0)
            if beta:
                apart = math.exp(known - one) - (known - one) - 1
                total, divergence = total + beta * apart, divergence + apart
        wanted.append(total / len(new) if loss == "grpo" else total)
    assert found.losses.tolist() == pytest.approx(wanted)
    assert clipped and found.clipped == clipped
    assert found.divergence.item() == pytest.approx(divergence)


def test_losses_of_rloo_are_of_whole_answers() -> None:
    settings, now, before = Policy(epsilon=0.2), drawn(1), drawn(2)
    found = policy_losses("rloo", settings, now, before, None, torch.tensor(GAINS, dtype=torch.float64), COUNTS)
    wanted, clipped = [], 0
    for gain, new, old in zip(GAINS, by_answer(now), by_answer(before), strict=True):
        ratio = math.exp(sum(new) - sum(old))
        wanted.append(-min(ratio * gain, min(max(ratio, 0.8), 1.2) * gain))
        clipped += len(new) * ((ratio < 0.8 and gain < 0) or (ratio > 1.2 and gain > 0))
    assert found.losses.tolist() == pytest.approx(wanted) and found.clipped == clipped


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_tokens_that_a_server_drew_are_weighed(objective: str) -> None:
    """By how much likelier they, or with RLOO their answers, were to the policy; and the divergence is not."""
    settings = Policy(server_cap=1.5, beta=0.3)
    now, before, served, reference = (drawn(seed) for seed in (1, 2, 4, 3))
    weights = server_weights(objective, settings, before, served, COUNTS)
    wanted: list[list[float]] = []
    for old, given in zip(by_answer(before), by_answer(served), strict=True):
        apart = [one - other for one, other in zip(old, given, strict=True)]
        apart = [sum(apart)] * len(apart) if objective == "rloo" else apart
        wanted.append([min(math.exp(each), 1.5) for each in apart])
    assert [each for part in wanted for each in part] == pytest.approx(weights.tolist())
    assert min(weights) < 1.5 == max(weights)
    gains = torch.tensor(GAINS, dtype=torch.float64)

    def found(known: torch.Tensor | None, given: torch.Tensor | None) -> torch.Tensor:
        return policy_losses(objective, settings, now, before, known, gains, COUNTS, given).losses

    if objective == "rloo":
        of_answers = torch.tensor([part[0] for part in wanted], dtype=torch.float64)
        assert found(None, weights).tolist() == pytest.approx((found(None, None) * of_answers).tolist())
        return
    of_tokens = gains.repeat_interleave(torch.tensor(COUNTS))
    alone = policy_losses("grpo", settings, now, before, None, of_tokens, [1] * sum(COUNTS)).losses
    weighed = torch.stack([part.sum() for part in (alone * weights).split(COUNTS)])
    divergence = found(reference, None) - found(None, None)
    assert found(reference, weights).tolist() == pytest.approx((weighed + divergence).tolist())


def test_the_gradient_of_a_first_step_is_that_of_the_weighed_likelihood() -> None:
    """Where the policy is still the one that answered, all ratios are 1, and what is left is REINFORCE."""
    now = drawn(1).requires_grad_()
    gains = torch.tensor(GAINS, dtype=torch.float64)
    policy_losses("grpo", Policy(), now, now.detach(), None, gains, COUNTS).losses.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-gain for gain, n in zip(GAINS, COUNTS, strict=True) for _ in range(n)])
