"""What one micro-batch does to memory and to the compute units, as functions of its shape.

A trace is measured by `fit` on the real model code, and read here without torch. It is linear in the layers and in a
few terms of batch and length, so one trace serves every shape; what changes the operations themselves is a `Setting` of
its own, whose hash is the trace's name. A second of fake tensors thus replaces a run on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import BatchLayout
from toolkit.models import attention
from toolkit.recipe import Recipe, model_configs

FORMAT = 2
"""Raise when a trace of the same setting would differ."""

CHUNK = 4096
"""Tokens that the fused output head and loss work on at a time (TRL's `TOKEN_CHUNK_SIZE`)."""

CHUNK_ON_CPU = 256
"""The same on a CPU (`models.cpu_head.CHUNK`)."""

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
    """

    matmul: Amount
    attention: Amount
    moved: Amount
    launches: Amount


@dataclass(frozen=True)
class Tensors:
    """Parameters that are alike.

    Args:
        place: `layer` for those inside the repeated layers.
        shape: Of each; for quantized ones the shape that they stand for.
        count: How many there are in the whole model.
        trained: Whether they get gradients.
        kind: Of the model itself, of an adapter, or stored in 4 or 8 bits.
    """

    place: Literal["embeddings", "layer", "head", "other"]
    shape: tuple[int, ...]
    count: int
    trained: bool
    kind: Literal["base", "adapter", "nf4", "int8"]

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
    """A model in one setting (see `Setting`), for every shape of micro-batch.

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


Layout = Literal["padded", "packed", "flat", "seq2seq"]
_LIBRARIES = ("torch", "transformers", "trl", "peft")
_NO_ARCHITECTURE = (
    *("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "task_specific_params"),
)
"""Keys of a config that change neither memory nor work."""
_ADAPTER_KEYS = ("name", "r", "lora_dropout", "target_modules", "modules_to_save", "use_dora")
_QUANTIZED_KEYS = ("quantization", "double_quantization")
_RARE_ADAPTER_KEYS = ("target_parameters", "layers_to_transform", "rank_pattern")
"""Part of a setting only where they are used."""


@dataclass(frozen=True)
class Setting:
    """One model in one way of computing. Plain values only, so that it can be hashed and handed to another process.

    Args:
        config: The model's `config.json`.
        device: What it will run on; kernels and rounding differ.
        objective: As in the recipe.
        method: The recipe's section `method`, without what leaves memory and work as they are; `extra` holds
            `extra.lora`, `new_tokens` the number of tokens whose rows are trained beside adapters, where there are any.
        load: Dtype of frozen weights, see `engines.Dtypes`.
        local: Dtype of trained weights as the forward pass sees them.
        autocast: Dtype of autocast, or None.
        attention: Backend, resolved.
        layout: How the collator lays out a batch.
        masked: Whether rows of different lengths are padded, so that attention reads a mask.
        checkpointing: Mode of activation checkpointing.
        every_n_layers: Of activation checkpointing.
        long: Whether a micro-batch has more than `CHUNK` tokens, from where on the loss works in chunks of so many.
        trust_remote_code: Whether the model's own code may run.
        path: `model.path`, where its code comes with the weights.
    """

    config: Mapping[str, Any]
    device: Literal["cuda", "cpu"]
    objective: str
    method: Mapping[str, Any]
    load: str
    local: str
    autocast: str | None
    attention: str
    layout: Layout
    masked: bool = False
    checkpointing: str = "none"
    every_n_layers: int = 1
    long: bool = True
    trust_remote_code: bool = False
    path: str | None = None

    @property
    def chunk(self) -> int:
        """Tokens that the fused output head and loss work on at a time."""
        return CHUNK_ON_CPU if self.device == "cpu" else CHUNK

    def in_bf16(self) -> Setting:
        """The same in bf16 where this is in fp16: as many bytes and, but for a model's own clamps, the same kernels."""
        halves = [key for key in ("load", "local", "autocast") if getattr(self, key) == "float16"]
        changes: dict[str, Any] = dict.fromkeys(halves, "bfloat16")
        return dataclasses.replace(self, **changes)

    def ends(self) -> tuple[Setting, Setting]:
        """The same with no layer checkpointed, and with every one."""
        every = dataclasses.replace(self, every_n_layers=1)
        return dataclasses.replace(every, checkpointing="none"), every

    def key(self) -> str:
        """A name for the trace of this setting; changes with the libraries that are traced."""
        content = {"format": FORMAT, "versions": _versions(), **dataclasses.asdict(self)}
        if self.device == "cpu" and self.objective != "seq2seq":
            content["chunk_on_cpu"] = self.chunk  # Of TRL's own head they would make another trace.
        if self.method.get("quantization") == "nf4" and model_configs.fused_experts(self.config):
            content["experts"] = "nf4"  # In 16 bits they would make another trace.
        content |= {} if self.layout == "flat" else {"rows": "short"}  # Of long ones alone it may be another trace.
        return _hash(content)

    def architecture(self) -> str:
        """A name for the model's architecture alone."""
        return _hash(dict(self.config))


def setting_of(recipe: Recipe, config: Mapping[str, Any], device: str, backend: str, layout: BatchLayout) -> Setting:
    """The setting in which a recipe trains.

    Args:
        config: The model's `config.json`.
        device: `cpu`, or any other for what torch calls CUDA.
        backend: Attention backend, see `attention.planned`.
        layout: How the batch is divided; its `seq_len` is the length of the longest row, where that is known.
    """
    types, method = dtypes(recipe), recipe.method
    # FSDP gathers parameters in the compute dtype, whatever their masters are.
    seen = types.compute if recipe.strategy.name == "fsdp" else types.local
    adapters, rare = method.name == "lora", set(_RARE_ADAPTER_KEYS) & set(method.changed())
    checkpointing = recipe.activation_checkpointing
    on_cpu = device == "cpu"
    rows = _layout(recipe, backend)
    stated = method.model_dump(include={*_ADAPTER_KEYS, *_QUANTIZED_KEYS, *rare} if adapters else {"name", "freeze"})
    if adapters and recipe.model.new_tokens:
        stated["new_tokens"] = len(recipe.model.new_tokens)
    return Setting(
        config={key: value for key, value in config.items() if key not in _NO_ARCHITECTURE},
        device="cpu" if on_cpu else "cuda",
        objective=recipe.objective,
        method=stated | ({"extra": dict(recipe.extra.lora)} if recipe.extra.lora else {}),
        load=types.load if adapters else seen,
        local=seen,
        autocast=types.autocast,
        attention=backend,
        layout=rows,
        # A row by itself is not padded, and Transformers drops a mask that hides nothing.
        masked=rows in ("padded", "seq2seq") and layout.micro_batch_size > 1,
        checkpointing=checkpointing.mode,
        every_n_layers=checkpointing.every_n_layers if checkpointing.mode in ("full", "offload") else 1,
        # Loops over chunks look different from one chunk; on a GPU, where they work in place, one trace serves both.
        long=not on_cpu or layout.micro_batch_size * layout.seq_len > CHUNK,
        trust_remote_code=recipe.model.trust_remote_code,
        path=recipe.model.path if recipe.model.trust_remote_code else None,
    )


def _layout(recipe: Recipe, backend: str) -> Layout:
    if recipe.objective == "seq2seq":
        return "seq2seq"
    if backend in attention.VARLEN:
        return "flat"
    return "packed" if recipe.data.packing else "padded"


@functools.cache
def _versions() -> dict[str, str]:
    """Of what is traced, without the last number: a repair changes no memory worth a new trace."""
    return {name: ".".join(importlib.metadata.version(name).split(".")[:2]) for name in _LIBRARIES}


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
