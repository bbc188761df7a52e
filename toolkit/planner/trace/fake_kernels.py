"""What cannot be traced as it is: kernels that fake tensors do not know, and CUDA's ways on a machine without it.

Each stand-in allocates and computes what the real operation does, so that the tracker counts the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from peft.tuners.lora import dora
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers import AttentionInterface, masking_utils, modeling_utils
from trl.kernels import chunked_logprob

from toolkit.distributed.engines import Dtypes
from toolkit.models import dropout
from toolkit.models.attention import backends
from toolkit.models.output_heads import fused_head
from toolkit.models.parallel import context_parallel
from toolkit.models.quantization import experts, stored
from toolkit.planner.trace.setting import Setting
from toolkit.planner.trace.tracker import STAND_INS, attention_flops

_ignore_causal_mask = masking_utils._ignore_causal_mask_sdpa

FLASH = "traced_varlen"
"""Name under which the stand-in for FlashAttention's kernels is registered with Transformers."""

_NF4_BLOCK, _NF4_NESTED_BLOCK = 64, 256


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernels lay out their result as they find the queries, mostly positions before heads, which makes joining the
    # heads a view.
    out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


# TRL's selective checkpointing keeps the outputs of operations with `flash_attn` in their name.
_LIBRARY = torch.library.Library(STAND_INS, "DEF")
for _schema, _function in {
    "flash_attn(Tensor q, Tensor k, Tensor v, SymInt keys) -> (Tensor, Tensor)": _flash,
    "flash_attn_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor l, SymInt keys) -> (Tensor, Tensor, Tensor)": (
        lambda grad, q, k, v, lse, keys: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    ),
    "grouped_mm(Tensor a, Tensor b) -> Tensor": lambda a, b: a.new_empty((a.shape[0], b.shape[-1])),
    "grouped_mm_input(Tensor grad, Tensor b) -> Tensor": lambda grad, b: grad.new_empty((grad.shape[0], b.shape[-1])),
    "grouped_mm_sums(Tensor a, Tensor grad, Tensor b) -> Tensor": lambda a, grad, b: b.new_empty(b.shape),
    "add_product_(Tensor(a!) acc, Tensor a, Tensor b) -> ()": lambda acc, a, b: None,
    "in_place_(Tensor(a!) tile) -> ()": lambda tile: None,
}.items():
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
_OPS = getattr(torch.ops, STAND_INS)
flop_registry[_OPS.add_product_] = flop_registry[torch.ops.aten.addmm]


@register_flop_formula(_OPS.flash_attn)
def _flash_flops(q: Any, k: Any, v: Any, keys: int, *args: Any, **kwargs: Any) -> int:
    return attention_flops(q, (*k[:2], keys, k[3]), v)


@register_flop_formula(_OPS.flash_attn_backward)
def _flash_backward_flops(grad: Any, q: Any, k: Any, v: Any, lse: Any, keys: int, *args: Any, **kwargs: Any) -> int:
    return 2 * attention_flops(q, (*k[:2], keys, k[3]), v)


@register_flop_formula(torch.ops.bitsandbytes.gemm_4bit)
def _gemm_4bit_flops(a: Any, b: Any, shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(a[:-1]) * shape[0] * shape[1]


@register_flop_formula([_OPS.grouped_mm, _OPS.grouped_mm_input, _OPS.grouped_mm_sums])
def _grouped_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Each row meets the matrix of one expert."""
    return 2 * a[0] * a[1] * b[-1]


class _Flash(torch.autograd.Function):
    """FlashAttention 2: saves its inputs, the output and the log-sum-exp; sums the gradient of queries in fp32.

    A mask is kept for the backward pass too: torch's memory-efficient kernel takes it there for a bias. With `keys`
    each query is counted to meet so many of them.

    Source: https://arxiv.org/abs/2307.08691, Algorithms 1 and 2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        keys: int | None = None,
    ) -> torch.Tensor:
        ctx.keys = k.shape[2] if keys is None else keys
        out, lse = _OPS.flash_attn(q, k, v, ctx.keys)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, _, lse, _ = ctx.saved_tensors
        sums = torch.empty(q.shape, dtype=torch.float32), torch.empty_like(lse)
        if k.shape[1] == q.shape[1]:
            return *_OPS.flash_attn_backward(grads[0], q, k, v, lse, ctx.keys), None, None
        # With fewer heads of keys and values each query head has gradients of its own, summed afterwards.
        spread = [each[:, :1].expand(-1, q.shape[1], -1, -1) for each in (k, v)]
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dq, *each_head = _OPS.flash_attn_backward(grads[0], q, *spread, lse, ctx.keys)
        del sums, each_head
        return dq, dk, dv, None, None


class _OnCpu(torch.autograd.Function):
    """`models.attention.document_attention`, which keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: int) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.keys = keys
        return _OPS.flash_attn(q, k, v, keys)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        return *_OPS.flash_attn_backward(grads[0], q, k, v, q, ctx.keys), None


class _Grouped(torch.autograd.Function):
    """`torch.nn.functional.grouped_mm`, which fake tensors know in bf16 only: rows (S, K) dealt to (E, K, N)."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _OPS.grouped_mm(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        to_a = _OPS.grouped_mm_input(grads[0], b.transpose(-2, -1)) if ctx.needs_input_grad[0] else None
        to_b = _OPS.grouped_mm_sums(a, grads[0], b) if ctx.needs_input_grad[1] else None
        return to_a, to_b


def _flash_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """(batch, heads, positions, head size) each; returns (batch, positions, heads, head size) and no weights."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    out = _Flash.apply(query.to(dtype), key.to(dtype), value.to(dtype))
    return out.transpose(1, 2), None


def _of_chunks(setting: Setting) -> Any:
    """Attention of a part of a row to keys and values that are gathered, by the code that a training runs.

    Rows that are traced side by side stand for documents, so a query meets the keys of its row alone. Of the two chunks
    the first sees the least that a process's does, the other all: so it is where a document is as long as the row.
    """

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, keys: int, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        if setting.device == "cpu":
            return _OnCpu.apply(query, key, value, keys).transpose(1, 2), None
        return _Flash.apply(query, key, value, None, keys).transpose(1, 2), None

    gathered = context_parallel.gather(attend)

    def of_rows(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        batch, _, length, _ = query.shape
        one = [each.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for each in (query, key, value)]
        half, rest = batch * length // 2, batch * length - batch * length // 2
        chunks = [
            {"tokens": half, "first": 0, "end": half},
            {"tokens": rest, "first": 0, "end": setting.context * batch * length},
        ]
        out, _ = gathered(module, *one, mask, row_chunks=chunks, keys=length)
        return out.unflatten(1, (batch, length))[0], None

    return of_rows


def implementation(setting: Setting) -> str:
    """Transformers' name of the attention to trace."""
    if setting.attention in backends.VARLEN or setting.attention == "flex":
        AttentionInterface.register(FLASH, _flash_attention if setting.context == 1 else _of_chunks(setting))
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(FLASH, lambda *args, **kwargs: None)
        return FLASH
    return backends.IMPLEMENTATIONS[setting.attention]


@contextlib.contextmanager
def installed(setting: Setting) -> Iterator[None]:
    """Puts the stand-ins in place while a model is traced."""
    functional = torch.nn.functional
    experts.autocast_grouped_products()
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (functional, {"grouped_mm": lambda a, b, **kwargs: _Grouped.apply(a, b)}),
        (stored.Product, {"forward": staticmethod(_recorded(stored.Product.forward))}),
    ]
    if setting.context > 1:
        replaced.append((context_parallel, {"sharing": lambda: setting.context}))
    if setting.method.get("use_dora"):
        dequantized = functools.partial(_dequantized, dtype=getattr(torch, setting.autocast or setting.local))
        replaced.append((dora, {"dequantize_module_weight": dequantized}))
    # Whatever a run in this process has put there. Where kernels are told where documents end it looks for none, which
    # saves a few small operations.
    finds = inspect.unwrap(masking_utils.find_packed_sequence_indices)
    alone = setting.layout == "padded" and not setting.masked
    replaced.append((masking_utils, {"find_packed_sequence_indices": _one_document if alone else finds}))
    if setting.objective == "seq2seq":
        replaced.append((masking_utils, {"_ignore_causal_mask_sdpa": _without_padding}))
    if setting.device == "cuda":
        replaced += [
            # Triton kernels work on logits in place; elsewhere torch makes copies.
            (chunked_logprob, {"_forward_tile": _tile, "_backward_tile": _tile, "_addmm_fp32": _OPS.add_product_}),
            (fused_head, {"_is_cpu": lambda place: False}),
            (modeling_utils, {"save_on_cpu": _SaveOnHost}),
            (functional, {"scaled_dot_product_attention": _scaled_dot_product_attention, "dropout": _dropout}),
        ]
        # Autocast as CUDA does it. A mode of torch would not be active where the backward pass computes a layer a
        # second time.
        for owner in (torch, torch.Tensor, functional):
            replaced.append((owner, {name: _in_fp32(getattr(owner, name)) for name in _FP32 if hasattr(owner, name)}))
    else:
        replaced.append((functional, {"dropout": dropout.dropout}))
    with contextlib.ExitStack() as stack:
        for owner, functions in replaced:
            stack.enter_context(patch.multiple(owner, **functions))
        yield


def _without_padding(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
    """Decoders behind an encoder make themselves a mask of ones, which real numbers show to hide nothing."""
    return _ignore_causal_mask(None, *args, **kwargs)


def _one_document(position_ids: torch.Tensor) -> None:
    """Without numbers Transformers takes positions for those of several documents, and masks them."""


def _dequantized(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """PEFT's `dequantize_module_weight`, which asks for bitsandbytes' own parameters, with their scales.

    Args:
        dtype: What the weight was quantized from.
    """
    weight = module.weight
    if isinstance(weight, bnb.nn.Params4bit | bnb.nn.Int8Params):
        # Not made yet: adapters take their shape from it.
        return torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if getattr(weight, "bnb_quantized", False):
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    if hasattr(module, "state"):
        return bnb.functional.int8_vectorwise_dequant(weight.data, module.state.SCB)
    return weight


def _recorded(forward: Any) -> Any:
    """The forward pass of a custom function where the tracker knows it for one when a backward pass repeats it."""

    @functools.wraps(forward)
    def recorded(ctx: Any, input: torch.Tensor, *args: Any) -> torch.Tensor:
        with torch.enable_grad():
            return forward(ctx, input.detach(), *args).detach()

    return recorded


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """GPUs keep a byte for every element; torch's own of CPUs the factors, in the type of the input.

    Source: `is_fused_kernel_acceptable` in ATen/native/Dropout.cpp.
    """
    return torch.native_dropout(input, p, training)[0] if training and 0 < p < 1 else input


def _tile(tile: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    _OPS.in_place_(tile)


class _SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
    """`save_on_cpu`, where everything is on a CPU: what is kept on the host takes no room on the device."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(lambda tensor: (tensor.shape, tensor.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1]))


_FP32 = (
    *("layer_norm", "group_norm", "softmax", "log_softmax", "pow", "__pow__", "rsqrt", "reciprocal", "norm", "sum"),
    *("prod", "cumsum", "exp", "log", "softplus", "cross_entropy", "nll_loss", "mse_loss"),
)
"""Operations that CUDA's autocast runs in fp32 and the CPU's does not.

Source: https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32.
"""


_FP32_INSIDE = ("sum", "prod", "cumsum")
"""Those of them that convert while they read, without a copy (`AT_FORALL_FP32_SET_OPT_DTYPE` in ATen/autocast_mode.h).
Softmax, which is there too, makes one of bf16."""


def _in_fp32(function: Any) -> Any:
    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu") and function.__name__ in _FP32_INSIDE:
            low = isinstance(args[0], torch.Tensor) and args[0].dtype in (torch.float16, torch.bfloat16)
            return function(*args, **({"dtype": torch.float32} | kwargs if low else kwargs))
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_fp32, (args, kwargs))
        return function(*args, **kwargs)

    return cast


def _fp32(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if low else value


def _scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # The memory-efficient kernel adds the mask to the scores, in their type.
        attn_mask = attn_mask.to(dtype)
    return _Flash.apply(query.to(dtype), key.to(dtype), value.to(dtype), attn_mask)


def quantized(module: Any, parameter: torch.nn.Parameter, types: Dtypes) -> torch.nn.Parameter | None:
    """A fake quantized weight as it is kept; None for a parameter that is not quantized.

    Quantizing itself needs numbers, so the stored form is made directly: 4-bit pairs with a scale for every 64 weights
    (which nested quantization stores in 8 bits, with a scale for every 256 of them), or bytes with a scale per row;
    `models.quantization.stored` makes its own.
    Source: https://arxiv.org/abs/2305.14314, section 3.
    """
    if isinstance(parameter, bnb.nn.Params4bit):
        blocks = -(-parameter.numel() // _NF4_BLOCK)
        state2 = None
        if parameter.compress_statistics:
            scales = torch.empty(-(-blocks // _NF4_NESTED_BLOCK), dtype=torch.float32)
            state2 = QuantState(absmax=scales, code=torch.empty(256), blocksize=_NF4_NESTED_BLOCK, dtype=torch.float32)
        state = QuantState(
            absmax=torch.empty(blocks, dtype=torch.float32 if state2 is None else torch.uint8),
            shape=parameter.shape,
            dtype=getattr(torch, types.compute),
            blocksize=_NF4_BLOCK,
            code=torch.empty(16),
            quant_type="nf4",
            offset=None if state2 is None else torch.empty(()),
            state2=state2,
        )
        storage = parameter.quant_storage
        count = -(-parameter.numel() // (2 * storage.itemsize))
        made = torch.nn.Parameter(torch.empty((count, 1), dtype=storage), requires_grad=False)
        made.quant_state = module.quant_state = state  # type: ignore[attr-defined]
        made.bnb_quantized = True  # type: ignore[attr-defined]
        return made
    if isinstance(parameter, bnb.nn.Int8Params):
        module.state.CB = torch.empty(parameter.shape, dtype=torch.int8)
        module.state.SCB = torch.empty(parameter.shape[0], dtype=torch.float32)
        # Which inputs are too large for 8 bits depends on the numbers; without a threshold none are set apart.
        module.state.threshold = 0.0
        made = torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.int8), requires_grad=False)
        made.CB = made.SCB = None  # type: ignore[attr-defined]
        return made
    if isinstance(parameter, stored.StoredWeight):
        return stored.stored_empty(parameter, getattr(torch, types.compute))
    return None
