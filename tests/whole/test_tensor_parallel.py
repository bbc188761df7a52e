"""Layers that several processes divide: the same losses, norms, weights and answers as of one process, and the same
files, from which any number of processes goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
import torch
from figures import record
from harness import write_recipe
from matrix import METHODS, RECIPE, SEQUENCES, STEPS, Difference, Launcher, Result, cells
from ranks import Ranks
from tiny import models_and_rows

MODELS = {
    "llama": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-8B",
    "gemma3": "google/gemma-3-1b-it",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
}
LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
ROUNDED = Difference(loss=6e-4, grad_norm=2e-2, held_out=5e-4, weights=1.5e-2)
"""Of bf16, as in `test_matrix`."""
IN_64_BITS = Difference(loss=3e-7, grad_norm=3e-7, held_out=3e-7, weights=5e-7)
"""Of 64: in 32 are what models do in their norms, the head in its softmax, and the figures that are written."""
# Adapters begin with gradients that are nearly zero. What their sums are rounded by in parts, which is no more than in
# one process (`test_divided_layers_in_64_bits_are_those_of_one_process`), a smaller `eps` would make updates of.
SETTINGS = {"full": METHODS["full"], "lora": [*METHODS["lora"], "optimizer.eps=1.0e-4"]}
CORE = [
    ("qwen3", "full", False, 4, 2, "ddp"),
    ("gemma3", "lora", True, 1, 4, "ddp"),
    ("gemma3", "full", True, 4, 4, "fsdp"),
    ("qwen3", "full", False, 4, 4, "zero2"),
    ("mistral", "lora", True, 1, 4, "zero1"),
    ("mistral", "lora", False, 4, 4, "ddp-sequence"),
]
CELLS = [
    *CORE,
    *itertools.product(MODELS, ("full", "lora"), (False, True), (1, 4), (2, 4), ("ddp",)),
    *itertools.product(MODELS, ("full", "lora"), (False, True), (1, 4), (4,), ("fsdp", "zero1", "zero2")),
    *itertools.product(("llama",), ("full", "lora"), (False, True), (1, 4), (2,), ("zero1", "zero2")),
    *itertools.product(("llama", "qwen3"), ("full", "lora"), (False,), (1, 4), (4,), ("ddp-sequence", "ddp-context")),
    *itertools.product(("gemma3",), ("full", "lora"), (True,), (4,), (4,), ("fsdp-sequence", "fsdp-context")),
    *itertools.product(("llama",), ("full", "lora"), (True,), (4,), (4,), ("zero2-sequence", "zero2_offload")),
]
"""Model, method, packing, micro-batches of a step, processes, of which two divide each layer, and engine, beside which
two of those that have the same part may share rows."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with tiny models that have two heads of keys and values, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("tensor")
    models_and_rows(folder, MODELS, kv_heads=2)
    write_recipe(folder, "matrix", RECIPE)
    return Launcher(folder, ranks)


@pytest.mark.parametrize(
    ("model", "method", "packing", "accumulation", "processes", "engine"),
    cells(CORE, CELLS),
)
def test_processes_that_divide_layers_equal_one_process(
    model: str,
    method: str,
    packing: bool,
    accumulation: int,
    processes: int,
    engine: str,
    launcher: Launcher,
    record_property: Callable[[str, object], None],
) -> None:
    common = [f"model.path={model}", *SETTINGS[method], f"data.packing={str(packing).lower()}"]
    alike = f"{model}-{method}-{packing}"
    # Queries and keys with norms of their own have gradients of which rounding is a larger share: one process is as far
    # from itself when it adds up products in parts, so it does.
    reference = launcher.result(alike, "single", *common, "batch.micro_batch_size=2", entry="in_parts")
    engine, _, way = engine.partition("-")
    groups = processes // (4 if way else 2)
    size = f"batch.micro_batch_size={2 * SEQUENCES // groups // accumulation}"
    name = f"{alike}-{accumulation}-{processes}-{engine}{way}"
    divided = ["parallel.tensor=2", *([f"parallel.{way}=2"] if way else [])]
    run = launcher.result(name, engine, *common, size, *divided, processes=processes)
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
    ("model", "method"),
    [
        pytest.param(model, method, marks=[] if (model, method) == ("llama", "lora") else [pytest.mark.matrix])
        for model, method in itertools.product(MODELS, ("full", "lora"))
    ],
)
def test_divided_layers_in_64_bits_are_those_of_one_process(
    model: str, method: str, launcher: Launcher, record_property: Callable[[str, object], None]
) -> None:
    common = [f"model.path={model}", *METHODS[method], "data.packing=true"]
    name = f"64-bits-{model}-{method}"
    reference = launcher.result(name, "single", *common, "batch.micro_batch_size=2", entry="in_64_bits")
    for processes in (2, 4):
        size = f"batch.micro_batch_size={16 // processes}"
        run = launcher.result(
            f"{name}-{processes}", "ddp", *common, size, "parallel.tensor=2", processes=processes, entry="in_64_bits"
        )
        difference = Difference.between(run, reference)
        record(
            record_property, "Processes that divide layers in 64 bits: largest difference from one process",
            run=f"{name}-{processes}", **difference.figures(),
        )  # fmt: skip
        # What is published of a full training is rounded to 32.
        assert method == "full" or {weight.dtype for weight in run.weights.values()} == {torch.float64}
        assert not {key: value for key, value in vars(difference).items() if not value <= getattr(IN_64_BITS, key)}


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("model", MODELS)
def test_one_process_that_sums_in_parts_is_one_that_does_not_but_for_rounding(
    model: str, method: str, launcher: Launcher, record_property: Callable[[str, object], None]
) -> None:
    common = [f"model.path={model}", *SETTINGS[method], "data.packing=false"]
    parts = launcher.result(f"{model}-{method}-False", "single", *common, "batch.micro_batch_size=2", entry="in_parts")
    whole = launcher.result(f"{model}-{method}-whole", "single", *common, "batch.micro_batch_size=2")
    difference = Difference.between(parts, whole)
    record(
        record_property, "One process that sums in parts: largest difference from itself", run=f"{model}-{method}",
        **difference.figures(),
    )  # fmt: skip
    assert 0 < max(vars(difference).values()) <= 2e-6


@pytest.mark.parametrize(
    ("method", "saved", "continued"),
    [
        ("full", "tensor", "tensor"),
        ("full", "sharded", "tensor"),
        ("full", "tensor", "tensor_zero1"),
        pytest.param("lora", "single", "tensor", marks=pytest.mark.matrix),
        pytest.param("full", "tensor_zero2", "tensor", marks=pytest.mark.matrix),
        pytest.param("full", "sharded", "sharded", marks=pytest.mark.matrix),
        pytest.param("lora", "sharded", "single", marks=pytest.mark.matrix),
        pytest.param("full", "single", "sharded", marks=pytest.mark.matrix),
        pytest.param("full", "sharded", "fsdp", marks=pytest.mark.matrix),
        pytest.param("full", "fsdp", "sharded", marks=pytest.mark.matrix),
        pytest.param("lora", "tensor", "single", marks=pytest.mark.matrix),
        pytest.param("full", "tensor", "zero3", marks=pytest.mark.matrix),
        pytest.param("full", "zero2", "tensor", marks=pytest.mark.matrix),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (
                ("full", "tensor_zero2", "tensor_zero2"),
                ("lora", "tensor_zero2", "tensor_zero1"),
                ("lora", "tensor_zero1", "single"),
                ("full", "tensor_zero2", "zero2"),
                ("full", "zero3", "tensor_zero2"),
                ("full", "sharded", "tensor_zero2"),
                ("lora", "tensor_zero2", "sharded"),
            )
        ),
    ],
)
def test_a_checkpoint_is_continued_by_other_divisions(
    method: str, saved: str, continued: str, launcher: Launcher
) -> None:
    """As one process would that was never stopped, with dropout of adapters, whose masks are those of one process where
    all read the same rows. Of `sharded` four processes divide layers and shard their parts with FSDP, of `tensor_zero2`
    and `tensor_zero1` with ZeRO."""
    common = ["model.path=llama", *METHODS[method], "checkpoint.save_steps=5", "checkpoint.save_total_limit=2"]
    four = {"sharded": "fsdp", "tensor_zero1": "zero1", "tensor_zero2": "zero2"}
    drops = method == "lora" and four.keys().isdisjoint((saved, continued))
    common += ["batch.micro_batch_size=2", *(["method.lora_dropout=0.1"] if drops else [])]
    alike = f"straight-{method}{'-drops' if drops else ''}"

    def run(name: str, engine: str, *further: str) -> Result:
        if engine in four:
            return launcher.result(name, four[engine], *common, "parallel.tensor=2", *further, processes=4)
        if engine != "tensor":
            return launcher.result(name, engine, *common, *further)
        return launcher.result(name, "ddp", *common, "parallel.tensor=2", *further, processes=2)

    reference, first = run(f"{alike}-single", "single"), f"{alike}-{saved}"
    run(first, saved)
    checkpoint = launcher.folder / "runs" / first / "checkpoints" / f"checkpoint-{STEPS // 2}"
    result = run(f"{first}-{continued}", continued, f"checkpoint.resume={checkpoint}")
    for name, weight in reference.weights.items():
        assert (result.weights[name] - weight).norm() <= 1e-6 * weight.norm(), name


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["full", "lora"])
def test_divided_layers_in_bf16_are_those_of_one_process(method: str, launcher: Launcher) -> None:
    common = ["model.path=llama", *METHODS[method], "precision=bf16", "batch.micro_batch_size=4"]
    reference = launcher.result(f"bf16-{method}", "single", *common)
    for engine, processes in (("ddp", 2), ("fsdp", 4), ("zero1", 4), ("zero2", 4)):
        if engine != "ddp":  # All is bf16 there: as the engine by itself.
            reference = launcher.result(f"bf16-{method}-{engine}", engine, *common, "batch.micro_batch_size=2")
        size = f"batch.micro_batch_size={8 // processes}"
        run = launcher.result(
            f"bf16-{method}-{engine}-parts", engine, *common, size, "parallel.tensor=2", processes=processes
        )
        difference = Difference.between(run, reference)
        assert not {key: value for key, value in vars(difference).items() if not value <= getattr(ROUNDED, key)}


@pytest.mark.parametrize(
    ("chosen", "engine"),
    [
        ("keep_best=eval_loss", "ddp"),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (("average_last=2", "ddp"), ("keep_best=eval_loss", "fsdp"), ("average_last=2", "fsdp"))
        ),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (("keep_best=eval_loss", "zero2"), ("average_last=2", "zero1"))
        ),
    ],
)
def test_the_model_that_is_published_is_that_of_one_process(chosen: str, engine: str, launcher: Launcher) -> None:
    """Weights that were kept in mid-training are put back into parts."""
    common = [
        "model.path=llama",
        "checkpoint.save_steps=3",
        "checkpoint.save_total_limit=2",
        "evaluation.every_steps=3",
    ]
    common += ["optimizer.learning_rate=3e-2", f"checkpoint.{chosen}", "batch.micro_batch_size=2"]
    name = chosen.partition("=")[0]
    reference = launcher.result(name, "single", *common)
    processes = 2 if engine == "ddp" else 4
    run = launcher.result(f"{name}-{engine}", engine, *common, "parallel.tensor=2", processes=processes)
    for key, weight in reference.weights.items():
        assert (run.weights[key] - weight).norm() <= 1e-5 * weight.norm(), key
    saved = [
        json.loads((launcher.folder / "runs" / each / "manifest.json").read_text())
        for each in (name, f"{name}-{engine}")
    ]
    assert saved[0]["published"] == saved[1]["published"]
    assert run.answers == reference.answers
