"""What generating answers costs while a model is trained on them: memory for the key-value cache, and time.

Each token of an answer reads all weights and all that is kept of the sequences once, which decides on GPUs, and passes
the layers, which decides on CPUs and for many sequences at once. Answers are taken to be as long as they may be.
"""

from __future__ import annotations

import math

from toolkit.distributed.layout import BatchLayout
from toolkit.planner.workload import WIDTH, Load, Workload
from toolkit.recipe import Recipe

SCORES = 24
"""Bytes for each entry of the vocabulary and sequence while a token is drawn: scores, their copy divided by the
temperature, probabilities and what is left of them in fp32, cumulated ones in fp64: `Drawn` in
`train.trainers.rollouts`."""


def generates(recipe: Recipe) -> bool:
    """Whether the processes that train generate answers, and not a server."""
    return recipe.writes and recipe.rollout.server is None


def of_step(recipe: Recipe, layout: BatchLayout) -> int:
    """Answers that a process generates for a step. Where a share of rows is drawn for it, there are three standard
    deviations more than expected, which are seldom exceeded."""
    rows = layout.in_sequences.micro_batch_size * layout.gradient_accumulation_steps
    if recipe.reinforces:
        return rows
    share = recipe.distillation.on_policy
    return min(rows, math.ceil(rows * share + 3 * math.sqrt(rows * share * (1 - share))))


def sequences(recipe: Recipe, layout: BatchLayout) -> int:
    """Answers that a process generates at once."""
    return min(recipe.rollout.batch_size or of_step(recipe, layout), of_step(recipe, layout))


def kept(workload: Workload, count: int) -> float:
    """Bytes of the caches of so many sequences at their end."""
    return count * workload.cache * WIDTH[workload.types.compute] / WIDTH["bfloat16"]


def turns(workload: Workload) -> tuple[int, int]:
    """How often a process generates in a step, and how many answers each time."""
    at_once = sequences(workload.recipe, workload.layout)
    return math.ceil(of_step(workload.recipe, workload.layout) / at_once), at_once


def prompt_tokens(workload: Workload, load: Load) -> float:
    """Tokens of a prompt, on average, of micro-batches that hold prompts with their answers."""
    mean = load.tokens / workload.layout.in_sequences.micro_batch_size
    return max(1.0, mean - workload.recipe.rollout.max_completion_tokens)
