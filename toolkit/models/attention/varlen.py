"""Attention over documents of any length: torch's kernels, ours on CPUs, or a package of FlashAttention 3 or 4.

torch's are FlashAttention 2, which was written for Ampere. Those for Hopper and Blackwell are packages, in versions
whose interfaces differ: torch 2.13 has a bridge to the fourth that expects two results of a function which returns five
in 4.0.0b36. Both are called here by what their versions have in common, as one operation, so that graphs of compiled
layers stay whole; `varlen_trials` finds out which of them can be trusted.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from toolkit.models.attention.document_attention import document_attention

PACKAGES = {"FlashAttention 3": "flash_attn_interface", "FlashAttention 4": "flash_attn.cute.interface"}
OWN = ""
"""No package: torch's kernels, and ours on CPUs."""

_used = OWN


def installed() -> list[str]:
    """Names of the packages that are there; whether they work is not known."""
    return [name for name in PACKAGES if file_of(name)]


def file_of(package: str) -> Path | None:
    """The file of a package's functions, if it is there; nothing is imported for it, which may take seconds."""
    top, *inner = PACKAGES[package].split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not inner:
        return Path(spec.origin) if spec and spec.origin else None
    files = (Path(place, *inner).with_suffix(".py") for place in spec.submodule_search_locations or ())
    return next((each for each in files if each.is_file()), None)


def use(package: str) -> None:
    """Has `torch_varlen` computed by a package in this process, or without one (`OWN`)."""
    global _used
    _used = package


def used() -> str:
    """The package that computes `torch_varlen` in this process, or `OWN`."""
    return _used


def attended(
    package: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float,
    window: int,
) -> torch.Tensor:
    """Causal attention of documents that lie end to end.

    Args:
        package: A name of `PACKAGES`, or `OWN`.
        query: (tokens, heads, size).
        key: (tokens, shared heads, size), and so value.
        boundaries: (documents + 1,) int32, cumulative lengths of queries and of keys.
        longest: Tokens of the longest document, of queries and of keys.
        scale: Of the scores.
        window: Tokens a query may look back to, itself included; 0 for all.

    Returns:
        (tokens, heads, size).
    """
    if package:
        return flash_attention(query, key, value, *boundaries, *longest, scale, window, package)[0]
    compute = _on_cpu if query.device.type == "cpu" else _on_gpu
    return compute(query, key, value, boundaries, longest, scale, window)


def continues(where: torch.device, dtype: torch.dtype) -> bool:
    """Whether the last queries of a document get by themselves, from all of its keys, what they get beside the others:
    a kernel may take the first of them for that of the first key, or refuse fewer queries than keys. A package is used
    only where it computes what torch's kernels do, of such documents, too, so that these are asked: a package's would
    be compiled for it.

    Args:
        where: The device that computes.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(32, heads, 64, generator=generator) for heads in (4, 2, 2))
    query, key, value = (each.to(where, dtype) for each in drawn)
    whole, last = (torch.tensor([0, count], dtype=torch.int32, device=where) for count in (32, 8))
    try:
        expected = attended(OWN, query, key, value, (whole, whole), (32, 32), 1 / 8, 0)[-8:].float()
        found = attended(OWN, query[-8:], key, value, (last, whole), (8, 32), 1 / 8, 0).float()
    except (RuntimeError, ValueError, TypeError):
        return False
    return bool((found - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm())


def _on_gpu(
    query: Any, key: Any, value: Any, boundaries: tuple[Any, Any], longest: tuple[int, int], scale: float, window: int
) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    # Heads may share keys and values in every version; from torch 2.12 on this has to be said.
    shared: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if torch.__version__ >= "2.12" else {}
    return varlen_attn(query, key, value, *boundaries, *longest, scale=scale, window_size=(window - 1, 0), **shared)


def _on_cpu(
    query: Any, key: Any, value: Any, boundaries: tuple[Any, Any], longest: tuple[int, int], scale: float, window: int
) -> Any:
    heads = (each.transpose(0, 1) for each in (query, key, value))
    return document_attention(*heads, *boundaries, scale, window)


@torch.library.custom_op("toolkit::flash_attention", mutates_args=())
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: int,
    longest_key: int,
    scale: float,
    window: int,
    package: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attended`; returns the logarithms of the sums of weights, (heads, tokens) in fp32, too."""
    query, key, value = map(_with_rows, (query, key, value))
    lengths = _lengths(ends, key_ends, longest, longest_key)
    if package == "FlashAttention 3":
        sides = {"window_size_left": window - 1, "window_size_right": 0}
        causal = {"softmax_scale": scale, "is_causal": not window}
        found = _third().fwd(query, key, value, **lengths, **causal, **sides, num_splits=1)
    else:
        found = _fourth()._flash_attn_fwd(query, key, value, **lengths, **_masked(scale, window), return_lse=True)
    return found[0], found[1].contiguous()


@torch.library.custom_op("toolkit::flash_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: int,
    longest_key: int,
    scale: float,
    window: int,
    package: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, from that of the result."""
    gradient, query, key, value, out = map(_with_rows, (gradient, query, key, value, out))
    same = torch.are_deterministic_algorithms_enabled()
    if package == "FlashAttention 3":
        into = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        lengths = (ends, key_ends, None, None, longest, longest_key)
        _third().bwd(
            gradient, query, key, value, out, sums, *into, *lengths, scale, not window, window - 1, 0, 0.0, same
        )  # fmt: skip
        return into
    found = _fourth()._flash_attn_bwd(
        *(query, key, value, out, gradient, sums), **_lengths(ends, key_ends, longest, longest_key),
        **_masked(scale, window), deterministic=same,
    )  # fmt: skip
    return found[0], found[1], found[2]


@flash_attention.register_fake
def _(query: Any, key: Any, value: Any, *args: Any) -> Any:
    sums = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return query.new_empty(*query.shape[:2], value.shape[2]), sums


@_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, *args: Any) -> Any:
    return tuple(torch.empty_like(_with_rows(each)) for each in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    query, key, value, ends, key_ends, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, ends, key_ends)


def _gradients(ctx: Any, gradient: torch.Tensor, of_sums: Any) -> tuple[Any, ...]:
    return *_backward(gradient, *ctx.saved_tensors, *ctx.rest), *[None] * 7


flash_attention.register_autograd(_gradients, setup_context=_keep)


@torch.library.custom_op("toolkit::taken", mutates_args=())
def taken(each: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(places, heads, size) of (tokens, heads, size): keys or values of which documents share some. Gradients of one
    token are added in fp32."""
    return each.index_select(0, places)


@torch.library.custom_op("toolkit::taken_backward", mutates_args=())
def _put_back(gradient: torch.Tensor, places: torch.Tensor, tokens: int) -> torch.Tensor:
    total = torch.zeros(tokens, *gradient.shape[1:], dtype=torch.float32, device=gradient.device)
    return total.index_add_(0, places, gradient.float()).to(gradient.dtype)


@taken.register_fake
def _(each: Any, places: Any) -> Any:
    return each.new_empty(places.shape[0], *each.shape[1:])


@_put_back.register_fake
def _(gradient: Any, places: Any, tokens: int) -> Any:
    return gradient.new_empty(tokens, *gradient.shape[1:])


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    each, places = inputs
    ctx.tokens = each.shape[0]
    ctx.save_for_backward(places)


taken.register_autograd(
    lambda ctx, gradient: (_put_back(gradient, *ctx.saved_tensors, ctx.tokens), None), setup_context=_keep_places
)


def _with_rows(each: torch.Tensor) -> torch.Tensor:
    """The kernels read heads whose numbers lie side by side."""
    return each if each.stride(-1) == 1 else each.contiguous()


def _lengths(ends: Any, key_ends: Any, longest: int, longest_key: int) -> dict[str, Any]:
    return {"cu_seqlens_q": ends, "cu_seqlens_k": key_ends, "max_seqlen_q": longest, "max_seqlen_k": longest_key}


def _masked(scale: float, window: int) -> dict[str, Any]:
    """The fourth's arguments for scores."""
    sides = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    return {"softmax_scale": scale, "causal": not window, **sides}


def _third() -> Any:
    importlib.import_module(PACKAGES["FlashAttention 3"])
    return torch.ops.flash_attn_3


def _fourth() -> Any:
    return importlib.import_module(PACKAGES["FlashAttention 4"])
