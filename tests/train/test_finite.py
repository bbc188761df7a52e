"""A run whose numbers end says so, and leaves nothing that looks like a good model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import metrics
from pages import Page
from ranks import ON_CPU, Finished, Ranks
from small import LORA, place_with

from toolkit.train.checkpoints.checkpoint import newest
from toolkit.train.health.finite import are_finite
from toolkit.train.main import main
from toolkit.train.run_folder import RunFolder

place = place_with("llama")

# At a rate of zero the first step changes nothing; the second one ends the model.
SUDDEN = ["optimizer.learning_rate=1e30", "schedule.name=linear", "schedule.warmup_steps=1", "max_steps=6"]
TOO_LARGE = ["optimizer.learning_rate=1e40", "schedule.name=constant"]  # For a weight in fp32.

UNWRITTEN = """
import cpu_engines

def main(arguments):
    import torch
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return cpu_engines.main(arguments)
"""

# The loss stays as it is; the gradients of some steps are no numbers.
BROKEN_GRADIENTS = """
import os
import cpu_engines

def main(arguments):
    import torch
    from toolkit.train.trainers.trainer import CausalTrainer

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    compute = CausalTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        return Broken.apply(loss) if str(self.state.global_step + 1) in os.environ["STEPS"].split(",") else loss

    CausalTrainer.compute_loss = compute_loss
    return cpu_engines.main(arguments)
"""


@pytest.mark.parametrize(
    ("name", "settings", "says", "good"),
    [
        ("every", [*SUDDEN, "checkpoint.save_steps=1"], "at step 3 the ", 2),
        ("sparse", [*SUDDEN, "logging.every_steps=4"], "at step 4 or one of the 3 before it the ", None),
        ("adapter", [*SUDDEN, *LORA, "checkpoint.save_steps=5"], "at step 3 the ", None),
        ("unsaved", [*TOO_LARGE, "max_steps=1"], "after step 1 trained weights are not finite", None),
        ("saved", [*TOO_LARGE, "max_steps=4", "save_steps=1"], "after step 1 trained weights are not finite", None),
    ],
)
def test_run_ends_where_its_numbers_end(
    name: str, settings: list[str], says: str, good: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe=small", f"output.name={name}", *settings]) == 1
    error = " ".join(capsys.readouterr().err.partition("error: ")[2].split())
    assert error.startswith(says) and "set optimizer.learning_rate below" in error
    folder = RunFolder(Path("runs") / name)
    assert not folder.final.exists() and folder.manifest().status == "failed"
    last, _ = newest(folder.checkpoints)
    assert (last and last.name) == (good and f"checkpoint-{good}")
    assert (str(last) in error) == (last is not None)
    rows = metrics(folder.path)
    page = Page((folder.path / "report.html").read_text(encoding="utf-8")).text
    assert f"The run failed: {says}" in page
    # The report shows where it was.
    broken = [row["step"] for row in rows if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))]
    assert broken == [int(says.split()[2])] if says.startswith("at ") else broken == []


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize(
    ("settings", "says", "good"),
    [
        pytest.param([*SUDDEN, "save_steps=1"], "at step 3 the ", "checkpoint-2", id="every"),
        pytest.param([*SUDDEN, *LORA], "at step 3 the ", None, id="adapter"),
        pytest.param([*TOO_LARGE, "max_steps=1"], "after step 1 trained weights are not finite", None, id="unsaved"),
    ],
)
def test_all_processes_of_an_engine_end_there(
    engine: str, settings: list[str], says: str, good: str | None, tmp_path: Path, place: Path, ranks: Ranks
) -> None:
    own = [f"strategy={engine}", "batch.micro_batch_size=1", f"output.dir={tmp_path}", *settings]
    done = ranks.run(place, "recipe=small", *own, processes=2, entry=ON_CPU)
    assert done.codes == [1, 1], done.stderr[-3000:]
    assert " ".join(done.stderr.rpartition("error: ")[2].split()).startswith(says), done.stderr[-3000:]
    folder = RunFolder(tmp_path / "small")
    assert not folder.final.exists() and folder.manifest().status == "failed"
    last, _ = newest(folder.checkpoints)
    assert (last and last.name) == good


def broken_at(steps: str, strategy: str, place: Path, ranks: Ranks, *settings: str) -> Finished:
    (place / "broken_gradients.py").write_text(BROKEN_GRADIENTS)
    own = [f"strategy.name={strategy}", "schedule.name=linear", *settings]
    return ranks.run(place, "recipe=small", *own, processes=2, entry="broken_gradients", STEPS=steps)


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(name, marks=pytest.mark.matrix) for name in ("zero1", "zero2")), "zero3"]
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_zero_leaves_out_no_update_in_silence_where_few_steps_are_logged(
    strategy: str, precision: str, tmp_path: Path, place: Path, ranks: Ranks
) -> None:
    own = [f"precision={precision}", "logging.every_steps=4", "max_steps=6", f"output.dir={tmp_path}"]
    done = broken_at("2", strategy, place, ranks, *own)
    assert done.codes == [1, 1], done.stderr[-3000:]
    assert "at step 2 or one of the 1 before it the gradients' norm became" in " ".join(done.stderr.split())
    assert not (tmp_path / "small" / "final").exists()


@pytest.mark.parametrize("strategy", ["zero2", pytest.param("zero3", marks=pytest.mark.matrix)])
def test_steps_without_an_update_are_told_of_fp16(strategy: str, tmp_path: Path, place: Path, ranks: Ranks) -> None:
    own = ["precision=fp16", f"output.dir={tmp_path}", "save_steps=3"]
    done = broken_at("2,3", strategy, place, ranks, *own, "max_steps=5")
    assert done.codes == [0, 0], done.stderr[-3000:]
    said = "2 steps of 5 made no update, because gradients overflowed in fp16"
    assert said in done.stderr
    run = tmp_path / "small"
    assert RunFolder(run).manifest().skipped_steps == [2, 3]
    page = Page((run / "report.html").read_text(encoding="utf-8")).text
    assert "gradients overflowed (fp16): 2, 3" in page
    rows = [row for row in metrics(run) if "loss" in row]
    assert [math.isfinite(row["grad_norm"]) for row in rows] == [True, False, False, True, True]
    # The schedule waits for them.
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-2, 8e-3, 8e-3, 8e-3, 6e-3])
    # A run that goes on from between them counts those before it too.
    done = broken_at(
        "3",
        strategy,
        place,
        ranks,
        *own,
        "max_steps=5",
        f"checkpoint.resume={run}/checkpoints/checkpoint-3",
        "output.name=on",
    )
    assert done.codes == [0, 0] and said in done.stderr, done.stderr[-3000:]
    assert RunFolder(tmp_path / "on").manifest().skipped_steps == [2, 3]


@pytest.mark.parametrize(
    ("scale", "says", "last"),
    [
        ("loss_scale: 1024", "gradients overflowed in fp16 in all 4 steps, none of which updated a weight", 4),
        ("initial_scale_power: 1", "at step 2 gradients overflowed in fp16 at the least scale of the loss", 2),
    ],
)
def test_fp16_that_takes_no_step_ends_the_run(
    scale: str, says: str, last: int, tmp_path: Path, place: Path, ranks: Ranks
) -> None:
    own = ["precision=fp16", f"extra.deepspeed={{fp16: {{{scale}}}}}", "max_steps=4", f"output.dir={tmp_path}"]
    done = broken_at("1,2,3,4", "zero2", place, ranks, *own)
    assert done.codes == [1, 1], done.stderr[-3000:]
    said = " ".join(done.stderr.split())
    assert says in said, done.stderr[-3000:]
    assert ("set extra.deepspeed.fp16.loss_scale below 1024, or to 0" in said) == scale.startswith("loss_scale")
    run = tmp_path / "small"
    assert not (run / "final").exists() and RunFolder(run).manifest().status == "failed"
    assert RunFolder(run).manifest().skipped_steps == list(range(1, last + 1))
    assert [row["step"] for row in metrics(run) if "loss" in row] == list(range(1, last + 1))


def test_weights_that_are_not_trained_may_be_anything() -> None:
    frozen = torch.nn.Parameter(torch.tensor([math.inf]), requires_grad=False)
    large = torch.nn.Parameter(torch.full((4096,), 6e4, dtype=torch.float16))
    assert are_finite([frozen, large])
    for number in (math.inf, -math.inf, math.nan):
        assert not are_finite([frozen, torch.nn.Parameter(torch.tensor([1.0, number], dtype=torch.bfloat16))])


@pytest.mark.parametrize(("rank", "finite"), [(0, False), (1, False), (2, True), (3, True)])
def test_what_zero3_fills_its_parts_up_with_may_be_anything(rank: int, finite: bool) -> None:
    """Five numbers in parts of two: the third process has one of them, the fourth none."""
    whole: Any = torch.nn.Parameter(torch.empty(0))
    whole.ds_numel, whole.ds_tensor = 5, torch.tensor([1.0 if rank == 2 else math.nan, math.nan])
    whole.ds_tensor.ds_numel = 2
    assert are_finite([whole], rank) is finite


@pytest.mark.matrix
def test_zero3_on_three_processes_is_finite(tmp_path: Path, place: Path, ranks: Ranks) -> None:
    """Memory that is not written holds what is no number."""
    (place / "unwritten.py").write_text(UNWRITTEN)
    own = ["strategy=zero3", "global_batch_size=6", f"output.dir={tmp_path}"]
    done = ranks.run(place, "recipe=small", *own, processes=3, entry="unwritten")
    assert done.codes == [0, 0, 0], done.stderr[-3000:]
