"""Compiled layers and the output head become machine code for GPUs, which takes no GPU to find out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import gpu_code
import pytest


def made(capability: str, *cases: str) -> Any:
    command = [sys.executable, gpu_code.__file__, capability, *cases]
    environ = {**os.environ, **gpu_code.environment()}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    # What cannot be compiled would run as it is.
    assert "WON'T CONVERT" not in ended.stderr, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("capability", "cases"),
    [
        ("9.0", tuple(gpu_code.CASES)),
        ("8.0", ("full", "adapters", "adapters, base in nf4")),
        ("12.0", ("full, products in fp8", "adapters, base in fp8, less kept")),
    ],
)
def test_a_layer_is_one_graph_whose_kernels_compile(capability: str, cases: tuple[str, ...]) -> None:
    for name, found in made(capability, *cases).items():
        assert found["graphs"] == 1, name
        # Norms, activation functions, rotary embeddings, and what stands between products, in both passes.
        assert found["kernels"] >= 10, name


@pytest.mark.parametrize(
    "capability", ["9.0", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("7.5", "12.0"))]
)
def test_the_heads_kernels_compile(capability: str) -> None:
    found = made(capability, "head")
    assert found["kernels"] == 2 and found["smallest"] > 1000
