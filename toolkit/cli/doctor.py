"""`toolkit doctor`: what this machine and environment are, as text to paste into a bug report.

Kernels and libraries are tried, not only looked up, since a package that is installed may still fail to import. What
fails is a line of the report; secrets and the home folder's name are left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub.constants import HF_HUB_CACHE
from packaging.requirements import Requirement

from toolkit.cache import cache_dir
from toolkit.common import in_a_line, table, usable_cores
from toolkit.planner.hardware import driver_version
from toolkit.planner.hardware.host_memory import host_memory

DISTRIBUTION = "accelerate-toolkit"
OPTIONAL = ("flash-attn", "liger-kernel", "torchao", "kernels", "tensorboard", "wandb", "mlflow", "trackio")
# Only what changes how libraries behave; values are shown, so nothing that may hold a secret.
ENVIRONMENT = (
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "TOOLKIT_CACHE", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME"),
    *("DS_ACCELERATOR", "WANDB_MODE"),
)


def collect() -> dict[str, Any]:
    """Sections by name: `machine`, `packages`, `devices`, `attention`, `libraries`, `places`, `problems`.

    Values are strings, or for `problems` a list of them; folders below the home folder start with `~`.
    """
    packages, problems = _packages()
    sections: dict[str, Any] = {
        "machine": _machine(),
        "packages": packages,
        "devices": _tried("torch", _devices),
        "attention": _tried("backends", _attention),
        "libraries": _tried("bitsandbytes", _bitsandbytes)
        | _tried("fp8", partial(_stored, "fp8"))
        | _tried("int4", partial(_stored, "int4"))
        | _tried("deepspeed", _deepspeed)
        | _tried("nccl", _nccl),
        "places": _places(),
    }
    tried = {**sections["devices"], **sections["attention"], **sections["libraries"]}
    problems += [f"{name}: {state}" for name, state in tried.items() if state.startswith("fails")]
    return sections | {"problems": problems}


def render(sections: dict[str, Any]) -> str:
    """The sections as aligned plain text, problems last."""
    *parts, (_, problems) = sections.items()
    lines = [f"{name}\n{table(values.items(), indent=2).plain}" for name, values in parts]
    lines += ["problems" if problems else "no problems found", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def _machine() -> dict[str, str]:
    memory, usable = psutil.virtual_memory(), host_memory()
    limit = f", of which a run may use {_gib(usable.bytes)} ({usable.limit})" if usable.limit else ""
    return {
        "os": platform.platform(),
        "python": f"{platform.python_version()} ({_short(sys.executable)})",
        "cpu cores": str(usable_cores()),
        "memory": f"{_gib(memory.total)}, {_gib(memory.available)} available{limit}",
    }


def _packages() -> tuple[dict[str, str], list[str]]:
    """Installed version of every dependency, and which are missing or outside the ranges of this distribution."""
    try:
        stated = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return {}, [f"{DISTRIBUTION} is not installed in this environment: run `make`, or pip install --no-deps -e ."]
    needed = [requirement for requirement in stated if not (requirement.marker and "extra" in str(requirement.marker))]
    packages, problems = {DISTRIBUTION: importlib.metadata.version(DISTRIBUTION)}, []
    for requirement in needed:
        version = _version(requirement.name)
        packages[requirement.name] = version or "missing"
        if version is None:
            problems.append(f"{requirement.name} is missing: pip install '{requirement}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is outside the tested range: pip install '{requirement}'")
    packages |= {name: version for name in OPTIONAL if (version := _version(name))}
    return packages, problems


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    import torch

    from toolkit.models import device

    devices = {"torch": f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}"}
    if not torch.cuda.is_available():
        devices["accelerator"] = "mps" if torch.backends.mps.is_available() else "none, training runs on the CPU"
        return devices
    devices["driver"] = driver_version()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        generation = f"{'gfx ' if torch.version.hip else 'capability '}{properties.major}.{properties.minor}"
        devices[f"cuda:{index}"] = f"{properties.name}, {_gib(properties.total_memory)}, {generation}"
    lacks = device.without_kernels()
    devices["kernels"] = f"fails: {lacks}" if lacks else "ok"
    devices["precision"] = "bf16" if device.has_bf16() else "no bf16: set precision=fp16"
    devices["tf32"] = "used for fp32 products" if device.has_tf32() else "none, fp32 products are exact"
    return devices


def _attention() -> dict[str, str]:
    from toolkit.models.attention import attention_kernels

    return attention_kernels.available()


def _tried(name: str, check: Callable[[], str | dict[str, str]]) -> dict[str, str]:
    """What a check finds, or how it fails: under its name, unless it has names of its own."""
    # A broken binary can raise nearly anything at import; the doctor's work is to say so, not to fall ill.
    try:
        result = check()
    except Exception as error:
        result = _short(f"fails: {in_a_line(error)}")
    return {name: result} if isinstance(result, str) else result


def _bitsandbytes() -> str:
    """Quantizes and restores a block of numbers on the device that training would use."""
    import torch
    from bitsandbytes import functional

    values = torch.linspace(-1, 1, 4096, device="cuda" if torch.cuda.is_available() else "cpu")
    restored = functional.dequantize_4bit(*functional.quantize_4bit(values, quant_type="nf4"))
    error = (restored - values).abs().max().item()
    if error > 0.2:
        return f"fails: nf4 restores numbers with an error of {error:.2f}"
    return f"ok: nf4 on {values.device.type}"


def _stored(form: str) -> str:
    """Takes a product of rows through a layer whose weight is stored in fp8 or int4."""
    import torch

    from toolkit.models.quantization.stored import StoredLinear, stored_as

    place = "cuda" if torch.cuda.is_available() else "cpu"
    plain = torch.nn.Linear(256, 256, bias=False, device=place, dtype=torch.bfloat16)
    layer, rows = StoredLinear(plain, form), torch.randn(16, 256, device=place, dtype=torch.bfloat16)
    layer.weight = stored_as(form, plain.weight.detach())
    wanted = plain(rows)
    error = ((layer(rows) - wanted).norm() / wanted.norm()).item()
    if not error < 0.1:
        return f"fails: a product is off by {error:.1%}"
    return f"ok: {'multiplied' if layer.multiplies_in_fp8(rows) else 'stored, and restored for products'} on {place}"


def _deepspeed() -> str:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    return f"ok: {deepspeed.__version__} imports"


def _nccl() -> str:
    import torch

    if not torch.cuda.is_available():
        return "not used without a GPU"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _places() -> dict[str, str]:
    folders = {"working folder": Path.cwd(), "toolkit cache": cache_dir(), "hugging face cache": Path(HF_HUB_CACHE)}
    places = {name: f"{_short(folder)}, {_free(folder)} free" for name, folder in folders.items()}
    return places | {name: _short(os.environ[name]) for name in ENVIRONMENT if name in os.environ}


def _free(folder: Path) -> str:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return _gib(shutil.disk_usage(existing).free)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _short(text: str | Path) -> str:
    """Hides the user's name: the home folder becomes `~`."""
    home = str(Path.home())
    return str(text).replace(home, "~") if home != "/" else str(text)
