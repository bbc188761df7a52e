"""How a run is divided: processes, the batch, and the number of steps."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.errors import UserError
from toolkit.recipe import Recipe

MICRO_BATCH_TOKENS = 16_384
"""A micro-batch of this many tokens keeps a current GPU busy; more only costs memory."""


@dataclass(frozen=True)
class World:
    """The processes of a run, as the launcher describes them in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def num_nodes(self) -> int:
        """Machines, each with `local_world_size` processes."""
        return self.world_size // self.local_world_size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Reads RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, which torchrun and accelerate set.

        Raises:
            UserError: If they are no numbers or contradict each other.
        """
        try:
            rank, local_rank = (int(environment.get(key, "0")) for key in ("RANK", "LOCAL_RANK"))
            world_size = int(environment.get("WORLD_SIZE", "1"))
            local_world_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
        except ValueError as error:
            raise UserError(
                f"the launcher's environment cannot be read: {error}",
                "unset RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, or start with accelerate launch or torchrun",
            ) from None
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size) or world_size % local_world_size:
            raise UserError(
                f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} and "
                f"LOCAL_WORLD_SIZE={local_world_size} contradict each other",
                "unset those left over from another launch, or start with accelerate launch or torchrun",
            )
        return cls(rank, local_rank, world_size, local_world_size)


@dataclass(frozen=True)
class BatchLayout:
    """How one optimizer step is put together: sizes in sequences, `seq_len` in tokens."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    seq_len: int

    @property
    def tokens_per_step(self) -> int:
        """Upper bound of the tokens in a step; reached when every sequence is full."""
        return self.global_batch_size * self.seq_len


def batch_layout(recipe: Recipe, world_size: int) -> BatchLayout:
    """Divides the global batch over processes and accumulation steps.

    Raises:
        UserError: If a division does not come out; names the nearest sizes that do.
    """
    batch = recipe.batch
    tokens = batch.tokens_per_step
    total = batch.sequences_per_step
    unit = world_size * (batch.micro_batch_size or 1)
    if total % unit:
        parts = f"{world_size} process" + ("es" if world_size > 1 else "")
        parts += f" x batch.micro_batch_size {batch.micro_batch_size}" if batch.micro_batch_size else ""
        nearest = sorted({max(1, total // unit) * unit, (total // unit + 1) * unit})
        scale = batch.seq_len if tokens else 1
        key = "batch.tokens_per_step" if tokens else "batch.global_batch_size"
        change = f"set {key}=" + " or ".join(str(size * scale) for size in nearest)
        sizes = [size for size in range(1, total + 1) if total % (world_size * size) == 0]
        if batch.micro_batch_size and sizes:
            smaller = [size for size in sizes if size < batch.micro_batch_size][-1:]
            larger = [size for size in sizes if size > batch.micro_batch_size][:1]
            change += f", or batch.micro_batch_size={' or '.join(map(str, smaller + larger))}"
        raise UserError(f"a global batch of {total} sequences does not divide into {parts}", change)
    per_process = total // world_size
    fitting = max(1, MICRO_BATCH_TOKENS // batch.seq_len)
    micro_batch = batch.micro_batch_size or max(size for size in _divisors(per_process) if size <= fitting)
    return BatchLayout(total, micro_batch, per_process // micro_batch, world_size, batch.seq_len)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Length:
    """How long a run is, in optimizer steps."""

    total_steps: int
    steps_per_epoch: float | None
    warmup_steps: int
    save_steps: int | None


def run_length(recipe: Recipe, num_rows: int | None, layout: BatchLayout) -> Length:
    """Steps from epochs. Rows continue into the next epoch inside a batch, so no row is dropped and no batch is short.

    Args:
        num_rows: Training sequences (packed ones when packing); None for a stream.
    """
    schedule = recipe.schedule
    per_epoch = num_rows / layout.global_batch_size if num_rows else None
    total = schedule.max_steps or math.ceil((schedule.num_epochs or 1.0) * (per_epoch or 0))
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = math.ceil((schedule.warmup_ratio or 0.0) * total)
    save = recipe.checkpoint.save_steps
    if recipe.checkpoint.save_epochs and per_epoch:
        save = max(1, math.ceil(recipe.checkpoint.save_epochs * per_epoch))
    return Length(total, per_epoch, warmup, save)
