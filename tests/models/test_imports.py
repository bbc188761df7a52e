"""What importing the frameworks costs, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from harness import ROOT

_SCRIPT = """
import gc, sys
from toolkit.models.imports import import_deepspeed, quick_imports

with quick_imports():
    import peft
    import_deepspeed()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
import bitsandbytes, deepspeed.runtime.zero.muon.muon_optimizer, torch
assert torch.compile.__module__ == "torch"
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler was imported"
# One of the four functions, which compile themselves when they are called.
made, scales = torch.ops.bitsandbytes.quantize_4bit(torch.linspace(-1, 1, 64), 64, "nf4", torch.uint8)
restored = torch.ops.bitsandbytes.dequantize_4bit(made, scales, 64, "nf4", (64,), torch.float32)
assert (restored - torch.linspace(-1, 1, 64)).abs().max() < 0.2
frozen = gc.get_freeze_count()
with quick_imports():
    pass
assert gc.get_freeze_count() == frozen, "what a run has made must still be collected"
"""


def test_the_compiler_is_not_imported_for_functions_that_are_not_called() -> None:
    result = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
