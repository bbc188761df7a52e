"""How layers are divided into pipeline stages, so that the slowest stage takes as little time as possible."""

from __future__ import annotations

from collections.abc import Iterator


def runs_as(schedule: str, stages: int, micro_batches: int) -> str:
    """Which of torch's schedules a step takes.

    Its 1F1B wants as many micro-batches as there are stages. With fewer it would begin no backward pass before the last
    forward pass of the first stage, and so be GPipe, which stands in for it.
    """
    return "gpipe" if schedule == "1f1b" and micro_batches < stages else schedule


def divides(schedule: str, processes: int, micro_batches: int) -> bool:
    """Whether a schedule takes so many micro-batches in a step: torch's interleaved one wants equal rounds of them,
    with at least as many in each as there are processes, or all of them in one where there are fewer."""
    return schedule != "interleaved_1f1b" or micro_batches % max(1, micro_batches // processes) == 0


def cut(layers: int, stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage, every one of which has at least one.

    Of all cuts with the smallest largest stage the one is taken whose later stages are the smallest: what an earlier
    stage holds of micro-batches on their way is more, but the last one has the logits too.

    Args:
        first: What the first stage has beside its layers (embeddings), in layers.
        last: What the last one has (final norm, output head and loss), in layers.
    """
    assert 1 <= stages <= layers
    if stages == 1:
        return (layers,)
    return min(_cuts(layers, stages), key=lambda each: (_largest(each, first, last), [*reversed(each)]))


def _cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Cuts whose stages in between are as equal as can be, which no other cut betters."""
    for begin in range(1, layers - stages + 2):
        for end in range(1, layers - begin - (stages - 2) + 1):
            between = layers - begin - end
            if stages == 2:
                if between == 0:
                    yield begin, end
                continue
            each, more = divmod(between, stages - 2)
            yield begin, *(each + (number < more) for number in range(stages - 2)), end


def _largest(layers: tuple[int, ...], first: float, last: float) -> float:
    begin, *between, end = layers
    return max(begin + first, end + last, *between)
