"""The fused output head: log-probabilities and gradients of a plain head, whatever the chunks; logits formed once.

Here a GPU's way is taken with the torch functions that stand for TRL's Triton kernels where there is no Triton; the
kernels themselves run under Triton's interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest
import torch
from harness import environment
from head_products import HeadProducts
from torch.nn import functional as F
from trl.trainer import utils as trl_utils

from toolkit.data.encoding.encode import IGNORE
from toolkit.models.output_heads import fused_head, head_chunk
from toolkit.models.output_heads.head_chunk import ON_CPU
from toolkit.planner.trace.types import CHUNK

VOCABULARY, HIDDEN = 300, 16
SCRIPT = Path(interpreter.__file__).with_name("head_interpreted.py")


@pytest.fixture(params=["cpu", "gpu"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose way is taken."""
    if request.param == "gpu":
        monkeypatch.setattr(fused_head, "_is_cpu", lambda place: False)
        monkeypatch.setattr(head_chunk, "_STEP", 64)
        monkeypatch.setattr(head_chunk, "_BYTES", 200 * VOCABULARY * 4)
    return request.param


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
    with fused_head.scoring(labels[None], alike):
        found = trl_utils._ChunkedLogProbFunction.apply(*tensors, targets, 1.0, 32768, softcap, scale, ("log_probs",))
    return found[0].masked_fill(labels == IGNORE, 0)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("tokens", [5, 48, ON_CPU + 48])
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


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("trained", [True, False])
def test_logits_are_formed_once(trained: bool) -> None:
    hidden, weight, _, labels = inputs(48, bias=False)
    with HeadProducts(VOCABULARY) as seen:
        scored(labels, hidden, weight.detach().requires_grad_(trained), None).sum().backward()
    assert seen.rows == [48]


@pytest.mark.usefixtures("place")
def test_tokens_that_weigh_differently_make_no_wrong_gradient() -> None:
    hidden, weight, _, labels = inputs(48, bias=False)
    log_probs = scored(labels, hidden, weight, None)
    to_hidden, to_weight = torch.autograd.grad(log_probs @ torch.arange(48.0), (hidden, weight))
    assert to_hidden.isfinite().all() and to_weight.isnan().all()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("bias", "softcap", "scale"), [(False, None, 1.0), (True, 3.0, 0.5)])
def test_where_that_is_said_tokens_weigh_differently(bias: bool, softcap: float | None, scale: float) -> None:
    hidden, weight, each, labels = inputs(ON_CPU + 48, bias)
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


@pytest.mark.usefixtures("place")
def test_in_fp16_a_word_of_small_probability_has_a_gradient() -> None:
    """Of which the least number is 6e-8."""
    hidden, weight = torch.ones(8, 1), torch.tensor([[0.0], *[[-17.0]] * 9])
    labels = torch.zeros(8, dtype=torch.long)
    found = []
    for dtype in (torch.float16, torch.float32):
        trained = weight.to(dtype).requires_grad_()
        log_probs = scored(labels, hidden.to(dtype).requires_grad_(), trained, None)
        # As a loss scale has it.
        found.append(torch.autograd.grad(-log_probs.mean() * 2.0**16, trained)[0].float() / 2.0**16)
    assert found[1][1] == pytest.approx(4.1e-8, rel=0.02)
    torch.testing.assert_close(*found, rtol=0.01, atol=0)


@pytest.mark.slow
def test_the_kernels_of_a_gpu_give_log_probabilities_and_gradients_of_plain_logits() -> None:
    environ = environment() | {"PYTHONPATH": interpreter.paths()}
    done = subprocess.run([sys.executable, SCRIPT], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, distances in json.loads(done.stdout.splitlines()[-1]).items():
        # bf16 has eight bits, and logits reach 15.
        bounds = (0.1, 0.012) if case == "bf16" else (1e-5, 1e-6)
        assert distances.pop("log_probs") < bounds[0], case
        assert max(distances.values()) < bounds[1], (case, distances)


@pytest.mark.parametrize(
    ("vocabulary", "itemsize", "tokens"),
    [(32_000, 2, 4096), (128_256, 2, 2048), (128_256, 4, 1024), (262_144, 2, 1024), (10_000_000, 4, 128)],
)
def test_on_a_gpu_logits_take_half_a_gibibyte_at_most_where_products_stay_wide(
    vocabulary: int, itemsize: int, tokens: int
) -> None:
    assert head_chunk.head_chunk(vocabulary, itemsize, on_cpu=False) == tokens <= CHUNK
