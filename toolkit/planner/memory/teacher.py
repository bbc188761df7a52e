"""What a teacher takes of a device beside its student: its weights all the time, and what its forward pass and the
comparison of both models' logits hold for a while."""

from __future__ import annotations

from toolkit.models.output_heads.head_chunk import JUDGED, ON_CPU
from toolkit.planner.memory.states import weights
from toolkit.planner.workload import WIDTH, Workload

_COMPARED, _MIXED, _APART = 28, 40, 4
"""Bytes for each entry of the vocabulary and token of a chunk that `Divergence` in `models.losses.distillation` holds
in fp32, beside the logits of the student: for the divergence of one model from the other, or of both from a mixture,
and more where the student's log-probabilities are not those by which labels are scored."""


def held(workload: Workload) -> float:
    """Bytes of a teacher's weights on each rank's device; 0 without one. Of those that wait on the host there is one
    layer."""
    teacher = workload.teacher
    if teacher is None:
        return 0.0
    away = streamed(workload)
    return _weights(teacher) + teacher.trace.buffers - away + away / max(1, teacher.trace.layers)


def streamed(workload: Workload) -> float:
    """Bytes of a teacher's layers that wait on the host, and cross the bus for every micro-batch."""
    settings, teacher = workload.recipe.distillation.teacher, workload.teacher
    if teacher is None or settings is None or not settings.offload or workload.on_cpu:
        return 0.0
    return _weights(teacher, "layer")


def _weights(teacher: Workload, place: str | None = None) -> float:
    """What the trace has of adapters is none of a teacher's."""
    own = (each for each in teacher.trace.tensors if each.kind != "adapter" and place in (None, each.place))
    return weights(teacher, own)


def states_kept(workload: Workload) -> float:
    """Bytes of its hidden states of a micro-batch, which wait for the student's."""
    return 0.0 if workload.teacher is None else workload.teacher.trace.boundary.at(workload.teacher.shape)


def compared(workload: Workload) -> float:
    """Bytes of logits and gradients while the logits of a chunk of tokens are compared; 0 without a teacher."""
    if workload.teacher is None:
        return 0.0
    settings, width = workload.recipe.distillation, WIDTH[workload.types.compute]
    chunk = min(workload.shape.tokens, ON_CPU if workload.on_cpu else JUDGED)
    entries = workload.trace.vocabulary
    apart = settings.temperature != 1 or workload.teacher.trace.vocabulary < entries
    beside = (_MIXED if 0 < settings.beta < 1 else _COMPARED) + _APART * apart
    # Logits are compared in fp32, of which those in 16 bits are copied.
    entry = beside + width + (WIDTH["float32"] if width < WIDTH["float32"] else 0)
    trace = workload.trace
    head = trace.own_head or [each for each in trace.tensors if each.place == "embeddings" and len(each.shape) == 2]
    gradient = max((each.numel for each in head if each.trained), default=0) * WIDTH["float32"]
    return chunk * entries * entry + gradient + workload.trace.boundary.at(workload.shape)
