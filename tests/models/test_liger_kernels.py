"""Liger's kernels under Triton's interpreter: equal to the models' own code, or not used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest
import small
from harness import environment, leave_unmeasured, losses

from toolkit.models import liger_kernels

SCRIPT = Path(interpreter.__file__).with_name("liger_interpreted.py")


@pytest.fixture(scope="module")
def paths():
    return interpreter.paths()


def run(paths, *arguments, **settings):
    command = [sys.executable, SCRIPT, *arguments]
    environ = environment() | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def outcomes(paths):
    """What came of each architecture, see `tests/support/liger_interpreted.py`."""
    return json.loads(run(paths).stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(liger_kernels.ARCHITECTURES))
def test_the_kernels_give_the_logits_and_gradients_of_a_models_own_code(outcomes, kind):
    outcome = outcomes[kind]
    assert outcome["reason"] == ""
    assert outcome["replaced"] >= 5  # Two norms of each of two layers, and the last one, at least.
    assert outcome["distance"] < 1e-5


@pytest.mark.slow
def test_a_kernel_that_computes_something_else_is_not_used(outcomes):
    outcome = outcomes["wrong"]
    assert outcome["reason"].startswith("the result of a tiny copy differs by 0.0")
    assert (outcome["replaced"], outcome["distance"]) == (0, 0.0)


@pytest.mark.slow
def test_an_architecture_that_was_not_tried_keeps_its_own_code(outcomes):
    assert outcomes["opt"] == {"reason": "they have not been tried with opt", "distance": 0.0, "replaced": 0}


@pytest.mark.slow
def test_remote_code_under_a_known_name_is_left_as_it_is(outcomes):
    assert outcomes["own code"] == "the model has code of its own"


@pytest.mark.slow
def test_the_tiny_copy_is_whole_where_zero3_divides_models(outcomes):
    assert outcomes["under ZeRO-3"] == ""


@pytest.mark.matrix
def test_a_training_uses_them_where_layers_are_not_compiled_and_its_losses_stay(paths, tmp_path):
    small.populate(tmp_path, "llama")
    leave_unmeasured(Path(os.environ["TOOLKIT_CACHE"]))
    found = {}
    # Every row of a tensor is a call of the interpreter's.
    few = ["max_steps=2", "batch.seq_len=48", "data.over_long=truncate", "batch.global_batch_size=2"]
    for compiles in ("off", "auto"):
        done = run(paths, "recipe=small", *few, f"compile={compiles}", f"output.name={compiles}", cwd=tmp_path)
        folder = tmp_path / "runs" / compiles
        effective = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["effective"]
        found[compiles] = (
            losses(folder),
            effective["liger_modules"],
            "Liger's kernels run" in done.stdout + done.stderr,
        )
    own, kernels = found["off"], found["auto"]
    assert (own[1:], kernels[2]) == ((0, False), True)
    assert kernels[1] >= 5
    assert len(own[0]) == 2
    assert kernels[0] == pytest.approx(own[0], rel=1e-5)
    assert kernels[0] != own[0]


def test_without_triton_or_liger_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert liger_kernels.missing() == "liger_kernel and triton not installed"
