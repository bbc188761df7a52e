"""The fused output head: log-probabilities of labels and their gradients, of a chunk of tokens at a time.

While the logits of some tokens are there, their gradient is formed, and with it those of the hidden states and of the
weight, at one product each, as Liger's kernel does. TRL's function, in whose place this stands, forms the logits anew
in the backward pass, a product more: with a vocabulary of 128,256, a twentieth of a step of a model of 1.2 billion
parameters. Keeping all logits, the alternative, is as fast, but holds as many as a batch has tokens. The arithmetic is
the same whatever the engine, and however many tokens a batch trains.

On a GPU, TRL's Triton kernels read the logits once for the log-probabilities and turn them into their gradient in
place. Where processes divide the vocabulary, each forms its part of the logits, and of every token the largest logit,
the sum of exponentials and the label's logit are reduced over them (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from toolkit.data.encoding.encode import IGNORE
from toolkit.models.output_heads.head_chunk import JUDGED, chunks, head_chunk
from toolkit.models.parallel.layer_sums import largest_over_parts, one_for_parts, sum_over_parts
from toolkit.models.parallel.tensor_parallel import Part

Criterion = Callable[[slice, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor | None]]
"""Given which tokens (N), their logits (N, V), their labels (N, 1) and whether a gradient is wanted: minus the losses
(N) of tokens, and the gradient of the losses' sum by the logits."""
_IN_FP16 = 2.0**10
"""By what gradients of logits are multiplied until they are summed in fp16, whose least number is 6e-8: probabilities
of most words are less. Their sums stay far below its largest, 65,504."""


@contextlib.contextmanager
def scoring(labels: torch.Tensor, alike: bool = True, part: Part | None = None) -> Iterator[None]:
    """While this context lasts, TRL's fused head scores these labels in this way.

    Args:
        alike: Whether the loss is a sum over all labels, each of which counts as much as the others.
        part: What this process has of the vocabulary, if not all of it.
    """
    with patch.object(trl_utils, "_ChunkedLogProbFunction", _Head(labels.ne(IGNORE).flatten(), alike, part)):
        yield


def judged_by(criterion: Criterion, labels: torch.Tensor) -> Any:
    """What takes the place of TRL's autograd function for TRL's fused head to score tokens by another criterion."""
    return _Head(labels.ne(IGNORE).flatten(), criterion=criterion)


@dataclass(frozen=True)
class _Head:
    """Takes the place of TRL's autograd function.

    Args:
        trained: Which of the tokens have a label.
        alike: See `scoring`.
        part: What this process has of the vocabulary, if not all of it.
        criterion: By what tokens are scored, if not by the log-probabilities of their labels.
    """

    trained: torch.Tensor
    alike: bool = True
    part: Part | None = None
    criterion: Criterion | None = None

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
        """Log-probabilities (N) of the targets (N), and None for what else TRL's function can compute.

        Args:
            hidden: (N, H).
            weight: (V, H), or (V / processes, H).
            bias: As long as the weight.
        """
        if self.part is not None:
            # What TRL has gathered of a sharded head would be scored as if it were the part.
            assert len(weight) == self.part.rows, "the head that is read is not this process's part"
            hidden = one_for_parts(hidden)
        wanted = [
            torch.is_grad_enabled() and each is not None and each.requires_grad for each in (hidden, weight, bias)
        ]
        place = hidden.device
        autocast = torch.get_autocast_dtype(place.type) if torch.is_autocast_enabled(place.type) else None
        compute = autocast or hidden.dtype
        rest = _Rest(targets, self.trained, softcap, scale, temperature, self.part, compute, self.criterion)
        log_probs = _LogProbs.apply(hidden, weight, bias, rest, wanted, self.alike)
        return log_probs, None, None, None, None


@dataclass(frozen=True)
class _Rest:
    """What labels are scored with beside hidden states and the head."""

    targets: torch.Tensor
    trained: torch.Tensor
    softcap: float | None
    scale: float
    temperature: float
    part: Part | None
    compute: torch.dtype
    criterion: Criterion | None


class _LogProbs(torch.autograd.Function):
    """The gradients of a sum of log-probabilities are formed with them, and multiplied by its own later on. Where
    tokens count differently, those of the head are sums with other weights, known only in the backward pass, which then
    forms the logits anew."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rest: _Rest,
        wanted: list[bool],
        alike: bool,
    ) -> torch.Tensor:
        ctx.rest, ctx.wanted, ctx.again = rest, wanted, not alike and any(wanted[1:])
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        ctx.scale = _IN_FP16 if rest.compute == torch.float16 and not ctx.again else 1.0
        now = [False] * 3 if ctx.again else wanted
        factors = None if ctx.scale == 1 else torch.full((len(hidden),), ctx.scale, device=hidden.device)
        log_probs, ctx.gradients = _scored(hidden, weight, bias, rest, now, factors)
        ctx.save_for_backward(*(hidden, weight, bias) if ctx.again else ())
        return log_probs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), rest = grads, ctx.rest
        if ctx.again:
            hidden, weight, bias = ctx.saved_tensors
            _, found = _scored(hidden, weight, bias, rest, ctx.wanted, -grad)
            made = [None if each is None else each.to(dtype) for each, dtype in zip(found, ctx.dtypes, strict=True)]
        else:
            # All tokens of a sum have the same, or the gradient is not a number.
            factor = grad.index_select(0, rest.trained.int().argmax(0, keepdim=True))
            factor = factor.where(((grad == factor) | ~rest.trained).all(), torch.nan)
            factors = [each / -ctx.scale for each in (grad[:, None], factor, factor)]
            made = list(map(_times, ctx.gradients, factors, ctx.dtypes))
        del ctx.gradients  # A second backward pass would multiply them again.
        return *made, None, None, None


def _times(gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """Their product, rounded once; what is multiplied is of no use afterwards."""
    if gradient is None:
        return None
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


def _scored(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rest: _Rest,
    wanted: list[bool],
    factors: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Log-probabilities (N), and the gradients of minus their sum.

    Args:
        wanted: Of hidden states, weight and bias, whether a gradient is.
        factors: (N,) what each token counts in the sum; if None, all count 1.
    """
    place, compute = hidden.device, rest.compute
    (tokens, _), vocabulary = hidden.shape, len(weight)
    matrix, exact = weight.to(compute), compute == torch.float32
    on_cpu = _is_cpu(place)
    by_kernels = not (on_cpu or rest.part or rest.criterion)
    chunk = JUDGED if rest.criterion and not on_cpu else head_chunk(vocabulary, compute.itemsize, on_cpu)
    log_probs = torch.empty(tokens, dtype=torch.float32, device=place)
    # Of minus the log-probabilities; sums over tokens in fp32.
    to_hidden = torch.empty_like(hidden, dtype=compute) if wanted[0] else None
    to_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
    to_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
    size = (min(tokens, chunk), vocabulary)
    tile = torch.empty(size, dtype=compute, device=place)
    scores = torch.empty((0, 0) if rest.criterion or by_kernels else size, dtype=torch.float32, device=place)

    def gradient_of(rows: slice, products: torch.Tensor) -> torch.Tensor | None:
        """Of what the head's product is for some tokens, if one is wanted; notes their log-probabilities."""
        labels = rest.targets[rows, None]
        if by_kernels:
            counts = rest.trained[rows, None].float()
            if factors is not None:
                counts.mul_(factors[rows, None])
            log_probs[rows] = _by_kernels(products, labels[:, 0], counts[:, 0] if any(wanted) else None, rest)
            return products if any(wanted) else None
        logits = products.float()
        if rest.scale != 1:
            logits = logits * rest.scale
        if rest.softcap is not None:
            capped = torch.tanh(logits / rest.softcap)
            logits = capped * rest.softcap
        if rest.temperature != 1:
            logits = logits / rest.temperature
        gradient: torch.Tensor | None
        if rest.criterion:
            log_probs[rows], gradient = rest.criterion(rows, logits, labels, any(wanted))
        elif rest.part is None:
            gradient = torch.log_softmax(logits, -1, out=scores[: len(labels)])
            log_probs[rows] = gradient.gather(1, labels)[:, 0]
            ones = torch.full_like(labels, -1, dtype=torch.float32)
        else:
            gradient, log_probs[rows], labels, ones = _over_parts(logits, labels, rest.part, scores[: len(labels)])
        if gradient is None or not any(wanted):
            return None
        if not rest.criterion:
            if rest.part is None:
                gradient.exp_()
            gradient.scatter_add_(1, labels, ones)
        if factors is not None:
            gradient.mul_(factors[rows, None])
        if rest.temperature != 1:
            gradient.div_(rest.temperature)
        if rest.softcap is not None:
            gradient.mul_(1 - capped.square())
        if rest.scale != 1:
            gradient.mul_(rest.scale)
        return gradient

    def score(rows: slice) -> None:
        """Of some tokens; what is made for them is gone before the next ones."""
        states, counted = hidden[rows].to(compute), rest.trained[rows, None]
        products = torch.mm(states, matrix.t(), out=tile[: len(states)])
        if bias is not None:
            products.add_(bias.to(compute))
        gradient = gradient_of(rows, products)
        if gradient is None:
            return
        if to_bias is not None:
            to_bias.add_((gradient * counted).sum(0, dtype=torch.float32))
        if gradient.dtype != compute:
            gradient = products.copy_(gradient)
        if to_hidden is not None:
            torch.mm(gradient, matrix, out=to_hidden[rows])
        if to_weight is None:
            return
        if not by_kernels:
            states = states * counted
        if exact:
            to_weight.addmm_(gradient.t(), states)
        elif on_cpu:
            to_weight.add_(gradient.t() @ states)
        else:
            chunked_logprob._addmm_fp32(to_weight, gradient.t(), states)

    for rows in chunks(tokens, chunk):
        score(rows)
    return log_probs, [to_hidden, to_weight, to_bias]


def _by_kernels(logits: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor | None, rest: _Rest) -> torch.Tensor:
    """Log-probabilities (N) by TRL's kernels, which a GPU without Triton has torch compute.

    Args:
        logits: (N, V) before scale, cap and temperature; the gradient of minus the sum of the log-probabilities takes
            their place, if one is wanted.
        labels: (N).
        counts: (N) what each token counts in that sum, of no use afterwards; None if no gradient is wanted.
    """
    tokens, vocabulary = logits.shape
    triton = chunked_logprob._use_triton(logits.device)
    settings: dict[str, Any] = {
        "logit_scale": rest.scale,
        "softcap": rest.softcap or 1.0,
        "inv_t": 1 / rest.temperature,
        "HAS_SOFTCAP": rest.softcap is not None,
        "BLOCK_SIZE": chunked_logprob._BLOCK_SIZE,
    }
    asked = dict.fromkeys((f"HAS_{name.upper()}" for name in chunked_logprob.OPTIONAL_OUTPUTS), False)
    largest, total, found, unused = torch.empty((4, tokens), device=logits.device).zero_()
    largest.fill_(-torch.inf)
    read: Any = chunked_logprob._forward_kernel[(tokens,)] if triton else chunked_logprob._forward_tile
    read(
        *(logits, logits.stride(0), labels, largest, total, unused, unused, unused, unused, found, 0, vocabulary),
        **asked,
        **settings,
    )
    normalizer = total.log_().add_(largest)
    if counts is not None:
        blocks = -(-vocabulary // chunked_logprob._BLOCK_SIZE)
        turn: Any = chunked_logprob._backward_kernel[(tokens, blocks)] if triton else chunked_logprob._backward_tile
        turn(
            *(logits, logits.stride(0), labels, normalizer, unused, counts.neg_(), unused, 0, vocabulary),
            HAS_LOGPROB_GRAD=True,
            HAS_ENTROPY_GRAD=False,
            **settings,
        )
    return found.sub_(normalizer)


def _over_parts(
    logits: torch.Tensor, labels: torch.Tensor, part: Part, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities where each process has a part of the vocabulary.

    Args:
        logits: (N, V / processes).
        labels: (N, 1).
        out: For the probabilities.

    Returns:
        Those of this process's part; log-probabilities (N) of the labels; where the labels stand in the part (N, 1),
        and -1 for those that do, 0 for others.
    """
    own = labels - part.first
    inside = own.ge(0) & own.lt(logits.shape[1])
    own = own.clamp(0, logits.shape[1] - 1)
    largest = largest_over_parts(logits.amax(1, keepdim=True))
    torch.sub(logits, largest, out=out)
    asked = out.gather(1, own).where(inside, 0)
    sums, asked = sum_over_parts(torch.stack([out.exp_().sum(1, keepdim=True), asked])).unbind()
    return out.div_(sums), (asked - sums.log())[:, 0], own, -inside.float()


def _is_cpu(place: torch.device) -> bool:
    return place.type == "cpu"
