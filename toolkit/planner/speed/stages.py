"""Where the layers of a pipeline are cut: by the time that its stages would take."""

from __future__ import annotations

import dataclasses

from toolkit.distributed.stages import cut
from toolkit.planner.pipeline import part
from toolkit.planner.speed.step import Step
from toolkit.planner.workload import Load, Workload


def stage_layers(workload: Workload, load: Load, experts: tuple[int, int] = (1, 1)) -> tuple[int, ...]:
    """Layers of each stage, of which the slowest takes as little as can be; none without a pipeline.

    The first stage has the look-up of embeddings beside its layers, the last one the final norm, the output head and
    the loss, each as the roofline of `Step` has it.

    Args:
        load: A micro-batch.
        experts: See `model_configs.experts`.
    """
    if workload.layout.pipeline == 1:
        return ()

    def seconds(first: bool = False, last: bool = False) -> float:
        of = dataclasses.replace(workload, trace=part(workload, workload.trace.layers, first, last))
        return sum(Step(of, load, (), experts=experts).passing.values())

    layers = seconds()
    each = layers / workload.trace.layers
    return cut(
        workload.trace.layers,
        workload.recipe.parallel.stages,
        (seconds(first=True) - layers) / each,
        (seconds(last=True) - layers) / each,
    )
