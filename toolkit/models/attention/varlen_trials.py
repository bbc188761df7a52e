"""Whether a run computes attention by FlashAttention 3 or 4, where their packages are installed: by trying them.

A run takes one where its results and gradients are those of torch's kernels, on this very GPU and for heads like the
model's, and where that saves more time than the first call takes, which may compile. A package is tried in a process of
its own, because a kernel that fails may take the process with it, and once: what came of it is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit import cache, own_process
from toolkit.common import in_a_line
from toolkit.models.attention.varlen import OWN, attended, file_of
from toolkit.recipe.model_configs import attention_widths, text_config

_log = logging.getLogger(__name__)
_TOKENS, _NUMBERS = 2**14, 2**26
"""What a micro-batch of documents that is timed has at most: tokens, and numbers of its queries."""
_WORTH = 60.0
"""Seconds of attention in a run that are worth trying others for: that takes as long, the first time."""
_GAIN = 1.05
"""How much faster others must be: less may be chance."""
_LIMIT_SECONDS = 600.0
_PASSING = (torch.OutOfMemoryError, torch.AcceleratorError, ImportError, OSError)
"""Errors that need not come back: of a GPU that others use, and of what may be installed by the next time."""


@dataclass(frozen=True)
class Documents:
    """A run's attention, as far as the speed of kernels depends on it.

    Args:
        heads: Of queries, in one process.
        shared_heads: Of keys and values, in one process.
        size: Numbers of a head.
        length: Tokens of a document.
        window: Tokens a query may look back to, in some layers; 0 for all.
        dtype: That of the computation, e.g. `bfloat16`.
    """

    heads: int
    shared_heads: int
    size: int
    length: int
    window: int
    dtype: str


@dataclass(frozen=True)
class Trial:
    """What came of trying a package.

    Args:
        seconds: Of a forward and a backward pass.
        own: The same with torch's kernels.
        first: Of the first call, which may compile.
        fault: What is wrong with it; empty if nothing is.
        lasting: Whether it would be the same another time.
    """

    seconds: float = 0.0
    own: float = 0.0
    first: float = 0.0
    fault: str = ""
    lasting: bool = True


def documents_of(config: Mapping[str, Any], divided: int, length: float, dtype: str) -> Documents | None:
    """The attention of a model; None where its layers' heads differ.

    Args:
        config: The model's.
        divided: Processes among which heads are divided.
        length: Tokens of a document, by which tokens attend.
        dtype: See `Documents`.
    """
    text, (heads, shared, size) = text_config(config), attention_widths(config)
    sizes = {value for key, value in text.items() if key.endswith("head_dim") and isinstance(value, int)}
    if not size or len(sizes) > 1:
        return None
    window = text.get("sliding_window")
    return Documents(
        heads=max(1, heads // divided),
        shared_heads=max(1, shared // divided),
        size=size,
        # To a kernel other data like this is the same.
        length=2 ** max(4, round(math.log2(max(length, 1.0)))),
        window=window if isinstance(window, int) else 0,
        dtype=dtype,
    )


def choose(documents: Documents, calls: float, where: torch.device, packages: Sequence[str]) -> tuple[str, str]:
    """The package that a run is to compute with, and what to say of it.

    Args:
        calls: How often attention is computed on one process, forward and backward.
        where: The GPU.
        packages: See `installed`.

    Returns:
        `OWN` for torch's kernels; nothing is said where nothing was tried.
    """
    if not packages:
        return OWN, ""
    try:
        takes = _measured(OWN, documents, where) * calls
    except RuntimeError as error:  # Where there is no room for it, training will say so.
        _log.debug("attention is not timed: %s", in_a_line(error))
        return OWN, ""
    torch.cuda.empty_cache()  # The model needs it in one piece.
    if takes < _WORTH:
        _log.debug("attention takes %.0f s of this run: no other kernels are tried", takes)
        return OWN, ""
    trials = _trials(documents, where, packages)
    said = [f"{name} is not used: {each.fault}" for name, each in trials.items() if each.fault]
    usable = [name for name, each in trials.items() if not each.fault]
    if usable:
        best = min(usable, key=lambda name: trials[name].seconds / trials[name].own)
        found = trials[best]
        ratio = found.own / found.seconds
        about = f"{ratio:.2f} times as fast as torch's own kernels for documents of {documents.length:,} tokens"
        if ratio >= _GAIN and takes * (1 - 1 / ratio) > found.first:
            return best, f"{best} computes attention, measured {about} on this GPU"
        said.append(f"{best} is not used: measured {about}, after {found.first:.0f} s of its first call")
    return OWN, "; ".join(said)


def _trials(documents: Documents, where: torch.device, packages: Sequence[str]) -> dict[str, Trial]:
    """What came of trying packages, now or before with the same versions."""
    dates = [file.stat().st_mtime_ns for name in packages if (file := file_of(name))]
    what = [dataclasses.asdict(documents), torch.cuda.get_device_name(where), torch.__version__, *packages, *dates]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]
    path = cache.cache_dir() / "attention" / f"{name}.json"
    try:
        return {name: Trial(**each) for name, each in json.loads(cache.find(path).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        pass  # Never tried, cut off, or of another version.
    trials = {name: tried(name, documents, where) for name in packages}
    if not all(each.lasting for each in trials.values()):
        return trials
    try:
        cache.keep(path, json.dumps({name: dataclasses.asdict(each) for name, each in trials.items()}))
    except OSError as error:
        _log.debug("what came of trying attention kernels is not kept: %s", error)
    return trials


def tried(package: str, documents: Documents, where: torch.device) -> Trial:
    """Tries a package in a process of its own."""
    question = json.dumps([package, dataclasses.asdict(documents), str(where)])
    command = own_process.command(__name__, question)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return Trial(fault=f"it took more than {_LIMIT_SECONDS:.0f} s")
    # Libraries may print lines of their own, also as they end.
    line = next((line for line in ended.stdout.splitlines() if line.startswith('{"')), "")
    if ended.returncode or not line:
        last = (ended.stderr.splitlines() or [""])[-1]
        # A signal is the system's, as where memory is full.
        return Trial(fault=f"trying it ended with code {ended.returncode}: {last}", lasting=ended.returncode >= 0)
    return Trial(**json.loads(line))


def trial(package: str, documents: Documents, where: torch.device) -> Trial:
    """Compares a package with torch's kernels, and times it, in this process."""
    try:
        began = time.perf_counter()
        for window in {0, documents.window}:
            if fault := _difference(package, documents, where, window):
                return Trial(fault=fault)
        first = time.perf_counter() - began
        own, seconds = (_measured(name, documents, where) for name in (OWN, package))
        return Trial(seconds, own, first)
    except Exception as error:  # Compilers, and versions that do not fit, raise anything.
        return Trial(fault=in_a_line(error), lasting=not isinstance(error, _PASSING))


def _difference(package: str, documents: Documents, where: torch.device, window: int) -> str:
    """Where results or gradients are others than torch's; empty if they are the same but for rounding."""
    own, others = (_computed(name, documents, where, window) for name in (OWN, package))
    names = ("results", "gradients of queries", "gradients of keys", "gradients of values")
    for name, expected, found in zip(names, own, others, strict=True):
        sizes = expected.float().norm(dim=-1)
        worst = ((found - expected).float().norm(dim=-1) / (sizes + sizes.mean())).max().item()
        if not worst <= 4 * torch.finfo(expected.dtype).eps:
            return f"its {name} differ from those of torch's kernels by up to {worst:.1%}"
    return ""


def _computed(package: str, documents: Documents, where: torch.device, window: int) -> list[torch.Tensor]:
    """Results and gradients of documents of unequal lengths, the last of which has more keys than queries."""
    length = min(documents.length, _tokens(documents) // 4)
    lengths = [length, max(1, length // 3), 1, length + length // 5, length]
    query, key, value, upstream = _drawn(documents, where, sum(lengths), sum(lengths) + length)
    ends, key_ends = (_ends(each, where) for each in (lengths, [*lengths[:-1], 2 * length]))
    longest = max(lengths), max(2 * length, *lengths)
    scale = documents.size**-0.5
    out = attended(package, query, key, value, (ends, key_ends), longest, scale, window)
    return [out, *torch.autograd.grad(out, [query, key, value], upstream)]


def _measured(package: str, documents: Documents, where: torch.device) -> float:
    """Seconds of a forward and a backward pass over a micro-batch: the middle of five, after two to warm up."""
    tokens = _tokens(documents)
    length = min(documents.length, tokens)
    lengths = [length] * (tokens // length)
    query, key, value, upstream = _drawn(documents, where, sum(lengths), sum(lengths))
    ends, scale = _ends(lengths, where), documents.size**-0.5

    def seconds() -> float:
        _wait(where)
        began = time.perf_counter()
        out = attended(package, query, key, value, (ends, ends), (length, length), scale, 0)
        torch.autograd.grad(out, [query, key, value], upstream)
        _wait(where)
        return time.perf_counter() - began

    return statistics.median([seconds() for _ in range(7)][2:])


def _tokens(documents: Documents) -> int:
    return min(_TOKENS, _NUMBERS // (documents.heads * documents.size))


def _drawn(documents: Documents, where: torch.device, tokens: int, keys: int) -> list[torch.Tensor]:
    """Queries, keys, values and what flows back, none of which moves the random numbers of the run."""
    generator = torch.Generator().manual_seed(0)
    dtype, shared = getattr(torch, documents.dtype), documents.shared_heads
    drawn = [
        torch.randn(count, heads, documents.size, generator=generator).to(where, dtype)
        for count, heads in ((tokens, documents.heads), (keys, shared), (keys, shared), (tokens, documents.heads))
    ]
    return [*(each.requires_grad_() for each in drawn[:3]), drawn[3]]


def _ends(lengths: Sequence[int], where: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(where, torch.int32)


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


if __name__ == "__main__":
    name, attention, device = json.loads(sys.argv[1])
    print(json.dumps(dataclasses.asdict(trial(name, Documents(**attention), torch.device(device)))))
