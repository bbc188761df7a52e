"""Counts what lives and what is computed while a model runs, real or fake, by watching every operation.

A dispatch mode sees each operation's tensors: a storage counts from the operation that makes it until it is freed,
rounded as CUDA's allocator does. Where a GPU would do otherwise than the traced CPU, the difference is added here.
Hooks on modules, the alternative, miss what is allocated inside of them.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

from toolkit.models.output_heads.head_chunk import chunks
from toolkit.models.parallel.context_parallel import GATHER
from toolkit.models.parallel.expert_parallel import SEND
from toolkit.models.parallel.layer_sums import SUMS

CATEGORIES = ("activations", "casts", "logits", "gradients", "chunks")
"""As in `Moment`; `chunks` are those of the logits that the loss holds for one chunk of tokens at a time."""
_CUDA_GRANULARITY = 512
"""Bytes to which CUDA's allocator rounds every block (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""
_IN_PLACE = (torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default)
"""What a backward pass does in place where no dispatch mode like this one is on: adding up two gradients of one tensor,
and the gradient of rows that were picked. A CPU's memory can be watched with such a mode only, so there it counts.

Sources: `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp, `index_backward` in FunctionsManual.cpp, and
`isTensorSubclassLike` in ATen/TensorSubclassLikeUtils.h, which is true of every tensor while a dispatch mode is on.
"""
_IN_RANK_ORDER = 1.5
"""Of what is gathered of shared rows, what lies beside it while its chunks are put in order: as they came, and one half
turned around."""
_FORWARD_ONLY = ("toolkit_tracing::flash_attn", "toolkit_tracing::grouped_mm", "bitsandbytes::gemm_4bit")
STAND_INS = "toolkit_tracing"
"""Library of the operations that stand in for kernels; those that return nothing write into their arguments."""
_THIN = 64
"""FLOPs for each byte below which a product, such as an adapter's, waits for memory on every current device."""
_WORK = ("matmul", "attention", "moved", "launches", "summed", "exchanged")


def attention_flops(q: Any, k: Any, v: Any) -> int:
    """Q K^T and P V over all pairs of positions, for (batch, heads, positions, head size)."""
    (batch, heads, queries, size), (_, _, keys, _) = q, k
    return 2 * batch * heads * queries * keys * (size + v[-1])


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def forward_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the forward pass."""
    return attention_flops(q, k, v)


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def backward_flops(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """Two products for each of the forward pass; that the kernel forms Q K^T once more is its own affair."""
    return 2 * attention_flops(q, k, v)


@dataclass
class Timeline:
    """What happened in one pass: for every operation where it was and what was live after it.

    Args:
        places: Place of each operation, as given to `Tracker.at`.
        names: Its name.
        live: Bytes by category, in the order of `CATEGORIES`, after each operation.
        work: FLOPs and bytes by kind, see `trace.Pass`.
        recomputed: The same, of what the backward pass computes a second time.
    """

    places: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    live: list[tuple[int, ...]] = field(default_factory=list)
    work: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_WORK, 0.0))
    recomputed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_WORK, 0.0))


class Tracker(TorchDispatchMode):
    """A dispatch mode that keeps the books.

    Args:
        known: Tensors that live all the time (parameters, buffers, the batch), which are not counted.
        weights: Parameters, whose copies in another dtype count as `casts`.
        on_gpu: Whether to count what a GPU would hold, whose allocator rounds every tensor up.
        chunk: Tokens that the loss works on at a time, if the batch has more of them.
        deadline: Of `time.process_time`. A model may go through its tokens one by one.

    Raises:
        TimeoutError: In the operation after the deadline.
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor],
        weights: Iterable[torch.Tensor],
        on_gpu: bool = False,
        chunk: int = 0,
        deadline: float = math.inf,
    ) -> None:
        super().__init__()
        self._chunk = chunk
        self._deadline = deadline
        self._on_gpu = on_gpu
        self._granularity = _CUDA_GRANULARITY if on_gpu else 1
        self._weights = {_key(weight) for weight in weights if weight.ndim > 1}
        # Kept, so that no other storage takes an address that is known.
        self._known = [tensor.untyped_storage() for tensor in known]
        self._sizes: dict[int, tuple[int, int]] = {storage._cdata: (0, 0) for storage in self._known}
        self._live = [0] * len(CATEGORIES)
        self.place = "embeddings"
        self.boundary = 0
        self.paddings: set[tuple[int, int]] = set()
        self.timeline = Timeline()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while this mode is on; torch would guard every operation against it."""
        return False

    def begin(self) -> Timeline:
        """Starts a new pass; what is live stays."""
        self.timeline = Timeline()
        return self.timeline

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Counts a tensor under another category from now on."""
        key, to = _key(tensor), CATEGORIES.index(category)
        if key in self._sizes:
            size, since = self._sizes[key]
            self._live[since] -= size
            self._live[to] += size
            self._sizes[key] = (size, to)

    def forget(self, tensor: torch.Tensor) -> None:
        """Counts a tensor no longer: from now on it lives all the time."""
        key = _key(tensor)
        if key in self._sizes:
            size, category = self._sizes[key]
            self._live[category] -= size
            self._sizes[key] = (0, 0)

    def chunks(self, tokens: int, size: int) -> Iterator[slice]:
        """Those of `head_chunk.chunks` that differ: all but the first and the last do what the second one does, which
        is noted as often as there are such."""
        each = list(chunks(tokens, size))
        alike = len(each) - 2
        if alike < 2:
            yield from each
            return
        yield each[0]
        line = self.timeline
        before, works = len(line.names), [(counts, dict(counts)) for counts in (line.work, line.recomputed)]
        yield each[1]
        more = alike - 1
        line.places += line.places[before:] * more
        line.names += line.names[before:] * more
        line.live += line.live[before:] * more
        for counts, begun in works:
            for key, count in begun.items():
                counts[key] += (counts[key] - count) * more
        yield each[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            # Two of three operations on fake tensors only ask where they are; this is how those answer, but quickly.
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        out = _outcome(func, args, kwargs or {})
        if time.process_time() > self._deadline:
            raise TimeoutError("this model takes too many operations to be traced")
        inputs = list(_tensors((*args, *kwargs.values()) if kwargs else args))
        outputs = list(_tensors(out))
        category = self._category(func, inputs, outputs)
        made = sum(self._add(tensor, category) for tensor in outputs)
        if func is torch.ops.aten.constant_pad_nd.default:
            self.paddings.update(zip(inputs[0].shape, outputs[0].shape, strict=True))
        self._count(func, args, kwargs, out, [*inputs, *outputs], made)
        self.timeline.places.append(self.place)
        self.timeline.names.append(func.name())
        live = list(self._live)
        if self._on_gpu and func in _IN_PLACE and _in_backward():
            live[category] -= made
        if self._on_gpu and func is torch.ops.aten.embedding_dense_backward.default:
            live[category] += _embedding_sums(*args[:3])
        if self._on_gpu and func is GATHER:
            live[category] += int(_IN_RANK_ORDER * made)
        if self._on_gpu and func.name() == "bitsandbytes::gemm_4bit":
            # For more rows than a few its CUDA kernel is a dequantization, whose result is gone afterwards.
            inside = args[2][0] * args[2][1] * args[0].element_size()
            live[CATEGORIES.index("casts")] += inside
            self.timeline.work["moved"] += inside + args[1].nbytes
        self.timeline.live.append(tuple(live))
        return out

    def _category(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
        name = func.name()
        converts = name.startswith("aten::_to_copy") and inputs and _key(inputs[0]) in self._weights
        if converts or "dequantize" in name:
            return CATEGORIES.index("casts")
        if self.place != "head":
            return CATEGORIES.index("activations")
        # The loss's buffer for logits, and its copy of the hidden states that belong to them; the last may be shorter.
        new = outputs if name.startswith(("aten::empty", "aten::_to_copy")) else []
        chunk = any(each.ndim == 2 and len(each) <= self._chunk for each in new)
        return CATEGORIES.index("chunks" if chunk else "logits")

    def _add(self, tensor: torch.Tensor, category: int) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return 0
        size = -(-storage.nbytes() // self._granularity) * self._granularity
        self._sizes[key] = (size, category)
        self._live[category] += size
        weakref.finalize(storage, self._drop, key)
        return size

    def _drop(self, key: int) -> None:
        size, category = self._sizes.pop(key)
        self._live[category] -= size

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: list[torch.Tensor], made: int) -> None:
        changes = func._schema.is_mutable
        if not made and not changes:
            return  # A view: no kernel runs.
        amounts = {"launches": 1.0}
        if func in SUMS:
            amounts["summed"] = float(args[0].nbytes)
        if func is SEND:
            amounts["exchanged"] = float(args[0].nbytes)
        packet, traffic = func._overloadpacket, sum(tensor.nbytes for tensor in tensors)
        if packet in flop_registry:
            kind = "attention" if "attention" in func.name() or "attn" in func.name() else "matmul"
            amounts[kind] = float(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
            if kind == "matmul" and amounts[kind] < _THIN * traffic:
                amounts["moved"] = float(traffic)
        elif not func.name().startswith("aten::empty"):
            amounts["moved"] = float(traffic)
        # A backward pass records nothing for a further one, except while it repeats a part of the forward pass. Within
        # a custom function nothing is recorded either way, but those that belong to the forward pass are known.
        repeats = torch._C._current_graph_task_id() != -1 and (torch.is_grad_enabled() or func.name() in _FORWARD_ONLY)
        for key, value in amounts.items():
            self.timeline.work[key] += value
            if repeats:
                self.timeline.recomputed[key] += value


class CompiledTracker(Tracker):
    """A tracker for compiled layers, which torch's compiler refuses within any other mode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """It may, as nothing of this mode is within a graph."""
        return True


def _outcome(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns; fake tensors take several times as long for those that they do not remember."""
    if func is torch.ops.aten._unsafe_view.default:
        return torch.ops.aten.view.default(*args)
    if func is torch.ops.aten.mm.out:
        return kwargs["out"]
    if func.namespace == STAND_INS and not func._schema.returns:
        return None
    return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operation's arguments or result, whose only containers are lists and tuples; torch's
    `tree_leaves`, which knows all kinds, takes several times as long."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _in_backward() -> bool:
    """Whether a backward pass is at work, and not on what it computes a second time."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _embedding_sums(grad: torch.Tensor, indices: torch.Tensor, num_weights: int) -> int:
    """Bytes that CUDA's gradient of an embedding allocates beside its result, for more than 3,072 indices.

    Sums in fp32 of up to ten rows each, and seven lists of indices (with what sorting needs).
    Source: `embedding_backward_cuda_kernel` in ATen/native/cuda/EmbeddingBackwardKernel.cu.
    """
    count, width = indices.numel(), -(-grad.shape[-1] // 32) * 32
    if count <= 3072:
        return 0
    return (count // 10 + min(count, num_weights)) * width * 4 + 7 * count * 8


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
