"""Layers that follow each other on several processes: the same losses, norms, weights and answers as of one process,
and the same files, from which any number of processes goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from figures import record
from harness import write_recipe
from matrix import METHODS, RECIPE, SEQUENCES, Difference, Launcher
from ranks import Ranks
from tiny import models_and_rows

MODELS = {
    "llama": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-8B",
    "gemma3": "google/gemma-3-1b-it",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}
LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
CORE = [
    ("llama", "full", False, 4, "1f1b", 2),
]
CELLS = [*CORE, *itertools.product(MODELS, ("full", "lora"), (False, True), (1, 4), SCHEDULES, (2, 4))]
"""Model, method, packing, micro-batches of a step, schedule, and processes, two of which a pipeline has."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with tiny models of four layers, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("pipeline")
    models_and_rows(folder, MODELS, layers=4)
    write_recipe(folder, "matrix", RECIPE)
    return Launcher(folder, ranks)


@pytest.mark.parametrize(
    ("model", "method", "packing", "accumulation", "schedule", "processes"),
    [
        pytest.param(*each, id="-".join(map(str, each)), marks=[] if each in CORE else [pytest.mark.matrix])
        for each in dict.fromkeys(CELLS)
    ],
)
def test_a_pipeline_equals_one_process(
    model: str,
    method: str,
    packing: bool,
    accumulation: int,
    schedule: str,
    processes: int,
    launcher: Launcher,
    record_property: Callable[[str, object], None],
) -> None:
    size = 2 * SEQUENCES * 2 // processes // accumulation
    common = [f"model.path={model}", *METHODS[method], f"data.packing={str(packing).lower()}"]
    # The routers' balance loss is one of each micro-batch.
    alike = f"{model}-{method}-{packing}-{size}"
    reference = launcher.result(alike, "single", *common, f"batch.micro_batch_size={size}")
    name = f"{model}-{method}-{packing}-{accumulation}-{schedule}-{processes}"
    piped = ["parallel.pipeline=2", f"parallel.schedule={schedule}", f"batch.micro_batch_size={size}"]
    run = launcher.result(name, "ddp", *common, *piped, processes=processes)
    difference = Difference.between(run, reference)
    record(
        record_property, "Pipelines: largest difference from one process", run=name, **difference.figures(),
    )  # fmt: skip
    assert not {key: value for key, value in vars(difference).items() if not value <= getattr(LIMITS, key)}
    assert run.answers == reference.answers
    saved, one = (launcher.folder / "runs" / each / "final" for each in (name, alike))
    assert sorted(file.name for file in saved.iterdir()) == sorted(file.name for file in one.iterdir())
