"""Learning from a teacher on every engine: the same losses, norms and weights as of one process; and the demo, in which
adapters recover what 4 bits have lost of a real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from demos import SECONDS, before_and_after
from figures import record
from harness import write_recipe
from matrix import METHODS, RECIPE, Difference, Launcher, cells
from ranks import Ranks
from tiny import models_and_rows, tiny_model

LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
COMMON = [
    *(
        "objective=distillation",
        "distillation.teacher.path=teacher",
        "distillation.ce_share=0.2",
        "distillation.beta=0.5",
    ),
    *("distillation.temperature=1.5", "schedule.max_steps=4", "evaluation.num_prompts=0"),
]
SETTINGS = {
    "full": [*METHODS["full"], "optimizer.eps=1.0e-4"],
    "lora": [*METHODS["lora"], "optimizer.eps=1.0e-4", "distillation.beta=0"],
    "qlora": [
        *(*METHODS["qlora"], "optimizer.eps=1.0e-4", "distillation.beta=1"),
        "distillation.teacher.quantization=nf4",
    ],
    "own": [
        *(*METHODS["full"], "optimizer.eps=1.0e-4", "distillation.on_policy=1", "rollout.max_completion_tokens=4"),
        "distillation.ce_share=0",
    ],
    "half": [
        *(*METHODS["lora"], "optimizer.eps=1.0e-4", "distillation.on_policy=0.5", "rollout.max_completion_tokens=4"),
        "rollout.batch_size=3",
    ],
    "packed": [*METHODS["lora"], "optimizer.eps=1.0e-4", "data.packing=true", "data.over_long=drop"],
}
CORE = [
    ("full", "ddp", 2),
    ("full", "zero3", 1),
    ("full", "fsdp", 2),
    ("lora", "zero2", 1),
    ("lora", "fsdp", 1),
    ("qlora", "ddp", 1),
    ("own", "zero3", 1),
    ("half", "fsdp", 2),
]
FULL = [
    (method, engine, size) for method in SETTINGS for engine in ("ddp", "zero2", "zero3", "fsdp") for size in (1, 2)
]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with a tiny student, a deeper teacher and rows, and the processes to train them on."""
    folder = tmp_path_factory.mktemp("distillation")
    models_and_rows(folder, {"llama": "meta-llama/Llama-3.2-1B"}, kv_heads=2)
    tiny_model("meta-llama/Llama-3.2-1B", folder / "teacher", seed=7, layers=3)
    write_recipe(folder, "matrix", RECIPE)
    return Launcher(folder, ranks)


@pytest.mark.parametrize(("method", "engine", "size"), cells(CORE, FULL))
def test_an_engine_equals_one_process(
    method: str, engine: str, size: int, launcher: Launcher, record_property: Callable[[str, object], None]
) -> None:
    common = [*COMMON, *SETTINGS[method]]
    reference = launcher.result(method, "single", *common, "batch.micro_batch_size=2")
    run = launcher.result(f"{method}-{engine}-{size}", engine, *common, f"batch.micro_batch_size={size}")
    difference = Difference.between(run, reference)
    title = "A teacher's distribution: largest difference from one process"
    record(record_property, title, run=f"{method}-{engine}-{size}", **difference.figures())
    assert not difference.over(LIMITS)
    assert min(reference.grad_norms) > 1e-4, "nothing was learnt"
    for one, other in zip(run.held_out, reference.held_out, strict=True):
        for key in ("eval_kl", "eval_cross_entropy"):
            assert one[key] == pytest.approx(other[key], rel=1e-5), key
        # A difference of nearly equal sums.
        assert one["eval_kl_plus_minus"] == pytest.approx(other["eval_kl_plus_minus"], rel=1e-3)
        assert one["eval_tokens"] == other["eval_tokens"]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.matrix
def test_the_demo_recovers_what_four_bits_have_lost(tmp_path: Path, ranks: Ranks) -> None:
    """With a real model: on held-out rows it comes nearer to itself in full precision."""
    less = ["schedule.max_steps=6", "batch.global_batch_size=4", "data.eval_max_samples=6"]
    first, last = before_and_after("distillation", tmp_path, ranks, *less)
    assert last["eval_kl"] < first["eval_kl"] and last["eval_loss"] < first["eval_loss"]
