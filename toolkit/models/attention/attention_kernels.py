"""Attention kernels: which ones run on this device, and attention over documents of any length for Transformers.

`torch_varlen` registers `torch.nn.attention.varlen` with Transformers. The kernels are part of the torch wheel, so
packed training is fast without building flash-attn. On a CPU, for which torch has none, `document_attention` does the
same. The collator supplies `cu_seq_lens_*` as tensors and
`max_length_*` as host integers; a tensor there would synchronise the device in every layer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub import constants
from torch.utils.checkpoint import CheckpointPolicy

from toolkit.models import device
from toolkit.models.attention import backends, varlen
from toolkit.recipe import Recipe

_log = logging.getLogger(__name__)
_SMALL_BLOCKS = {
    **{"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 4},
    **dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 32),
    **{"bwd_num_stages": 2, "bwd_num_warps": 4},
}
"""Flex attention's for heads wider than 128 on cards that give a kernel 99 KiB of shared memory. Compiled for compute
capability 8.6 and heads of 256, torch's own take 148 KiB forward and 133 backward, so that there are "no valid triton
configs" (pytorch issues 180278 and 198224), and these 84 and 68. Forward they are torch's for 12.0, backward those that
were measured to be right and fast there (pytorch pull 198228)."""
_FLASH_MODULES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}


def available(compute: str = "bfloat16") -> dict[str, str]:
    """Every backend with `ok`, or the reason why it does not run on this machine in a dtype."""
    reasons = backends.on_device(device.kind(), device.capability(), compute)
    if not torch.cuda.is_available():
        return reasons | dict.fromkeys(_FLASH_MODULES, "needs a GPU")
    for name, module in _FLASH_MODULES.items():
        there = _imports(module) or hub_build(name)
        lacks = f"{module} does not import, and no build of it from kernels-community is in the hub's cache"
        reasons[name] = backends.in_16_bits(compute) or ("ok" if there else lacks)
    return reasons


def hub_build(backend: str) -> str:
    """The repository on the hub whose build of FlashAttention Transformers takes where a backend's package is missing.

    Empty where the package is there, `kernels` is not, or the build for this machine is not in the hub's cache: what a
    run computes with is not downloaded in its midst, nor because a server answers.
    """
    from transformers.integrations.hub_kernels import load_and_register_attn_kernel
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK
    from transformers.utils import is_kernels_available

    if backend not in _FLASH_MODULES or _imports(_FLASH_MODULES[backend]) or not is_kernels_available():
        return ""
    try:
        with _from_cache():
            load_and_register_attn_kernel(FLASH_ATTN_KERNEL_FALLBACK[backend])
    except Exception as error:
        # A build for other versions of torch or CUDA raises anything on its shared library.
        _log.debug("%s: %s", FLASH_ATTN_KERNEL_FALLBACK[backend], error)
        return ""
    return FLASH_ATTN_KERNEL_FALLBACK[backend]


def implementation(backend: str) -> str:
    """What Transformers calls a backend here; a build from the hub is loaded for it, from the hub's cache.

    Args:
        backend: A key of `attention.IMPLEMENTATIONS` that `available` calls ok.
    """
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    repository = hub_build(backend)
    if not repository:
        return backends.IMPLEMENTATIONS[backend]
    # Transformers asks the hub for it once more, but only where another one was loaded last.
    with _from_cache():
        lazy_import_flash_attention(repository)
    return repository


@contextmanager
def _from_cache() -> Iterator[None]:
    """While this lasts, what is on the hub is taken from its cache, and the hub is not asked."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def prepare(backend: str, recipe: Recipe) -> None:
    """Has Transformers compute attention as a backend is meant to on this device, of rows as they are in a recipe.

    Args:
        backend: A key of `attention.IMPLEMENTATIONS`.
    """
    if backend == "torch_varlen":
        register()
    if backend == "flex":
        fit_flex(device.capability())
    find_documents(by_positions=recipe.data.packing and backend not in backends.VARLEN)
    trust_masks(recipe.objective == "seq2seq")
    if torch.cuda.is_available():
        repeat_shared_heads(device.capability())


def register() -> None:
    """Makes `attn_implementation="torch_varlen"` known to Transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    AttentionInterface.register("torch_varlen", varlen_attention)
    # Boundaries of documents travel in cu_seq_lens, so there is a mask only where somebody else pads rows.
    ALL_MASK_ATTENTION_FUNCTIONS.register("torch_varlen", flash_attention_mask)


def find_documents(by_positions: bool) -> None:
    """Whether Transformers looks for documents in the positions of rows that have no mask.

    Kernels that are told lengths have no use for what it finds, and in rows of one document there is nothing to find;
    but to learn that the host waits for the device, in every micro-batch.
    """
    from transformers import masking_utils

    finds = inspect.unwrap(masking_utils.find_packed_sequence_indices)

    @functools.wraps(finds)
    def found(position_ids: torch.Tensor) -> torch.Tensor | None:
        return finds(position_ids) if by_positions else None

    masking_utils.find_packed_sequence_indices = found


def trust_masks(encoder_decoder: bool) -> None:
    """Has Transformers take it that something is padded where a batch has a mask, and nothing where it has none.

    Else the host waits for the device, in every micro-batch: it looks into the masks of `sdpa`, without which torch's
    faster kernels run, and into rows without a mask, to warn of padding. Decoders behind an encoder make themselves a
    mask, which hides nothing: what their targets are filled up with comes last.
    """
    from transformers import PreTrainedModel, masking_utils

    model: Any = PreTrainedModel
    model.warn_if_padding_and_no_attention_mask = lambda model, input_ids, attention_mask: None
    for name, own_mask in (("_ignore_causal_mask_sdpa", encoder_decoder), ("_ignore_bidirectional_mask_sdpa", False)):
        looks = inspect.unwrap(getattr(masking_utils, name))

        @functools.wraps(looks)
        def hides_nothing(mask: Any, *args: Any, _looks: Any = looks, _own: bool = own_mask, **kwargs: Any) -> bool:
            if mask is not None and mask.is_cuda:
                return _own and _looks(None, *args, **kwargs)
            return bool(_looks(mask, *args, **kwargs))

        setattr(masking_utils, name, hides_nothing)


def fit_flex(capability: str | None) -> None:
    """Has flex attention take blocks that fit into the shared memory of GPUs of a compute capability.

    That is 99 KiB for 8.6, 8.9 and 12 (GeForce from RTX 30 on, workstations, A10, L4, L40), 163 and more for others
    (CUDA C++ Programming Guide, technical specifications per compute capability).
    """
    from transformers import AttentionInterface
    from transformers.integrations.flex_attention import flex_attention_forward

    little = capability is not None and (capability in ("8.6", "8.9") or capability.startswith("12."))

    def fitted(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        wide = little and query.shape[-1] > 128
        return flex_attention_forward(module, query, *args, **kwargs, kernel_options=_SMALL_BLOCKS if wide else None)

    AttentionInterface.register("flex_attention", fitted)


def repeat_shared_heads(capability: str | None) -> None:
    """Has Transformers repeat keys and values that heads share, where no fused kernel takes them as they are.

    FlashAttention does, in 16 bits and from compute capability 8.0 on. Elsewhere torch would silently compute all
    scores of a layer at once, in memory that grows with the square of the length
    (`check_batch_size_and_num_heads_dense` in ATen/native/transformers/sdp_utils_cpp.h; transformers issue 48633).

    Args:
        capability: See `device.capability`; of AMD's GPUs there is none, and repeating is never wrong.
    """
    from transformers.integrations import sdpa_attention

    takes = inspect.unwrap(sdpa_attention.use_gqa_in_sdpa)

    @functools.wraps(takes)
    def shares(attention_mask: Any, key: Any, value: Any) -> bool:
        where = key.device.type
        dtype = torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) else key.dtype
        flash = float(capability or 0) >= 8 and dtype in (torch.float16, torch.bfloat16)
        return flash and bool(takes(attention_mask, key, value))

    sdpa_attention.use_gqa_in_sdpa = shares


def varlen_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_places: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Causal attention within documents, through torch's variable-length FlashAttention where it runs.

    Args:
        query: (batch, num_heads, tokens, head_dim); key and value may have fewer heads.
        attention_mask: (batch, tokens) where rows are padded, which is refused.
        sliding_window: Tokens a query may look back to, itself included.
        cu_seq_lens_q: (documents + 1,) int32, cumulative lengths of one row; without them rows are documents.
        cu_seq_lens_k: Those of the keys, where they differ; a document's queries are then those of its last tokens.
        max_length_q: Longest document, a host integer.
        max_length_k: The same of the keys.
        key_places: (sum of the keys' lengths,) where in the row the keys of each document are, where some are of
            several; see `collate.Collator`.

    Returns:
        (batch, tokens, num_heads, head_dim), and no attention weights.
    """
    batch, _, tokens, size = query.shape
    if dropout:
        raise ValueError("torch_varlen attention has no dropout; set attention_dropout to 0 or use sdpa")
    if cu_seq_lens_q is None:
        if attention_mask is not None or key.shape[2] != tokens:
            raise ValueError("torch_varlen attention takes cu_seq_lens, no padding and no cache; use sdpa for these")
        cu_seq_lens_q = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=query.device)
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in to_compute(query, key, value))
    if key_places is not None:
        k, v = (varlen.taken(each, key_places) for each in (k, v))
    scale = size**-0.5 if scaling is None else scaling
    boundaries = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
    longest = (max_length_q or tokens, max_length_k or max_length_q or tokens)
    out = varlen.attended(varlen.used(), q, k, v, boundaries, longest, scale, sliding_window or 0)
    return out.view(batch, tokens, *out.shape[1:]), None


def to_compute(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """In the dtype that attention computes in.

    Rotary embeddings and norms of queries and keys with fp32 masters give fp32 under autocast; kernels take 16 bits.
    """
    where = query.device.type
    dtype = torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _imports(module: str) -> bool:
    try:
        # The fourth's package alone makes `flash_attn` a module, too, and an empty one.
        return hasattr(importlib.import_module(module), "flash_attn_varlen_func")
    except Exception:
        # A broken build of flash-attn raises anything from ImportError to OSError on its shared library.
        return False


def keep_attention(model: Any) -> None:
    """Makes selective activation checkpointing keep the outputs of attention, once it is switched on.

    TRL knows the kernels of `scaled_dot_product_attention` and of flash-attn by name, but not those of `torch_varlen`,
    which would be computed twice. Nor does it ask whether a kernel drops out attention weights. One that does is
    computed again: kept, it would draw no random numbers in the backward pass, and what drops out behind it would draw
    others than it did in the forward pass.
    """
    import torch.nn.attention.varlen
    from trl.models import selective_activation_checkpointing as selective

    chooses = selective._build_policy_fn
    own = (torch.ops.toolkit.document_attention.default, torch.ops.toolkit.flash_attention.default)
    ours = {torch.ops.torch_attn._varlen_attn.default, *own}
    selective._build_policy_fn = lambda aten_attention_ops: _unless_it_drops(chooses(aten_attention_ops | ours))
    try:
        selective.enable_selective_activation_checkpointing(model)
    finally:
        selective._build_policy_fn = chooses


def _unless_it_drops(choose: Callable[..., CheckpointPolicy]) -> Callable[..., CheckpointPolicy]:
    """TRL's choice of what is kept, less attention with dropout."""

    def chosen(context: Any, kernel: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        choice = choose(context, kernel, *args, **kwargs)
        if choice is not CheckpointPolicy.MUST_SAVE:
            return choice
        names = (each.name for each in kernel._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        drops = any(value for name, value in given.items() if "dropout" in name)
        return CheckpointPolicy.PREFER_RECOMPUTE if drops else choice

    return chosen
