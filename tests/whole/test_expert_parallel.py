"""Experts that several processes divide: the same losses, norms, weights and answers as of one process, and the same
files, from which any number of processes goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from figures import record
from harness import metrics, write_recipe
from matrix import METHODS, RECIPE, SEEDS, SEQUENCES, STEPS, Difference, Launcher, Result, cells
from ranks import ON_CPU, Ranks
from tiny import models_and_rows, tiny_model
from transformers import AutoModelForCausalLM

MODELS = {"qwen3_moe": "Qwen/Qwen3-30B-A3B"}
_SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 256,
}  # fmt: skip
MORE = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **_SIZES},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, **_SIZES},
}
SEED = f"seed={SEEDS[0]}"
LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
CORE = [("qwen3_moe", "full", False, 4, 2), ("qwen3_moe", "lora", True, 1, 4)]
CELLS = [
    *CORE,
    *itertools.product(MODELS, ("full", "lora"), (False, True), (1, 4), (2, 4)),
    *itertools.product(MORE, ("full", "lora"), (True,), (4,), (2,)),
]
"""Model, method, packing, micro-batches of a process in a step, and processes, of which two divide the experts."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with tiny mixtures, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("expert")
    models_and_rows(folder, MODELS)
    for name, config in MORE.items():
        tiny_model(config, folder / name)
    write_recipe(folder, "matrix", RECIPE)
    return Launcher(folder, ranks)


@pytest.mark.parametrize(
    ("model", "method", "packing", "accumulation", "processes"),
    cells(CORE, CELLS),
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
    common = [f"model.path={model}", *METHODS[method], f"data.packing={str(packing).lower()}"]
    # The routers' balance loss is one of each micro-batch: as many of as many rows.
    sequences = 2 * SEQUENCES
    size = max(1, sequences // processes // accumulation)
    common += [f"batch.global_batch_size={size * processes * accumulation}", f"batch.micro_batch_size={size}"]
    alike = f"{model}-{method}-{packing}-{size}-{size * processes * accumulation}"
    saved, one = equal_with_a_seed(launcher, common, ["parallel.expert=2"], processes, alike, record_property)
    assert sorted(file.name for file in saved.iterdir()) == sorted(file.name for file in one.iterdir())
    if method == "lora":
        assert json.loads((saved / "adapter_config.json").read_text()) == json.loads(
            (one / "adapter_config.json").read_text()
        )


def equal_with_a_seed(
    launcher: Launcher,
    common: list[str],
    divided: list[str],
    processes: int,
    name: str,
    record_property: Callable[[str, object], None],
) -> tuple[Path, Path]:
    """Trains `common` with `divided` on `processes`, and on one process, which must be equal with one of the seeds.

    Returns:
        What both saved.
    """
    tried = []
    for seed in SEEDS:
        alike = f"{name}-{seed}"
        reference = launcher.result(alike, "single", *common, f"seed={seed}")
        run_name = "-".join([alike, *divided, str(processes)]).replace("parallel.", "").replace("=", "")
        run = launcher.result(run_name, "ddp", *common, *divided, f"seed={seed}", processes=processes)
        difference = Difference.between(run, reference)
        tried.append(difference)
        if not difference.over(LIMITS):
            record(
                record_property, "Processes that divide experts: largest difference from one process", run=run_name,
                **difference.figures(),
            )  # fmt: skip
            assert run.answers == reference.answers
            saved, one = (launcher.folder / "runs" / each / "final" for each in (run_name, alike))
            return saved, one
    pytest.fail(f"{name}: equal with none of the seeds {SEEDS}: {tried}")


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_travels_in_16_bits_trains_as_one_process_does(method: str, launcher: Launcher) -> None:
    """Weights differ from one process's by no more than bf16 itself makes those differ from a training in fp32."""
    common = ["model.path=qwen3_moe", *METHODS[method], SEED, "batch.micro_batch_size=2"]
    exact = launcher.result(f"fp32-{method}", "single", *common)
    common += ["precision=bf16"]
    reference = launcher.result(f"bf16-{method}", "single", *common)
    run = launcher.result(f"bf16-{method}-expert", "ddp", *common, "parallel.expert=2", processes=2)
    difference = vars(Difference.between(run, reference))
    rounding = max(
        float((reference.weights[name].float() - weight.float()).norm() / weight.float().norm())
        for name, weight in exact.weights.items()
    )
    limits = {"loss": 6e-4, "grad_norm": 2e-2, "held_out": 5e-4, "weights": rounding}
    assert not {key: value for key, value in difference.items() if not value <= limits[key]}


@pytest.mark.matrix
@pytest.mark.parametrize(("way", "method", "processes"), [("sequence", "full", 2), ("context", "lora", 4)])
def test_processes_that_share_rows_divide_experts_too(
    way: str, method: str, processes: int, launcher: Launcher, record_property: Callable[[str, object], None]
) -> None:
    size = 2 * SEQUENCES
    common = ["model.path=qwen3_moe", *METHODS[method], "data.packing=true", f"batch.global_batch_size={size}"]
    common += [f"batch.micro_batch_size={size * 2 // processes}"]
    divided = [f"parallel.{way}=2", "parallel.expert=2"]
    equal_with_a_seed(launcher, common, divided, processes, f"shared-{method}", record_property)


def test_the_shipped_recipe_trains_on_four_processes(launcher: Launcher, ranks: Ranks) -> None:
    """On a tiny model of its architecture: each has one of four experts, and what ran is what was asked for."""
    recipe = [
        "recipe=qwen3_30b_a3b_full_expert",
        "model.path=qwen3_moe",
        "data.sources=[chat.jsonl]",
        "data.eval_split=0.1",
    ]
    batch = ["batch.seq_len=128", "batch.micro_batch_size=1", "batch.global_batch_size=8", "schedule.max_steps=2"]
    further = ["parallel.expert=4", "evaluation.max_new_tokens=4", "precision=fp32", "output.name=recipe"]
    done = ranks.run(launcher.folder, *recipe, *batch, *further, processes=4, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    run = launcher.folder / "runs" / "recipe"
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["effective"]["expert"], manifest["plan"]["expert"], manifest["batch"]["expert"]) == (4, 4, 4)
    steps = [row for row in metrics(run) if "loss" in row]
    assert len(steps) == 2
    for row in steps:
        # Of four experts with two for each token: the fullest has 1 to 2 times the mean, and each process one.
        assert 1 <= row["expert_load"] == row["process_load"] <= row["expert_load_worst"] <= 2
        assert row["dropped_tokens"] == 0 <= row["idle_experts"] <= 0.5
    assert "the fullest expert of a layer met" in (run / "report.html").read_text(encoding="utf-8")
    saved = AutoModelForCausalLM.from_pretrained(run / "final")
    assert saved.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 4


@pytest.mark.parametrize(
    ("method", "saved", "continued"),
    [
        # What is whole when it is saved is divided again.
        ("lora", "expert", "expert"),
        pytest.param("full", "expert", "single", marks=pytest.mark.matrix),
        pytest.param("lora", "single", "expert", marks=pytest.mark.matrix),
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
