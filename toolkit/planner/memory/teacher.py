"""What a teacher takes of a device beside its student: its weights all the time, and what its forward pass and the
comparison of both models' logits hold for a while."""

from __future__ import annotations

from toolkit.planner.generation import vocabulary
from toolkit.planner.memory.states import weights
from toolkit.planner.workload import WIDTH, Workload

_COMPARED = 36
"""Bytes for each entry of the vocabulary and token of a chunk that `models.distillation.Divergence` holds on top of
what a loss of labels does: in fp32 the teacher's logits, both models' log-probabilities at the temperature and the
student's without it, and while they are compared mixture, difference, probabilities, a product and the gradient."""
_CHUNK, _CHUNK_ON_CPU = 512, 256
"""Tokens of a chunk, see `models.cpu_head`."""


def held(workload: Workload) -> float:
    """Bytes of a teacher's weights on each rank; 0 without one. What the trace has of adapters is none of it."""
    teacher = workload.teacher
    if teacher is None:
        return 0.0
    own = (each for each in teacher.trace.tensors if each.kind != "adapter")
    return weights(teacher, own) + teacher.trace.buffers


def states_kept(workload: Workload) -> float:
    """Bytes of its hidden states of a micro-batch, which wait for the student's."""
    return 0.0 if workload.teacher is None else workload.teacher.trace.boundary.at(workload.teacher.shape)


def compared(workload: Workload) -> float:
    """Bytes held while tokens are compared; and of the gradient of a trained head, which is formed with the loss."""
    if workload.teacher is None:
        return 0.0
    chunk = min(workload.shape.tokens, _CHUNK_ON_CPU if workload.on_cpu else _CHUNK)
    entries = vocabulary(workload.trace)
    head = [each for each in workload.trace.tensors if each.place == "head" and len(each.shape) == 2]
    head = head or [each for each in workload.trace.tensors if each.place == "embeddings" and len(each.shape) == 2]
    # On a CPU that of labels is formed so, too.
    gradient = 0 if workload.on_cpu else max((each.numel for each in head if each.trained), default=0)
    return chunk * entries * _COMPARED + gradient * WIDTH["float32"]
