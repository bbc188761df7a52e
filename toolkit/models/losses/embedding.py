"""Vectors of texts: how they are pooled from the outputs of tokens, and the losses by which they are learnt.

Losses are those of sentence-transformers (5 and 6): `MultipleNegativesRankingLoss`, which is InfoNCE (van den Oord et
al. 2018, arXiv:1807.03748; Henderson et al. 2017, arXiv:1705.00652), `CoSENTLoss`, and either at several sizes of a
vector, `MatryoshkaLoss`. They are of all rows of a step at once, in double precision; a row's loss reads the vectors of
others, so what comes back with the losses is their gradient with respect to all vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from toolkit.recipe.embedding import COSENT, Embedding

_AT_ONCE = 2**22
"""Cosines that are held at a time."""
_ROUNDING = 1e-6
"""By how much cosines of the same vectors differ that kernels have added up otherwise."""


def pooled(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Vectors (texts, width) of length 1, in fp32.

    Args:
        hidden: (texts, tokens, width) outputs of the last layer.
        mask: (texts, tokens) 1 for tokens, 0 for padding on either side.
        pooling: `mean`, `cls` (the first token) or `last`.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    if pooling == "mean":
        weights = mask.to(torch.float32)
        vectors = torch.einsum("btw,bt->bw", hidden.float(), weights / weights.sum(1, keepdim=True))
    else:
        absent = mask == 0
        far = places.masked_fill(absent, -1) if pooling == "last" else -places.masked_fill(absent, mask.shape[1])
        vectors = hidden[torch.arange(len(hidden), device=hidden.device), far.argmax(1)].float()
    return F.normalize(vectors, dim=-1)


def pooled_flat(hidden: torch.Tensor, ends: torch.Tensor, texts: int, pooling: str) -> torch.Tensor:
    """The same of texts that lie end to end.

    Args:
        hidden: (1, tokens, width) outputs of the last layer.
        ends: (at least texts + 1,) cumulative lengths.
        texts: How many there are; what follows them is padding.
        pooling: See `pooled`.
    """
    begins, ends = ends[:texts, None], ends[1 : texts + 1, None]
    if pooling == "mean":
        places = torch.arange(hidden.shape[1], device=hidden.device)
        inside = ((places >= begins) & (places < ends)).to(torch.float32)
        vectors = (inside / (ends - begins)) @ hidden[0].float()
    else:
        vectors = hidden[0, (begins if pooling == "cls" else ends - 1)[:, 0].long()].float()
    return F.normalize(vectors, dim=-1)


def losses_and_gradient(
    settings: Embedding, vectors: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of all rows of a step, and the gradient of their sum.

    Args:
        vectors: (rows, texts, width) of length 1.
        keys: (rows, texts) by which equal texts are known.
        scores: (rows,) of pairs, for the loss that reads them.

    Returns:
        (rows,) losses and (rows, texts, width) the gradient, both in double precision.
    """
    leaf = vectors.detach().double().requires_grad_()
    total = torch.zeros(len(leaf), dtype=torch.float64, device=leaf.device)
    with torch.enable_grad():
        for size in settings.dims or [leaf.shape[-1]]:
            unit = F.normalize(leaf[..., :size], dim=-1)
            cut = unit.detach().requires_grad_()
            if settings.loss == COSENT:
                losses = cosent(cut, scores, settings.temperature)
                losses.sum().backward()
                total += losses.detach()
            else:
                every = max(1, _AT_ONCE // (len(cut) * (cut.shape[1] - 1)))
                for rows in torch.arange(len(cut), device=cut.device).split(every):
                    losses = ranking(cut, keys, settings.temperature, rows)
                    losses.sum().backward()
                    total[rows] += losses.detach()
            unit.backward(cut.grad)
    assert leaf.grad is not None
    return total, leaf.grad


def ranking(vectors: torch.Tensor, keys: torch.Tensor, temperature: float, rows: torch.Tensor) -> torch.Tensor:
    """How unlikely each anchor's own positive is among all candidates: -log softmax(cosines / temperature).

    Candidates are the positives of all rows and their negatives, but for those known to belong to the anchor as well
    (see `known_positives`).

    Args:
        rows: Numbers of the rows whose losses are wanted.

    Returns:
        (len(rows),) losses.
    """
    candidates = torch.cat([vectors[:, 1], vectors[:, 2:].flatten(0, 1)])
    cosines = vectors[rows, 0] @ candidates.T / temperature
    cosines = cosines.masked_fill(known_positives(keys, rows), -torch.inf)
    return F.cross_entropy(cosines, rows, reduction="none")


def known_positives(keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(len(rows), candidates) candidates that are no negatives of an anchor, its own positive left out: the same text
    as itself, or as the positive of any row with the same anchor."""
    candidates = torch.cat([keys[:, 1], keys[:, 2:].flatten()])
    _, texts = torch.unique(candidates, return_inverse=True)
    places, alike = (keys[rows, :1] == keys[:, 0]).nonzero(as_tuple=True)
    belongs = torch.zeros(len(rows), int(texts.max()) + 1, dtype=torch.bool, device=keys.device)
    belongs[places, texts[alike]] = True
    known = belongs[:, texts] | (candidates == keys[rows, :1])
    known[torch.arange(len(rows), device=rows.device), rows] = False
    return known


def cosent(vectors: torch.Tensor, scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """CoSENT (Su 2022, kexue.fm/archives/8847): log(1 + sum of exp((cosine i - cosine j) / temperature) over all pairs
    i, j of rows of which j has the higher score). It is one number of a step.

    Returns:
        (rows,) that number for each row, so that their mean is it.
    """
    cosines = (vectors[:, 0] * vectors[:, 1]).sum(-1) / temperature
    order = scores[:, None] < scores[None, :]
    differences = (cosines[:, None] - cosines[None, :])[order]
    loss = torch.logsumexp(torch.cat([cosines.new_zeros(1), differences]), 0)
    return loss.expand(len(vectors))


def ranks(vectors: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(rows,) the place at which each anchor finds its own positive among all different candidates, from 1 on.

    What is known to belong to the anchor as well does not stand before it, and what is as near, but for rounding, does;
    so does all else where vectors are not numbers.
    """
    flat = torch.cat([keys[:, 1], keys[:, 2:].flatten()])
    _, inverse = torch.unique(flat, return_inverse=True)
    # Of each different text the first candidate.
    first = torch.full((int(inverse.max()) + 1,), len(flat), device=flat.device).scatter_reduce(
        0, inverse, torch.arange(len(flat), device=flat.device), "amin"
    )
    candidates = torch.cat([vectors[:, 1], vectors[:, 2:].flatten(0, 1)])[first]
    found = []
    for rows in torch.arange(len(vectors), device=keys.device).split(max(1, _AT_ONCE // len(first))):
        nearness = vectors[rows, 0] @ candidates.T
        own = nearness.gather(1, inverse[rows, None])
        known = known_positives(keys, rows)[:, first] | (flat[first] == keys[rows, 1:2])
        further = nearness < own - _ROUNDING
        found.append(1 + (~further & ~known).sum(1))
    return torch.cat(found)


def drop_pooler(model: Any) -> None:
    """Takes the layer that some encoders have behind their first token off a model: vectors are pooled without it, and
    sentence-transformers does not read it, so it would be trained by nothing."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None


def named_poolings(config: dict[str, Any]) -> Sequence[str]:
    """What a `1_Pooling/config.json` asks for, by the newer or the older names of sentence-transformers."""
    mode = config.get("pooling_mode")
    if mode:
        return [mode] if isinstance(mode, str) else [*mode]
    return [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
