"""Layers that several processes divide: the same losses, norms, weights and answers as of one process, and the same
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

MODELS = {
    "llama": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-8B",
    "gemma3": "google/gemma-3-1b-it",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
}
LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
CORE = [("qwen3", "full", False, 4, 2), ("gemma3", "lora", True, 1, 4)]
CELLS = [*CORE, *itertools.product(MODELS, ("full", "lora"), (False, True), (1, 4), (2, 4))]
"""Model, method, packing, micro-batches of a step, and processes, of which two divide each layer."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with tiny models that have two heads of keys and values, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("tensor")
    models_and_rows(folder, MODELS, kv_heads=2)
    write_recipe(folder, "matrix", RECIPE)
    return Launcher(folder, ranks)


@pytest.mark.parametrize(
    ("model", "method", "packing", "accumulation", "processes"),
    [
        pytest.param(*each, id="-".join(map(str, each)), marks=[] if each in CORE else [pytest.mark.matrix])
        for each in dict.fromkeys(CELLS)
    ],
)
def test_processes_that_divide_layers_equal_one_process(
    model: str,
    method: str,
    packing: bool,
    accumulation: int,
    processes: int,
    launcher: Launcher,
    record_property: Callable[[str, object], None],
) -> None:
    common = [f"model.path={model}", *METHODS[method], f"data.packing={str(packing).lower()}"]
    alike = f"{model}-{method}-{packing}"
    reference = launcher.result(alike, "single", *common, "batch.micro_batch_size=2")
    size = f"batch.micro_batch_size={2 * SEQUENCES * 2 // processes // accumulation}"
    name = f"{alike}-{accumulation}-{processes}"
    run = launcher.result(name, "ddp", *common, size, "parallel.tensor=2", processes=processes)
    difference = Difference.between(run, reference)
    record(
        record_property, "Processes that divide layers: largest difference from one process", run=name,
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
        ("full", "tensor", "tensor"),
        ("lora", "single", "tensor"),
        pytest.param("lora", "tensor", "single", marks=pytest.mark.matrix),
        pytest.param("full", "tensor", "zero3", marks=pytest.mark.matrix),
        pytest.param("full", "zero2", "tensor", marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_is_continued_by_other_divisions(
    method: str, saved: str, continued: str, launcher: Launcher
) -> None:
    """As one process would that was never stopped, with dropout of adapters, whose masks are those of one process."""
    common = ["model.path=llama", *METHODS[method], "checkpoint.save_steps=5", "checkpoint.save_total_limit=2"]
    common += ["batch.micro_batch_size=2", *(["method.lora_dropout=0.1"] if method == "lora" else [])]

    def run(name: str, engine: str, *further: str) -> Result:
        if engine != "tensor":
            return launcher.result(name, engine, *common, *further)
        return launcher.result(name, "ddp", *common, "parallel.tensor=2", *further, processes=2)

    reference, first = run(f"straight-{method}-single", "single"), f"straight-{method}-{saved}"
    run(first, saved)
    checkpoint = launcher.folder / "runs" / first / "checkpoints" / f"checkpoint-{STEPS // 2}"
    result = run(f"{first}-{continued}", continued, f"checkpoint.resume={checkpoint}")
    for name, weight in reference.weights.items():
        assert (result.weights[name] - weight).norm() <= 1e-6 * weight.norm(), name
