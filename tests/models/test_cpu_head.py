"""The output head on CPUs: log-probabilities and gradients of a plain head, whatever the chunks; logits formed once."""

from __future__ import annotations

import pytest
import torch
from head_products import HeadProducts
from torch.nn import functional as F
from trl.trainer import utils as trl_utils

from toolkit.data.encode import IGNORE
from toolkit.models import cpu_head
from toolkit.planner.trace.types import CHUNK_ON_CPU

VOCABULARY, HIDDEN = 300, 16


def inputs(tokens: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (tokens, VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    labels[-5:] = IGNORE
    each = torch.randn(VOCABULARY, generator=generator).requires_grad_() if bias else None
    return hidden.requires_grad_(), weight.requires_grad_(), each, labels


def scored(
    labels: torch.Tensor,
    *tensors: torch.Tensor | None,
    softcap: float | None = None,
    scale: float = 1.0,
    alike: bool = True,
) -> torch.Tensor:
    """As TRL's head calls it."""
    targets = labels.clamp(min=0)
    with cpu_head.scored_on_cpu(labels[None], alike):
        found = trl_utils._ChunkedLogProbFunction.apply(*tensors, targets, 1.0, 32768, softcap, scale, ("log_probs",))
    return found[0].masked_fill(labels == IGNORE, 0)


@pytest.mark.parametrize("tokens", [5, 48, cpu_head.CHUNK + 48])
@pytest.mark.parametrize(("bias", "softcap", "scale"), [(False, None, 1.0), (True, 3.0, 0.5)])
def test_it_is_a_plain_head_in_any_number_of_chunks(
    tokens: int, bias: bool, softcap: float | None, scale: float
) -> None:
    hidden, weight, each, labels = inputs(tokens, bias)
    logits = F.linear(hidden, weight, each) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wanted = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / 7
    trained = [tensor for tensor in (hidden, weight, each) if tensor is not None]
    expected = torch.autograd.grad(wanted, trained)

    loss = -scored(labels, hidden, weight, each, softcap=softcap, scale=scale).sum() / 7
    torch.testing.assert_close(loss, wanted)
    for gradient, own in zip(torch.autograd.grad(loss, trained), expected, strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [True, False])
def test_logits_are_formed_once(trained: bool) -> None:
    hidden, weight, _, labels = inputs(48, bias=False)
    with HeadProducts(VOCABULARY) as seen:
        scored(labels, hidden, weight.detach().requires_grad_(trained), None).sum().backward()
    assert seen.rows == [48]


def test_tokens_that_weigh_differently_make_no_wrong_gradient() -> None:
    hidden, weight, _, labels = inputs(48, bias=False)
    log_probs = scored(labels, hidden, weight, None)
    to_hidden, to_weight = torch.autograd.grad(log_probs @ torch.arange(48.0), (hidden, weight))
    assert to_hidden.isfinite().all() and to_weight.isnan().all()


@pytest.mark.parametrize(("bias", "softcap", "scale"), [(False, None, 1.0), (True, 3.0, 0.5)])
def test_where_that_is_said_tokens_weigh_differently(bias: bool, softcap: float | None, scale: float) -> None:
    hidden, weight, each, labels = inputs(cpu_head.CHUNK + 48, bias)
    weights = torch.arange(len(labels)) - 100.0
    logits = F.linear(hidden, weight, each) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wanted = (F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none") * weights).sum()
    trained = [tensor for tensor in (hidden, weight, each) if tensor is not None]
    expected = torch.autograd.grad(wanted, trained)
    log_probs = scored(labels, hidden, weight, each, softcap=softcap, scale=scale, alike=False)
    for gradient, own in zip(torch.autograd.grad(-(log_probs * weights).sum(), trained), expected, strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-4, atol=1e-3)


def test_the_plan_has_its_chunks() -> None:
    assert cpu_head.CHUNK == CHUNK_ON_CPU
