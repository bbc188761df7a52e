"""Triton's interpreter: where it is installed, and what it lacks.

It is for processes of their own, as `TRITON_INTERPRET` counts when Triton is imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
PINNED = ("liger-kernel==0.8.5", "triton==3.9.0")
"""Beside the environment of the other tests: TRL and PEFT import Liger wherever they find it."""


def paths() -> str:
    """`PYTHONPATH` with Liger and Triton in it."""
    return os.pathsep.join(map(str, (installed(*PINNED), ROOT)))


def installed(*pinned: str) -> Path:
    """A folder with packages that the environment of the other tests must not have."""
    name = hashlib.sha256("_".join(pinned).encode()).hexdigest()[:12]
    folder = Path(os.environ["TOOLKIT_CACHE"], "installed", f"{pinned[0]}_{name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            partial = folder.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", partial, *pinned]
            subprocess.run(command, check=True, timeout=600)
            partial.rename(folder)
    return folder


def complete() -> None:
    """Adds what Triton 3.9's interpreter lacks."""
    import numpy
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    own_conversion, own_exp, own_rsqrt = interpreter._implicit_cvt, tl.math.exp, tl.math.rsqrt

    def converted(argument: Any) -> Any:
        """The interpreter leaves out floats, which a compiled kernel gets as fp32."""
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return own_conversion(argument)

    def rsqrt(x: Any) -> Any:
        """CUDA's library of functions has no interpreted form."""
        return own_rsqrt(x, _semantic=interpreter.interpreter_semantic)

    def tanh(x: Any) -> Any:
        return 2.0 / (1.0 + own_exp(x * -2.0, _semantic=interpreter.interpreter_semantic)) - 1.0

    interpreter._implicit_cvt, libdevice.rsqrt, libdevice.tanh = converted, rsqrt, tanh
