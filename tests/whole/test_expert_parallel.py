"""Experts that several processes divide: the same losses, norms, weights and answers as of one process, and the same
files, from which any number of processes goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from figures import record
from harness import write_recipe
from matrix import METHODS, RECIPE, SEQUENCES, STEPS, Difference, Launcher, Result
from ranks import Ranks
from tiny import models_and_rows

MODELS = {"qwen3_moe": "Qwen/Qwen3-30B-A3B"}
# By the usual seed two experts of a token are so nearly alike that on some processors rounding decides between them.
SEED = "seed=2"
LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
CORE = [("qwen3_moe", "full", False, 4, 2), ("qwen3_moe", "lora", True, 1, 4)]
CELLS = [*CORE, *itertools.product(MODELS, ("full", "lora"), (False, True), (1, 4), (2, 4))]
"""Model, method, packing, micro-batches of a process in a step, and processes, of which two divide the experts."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with tiny mixtures, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("expert")
    models_and_rows(folder, MODELS)
    write_recipe(folder, "matrix", RECIPE)
    return Launcher(folder, ranks)


@pytest.mark.parametrize(
    ("model", "method", "packing", "accumulation", "processes"),
    [
        pytest.param(*each, id="-".join(map(str, each)), marks=[] if each in CORE else [pytest.mark.matrix])
        for each in dict.fromkeys(CELLS)
    ],
)
def test_processes_that_divide_experts_equal_one_process(
    model: str,
    method: str,
    packing: bool,
    accumulation: int,
    processes: int,
    launcher: Launcher,
    record_property: Callable[[str, object], None],
) -> None:
    common = [f"model.path={model}", *METHODS[method], SEED, f"data.packing={str(packing).lower()}"]
    # The routers' balance loss is one of each micro-batch: as many of as many rows.
    sequences = 2 * SEQUENCES
    size = max(1, sequences // processes // accumulation)
    common += [f"batch.global_batch_size={size * processes * accumulation}", f"batch.micro_batch_size={size}"]
    alike = f"{model}-{method}-{packing}-{size}-{size * processes * accumulation}"
    reference = launcher.result(alike, "single", *common)
    name = f"{alike}-{accumulation}-{processes}"
    run = launcher.result(name, "ddp", *common, "parallel.expert=2", processes=processes)
    difference = Difference.between(run, reference)
    record(
        record_property, "Processes that divide experts: largest difference from one process", run=name,
        **difference.figures(),
    )  # fmt: skip
    assert not {key: value for key, value in vars(difference).items() if not value <= getattr(LIMITS, key)}
    assert run.answers == reference.answers
    saved, one = (launcher.folder / "runs" / each / "final" for each in (name, alike))
    assert sorted(file.name for file in saved.iterdir()) == sorted(file.name for file in one.iterdir())
    if method == "lora":
        assert json.loads((saved / "adapter_config.json").read_text()) == json.loads(
            (one / "adapter_config.json").read_text()
        )


@pytest.mark.parametrize(
    ("method", "saved", "continued"),
    [
        ("full", "expert", "single"),
        ("lora", "single", "expert"),
        pytest.param("full", "expert", "expert", marks=pytest.mark.matrix),
        pytest.param("full", "expert4", "expert", marks=pytest.mark.matrix),
        pytest.param("lora", "expert", "ddp", marks=pytest.mark.matrix),
        pytest.param("full", "expert", "zero3", marks=pytest.mark.matrix),
        pytest.param("full", "zero2", "expert", marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_is_continued_by_other_divisions(
    method: str, saved: str, continued: str, launcher: Launcher
) -> None:
    """As one process would that was never stopped."""
    common = ["model.path=qwen3_moe", *METHODS[method], SEED, "checkpoint.save_steps=5"]
    common += ["checkpoint.save_total_limit=2", "batch.micro_batch_size=1"]

    def run(name: str, engine: str, *further: str) -> Result:
        if not engine.startswith("expert"):
            return launcher.result(name, engine, *common, *further)
        size = int(engine.removeprefix("expert") or 2)
        return launcher.result(name, "ddp", *common, f"parallel.expert={size}", *further, processes=size)

    reference, first = run(f"straight-{method}-single", "single"), f"straight-{method}-{saved}"
    run(first, saved)
    checkpoint = launcher.folder / "runs" / first / "checkpoints" / f"checkpoint-{STEPS // 2}"
    result = run(f"{first}-{continued}", continued, f"checkpoint.resume={checkpoint}")
    for name, weight in reference.weights.items():
        assert (result.weights[name] - weight).norm() <= 1e-6 * weight.norm(), name
