"""How many processes prepare batches beside each training process: what `data.num_workers: auto` stands for.

A training process prepares the batches of a step before it computes, and a stream's rows in a thread that takes turns
with the loop. Workers do it meanwhile, but have to be forked, take memory and hand over what they make. Rows that were
tokenised before lie in a file mapped into memory and take under a hundredth of a step on every device that is known, so
nearly always it is a stream that is worth a worker.
"""

from __future__ import annotations

from toolkit.distributed.layout import BatchLayout
from toolkit.planner.hardware import Hardware
from toolkit.planner.plan import Work
from toolkit.recipe import Recipe

BATCH_SECONDS, ROW_SECONDS, TOKEN_SECONDS = 1e-4, 2e-5, 1e-8
"""To read and collate a micro-batch, for itself and for each of its rows and tokens: 0.15 ms for two rows of a hundred
tokens and 0.4 ms for eight of 2,048 were measured on a core of an EPYC."""
TOKENISED_ROW_SECONDS, TOKENISED_TOKEN_SECONDS = 3e-4, 1.2e-6
"""To read, convert and tokenise a row of a stream: 0.39 ms for a chat of 79 tokens and 1.2 ms for a text of 967."""
WORTH = 0.02
"""A smaller share of a step is not worth a process."""
BUSY = 0.5
"""One worker that needs more of a step than this may be late when rows are long."""


def loader_workers(recipe: Recipe, layout: BatchLayout, hardware: Hardware, work: Work) -> tuple[int, str]:
    """Worker processes of each training process, and why so many.

    Args:
        work: Of a step with this layout on this hardware.
    """
    size, streams = layout.world_size, recipe.data.streaming
    rows, tokens = layout.global_batch_size / size, work.tokens_per_step / size
    seconds = layout.gradient_accumulation_steps * BATCH_SECONDS + rows * ROW_SECONDS + tokens * TOKEN_SECONDS
    if streams:
        seconds += rows * TOKENISED_ROW_SECONDS + tokens * TOKENISED_TOKEN_SECONDS
    share = seconds / work.step_seconds.value
    takes = f"{'tokenising' if streams else 'making'} its batches takes {share:.2%} of a step"
    cores = hardware.node.cores // min(hardware.devices_per_node, size)
    if share < WORTH:
        return 0, takes
    if cores < 2:
        return 0, f"{takes}, and a process has one core"
    # The rows of a stream have one order, in which one process reads them.
    return (1 if streams or share < BUSY else 2), takes
