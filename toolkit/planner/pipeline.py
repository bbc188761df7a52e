"""What each process of a pipeline has of a model, how many micro-batches it holds, and how long it waits.

Formulas are those of torch 2.13's schedules as they order the work of equal stages; tests/planner/test_pipeline.py runs
their orders and compares. The bubble of GPipe and 1F1B is that of Huang et al. 2019 (section 2.3), that of interleaved
stages Narayanan et al.'s (2021, section 2.2); ZB-V's is zero only where passes for inputs and for weights and the
forward pass take equally long (Qi et al. 2023, section 6), and here what is left otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from toolkit.planner.trace.types import Amount, Moment, Tensors, Trace
from toolkit.planner.workload import WIDTH, Workload
from toolkit.recipe.parallel import Parallel


def place_of(stage: int, parallel: Parallel) -> int:
    """Which process of a pipeline has a stage; as `models.pipeline.Split.place`."""
    turn, at = divmod(stage, parallel.pipeline)
    return parallel.pipeline - 1 - at if parallel.schedule == "zero_bubble" and turn % 2 else at


def of_process(workload: Workload, place: int) -> Workload:
    """What one process of a pipeline has, as a model of its own.

    Args:
        workload: Of the whole model, with its `stages`.
        place: Of the process in the pipeline.
    """
    own = [stage for stage in range(len(workload.stages)) if place_of(stage, workload.recipe.parallel) == place]
    first, last = 0 in own, len(workload.stages) - 1 in own
    layers = sum(workload.stages[stage] for stage in own)
    trace = part(workload, layers, first, last)
    return dataclasses.replace(workload, trace=trace, place=place, untied=bool(workload.trace.own_head))


def processes(workload: Workload) -> list[Workload]:
    """What all processes of a pipeline have, in order; the workload itself where there is none."""
    if not workload.stages:
        return [workload]
    return [of_process(workload, place) for place in range(workload.layout.pipeline)]


def part(workload: Workload, layers: int, first: bool, last: bool) -> Trace:
    """So many layers of a model, with its embeddings, and with its final norm and output head, or without."""
    trace = workload.trace
    tensors = tuple(_tensors(trace, layers, first, last))
    if last:
        moments = trace.moments
    else:
        weights = trace.own_head or [each for each in trace.tensors if each.place == "embeddings"]
        size = max((each.numel for each in weights if each.trained), default=0) * WIDTH[workload.types.local]
        moments = tuple(_without_head(each, size, tied=not trace.own_head) for each in trace.moments)
    passes = trace.passes
    if not last:
        # Outside of the layers there is nothing but the look-up of embeddings: read and written, and of gradients
        # read, added and written.
        looked_up = {"forward": 2.0, "evaluation": 2.0, "backward": 3.0} if first else {}
        passes = {
            name: dataclasses.replace(
                each,
                matmul=_inside(each.matmul),
                attention=_inside(each.attention),
                moved=_inside(each.moved, looked_up.get(name, 0.0), trace.boundary),
                launches=_inside(each.launches),
                summed=_inside(each.summed),
            )
            for name, each in trace.passes.items()
        }
    return dataclasses.replace(trace, layers=layers, tensors=tensors, moments=moments, passes=passes)


def _tensors(trace: Trace, layers: int, first: bool, last: bool) -> Iterable[Tensors]:
    tied = not trace.own_head
    for each in trace.tensors:
        if each.place == "layer":
            yield dataclasses.replace(each, count=round(each.count * layers / trace.layers))
        elif (first and each.place == "embeddings") or (last and (each.place != "embeddings" or tied)):
            yield each


def _without_head(moment: Moment, gradient: float, tied: bool) -> Moment:
    """The same moment where there is no output head: neither its gradient nor its logits or its copy in 16 bits."""
    fixed = less = moment.gradients.fixed
    if fixed and moment.phase == "backward":
        # Less than nothing stands for a layer whose gradients are still to come. That of a tied weight may be among
        # what the loss holds.
        own = min(fixed[0], max(0.0, fixed[0] - gradient)) if tied else fixed[0] - gradient
        less = (own, *fixed[1:])
    return dataclasses.replace(
        moment,
        gradients=dataclasses.replace(moment.gradients, fixed=less),
        casts=_inside(moment.casts),
        logits=Amount(),
    )


def _inside(amount: Amount, share: float = 0.0, of: Amount | None = None) -> Amount:
    """What there is in the layers, with a share of something beside."""
    fixed = tuple(share * each for each in of.fixed) if of and share else ()
    return dataclasses.replace(amount, fixed=fixed, chunk=0.0)


def units(parallel: Parallel, place: int, micro_batches: int) -> int:
    """How many stages' worth of micro-batches a process holds activations of at most."""
    size = parallel.pipeline
    if parallel.schedule == "gpipe" or (parallel.schedule == "1f1b" and micro_batches < parallel.stages):
        return micro_batches
    if parallel.schedule == "1f1b":
        return min(micro_batches, size - place)
    if parallel.schedule == "interleaved_1f1b":
        # `_get_warmup_ops`, and the one that follows.
        rounds = max(1, micro_batches // size)
        return min(2 * micro_batches, micro_batches // rounds + 2 * (size - 1 - place) + 1)
    return min(2 * size, 2 * micro_batches, micro_batches + 1 + place)


def bubble(parallel: Parallel, micro_batches: int, forward: float, inputs: float, weights: float) -> float:
    """Seconds of a step in which a process waits for the pipeline to fill and to run empty.

    Args:
        forward: Seconds of a micro-batch on a process, of all its stages.
        inputs: The same of the gradients of inputs, with what is recomputed for them.
        weights: The same of the gradients of weights.
    """
    others, whole = parallel.pipeline - 1, forward + inputs + weights
    if parallel.schedule in ("gpipe", "1f1b"):
        return others * whole
    if parallel.schedule == "interleaved_1f1b":
        return others * whole / 2
    size = parallel.pipeline
    # With one micro-batch nothing fills up; with as many as processes, or twice as many, what could be is filled up.
    known = (
        (1, forward + inputs),
        (size, max(inputs, (forward + inputs) / 2)),
        (2 * size - 1, max(forward / 2, inputs / 2, inputs - weights)),
    )
    for (least, most_waiting), (most, waiting) in itertools.pairwise(known):
        if micro_batches < most:
            return others * (most_waiting + (waiting - most_waiting) * (micro_batches - least) / (most - least))
    return others * known[-1][1]


def tied_bytes(workload: Workload) -> float:
    """Bytes of the gradients of embeddings that are the output head too, which a process with the first stage and one
    with the last send each other.

    Args:
        workload: Of one process.
    """
    parallel, last = workload.recipe.parallel, len(workload.stages) - 1
    ends = {place_of(0, parallel), place_of(last, parallel)}
    if len(ends) == 1 or workload.place not in ends:
        return 0.0
    tied = [each.numel for each in workload.trace.tensors if each.place == "embeddings" and each.trained]
    return 0.0 if workload.untied else float(max(tied, default=0) * WIDTH[workload.types.local])


def hops(workload: Workload, boundary: float, tokens: float) -> tuple[float, float]:
    """Bytes that a process sends to the next stages for a micro-batch, and to those before: hidden states and gradients
    of them, and of mixtures whose routers are balanced the scores of all routers so far.

    Args:
        workload: Of one process.
        boundary: Bytes of the hidden states between two layers.
        tokens: Of a micro-batch, with padding.
    """
    parallel, stages = workload.recipe.parallel, workload.stages
    last, score = len(stages) - 1, tokens * workload.routed * WIDTH[workload.types.compute]
    on = back = 0.0
    for stage in (each for each in range(last + 1) if place_of(each, parallel) == workload.place):
        if stage < last and place_of(stage + 1, parallel) != workload.place:
            on += boundary + score * sum(stages[: stage + 1])
        if stage and place_of(stage - 1, parallel) != workload.place:
            back += boundary + score * sum(stages[:stage])
    return on, back
