"""Rows that several processes share, beyond the plain trainings of `test_matrix`: checkpoints, dropout, bf16, compiled
and recomputed layers."""

from __future__ import annotations

import pytest
from harness import write_recipe
from matrix import METHODS, RECIPE, STEPS, Difference, Launcher, Result
from ranks import Ranks
from tiny import models_and_rows

LIMITS = Difference(loss=1e-6, grad_norm=1e-6, held_out=1e-6, weights=1e-6)
ROUNDED = Difference(loss=6e-4, grad_norm=2e-2, held_out=5e-4, weights=1.5e-2)
"""Of bf16, as in `test_matrix`."""
WAYS = ("sequence", "context")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """A folder with a tiny model and data, and the processes to train it on."""
    folder = tmp_path_factory.mktemp("shared")
    models_and_rows(folder, {"llama": "meta-llama/Llama-3.2-1B"})
    write_recipe(folder, "matrix", RECIPE)
    return Launcher(folder, ranks)


def shared(launcher: Launcher, name: str, way: str, *overrides: str, engine: str = "ddp") -> Result:
    """A run of two processes that share rows in this way; of one for `single`."""
    if way == "single":
        return launcher.result(name, "single", *overrides)
    return launcher.result(name, engine, *overrides, f"parallel.{way}=2", processes=2)


def assert_within(run: Result, reference: Result, limits: Difference) -> None:
    difference = Difference.between(run, reference)
    assert not {key: value for key, value in vars(difference).items() if not value <= getattr(limits, key)}


@pytest.mark.parametrize(
    ("saved", "continued", "method", "engine"),
    [
        ("context", "context", "lora", "ddp"),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (
                ("sequence", "sequence", "lora", "ddp"),
                ("sequence", "sequence", "full", "zero3"),
                ("context", "context", "full", "fsdp"),
                ("sequence", "context", "full", "ddp"),
                ("context", "single", "full", "ddp"),
                ("single", "sequence", "full", "ddp"),
            )
        ),
    ],
)
def test_a_checkpoint_is_continued(saved: str, continued: str, method: str, engine: str, launcher: Launcher) -> None:
    """To the weights of the run that was never stopped; where rows stay shared alike with dropout, whose masks each
    process draws for its own tokens."""
    common = ["model.path=llama", *METHODS[method], "checkpoint.save_steps=5", "checkpoint.save_total_limit=2"]
    common += ["batch.micro_batch_size=2", *(["method.lora_dropout=0.1"] if method == "lora" else [])]
    name = f"straight-{saved}-{method}-{engine}"
    reference = shared(launcher, name, saved, *common, engine=engine)
    checkpoint = launcher.folder / "runs" / name / "checkpoints" / f"checkpoint-{STEPS // 2}"
    run = shared(launcher, f"{name}-{continued}", continued, *common, f"checkpoint.resume={checkpoint}", engine=engine)
    assert len(run.losses) == STEPS // 2
    for key, weight in reference.weights.items():
        assert (run.weights[key] - weight).norm() <= 1e-6 * weight.norm(), key


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("way", WAYS)
def test_shared_rows_in_bf16_are_those_of_one_process(way: str, method: str, launcher: Launcher) -> None:
    common = ["model.path=llama", *METHODS[method], "precision=bf16", "data.packing=true", "batch.micro_batch_size=4"]
    reference = shared(launcher, f"bf16-{method}", "single", *common)
    assert_within(shared(launcher, f"bf16-{method}-{way}", way, *common), reference, ROUNDED)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "changed", [["compile=layers"], ["activation_checkpointing=full"], ["activation_checkpointing=selective"]], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_recomputed_layers_of_shared_rows(way: str, changed: list[str], launcher: Launcher) -> None:
    common = ["model.path=llama", "data.packing=true", "batch.micro_batch_size=4"]
    reference = shared(launcher, "plain", "single", *common)
    run = shared(launcher, f"{way}-{changed[0]}".translate(_PLAIN), way, *common, *changed)
    assert_within(run, reference, LIMITS)


_PLAIN = str.maketrans("=./", "---")
