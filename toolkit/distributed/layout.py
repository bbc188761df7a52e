"""How a run is divided: processes, the batch, and the number of steps.

The recipe states the global batch; micro-batch and accumulation follow from the number of processes, so that a run
trains the same wherever it is launched. What does not divide is refused with the nearest sizes that do.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from fractions import Fraction

from pydantic import computed_field
from pydantic.dataclasses import dataclass

from toolkit.common import UserError
from toolkit.distributed.stages import divides
from toolkit.recipe import Recipe


@dataclass(frozen=True)
class World:
    """The processes of a run, as the launcher describes them in the environment.

    Args:
        master_addr: Host of the rendezvous, where the environment does not name it already.
        master_port: Its port.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def num_nodes(self) -> int:
        """Machines, each with `local_world_size` processes."""
        return self.world_size // self.local_world_size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """Reads RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, which torchrun and accelerate set, or those of srun.

        Raises:
            UserError: If they are incomplete, no numbers, or contradict each other.
        """
        # Looked up at each call: Datasets replaces `os.environ` by a copy when it has mapped with several processes.
        environment = os.environ if environment is None else environment
        keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        given = {key: environment[key] for key in keys if key in environment}
        if not given and _is_slurm_task(environment):
            return cls._from_slurm(environment)
        missing = [key for key in keys if key not in given]
        # Cluster platforms announce a single process by RANK and WORLD_SIZE alone, which misleads nobody.
        if given and missing and not (missing == ["LOCAL_RANK"] and given["WORLD_SIZE"] == "1"):
            raise UserError(
                f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set without {' and '.join(missing)}",
                f"`unset {' '.join(given)}` if left over from another launch, or start with toolkit launch, "
                "accelerate launch, torchrun or srun",
            )
        numbers = {key: environment.get(key, "1" if key == "WORLD_SIZE" else "0") for key in keys}
        # DeepSpeed's launcher calls it LOCAL_SIZE.
        local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
        numbers["LOCAL_WORLD_SIZE"] = local or numbers["WORLD_SIZE"]
        return cls._checked(numbers)

    @classmethod
    def _from_slurm(cls, environment: Mapping[str, str]) -> World:
        size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
        per_node = per_node or environment.get("SLURM_NTASKS_PER_NODE", size)
        # Slurm writes 4, 4 and 3 as `4(x2),3`.
        counts = {part.partition("(x")[0] for part in per_node.split(",")}
        if len(counts) > 1:
            raise UserError(
                f"Slurm started unequal numbers of processes per node: {per_node.replace(',', ', ')}",
                "give srun --ntasks-per-node, the same for every node",
            )
        world = cls._checked(
            {
                "SLURM_PROCID": environment.get("SLURM_PROCID", "0"),
                "SLURM_LOCALID": environment.get("SLURM_LOCALID", "0"),
                "SLURM_NTASKS": size,
                "SLURM_TASKS_PER_NODE": counts.pop(),
            }
        )
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
        # Jobs on one machine need different ports; Linux hands out ports from 32768 on by itself.
        job = int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
        return dataclasses.replace(world, master_addr=_first_host(hosts), master_port=20_000 + job % 10_000)

    @classmethod
    def _checked(cls, texts: Mapping[str, str]) -> World:
        """From the variables of rank, rank in the node, processes and processes per node, in this order."""
        try:
            rank, local_rank, world_size, local_world_size = map(int, texts.values())
        except ValueError as error:
            raise UserError(
                f"the launcher's environment cannot be read: {error}",
                f"unset {', '.join(texts)}, or start with toolkit launch, accelerate launch, torchrun or srun",
            ) from None
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size) or world_size % local_world_size:
            raise UserError(
                f"{', '.join(f'{key}={text}' for key, text in texts.items())} contradict each other",
                "unset those left over from another launch, or start with toolkit launch or accelerate launch",
            )
        return cls(rank, local_rank, world_size, local_world_size)


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. A shell inside an allocation sees the job, but is no task of it."""
    step = environment.get("SLURM_STEP_ID", "")
    # Slurm numbers the steps of batch scripts and interactive shells downwards from 2**32.
    return step.isdigit() and int(step) < 2**32 - 256 and "SLURM_PROCID" in environment


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `node[03-05,9],other` to `node03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else nodes


@dataclass(frozen=True)
class BatchLayout:
    """How one optimizer step is put together: sizes in rows, `seq_len` in tokens; of micro-batches on average."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    seq_len: int
    sequence: int = 1
    """Processes that share each row by exchanging heads, see `parallel.sequence` of the recipe."""
    context: int = 1
    """Processes that share each row by gathering keys and values, see `parallel.context`."""
    tensor: int = 1
    """Processes that divide each layer, see `parallel.tensor`."""
    expert: int = 1
    """Processes that divide the experts of each layer, see `parallel.expert`."""
    pipeline: int = 1
    """Processes over which the layers are spread, see `parallel.pipeline`. Those that have the same layers are of
    neighbouring ranks: where a pipeline goes from node to node, gradients are averaged within nodes."""
    answers: int = 1
    """Sequences of a row: two of a pair of answers, as many as a prompt is given, of which sizes count as one."""

    @property
    def sharing(self) -> int:
        """Processes that share each row, in whichever way."""
        return self.sequence * self.context

    @property
    def together(self) -> int:
        """Processes of neighbouring ranks that get the same rows."""
        return self.sharing * self.tensor

    def part_of_rows(self, rank: int) -> int:
        """Which part of its rows a process has; those that divide layers, whose ranks are neighbours, have the same."""
        return rank // self.tensor % self.sharing

    @property
    def data_parallel_size(self) -> int:
        """Groups of processes that each get rows of their own."""
        return self.world_size // (self.together * self.pipeline)

    def replica(self, rank: int) -> int:
        """Which of these groups a process belongs to."""
        return rank % (self.world_size // self.pipeline) // self.together

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_step(self) -> int:
        """Upper bound of the tokens in a step; reached when every sequence is full."""
        return self.global_batch_size * self.answers * self.seq_len

    @property
    def in_sequences(self) -> BatchLayout:
        """The layout with sizes in sequences instead of rows, for rows of several answers."""
        sizes = {name: self.answers * getattr(self, name) for name in ("global_batch_size", "micro_batch_size")}
        return dataclasses.replace(self, **sizes, answers=1)

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step, of all processes together."""
        return self.gradient_accumulation_steps * self.data_parallel_size


def batch_layout(recipe: Recipe, world_size: int) -> BatchLayout:
    """Divides the global batch over processes and accumulation steps; of `auto` it takes the largest micro-batch.

    Raises:
        UserError: If a division does not come out; names the nearest sizes that do.
    """
    batch, parallel = recipe.batch, recipe.parallel
    together = parallel.together * parallel.pipeline
    replicas = _replicas(world_size, together, parallel.together_by if parallel.pipeline == 1 else "parallel.pipeline")
    _replicas(world_size, parallel.expert, "parallel.expert")
    stated = None if batch.micro_batch_size == "auto" else batch.micro_batch_size
    tokens = batch.tokens_per_step
    total = batch.sequences_per_step
    unit = replicas * (stated or 1)
    if total % unit:
        parts = f"{world_size} process" + ("es" if world_size > 1 else "")
        parts += f", {together} to a row," if together > 1 else ""
        parts += f" x batch.micro_batch_size {stated}" if stated else ""
        nearest = sorted({max(1, total // unit) * unit, (total // unit + 1) * unit})
        scale = batch.seq_len if tokens else 1
        key = "batch.tokens_per_step" if tokens else "batch.global_batch_size"
        change = f"set {key}=" + " or ".join(str(size * scale) for size in nearest)
        sizes = [size for size in range(1, total + 1) if total % (replicas * size) == 0]
        if stated and sizes:
            smaller = [size for size in sizes if size < stated][-1:]
            larger = [size for size in sizes if size > stated][:1]
            change += f", or batch.micro_batch_size={' or '.join(map(str, smaller + larger))}"
        fewer = next(
            (
                number
                for number in range(replicas - 1, 0, -1)
                if total % (number * (stated or 1)) == 0 and number * together % parallel.expert == 0
            ),
            0,
        )
        if fewer:
            # What is continued keeps its global batch.
            change += f", or start {fewer * together} process" + ("es" if fewer * together > 1 else "")
        raise UserError(f"a global batch of {total} sequences does not divide into {parts}", change)
    share = total // replicas
    if stated and not divides(parallel.schedule, parallel.pipeline, share // stated):
        sizes = micro_batch_sizes(recipe, world_size, row_tokens=1)
        smaller, larger = [size for size in sizes if size < stated][-1:], [size for size in sizes if size > stated][:1]
        raise UserError(
            f"parallel.schedule={parallel.schedule} takes micro-batches in equal rounds of at least "
            f"{parallel.pipeline}, which {share // stated} of them do not make",
            f"set batch.micro_batch_size={' or '.join(map(str, smaller + larger))}, or parallel.schedule=1f1b",
        )
    micro_batch = stated or micro_batch_sizes(recipe, world_size)[-1]
    divided = (parallel.sequence, parallel.context, parallel.tensor, parallel.expert, parallel.pipeline)
    return BatchLayout(total, micro_batch, share // micro_batch, world_size, batch.seq_len, *divided, recipe.answers)


def answered_at_once(recipe: Recipe, layout: BatchLayout) -> int:
    """Held-out prompts that a process answers at once, each of them once: by default as many as a micro-batch has
    answers, and no more than `rollout.batch_size`."""
    rows = layout.in_sequences.micro_batch_size
    return recipe.evaluation.batch_size or min(rows, recipe.rollout.batch_size or rows)


def _replicas(world_size: int, together: int, key: str) -> int:
    """Groups of processes that get the same rows, or divide experts."""
    if world_size % together == 0:
        return world_size // together
    smaller = [str(size) for size in range(1, min(together, world_size + 1)) if world_size % size == 0]
    start = [size for size in (world_size // together * together, (world_size // together + 1) * together) if size]
    raise UserError(
        f"{key}={together} does not divide {world_size} process" + ("es" if world_size > 1 else ""),
        f"set {key}={' or '.join(smaller[-2:])}, or start {' or '.join(map(str, start))} processes",
    )


def micro_batch_sizes(recipe: Recipe, world_size: int, row_tokens: float | None = None) -> list[int]:
    """Sizes that divide a process's share of the global batch, ascending, up to `batch.micro_batch_tokens` of each.

    Args:
        row_tokens: Tokens of a sequence, on average; by default all are full.
    """
    parallel = recipe.parallel
    replicas = world_size // (parallel.together * parallel.pipeline)
    share = max(1, recipe.batch.sequences_per_step // max(1, replicas))
    row_tokens = row_tokens or recipe.answers * recipe.batch.seq_len
    largest = max(1, int(parallel.sharing * recipe.batch.micro_batch_tokens / row_tokens))
    sizes = [size for size in range(1, min(share, largest) + 1) if share % size == 0]
    taken = [size for size in sizes if divides(parallel.schedule, parallel.pipeline, share // size)]
    return taken or sizes[:1]


REHEARSED_FROM = 20
"""Steps until the first save, or the end, from which on a run saves once before: fewer are soon lost."""


@dataclass(frozen=True)
class Length:
    """How long a run is, in optimizer steps."""

    total_steps: int
    steps_per_epoch: float | None
    warmup_steps: int
    save_steps: int | None
    rehearse: bool = False

    def rehearses(self, step: int = 0) -> bool:
        """Whether a start at this step saves after the next one, for want of a save that comes soon."""
        left = self.total_steps - step
        following = self.save_steps - step % self.save_steps if self.save_steps else left
        return self.rehearse and min(left, following) >= REHEARSED_FROM

    @property
    def epochs(self) -> float | None:
        """Passes over the rows; None for a stream."""
        return self.total_steps / self.steps_per_epoch if self.steps_per_epoch else None


def run_length(recipe: Recipe, num_rows: int | None, layout: BatchLayout) -> Length:
    """Steps from epochs. Rows continue into the next epoch inside a batch, so no row is dropped and no batch is short.

    Args:
        num_rows: Training sequences (packed ones when packing); None for a stream.
    """
    schedule = recipe.schedule
    per_epoch = Fraction(num_rows or 0, layout.global_batch_size)
    if recipe.reinforces:
        per_epoch *= recipe.policy.num_iterations
    total = schedule.max_steps or _steps(schedule.num_epochs or 1.0, per_epoch)
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = _steps(schedule.warmup_ratio or 0.0, total)
    save = recipe.checkpoint.save_steps
    if recipe.checkpoint.save_epochs and per_epoch:
        save = max(1, _steps(recipe.checkpoint.save_epochs, per_epoch))
    return Length(total, float(per_epoch) or None, warmup, save, recipe.checkpoint.rehearse)


def _steps(share: float, steps: Fraction | int) -> int:
    """So much of some steps, rounded up. The share is taken as the decimal that is written in the recipe: in floating
    point 1.1 epochs of 50 steps are 55.00000000000001, and would be 56."""
    return math.ceil(Fraction(str(share)) * steps)
