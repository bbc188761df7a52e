"""What one micro-batch does to memory and to the compute units, as functions of its shape.

A trace is measured by `fit` on the real model code, and read here without torch. It is linear in the layers and in a
few terms of batch and length, so one trace serves every shape; what changes the operations themselves is another
`setting.Setting`. A second of fake tensors thus replaces a run on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

FORMAT = 3
"""Raise when a trace of the same setting would differ."""

CHUNK = 4096
"""Tokens of a row that is traced: at least as many as the output head works on at a time
(`models.output_heads.head_chunk`)."""

_COMPARED = ((1, 512), (2, 4096), (1, 65536))
"""Sequences and tokens of each."""

Phase = Literal["forward", "backward", "evaluation"]
Place = Literal["embeddings", "first_layer", "last_layer", "head"]


@dataclass(frozen=True)
class Shape:
    """A micro-batch of `batch` sequences, perhaps not a whole number, of `seq_len` tokens through `layers` layers.

    Args:
        target_len: Of pairs the tokens of a target, where that is less: what the decoder's layers see.
    """

    layers: int
    batch: float
    seq_len: int
    target_len: int | None = None

    @property
    def tokens(self) -> float:
        """Tokens of the micro-batch."""
        return self.batch * self.seq_len


@dataclass(frozen=True)
class Amount:
    """A quantity that is linear in the layers and in 1, tokens, tokens x sequence length, sequence length, its square
    (biases of positions, which rows share), tokens with those that complete the last block of each row, and rows.

    Args:
        fixed: Coefficients of these seven, in this order, outside the layers; zeros at the end are left out.
        per_layer: The same for each layer.
        chunk: What there is beside, once, for each chunk of tokens; less for fewer of them.
        tokens: Of a chunk.
        block: Tokens to a multiple of which layers pad each sequence.
    """

    fixed: tuple[float, ...] = ()
    per_layer: tuple[float, ...] = ()
    chunk: float = 0.0
    tokens: int = CHUNK
    block: int = 1

    def less(self, other: Amount, times: float = 1.0) -> Amount:
        """So many times what this is more than another."""

        def difference(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(times * (a - b) for a, b in itertools.zip_longest(one, other, fillvalue=0.0))

        fixed, per_layer = difference(self.fixed, other.fixed), difference(self.per_layer, other.per_layer)
        return dataclasses.replace(self, fixed=fixed, per_layer=per_layer, chunk=times * (self.chunk - other.chunk))

    def at(self, shape: Shape) -> float:
        """The quantity for one shape; never negative.

        Of pairs encoder, embeddings and head are taken to see the longer side. Cross-attention's keys and values, which
        are of the source, weigh less than that: traced Blenderbots hold 2 to 22% less, with targets of 1/8 to 1/2.
        """
        whole = self.of(shape.layers, shape.tokens, shape.tokens * shape.seq_len, shape.seq_len)
        if shape.target_len is None:
            return whole
        outside = self.of(0, shape.tokens, shape.tokens * shape.seq_len, shape.seq_len)
        targets = shape.batch * shape.target_len
        layers = Amount(per_layer=self.per_layer, block=self.block)
        return min(whole, outside + layers.of(shape.layers, targets, targets * shape.target_len, shape.target_len))

    def of(self, layers: int, tokens: float, pairs: float, longest: float = 0, share: float = 1.0) -> float:
        """The same for sequences of different lengths: their sum, the sum of their squares, and the longest.

        Args:
            share: Of the tokens those that reach the output head, which most of what is outside the layers is for.
        """
        rows = tokens / longest if longest else 0.0
        terms = (1, tokens, pairs, longest, longest**2, rows * math.ceil(longest / self.block) * self.block, rows)
        parts = [each * term for each, term in zip(self.fixed, terms, strict=False)]
        outside = sum(parts[:1]) + share * sum(parts[1:])
        inside = sum(each * term for each, term in zip(self.per_layer, terms, strict=False))
        return max(0.0, outside + layers * inside + self.chunk * min(1.0, share * tokens / self.tokens))


NOTHING = Amount()


@dataclass(frozen=True)
class Moment:
    """A moment at which much is live, beside what lives all the time: parameters, optimizer, gradients from before.

    All amounts are bytes on one device.

    Args:
        phase: Forward or backward pass of training, or the forward pass of an evaluation.
        place: Where the pass is: a layer stands for all between the first and the last.
        accumulating: Whether gradients of an earlier micro-batch exist; then those made here are added and freed.
        activations: What the layers keep for the backward pass, and their temporary tensors.
        casts: Copies of weights in the compute dtype (autocast), or dequantized.
        logits: What the output head and the loss hold.
        gradients: Gradients of parameters that this micro-batch has made so far, in the dtype of the parameters.
    """

    phase: Phase
    place: Place
    accumulating: bool
    activations: Amount
    casts: Amount
    logits: Amount
    gradients: Amount


@dataclass(frozen=True)
class Pass:
    """What the device does in one pass over a micro-batch.

    Args:
        matmul: FLOPs of matrix products (a multiply and an add count as two).
        attention: FLOPs of attention's two products over all pairs of positions, whether a mask hides them or not.
        moved: Bytes that all other operations read and write.
        launches: Number of operations that start a kernel.
        summed: Bytes that are summed over the processes that divide layers.
        exchanged: Bytes that are exchanged by the processes that divide experts, with those that each keeps itself.
    """

    matmul: Amount
    attention: Amount
    moved: Amount
    launches: Amount
    summed: Amount = Amount()
    exchanged: Amount = Amount()


@dataclass(frozen=True)
class Tensors:
    """Parameters that are alike.

    Args:
        place: `layer` for those inside the repeated layers.
        shape: Of each; for quantized ones the shape that they stand for, for divided ones that of a part.
        count: How many there are in the whole model.
        trained: Whether they get gradients.
        kind: Of the model itself, of an adapter, or stored in 4 or 8 bits.
        parts: How many processes divide each (`parallel.tensor`, or `parallel.expert` those of experts).
    """

    place: Literal["embeddings", "layer", "head", "other"]
    shape: tuple[int, ...]
    count: int
    trained: bool
    kind: Literal["base", "adapter", "nf4", "int8", "fp8", "int4"]
    parts: int = 1

    @property
    def numel(self) -> int:
        """Elements of each."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Cache:
    """What layers that are alike keep of one sequence while the model generates, in 16 bits.

    Args:
        layers: How many there are.
        fixed: Bytes of the states of recurrences and convolutions, whatever the length.
        per_token: Bytes of keys and values.
        window: Most tokens that are kept; None for all.
    """

    layers: int
    fixed: float
    per_token: float
    window: int | None

    def at(self, context: int) -> float:
        """Bytes for so many tokens."""
        return self.layers * (self.fixed + self.per_token * min(context, self.window or context))


@dataclass(frozen=True)
class Trace:
    """A model in one `setting.Setting`, for every shape of micro-batch.

    Args:
        layers: Repeated layers of the whole model (of the decoder, where there is an encoder).
        tensors: All parameters; tied ones once.
        moments: Candidates for the peak; for one shape the largest sum decides.
        passes: `forward`, `backward` (with what it recomputes), `recompute` (that part alone), `evaluation`.
        boundary: Bytes of the hidden states between two layers, which offloaded checkpointing keeps on the host.
        buffers: Bytes of what the model holds beside parameters (rotary frequencies, position tables).
        caches: What the layers keep of a sequence that is generated; None where it is not known.
        origin: `traced`, or `formulas` where the model's code could not be traced.
        note: Why it could not be traced.
        fused_head: Whether TRL's fused output head is what a decoder computes, or labels are scored by the model's own
            forward, from all logits.
    """

    layers: int
    tensors: tuple[Tensors, ...]
    moments: tuple[Moment, ...]
    passes: Mapping[str, Pass]
    boundary: Amount
    buffers: int
    caches: tuple[Cache, ...] | None
    origin: Literal["traced", "formulas"] = "traced"
    note: str = ""
    fused_head: bool = True

    def whole(self) -> Trace:
        """The trace with divided parameters whole again, as they are saved."""

        def joined(each: Tensors) -> Tensors:
            return dataclasses.replace(each, shape=(each.parts * each.shape[0], *each.shape[1:]), parts=1)

        return dataclasses.replace(
            self, tensors=tuple(joined(each) if each.parts > 1 else each for each in self.tensors)
        )

    def scored_twice(self) -> Trace:
        """The same with logits that the backward pass forms anew, as it does for a trained head by whose scores tokens
        count differently in the loss (`models.output_heads.fused_head`)."""
        matrices = {each.place: each for each in self.tensors if len(each.shape) == 2}
        head = matrices.get("head", matrices.get("embeddings"))
        if head is None or not head.trained or not self.fused_head:
            return self
        product = Amount(fixed=(0.0, -2.0 * head.numel))
        again = {
            name: dataclasses.replace(self.passes[name], matmul=self.passes[name].matmul.less(product))
            for name in ("backward", "recompute")
        }
        return dataclasses.replace(self, passes={**self.passes, **again})

    @property
    def kept(self) -> Amount:
        """Bytes that the layers keep for the backward pass, as they are when it begins."""
        begins = next(each for each in self.moments if (each.phase, each.place) == ("backward", "head"))
        parts = begins.activations, begins.casts
        summed = itertools.zip_longest(*(each.per_layer for each in parts), fillvalue=0.0)
        return Amount(per_layer=tuple(map(sum, summed)), block=begins.activations.block)

    def peak(self, shape: Shape, phase: Phase) -> float:
        """Most bytes that are live in a pass, beside what lives all the time."""
        moments = (each for each in self.moments if each.phase == phase)
        amounts = ((each.activations, each.casts, each.logits, each.gradients) for each in moments)
        return max((sum(each.at(shape) for each in parts) for parts in amounts), default=0.0)

    @functools.cached_property
    def peaks(self) -> tuple[float, ...]:
        """`peak` for short and for long rows, by which traces of one model are compared."""
        shapes = (Shape(self.layers, *each) for each in _COMPARED)
        return tuple(self.peak(shape, phase) for shape in shapes for phase in ("forward", "backward"))

    @property
    def own_head(self) -> list[Tensors]:
        """The weights of the output head; empty where it is tied to the embeddings."""
        return [each for each in self.tensors if each.place == "head" and len(each.shape) > 1]

    @property
    def vocabulary(self) -> int:
        """Entries of the output head, or of the embeddings that it is tied to."""
        sizes = {each.place: each.shape[0] for each in self.tensors if len(each.shape) == 2}
        return int(sizes.get("head") or sizes.get("embeddings") or 0)

    def elements(self, *, trained: bool | None = None, kind: str | None = None, place: str | None = None) -> int:
        """Number of parameters of some kind."""
        return sum(
            tensors.numel * tensors.count
            for tensors in self.tensors
            if (trained is None or tensors.trained == trained)
            and (kind is None or tensors.kind == kind)
            and (place is None or tensors.place == place)
        )

    def met(self, experts: tuple[int, int], *, trained: bool | None = None) -> float:
        """Number of parameters that one token meets.

        Args:
            experts: How many a layer has, and how many of them a token meets (`model_configs.experts`).
        """
        count, active = experts
        shared = 1 - active / count
        idle = (each for each in self.tensors if len(each.shape) == 3 and each.shape[0] == count > 1)
        spared = sum(each.numel * each.count * shared for each in idle if trained is None or each.trained == trained)
        return self.elements(trained=trained) - spared

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers; see `from_json`."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """The reverse of `to_json`.

        Raises:
            ValueError: For what is cut off or of another version.
        """
        return _traces().validate_python(data)


@functools.cache
def _traces() -> TypeAdapter[Trace]:
    return TypeAdapter(Trace)
