"""What the GPU of this process can do: the one place where runs ask torch for its generation.

Plans ask the catalogue instead, for a device that need not be here. AMD's GPUs answer torch's questions for CUDA too,
with numbers that count AMD's generations (`gfx942` is 9.4), so nothing may be concluded from a number alone.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from toolkit.distributed import device_limits


def kind() -> Literal["cuda", "rocm", "cpu"]:
    """Which build of torch runs; a CPU where it finds no GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def current() -> int | str:
    """Where this process keeps its model: the number of its GPU, or `cpu`."""
    return "cpu" if kind() == "cpu" else torch.cuda.current_device()


def sent(numbers: Any, to: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers that the host has, as a tensor on a device: from pinned memory, or the host would wait for the device."""
    here = torch.as_tensor(numbers, dtype=dtype)
    return (here.pin_memory() if to.type == "cuda" else here).to(to, non_blocking=True)


def capability() -> str | None:
    """CUDA's compute capability, such as `9.0`; None on AMD's GPUs and on a CPU."""
    return "{}.{}".format(*torch.cuda.get_device_capability()) if kind() == "cuda" else None


def has_bf16() -> bool:
    """Whether a GPU has units for bf16."""
    return device_limits.has_bf16(kind(), capability())


def has_tf32() -> bool:
    """Whether torch computes fp32 products in TF32 on request."""
    return device_limits.has_tf32(kind(), capability())


def without_kernels() -> str:
    """Why this build of torch runs nothing on this GPU; empty if it does.

    Code for a generation (`sm_75`) runs on later ones of the same first digit, and what is left to the driver to
    compile (`compute_120`) on all later ones (CUDA C++ Programming Guide, 3.1.2 and 3.1.3).
    """
    codes = torch.cuda.get_arch_list()
    if kind() != "cuda" or not codes:
        return ""
    major, minor = torch.cuda.get_device_capability()
    for code in codes:
        form, _, digits = code.rstrip("af").partition("_")
        oldest = divmod(int(digits), 10)
        if oldest <= (major, minor) and (form == "compute" or oldest[0] == major):
            return ""
    return f"torch {torch.__version__} has no kernels for its compute capability {capability()}, only {' '.join(codes)}"


def name() -> str:
    """The GPU's, or `a CPU`."""
    return "a CPU" if kind() == "cpu" else torch.cuda.get_device_name()


def set_tf32(wanted: bool | Literal["auto"]) -> None:
    """Has products of fp32 matrices and convolutions computed in TF32, or not.

    By torch's older switches: the newer `fp32_precision` leaves them behind, and whoever reads them then, as inductor
    does to compile flex attention, gets a RuntimeError. The older ones set the newer ones too.

    Args:
        wanted: `auto`, where the device has it.
    """
    on = has_tf32() if wanted == "auto" else wanted
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def computes_tf32() -> bool:
    """Whether products of fp32 matrices are computed in TF32 now."""
    return has_tf32() and torch.get_float32_matmul_precision() != "highest"
