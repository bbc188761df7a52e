"""Layers that follow each other on several processes: the same losses, norms, weights and answers as of one process,
and the same files, from which any number of processes goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
import torch
from figures import record
from harness import write_recipe
from matrix import METHODS, RECIPE, SEEDS, SEQUENCES, STEPS, Difference, Launcher, Result, cells
from ranks import Ranks
from tiny import models_and_rows

MODELS = {
    "llama": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-8B",
    "gemma3": "google/gemma-3-1b-it",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}
# As in test_tensor_parallel.py: a smaller `eps` makes updates out of rounding where adapters begin.
SETTINGS = {"full": METHODS["full"], "lora": [*METHODS["lora"], "optimizer.eps=1.0e-4"]}
LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
CORE = [
    ("llama", "full", False, 4, "1f1b", 2),
    ("gemma3", "lora", True, 1, "zero_bubble", 2),
    ("qwen3_moe", "full", True, 4, "interleaved_1f1b", 4),
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
    cells(CORE, CELLS),
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
    common = [f"model.path={model}", *SETTINGS[method], f"data.packing={str(packing).lower()}"]
    # The routers' balance loss is one of each micro-batch.
    piped = ["parallel.pipeline=2", f"parallel.schedule={schedule}"]
    for seed in SEEDS if model == "qwen3_moe" else SEEDS[:1]:
        alike = f"{model}-{method}-{packing}-{size}-{seed}"
        same = [*common, f"batch.micro_batch_size={size}", f"seed={seed}"]
        reference = launcher.result(alike, "single", *same)
        name = f"{model}-{method}-{packing}-{accumulation}-{schedule}-{processes}-{seed}"
        run = launcher.result(name, "ddp", *same, *piped, processes=processes)
        difference = Difference.between(run, reference)
        if not (over := difference.over(LIMITS)):
            break
    record(record_property, "Pipelines: largest difference from one process", run=name, **difference.figures())
    assert not over
    assert run.answers == reference.answers
    saved, one = (launcher.folder / "runs" / each / "final" for each in (name, alike))
    assert sorted(file.name for file in saved.iterdir()) == sorted(file.name for file in one.iterdir())
    manifest = json.loads((launcher.folder / "runs" / name / "manifest.json").read_text(encoding="utf-8"))
    effective, stages = manifest["effective"], manifest["plan"]["stages"]
    # 1F1B wants a micro-batch for each process.
    runs = "gpipe" if (schedule, accumulation) == ("1f1b", 1) else schedule
    assert (effective["engine"], effective["pipeline"], effective["schedule"]) == ("pipeline", 2, runs)
    assert effective["stages"]["0"] == [0, stages[0]] and sum(stages) == 4
    assert 0 < manifest["plan"]["work"]["bubble_seconds"] < manifest["plan"]["work"]["step_seconds"]["value"]


@pytest.mark.parametrize(
    ("method", "saved", "continued"),
    [
        ("full", "1f1b", "single"),
        ("lora", "single", "zero_bubble"),
        pytest.param("lora", "interleaved_1f1b", "interleaved_1f1b", marks=pytest.mark.matrix),
        pytest.param("full", "zero_bubble", "gpipe", marks=pytest.mark.matrix),
        pytest.param("full", "zero2", "1f1b", marks=pytest.mark.matrix),
        pytest.param("full", "1f1b", "fsdp", marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_is_continued_by_other_layouts(
    method: str, saved: str, continued: str, launcher: Launcher
) -> None:
    """As one process would that was never stopped."""
    common = ["model.path=llama", *METHODS[method], "checkpoint.save_steps=5", "checkpoint.save_total_limit=2"]
    common += ["batch.micro_batch_size=2"]

    def run(name: str, way: str, *further: str) -> Result:
        if way not in SCHEDULES:
            return launcher.result(name, way, *common, *further)
        piped = ["parallel.pipeline=2", f"parallel.schedule={way}"]
        return launcher.result(name, "ddp", *common, *piped, *further, processes=2)

    reference, first = run(f"straight-{method}-single", "single"), f"straight-{method}-{saved}"
    run(first, saved)
    checkpoint = launcher.folder / "runs" / first / "checkpoints" / f"checkpoint-{STEPS // 2}"
    result = run(f"{first}-{continued}", continued, f"checkpoint.resume={checkpoint}")
    for name, weight in reference.weights.items():
        assert (result.weights[name] - weight).norm() <= 1e-6 * weight.norm(), name


@pytest.mark.parametrize(
    "schedule", [each if each == "1f1b" else pytest.param(each, marks=pytest.mark.matrix) for each in SCHEDULES]
)
def test_with_dropout_it_goes_on_as_if_it_had_not_stopped(schedule: str, launcher: Launcher) -> None:
    """Masks are other ones than of one process, and those of each process are its own."""
    common = ["model.path=llama", *METHODS["lora"], "method.lora_dropout=0.2", "batch.micro_batch_size=2"]
    common += ["checkpoint.save_steps=5", "checkpoint.save_total_limit=2"]
    piped = [*common, "parallel.pipeline=2", f"parallel.schedule={schedule}"]
    name = f"dropout-{schedule}"
    straight = launcher.result(name, "ddp", *piped, processes=2)
    checkpoint = launcher.folder / "runs" / name / "checkpoints" / f"checkpoint-{STEPS // 2}"
    again = launcher.result(f"{name}-again", "ddp", *piped, f"checkpoint.resume={checkpoint}", processes=2)
    for key, weight in straight.weights.items():
        assert (again.weights[key] - weight).norm() <= 1e-6 * weight.norm(), key
    one = launcher.result("dropout-single", "single", *common)
    difference = Difference.between(straight, one)
    assert difference.held_out < 1e-3 < difference.weights
    states = [torch.load(checkpoint / f"rng_state_{rank}.pth", weights_only=False)["cpu"] for rank in range(2)]
    # A state begins with the seed.
    assert not torch.equal(*(state[:8] for state in states))


@pytest.mark.matrix
@pytest.mark.parametrize("further", [["checkpoint.average_last=2"], ["checkpoint.keep_best=eval_loss"]])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_published_models_are_chosen_as_by_one_process(method: str, further: list[str], launcher: Launcher) -> None:
    common = ["model.path=llama", *METHODS[method], "checkpoint.save_steps=4", "evaluation.every_steps=4", *further]
    name = f"chosen-{method}-{further[0].partition('=')[0]}"
    reference = launcher.result(f"{name}-single", "single", *common, "batch.micro_batch_size=2")
    piped = ["parallel.pipeline=2", "batch.micro_batch_size=2"]
    run = launcher.result(name, "ddp", *common, *piped, processes=2)
    difference = Difference.between(run, reference)
    assert not {key: value for key, value in vars(difference).items() if not value <= getattr(LIMITS, key)}
    assert run.answers == reference.answers


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("method", "further"),
    [
        ("full", ["precision=bf16"]),
        ("lora", ["precision=bf16"]),
        ("full", ["activation_checkpointing=full"]),
        ("lora", ["activation_checkpointing=full"]),
        ("dora", []),
        ("full", ["optimizer.name=sgd", "optimizer.args={}", "~optimizer.beta2", "~optimizer.eps"]),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_further_settings_train_alike(
    method: str,
    further: list[str],
    schedule: str,
    launcher: Launcher,
    record_property: Callable[[str, object], None],
) -> None:
    common = ["model.path=llama", *METHODS[method], *further, "batch.micro_batch_size=2"]
    name = f"further-{method}-{'-'.join(further)}".translate(str.maketrans("=./{}~", "------"))
    reference = launcher.result(f"{name}-single", "single", *common)
    piped = ["parallel.pipeline=2", f"parallel.schedule={schedule}"]
    difference = Difference.between(
        launcher.result(f"{name}-{schedule}", "ddp", *common, *piped, processes=2), reference
    )
    record(
        record_property, "Pipelines, further settings: largest difference from one process", run=f"{name}-{schedule}",
        **difference.figures(),
    )  # fmt: skip
    # As `test_matrix.LIMITS` has them.
    low = Difference(loss=6e-4, grad_norm=2e-2, held_out=5e-4, weights=1.5e-2)
    limits = vars(low if "precision=bf16" in further else LIMITS)
    assert not {key: value for key, value in vars(difference).items() if not value <= limits[key]}
