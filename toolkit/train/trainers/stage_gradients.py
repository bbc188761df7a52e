"""What is done to the gradients of stages when a pipeline has run empty: those of one weight that two processes have
are added up, and all are averaged over the processes that have the same stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from toolkit.models.parallel.pipeline import Chain, alike_group, pipeline_group

_BUCKET = 25 * 2**20
"""Bytes of gradients that are averaged at a time, as DDP does."""


@torch.no_grad()
def add_tied(model: Any, own: Chain) -> None:
    """Adds the gradients that the output head has of the embeddings' weight, and the reverse: as both processes add the
    same numbers, both keep the same weight."""
    first, last = 0 in own.stages, own.last in own.stages
    if not own.tied or not (first or last):
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    weight = (base.get_output_embeddings() if last else base.get_input_embeddings()).weight
    if not weight.requires_grad:
        return
    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    other, peer = torch.empty_like(weight.grad), own.rank(0 if last else own.last)
    group, sent = pipeline_group(), weight.grad.contiguous()
    works = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    weight.grad += other


@torch.no_grad()
def average(model: Any) -> None:
    """Averages gradients over the processes that have the same stages."""
    group = alike_group()
    size = dist.get_world_size(group)
    if size == 1:
        return
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
    for bucket in _buckets(each.grad for each in trained):
        flat = torch.cat([each.flatten() for each in bucket])
        dist.all_reduce(flat, group=group)
        flat /= size
        for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            each.copy_(part.view_as(each))


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one type, up to so many bytes together."""
    bucket: list[torch.Tensor] = []
    for each in gradients:
        if bucket and (each.dtype != bucket[0].dtype or sum(map(_bytes, bucket)) + _bytes(each) > _BUCKET):
            yield bucket
            bucket = []
        bucket.append(each)
    if bucket:
        yield bucket


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
