"""Packages of FlashAttention 3 and 4, with their interfaces, that compute on a CPU.

`place` writes them into a folder for `PYTHONPATH`. `$FLASH_STAND_IN` says what is wrong with them: `dropped` (the last
document's keys), `flipped` (a gradient), `raises`, `memory`, `context`, `missing`,
`killed`, or `chatty` (as it ends).
"""

from __future__ import annotations

import atexit
import os
import signal
from pathlib import Path
from typing import Any

import torch

from toolkit.models.attention.document_attention import _backward, document_attention

PLACES = {"FlashAttention 3": "flash_attn_interface.py", "FlashAttention 4": "flash_attn/cute/interface.py"}
SOURCES = {
    "FlashAttention 3": "from flash_stand_ins import third\nthird()\n",
    "FlashAttention 4": "from flash_stand_ins import _flash_attn_bwd, _flash_attn_fwd\n",
}
_libraries: list[torch.library.Library] = []


def place(folder: Path, *packages: str) -> Path:
    """Writes packages into a folder."""
    for name in packages:
        file = folder / PLACES[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SOURCES[name])
    return folder


def _heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.cpu().transpose(0, 1) for each in tensors]


def _window(causal: bool, left: int | None, right: int | None) -> int:
    assert (left in (None, -1) and right in (None, 0)) if causal else (left is not None and left >= 0 == right)
    return 0 if causal else 1 + (left or 0)


def _forward(
    query: Any, key: Any, value: Any, ends: Any, key_ends: Any, longest: int, longest_key: int, scale: float,
    causal: bool, left: int | None, right: int | None,
) -> tuple[Any, Any]:  # fmt: skip
    fault = os.environ.get("FLASH_STAND_IN")
    if fault == "raises":
        raise RuntimeError("no kernel image is available\nfor execution on the device")
    if fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if fault == "context":
        raise torch.AcceleratorError("CUDA error: out of memory")
    if fault == "missing":
        raise ModuleNotFoundError("No module named 'cutlass'")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "chatty":
        atexit.register(print, "cleaned up")
    assert ends.dtype == key_ends.dtype == torch.int32 and query.dtype in (torch.bfloat16, torch.float16)
    assert longest == int(ends.diff().max()) and longest_key == int(key_ends.diff().max())
    bounds = [ends.cpu(), key_ends.cpu()]
    if fault == "dropped":
        bounds[1][-1] = bounds[1][-2] + bounds[0].diff()[-1]
    out = document_attention(*_heads(query, key, value), *bounds, scale, _window(causal, left, right))
    return out.to(query.device), torch.zeros(query.shape[1], len(query), device=query.device)


def _gradients(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, ends: Any, key_ends: Any, scale: float,
    causal: bool, left: int | None, right: int | None,
) -> list[Any]:  # fmt: skip
    assert out.shape == gradient.shape == query.shape and sums.shape == (query.shape[1], len(query))
    window = _window(causal, left, right)
    found = _backward(gradient.cpu(), *_heads(query, key, value), ends.cpu(), key_ends.cpu(), scale, window)
    if os.environ.get("FLASH_STAND_IN") == "flipped":
        found[1].neg_()
    return [each.transpose(0, 1).to(query.device) for each in found]


def third() -> None:
    """Defines the third's operations; their arguments stand in this order in hopper/flash_api.cpp."""
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        return
    library = torch.library.Library("flash_attn_3", "DEF")
    ends = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
    sides = "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1"
    longest = "int? max_seqlen_q=None, int? max_seqlen_k=None"
    library.define(
        f"fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v=None, {ends}, Tensor? seqused_q=None, {longest}, {sides}, "
        "float softcap=0.0, int num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
        f"Tensor(b!)? dk=None, Tensor(c!)? dv=None, {ends}, Tensor? seqused_q=None, Tensor? seqused_k=None, {longest}, "
        f"{sides}, float softcap=0.0, bool deterministic=False, int sm_margin=0) -> Tensor"
    )
    library.impl("fwd", _third_forward, "CompositeExplicitAutograd")
    library.impl("bwd", _third_backward, "CompositeExplicitAutograd")
    _libraries.append(library)


def _third_forward(
    q: Any, k: Any, v: Any, q_v: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, softmax_scale: Any = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, num_splits: int = 0,
) -> Any:  # fmt: skip
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    found = _forward(q, k, v, *ends, *longest, softmax_scale, is_causal, window_size_left, window_size_right)
    return *found, q.new_empty(0), q.new_empty(0)


def _third_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, softmax_scale: Any,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Any:  # fmt: skip
    assert seqused_q is seqused_k is None and not softcap
    ends, sides = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
    for into, each in zip(
        (dq, dk, dv), _gradients(dout, q, k, v, out, softmax_lse, *ends, softmax_scale, is_causal, *sides), strict=True
    ):
        into.copy_(each)
    return softmax_lse.clone()


def _flash_attn_fwd(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, causal: bool, window_size_left: int | None = None, window_size_right: int | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """The fourth's."""
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    found = _forward(q, k, v, *ends, *longest, softmax_scale, causal, window_size_left, window_size_right)
    assert return_lse
    return *found, None, None, None


def _flash_attn_bwd(
    q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size_left: int | None = None,
    window_size_right: int | None = None, deterministic: bool = False,
) -> Any:  # fmt: skip
    ends, sides = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
    return tuple(_gradients(dout, q, k, v, out, lse, *ends, softmax_scale, causal, *sides))
