"""What makes training quick changes no result: the same training with all of it, and with none of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small
from harness import metrics
from ranks import Ranks

SLOW = """
import toolkit.train.main as run
import toolkit.models.adapters as adapters
import toolkit.train.batching as batching
import toolkit.train.trainers.objectives as objectives
import toolkit.train.setup as setup
from toolkit.data.batching.batches import MicroBatches
from toolkit.models.output_heads.output_head import HeadChoice

class ByNumber(MicroBatches):
    def __iter__(self):
        rows = self.order.between(0, self.steps * self.global_batch_size).reshape(-1, self.micro_batch_size)
        return iter(rows.tolist())

def by_number(arguments):
    batching.MicroBatches = ByNumber
    return run.main(arguments)

def main(arguments):
    objectives.choose = lambda *_: HeadChoice(fused=False, selects=False)
    setup.StepCasts = lambda: None
    adapters.add_by_product = lambda model: None
    batching.ALIGNED = 1
    return by_number([*arguments, "compile=off", "model.attention=sdpa"])
"""
"""Rows as they come, cut by number and not by tokens; and all logits, attention over padded rows,
without what compiled layers, adapters that are cast once in a step or are added by their product would save."""

HELD = """
import toolkit.train.main as run
import toolkit.train.setup as setup

def main(arguments):
    setup.drops_casts = lambda recipe: False
    return run.main(arguments)
"""
"""With copies of all weights until the forward pass ends."""

# Nor do updates of a size of their own follow from rounding, see `matrix.py`.
CAREFUL = ["optimizer.learning_rate=1e-3", "optimizer.eps=1e-5"]
LORA = ["method.name=lora", "method.lora_dropout=0"]
FP32, BF16 = {"loss": 1e-6, "grad_norm": 1e-6}, {"loss": 6e-4, "grad_norm": 2e-2}  # As `test_matrix` has for engines.

place = small.place_with("llama")


@pytest.fixture(autouse=True)
def entry(place: Path) -> None:
    """A module beside the data with the slow ways."""
    (place / "slow.py").write_text(SLOW, encoding="utf-8")
    (place / "held.py").write_text(HELD, encoding="utf-8")
    (place / "by_number.py").write_text("from slow import by_number as main\n", encoding="utf-8")


def trained(
    place: Path, ranks: Ranks, name: str, entry: str, *overrides: str, recipe: str = "small", processes: int = 2
) -> tuple[dict[str, list[float]], dict]:
    """Losses and norms of gradients of the steps of a run, and what of it really ran."""
    settings = [f"recipe={recipe}", "max_steps=3", "batch.global_batch_size=8", *CAREFUL, *overrides]
    folder = ranks.folder / "-".join([name, *overrides]).translate(str.maketrans("=./", "---"))
    done = ranks.run(place, *settings, f"output.dir={folder}", processes=processes, entry=entry)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled again" not in done.stderr
    rows = [row for row in metrics(folder / recipe) if "loss" in row]
    manifest = json.loads((folder / recipe / "manifest.json").read_text(encoding="utf-8"))
    return {key: [row[key] for row in rows] for key in FP32}, manifest


def check_equal(one: dict[str, list[float]], other: dict[str, list[float]], limits: dict[str, float]) -> None:
    assert len(one["loss"]) == 3
    for key, limit in limits.items():
        assert one[key] == pytest.approx(other[key], rel=limit, abs=0), key


def test_rows_dealt_by_tokens_train_as_rows_dealt_by_number(place: Path, ranks: Ranks) -> None:
    by_tokens, _ = trained(place, ranks, "tokens", "toolkit.run")
    by_number, _ = trained(place, ranks, "number", "by_number")
    check_equal(by_tokens, by_number, FP32)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_copies_of_weights_that_go_with_their_layers_change_no_digit(mode: str, place: Path, ranks: Ranks) -> None:
    common = ["precision=bf16", f"activation_checkpointing={mode}", "batch.micro_batch_size=2", "strategy=ddp"]
    dropped, _ = trained(place, ranks, "dropped", "toolkit.run", *common)
    held, _ = trained(place, ranks, "held", "held", *common)
    assert dropped == held and len(held["loss"]) == 3


@pytest.mark.parametrize(
    ("overrides", "compiled", "limits"),
    [
        pytest.param([*LORA, "precision=bf16"], "off", BF16, id="lora-bf16"),
        pytest.param([], "layers", FP32, id="full-fp32-compiled", marks=pytest.mark.matrix),
        pytest.param(LORA, "layers", FP32, id="lora-fp32-compiled", marks=pytest.mark.matrix),
        pytest.param([*LORA, "precision=bf16"], "layers", BF16, id="lora-bf16-compiled", marks=pytest.mark.matrix),
        pytest.param(
            [*LORA, "activation_checkpointing=full"], "layers", FP32, id="recomputed", marks=pytest.mark.matrix
        ),
    ],
)
def test_all_that_is_quick_trains_as_nothing_of_it_does(
    overrides: list[str], compiled: str, limits: dict[str, float], place: Path, ranks: Ranks
) -> None:
    quick, ran = trained(place, ranks, "quick", "toolkit.run", *overrides, f"compile={compiled}")
    slow, ran_slow = trained(place, ranks, "slow", "slow", *overrides)
    ways = ("output_head", "attention", "compile", "compiled_graphs")
    graphs = 1 if compiled == "layers" else None
    assert [ran["effective"].get(key) for key in ways] == ["fused", "torch_varlen", compiled, graphs]
    assert [ran_slow["effective"].get(key) for key in ways] == ["own", "sdpa", "off", None]
    check_equal(quick, slow, limits)


@pytest.mark.matrix
def test_the_demo_trains_alike_with_and_without(place: Path, ranks: Ranks) -> None:
    common = ["precision=fp32", "evaluation.num_prompts=0", "data.eval_split=null"]
    demo: Any = {"recipe": "smollm2_135m_lora_demo", "processes": 1}
    quick, ran = trained(place, ranks, "quick", "toolkit.run", *common, "compile=layers", **demo)
    slow, _ = trained(place, ranks, "slow", "slow", *common, **demo)
    assert (ran["effective"]["compile"], ran["effective"]["compiled_graphs"]) == ("layers", 1)
    check_equal(quick, slow, FP32)
