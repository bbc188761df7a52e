"""Each loss of pairs against its formula written out, and against TRL's own."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.models.losses.preference import judged_losses, pair_losses
from toolkit.recipe.preference import PAIRED, REWARD, Preference

CHOSEN, REJECTED = [-31.0, -12.5, -70.25, -4.0], [-30.0, -15.5, -55.5, -40.0]
REFERENCES = [[-33.0, -12.0, -68.0, -9.0], [-28.5, -13.5, -60.0, -33.0]]
TOKENS = [[10, 3, 22, 2], [8, 5, 21, 9]]


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def settings(**values: Any) -> Preference:
    return Preference(**values)


# Of how much likelier the chosen and the rejected answer have become, c and r.
BETA, EPSILON = 0.3, 0.1
OF_DPO: dict[str, Any] = {
    "sigmoid": lambda c, r: -log_sigmoid(BETA * (c - r)),
    "hinge": lambda c, r: max(0.0, 1 - BETA * (c - r)),
    "robust": lambda c, r: (
        -((1 - EPSILON) * log_sigmoid(BETA * (c - r)) - EPSILON * log_sigmoid(-BETA * (c - r))) / (1 - 2 * EPSILON)
    ),
    "exo_pair": lambda c, r: (
        sigmoid(BETA * (c - r)) * (log_sigmoid(BETA * (c - r)) - math.log(1 - EPSILON))
        + sigmoid(BETA * (r - c)) * (log_sigmoid(BETA * (r - c)) - math.log(EPSILON))
    ),
    "nca_pair": lambda c, r: -log_sigmoid(BETA * c) - log_sigmoid(-BETA * c) / 2 - log_sigmoid(-BETA * r) / 2,
    "bco_pair": lambda c, r: -log_sigmoid(BETA * c) - log_sigmoid(-BETA * r),
    "sppo_hard": lambda c, r: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r: 1 - sigmoid(BETA * c) + sigmoid(BETA * r),
    "apo_down": lambda c, r: sigmoid(BETA * c) + 1 - sigmoid(BETA * (c - r)),
    "ipo": lambda c, r: (c - r - 1 / (2 * BETA)) ** 2,
}


def pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, reference and tokens, (pairs, 2)."""
    log_probs = torch.tensor([CHOSEN, REJECTED], dtype=torch.float64).T
    return log_probs, torch.tensor(REFERENCES, dtype=torch.float64).T, torch.tensor(TOKENS).T


@pytest.mark.parametrize("loss", OF_DPO)
@pytest.mark.parametrize("per_token", [False, True])
def test_losses_of_dpo_are_those_of_their_papers(loss: str, per_token: bool) -> None:
    log_probs, reference, tokens = pairs()
    per_token = per_token and loss in ("sigmoid", "hinge", "robust", "exo_pair")
    smoothing = EPSILON if loss in ("robust", "exo_pair") else 0.0
    given = settings(loss=loss, beta=BETA, label_smoothing=smoothing, length_normalized=per_token)
    losses, rewards = pair_losses("dpo", given, log_probs, tokens, reference)
    for number, row in enumerate(zip(CHOSEN, REJECTED, *REFERENCES, *TOKENS, strict=True)):
        lengths = row[4:] if per_token or loss == "ipo" else (1, 1)
        chosen, rejected = (row[0] - row[2]) / lengths[0], (row[1] - row[3]) / lengths[1]
        assert losses[number].item() == pytest.approx(OF_DPO[loss](chosen, rejected), rel=1e-12)
        assert rewards[number].tolist() == pytest.approx([BETA * chosen, BETA * rejected])


def test_losses_without_a_reference_are_those_of_their_papers() -> None:
    log_probs, _, tokens = pairs()
    cpo, _ = pair_losses("cpo", settings(beta=BETA, label_smoothing=EPSILON), log_probs, tokens)
    simpo, _ = pair_losses("simpo", settings(beta=2.0, margin=0.8), log_probs, tokens)
    orpo, rewards = pair_losses("orpo", settings(beta=BETA), log_probs, tokens)
    for number, (c, r, n, m) in enumerate(zip(CHOSEN, REJECTED, *TOKENS, strict=True)):
        wanted = -(1 - EPSILON) * log_sigmoid(BETA * (c - r)) - EPSILON * log_sigmoid(BETA * (r - c))
        assert cpo[number].item() == pytest.approx(wanted, rel=1e-12)
        assert simpo[number].item() == pytest.approx(-log_sigmoid(2.0 * (c / n - r / m) - 0.8), rel=1e-12)
        odds = [math.exp(each) / (1 - math.exp(each)) for each in (c / n, r / m)]
        assert orpo[number].item() == pytest.approx(-BETA * log_sigmoid(math.log(odds[0] / odds[1])), rel=1e-9)
        assert rewards[number].tolist() == pytest.approx([c / n, r / m])


@pytest.mark.parametrize("objective", [each for each in PAIRED if each != REWARD])
def test_the_likelihood_of_the_chosen_answer_is_added_per_token_and_pair(objective: str) -> None:
    log_probs, reference, tokens = pairs()
    with_term, _ = pair_losses(objective, settings(sft_weight=0.5), log_probs, tokens, reference)
    without, _ = pair_losses(objective, settings(), log_probs, tokens, reference)
    wanted = [-0.5 * c / n for c, n in zip(CHOSEN, TOKENS[0], strict=True)]
    assert (with_term - without).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("divergence", [0.0, 1.5])
def test_losses_of_judged_answers_are_those_of_the_paper(divergence: float) -> None:
    gains, good = [2.0, -3.0, 1.5, 40.0], [True, True, False, False]
    given = settings(beta=BETA, desirable_weight=1.3, undesirable_weight=0.7)
    log_ratios = torch.tensor(gains, dtype=torch.float64, requires_grad=True)
    losses = judged_losses(given, log_ratios, torch.tensor(good), torch.tensor(divergence, dtype=torch.float64))
    wanted = [
        weight * (1 - sigmoid(sign * BETA * (gain - divergence)))
        for gain, weight, sign in zip(gains, (1.3, 1.3, 0.7, 0.7), (1, 1, -1, -1), strict=True)
    ]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-12)
    losses.sum().backward()
    # What a good answer gains lessens the loss, what a bad one gains adds to it.
    assert log_ratios.grad is not None and log_ratios.grad.sign().tolist() == [-1, -1, 1, 1]


def test_an_answer_that_is_certain_has_a_finite_loss_and_gradient() -> None:
    log_probs = torch.tensor([[0.0, -5.0], [-1e-9, 0.0]], dtype=torch.float64, requires_grad=True)
    losses, _ = pair_losses("orpo", settings(), log_probs, torch.ones(2, 2))
    losses.sum().backward()
    assert losses.isfinite().all() and log_probs.grad is not None and log_probs.grad.isfinite().all()


def test_losses_without_a_reference_are_trls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.cpo.cpo_trainer import CPOTrainer
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    log_probs, _, tokens = pairs()
    device = SimpleNamespace(device="cpu")
    own = {"beta": BETA, "label_smoothing": EPSILON, "accelerator": device, "alpha": 0.0}
    cpo, *_ = CPOTrainer.cpo_loss(SimpleNamespace(**own, loss_type="sigmoid"), *log_probs.T)
    mean = log_probs / tokens
    simpo, *_ = CPOTrainer.cpo_loss(
        SimpleNamespace(**own | {"label_smoothing": 0.0}, loss_type="simpo", simpo_gamma=0.8), *mean.T
    )
    orpo, *_ = ORPOTrainer.odds_ratio_loss(SimpleNamespace(**own), *mean.T)
    given = settings(beta=BETA, label_smoothing=EPSILON)
    torch.testing.assert_close(pair_losses("cpo", given, log_probs, tokens)[0], cpo)
    torch.testing.assert_close(pair_losses("simpo", settings(beta=BETA, margin=0.8), log_probs, tokens)[0], simpo)
    # TRL computes it in fp32, and returns what is subtracted from the likelihood.
    torch.testing.assert_close(-pair_losses("orpo", settings(beta=BETA), log_probs, tokens)[0].float(), orpo)
