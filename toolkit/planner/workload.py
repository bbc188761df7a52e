"""One recipe on one machine: what every figure of a plan is computed from, and what follows from it at once."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from toolkit.distributed.engines import Dtypes, dtypes
from toolkit.distributed.layout import BatchLayout
from toolkit.planner.hardware import Hardware
from toolkit.planner.trace.types import NOTHING, Amount, Shape, Tensors, Trace
from toolkit.recipe import Recipe
from toolkit.recipe.parallel import Strategy

WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element."""


@dataclass(frozen=True)
class Division:
    """Over how many ranks weights, gradients, and the optimizer's masters and moments are divided."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1


@dataclass(frozen=True)
class Load:
    """One micro-batch of one rank, on average.

    Args:
        tokens: Padding not counted.
        padded: With it, and without those that are computed for others, see `prefixes.are_shared`.
        within: Pairs of positions within documents.
        attended: Pairs that the attention kernel works through.
        grid: Pairs of the padded sequences.
        longest: Tokens of the longest sequence.
        scored: Tokens that reach the output head.
        kernel: The backend that attention's rates are of, where they were measured.
        stretch: Tokens of the row or the document in which a token attends, for these rates.
    """

    tokens: float
    padded: float
    within: float
    attended: float
    grid: float
    longest: float
    scored: float
    kernel: str = "sdpa"
    stretch: float = 1.0

    def sharing(self, tokens: float, beginning: float) -> Load:
        """The same where so many tokens are computed for others, each document beginning with `beginning` of them."""
        pairs = tokens * beginning
        fewer = {"within": pairs, "attended": pairs / 2, "grid": pairs}
        return dataclasses.replace(
            self, padded=self.padded - tokens, **{key: getattr(self, key) - each for key, each in fewer.items()}
        )

    def divided(self, parts: int) -> Load:
        """What one of several processes has that share rows."""
        shares = {
            key: getattr(self, key) / parts for key in ("tokens", "padded", "within", "attended", "grid", "scored")
        }
        return dataclasses.replace(self, **shares)


@dataclass(frozen=True)
class Workload:
    """A resolved recipe, divided over devices; on a CPU what is offloaded stays in the same memory and counts."""

    recipe: Recipe
    layout: BatchLayout
    hardware: Hardware
    trace: Trace
    longest: int | None = None
    """Tokens of the longest row where the rows of the micro-batch may be fewer, so that they have no more tokens."""
    target_len: int | None = None
    """Tokens of the longest target of pairs, where it is known."""
    evaluation_len: int | None = None
    """Tokens of a row in the fullest batch of an evaluation, where they differ from those of a micro-batch."""

    heads: tuple[int, int, int] = (0, 0, 0)
    """See `model_configs.attention_widths`; asked where processes share rows, or documents their beginnings."""
    keys_again: float = 0.0
    """Tokens whose keys and values are there for a document beside those that are computed, see
    `prefixes.are_shared`."""
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline, where there is one."""
    place: int | None = None
    """Which process of it this is, see `pipeline.of_process`; None of the whole model."""
    untied: bool = False
    """For a process of a pipeline: whether the whole model's output head is not tied to the embeddings."""
    usual: float = 1.0
    """Tokens of a micro-batch on average, as a share of those of the fullest; of a pipeline others wait beside it."""
    cache: int = 0
    """Bytes in 16 bits that the longest sequence keeps while it is generated, where the model is trained on its own
    answers."""
    teacher: Workload | None = None
    """The model that is learnt from, where there is one."""
    experts: tuple[int, int] = (1, 1)
    """Experts of a teacher's layer, and how many of them a token uses; see `model_configs.experts`."""
    written_again: Amount = NOTHING
    """Bytes that the kernels of compiled layers write and read in the backward pass instead of keeping them for it."""
    routed: int = 0
    """Scores that a layer's router has for each token, where a pipeline sends them on to be balanced."""

    @property
    def strategy(self) -> Strategy:
        """The recipe's."""
        return self.recipe.strategy

    @functools.cached_property
    def types(self) -> Dtypes:
        """In what it computes, keeps, reduces and publishes."""
        return dtypes(self.recipe)

    @functools.cached_property
    def over(self) -> Division:
        """What the recipe's strategy divides."""
        strategy, ranks = self.strategy, self.layout.world_size // self.layout.tensor
        if strategy.name == "fsdp":
            ranks = self.hardware.devices_per_node if strategy.sharding == "hybrid_shard" else ranks
            return Division(ranks, ranks, ranks)
        return Division(*(ranks if strategy.zero_stage >= least else 1 for least in (3, 2, 1)))

    @functools.cached_property
    def trained(self) -> int:
        """Elements that get gradients."""
        return self.trace.elements(trained=True)

    @functools.cached_property
    def apart(self) -> int:
        """Elements that get gradients of experts that processes divide, which the engine leaves alone."""
        parts = self.layout.expert
        divided = (each for each in self.trace.tensors if parts > 1 and each.trained and each.parts == parts)
        return sum(each.numel * each.count for each in divided)

    @property
    def owned(self) -> float:
        """Elements that one rank's optimizer updates."""
        return self.trained / self.over.optimizer

    @property
    def shape(self) -> Shape:
        """Shape of a micro-batch, or of the part of it that a process has."""
        longest = self.longest or self.layout.seq_len
        tokens = self.layout.in_sequences.micro_batch_size * self.layout.seq_len / self.layout.sharing
        return Shape(self.trace.layers, tokens / longest, longest, self.target_len)

    @functools.cached_property
    def exchanged(self) -> tuple[float, float]:
        """Bytes of a token of a process's part that go to others in the forward pass of a layer, and in the backward
        pass; none where processes share no rows."""
        (heads, shared, size), parts = self.heads, self.layout.sharing
        heads, shared = heads // self.layout.tensor, shared // self.layout.tensor
        width = size * WIDTH[self.types.compute]
        if self.layout.context > 1:
            # Keys and values go to all others; backwards they do once more, and the gradients come back.
            once = 2.0 * shared * width * (parts - 1)
            return once, 2 * once
        # Queries, keys and values with their copies, and what attention returns; each process keeps its own heads.
        copies = parts // math.gcd(shared or 1, parts)
        once = (2 * heads + 2 * shared * copies) * width * (parts - 1) / parts
        checkpointing = self.recipe.activation_checkpointing
        return once, once * (1 + 1 / checkpointing.every_n_layers if checkpointing.of_layers else 1)

    @property
    def passes_before(self) -> int:
        """How often each micro-batch is passed over without gradients before: answers of other rows to judged ones,
        texts whose vectors the losses of other micro-batches read, and answers that a reference is asked about; by
        RLOO, whose reward that is a part of, the policy too."""
        recipe = self.recipe
        if recipe.reinforces:
            return (2 if recipe.objective == "rloo" else 1) if recipe.policy.beta else 0
        return int(recipe.judges or (recipe.embeds and self.accumulates))

    @property
    def accumulates(self) -> bool:
        """Whether gradients are summed over several micro-batches."""
        return self.layout.gradient_accumulation_steps > 1

    @property
    def kept_for_backward(self) -> float:
        """Elements of the last layers that ZeRO-3 keeps from their forward to their backward pass, because they are
        used again within `max_reuse_distance`: what follows a layer is passed twice in between, and a third time where
        layers are recomputed."""
        return self.strategy.max_reuse_distance / (3 if self.recipe.activation_checkpointing.of_layers else 2)

    @property
    def reduces_at_the_end(self) -> bool:
        """Whether DeepSpeed sums whole gradients in fp32 and all-reduces them once the last backward pass is over, as
        for ZeRO-1 in bf16 (`_do_optimizer_sanity_check` of its engine, `runtime/bf16_optimizer.py`)."""
        strategy, types = self.strategy, self.types
        bf16 = types.local == "bfloat16" and types.reduce == "float32" and strategy.offload_optimizer == "none"
        return bf16 and strategy.zero_stage == 1

    @property
    def reductions(self) -> int:
        """How often in a step FSDP reduces gradients; where not with every micro-batch, it sums them whole."""
        return self.layout.gradient_accumulation_steps if self.strategy.sync_each_batch else 1

    @property
    def on_cpu(self) -> bool:
        """Whether gloo reduces, tensors are freed at once, and all processes share the host's memory."""
        return self.hardware.device.kind == "cpu"

    @property
    def processes_per_node(self) -> int:
        """One per device."""
        return min(self.hardware.devices_per_node, self.layout.world_size)

    def width(self, tensors: Tensors) -> int:
        """Bytes of an element of a parameter that is not quantized, as the model holds it between steps."""
        return WIDTH[self.types.local if tensors.trained or tensors.kind == "adapter" else self.types.load]
