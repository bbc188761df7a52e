"""Batches whose numbers are wrong are left out on every engine as if they had not been there, or end the run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import losses, metrics, strict_json, write_recipe
from ranks import ON_CPU, Ranks
from safetensors.torch import load_file, save_file
from small import MODELS, RECIPE, populate
from tiny import text_rows, tiny_model
from transformers import AutoTokenizer

from toolkit.train.main import main
from toolkit.train.run_folder import RunFolder

# A letter of which no other row has the first byte; the model knows it as no number.
BROKEN = "Ω"
ROWS = [f"{row['text']} {row['text']}"[:60] for row in text_rows(16)]
COMMON = [
    *("objective=language_modelling", "data.shuffle=false", "schedule.name=constant", "batch.global_batch_size=4"),
    *("batch.micro_batch_size=1", "model.path=qwen", "method.freeze=[model.embed_tokens.*]"),
    # At steps of 1e-2 Adam makes 1.5e-6 of rounding that depends on the number of threads.
    "optimizer.learning_rate=1e-3",
]
SKIP = ["faults.on_nan=skip"]
SPIKE = ["faults.on_spike=skip", "faults.spike_window=4", "faults.spike_sigmas=0.8"]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bad")
    populate(folder)
    tiny_model(MODELS["qwen"], folder / "qwen", kv_heads=2)
    tiny_model(MODELS["qwen"], folder / "deep", layers=4)
    tiny_model(MODELS["moe"], folder / "mixture")
    for model in ("qwen", "deep", "mixture"):
        first = AutoTokenizer.from_pretrained(folder / model)(BROKEN)["input_ids"][0]
        weights = load_file(folder / model / "model.safetensors")
        weights["model.embed_tokens.weight"][first] = math.nan
        save_file(weights, folder / model / "model.safetensors", {"format": "pt"})
    unlike = "".join(chr(33 + 7 * number % 90) for number in range(60))
    alike = [ROWS[0]] * 28
    for name, rows in {
        "good": [*ROWS[:8], *ROWS[12:]],
        "bad": [*ROWS[:8], ROWS[8], BROKEN, ROWS[10], ROWS[11], *ROWS[12:]],
        "alike": alike,
        "spiky": [*alike[:16], *[unlike[number:] + unlike[:number] for number in range(4)], *alike[16:]],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    write_recipe(folder, "small", RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def settings(data: str, steps: int, *more: str) -> list[str]:
    return ["recipe=small", *COMMON, f"data.sources=[{data}.jsonl]", f"max_steps={steps}", *more]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        name: weight for name, weight in load_file(run / "final" / "model.safetensors").items() if "embed" not in name
    }


def bad_batches(run: Path) -> list[dict]:
    return [strict_json(line) for line in (run / "bad_batches.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def reference(place: Path) -> dict[str, Path]:
    """Runs of one process on rows of which none is bad."""
    runs = {}
    for name, steps in (("good", 3), ("alike", 6)):
        assert main(settings(name, steps, f"output.name={name}")) == 0
        runs[name] = Path("runs") / name
    return runs


def difference(run: Path, other: Path) -> float:
    """The largest difference between the weights of two runs, as a share of the largest weight."""
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours)


def check_skipped(run: Path, good: Path) -> None:
    """The third of four batches was left out."""
    assert difference(run, good) == 0
    assert RunFolder(run).manifest().skipped_steps == [3]
    taken = [row for row in metrics(run) if "loss" in row]
    assert [math.isfinite(row["loss"]) for row in taken] == [True, True, False, True]
    assert [row["loss"] for row in taken if row["step"] != 3] == losses(good)
    (line,) = bad_batches(run)
    assert (line["step"], line["then"], line["rows"]) == (3, "skipped", [9])
    assert line["loss"] == "NaN" and line["texts"][0].startswith(BROKEN)


def test_run_goes_on_as_if_the_batch_had_not_been_there(reference: dict[str, Path]) -> None:
    assert main(settings("bad", 4, *SKIP, "output.name=skipped")) == 0
    check_skipped(Path("runs/skipped"), reference["good"])


DIVISIONS = {
    "pipeline": ["parallel.pipeline=2"],
    "zero_bubble": ["parallel.pipeline=2", "parallel.schedule=zero_bubble", "model.path=deep"],
    "tensor": ["parallel.tensor=2"],
    "tensor_zero1": ["parallel.tensor=2", "strategy=zero1"],
    "tensor_zero2": ["parallel.tensor=2", "strategy=zero2"],
    "sequence": ["parallel.sequence=2"],
    "context": ["parallel.context=2"],
    "expert": ["parallel.expert=2", "model.path=mixture"],
}
"""What two processes divide beside rows."""
ENGINES = {name: [f"strategy={name}"] for name in ("ddp", "zero1", "zero2", "zero3", "fsdp")} | DIVISIONS


def engines(*fast: str) -> list[object]:
    """All engines, as a test's parameters."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.matrix) for name in ENGINES]


@pytest.mark.parametrize("engine", engines("zero3", "pipeline"))
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.matrix)])
def test_every_engine_leaves_the_batch_out(
    engine: str, precision: str, reference: dict[str, Path], place: Path, tmp_path: Path, ranks: Ranks
) -> None:
    own = [*SKIP, *ENGINES[engine], f"precision={precision}", f"output.dir={tmp_path}"]
    for name, steps in (("good", 3), ("bad", 4)):
        done = ranks.run(place, *settings(name, steps, *own, f"output.name={name}"), processes=2, entry=ON_CPU)
        assert done.codes == [0, 0], done.stderr[-3000:]
    check_skipped(tmp_path / "bad", tmp_path / "good")
    if precision == "fp32" and engine not in DIVISIONS:  # Whose losses other tests compare, at smaller steps.
        assert losses(tmp_path / "good") == pytest.approx(losses(reference["good"]), rel=1e-6)


@pytest.mark.parametrize("engine", ["single", *engines()])
def test_spike_is_left_out(engine: str, reference: dict[str, Path], place: Path, tmp_path: Path, ranks: Ranks) -> None:
    own = [*SPIKE, *ENGINES.get(engine, ["strategy=single"]), f"output.dir={tmp_path}"]
    done = ranks.run(place, *settings("spiky", 7, *own), processes=1 + (engine != "single"), entry=ON_CPU)
    assert set(done.codes) == {0}, done.stderr[-3000:]
    run = tmp_path / "small"
    assert RunFolder(run).manifest().skipped_steps == [5]
    if engine not in DIVISIONS:
        assert losses(run)[-1] == pytest.approx(losses(reference["alike"])[-1], rel=1e-6)
    assert "at step 5 the loss rose to" in done.stderr and "its batch is skipped" in done.stderr
    assert sorted(row for line in bad_batches(run) for row in line["rows"]) == [16, 17, 18, 19]


def test_interrupted_run_skips_the_same(reference: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    saved = [*SPIKE, "checkpoint.save_steps=1", "checkpoint.save_total_limit=9"]
    assert main(settings("spiky", 7, *saved, "output.name=straight")) == 0
    # From before the spike, with what its loss is compared with; and from right after.
    for step in (4, 5):
        resume = f"checkpoint.resume=runs/straight/checkpoints/checkpoint-{step}"
        assert main(settings("spiky", 7, *saved, f"output.name=from-{step}", resume)) == 0
        run = Path(f"runs/from-{step}")
        assert difference(run, reference["alike"]) == 0 and RunFolder(run).manifest().skipped_steps == [5]
        assert losses(run) == losses(Path("runs/straight"))[step:]


def test_a_step_that_is_taken_again_is_not_listed_as_skipped_before() -> None:
    """The run goes on from before its spike, and skips none any more."""
    saved = [*SPIKE, "checkpoint.save_steps=4", "output.name=again"]
    assert main(settings("spiky", 7, *saved)) == 0
    run = Path("runs/again")
    assert RunFolder(run).manifest().skipped_steps == [5]
    for gone in ("final", "checkpoints/checkpoint-7"):
        shutil.rmtree(run / gone)
    assert main(settings("spiky", 7, *saved, "faults.on_spike=ignore")) == 0
    assert RunFolder(run).manifest().skipped_steps == [] and len(losses(run)) == 7


@pytest.mark.parametrize(
    ("name", "data", "more", "says", "then"),
    [
        ("stop", "bad", [], "at step 3 the loss became nan", [3]),
        (
            "sparse",
            "bad",
            ["logging.every_steps=4"],
            "at step 4 or one of the 3 before it the loss became nan",
            [1, 2, 3, 4],
        ),
        ("spike", "spiky", [*SPIKE, "faults.on_spike=stop"], "at step 5 the loss rose to", [5]),
        ("spike-nan", "bad", ["faults.on_spike=stop"], "at step 3 the loss became nan", [3]),
        ("many", "worse", [*SKIP, "max_skips=1"], "at step 2 the loss became nan, and faults.max_skips=1", [1, 2]),
    ],
)
def test_bad_batch_ends_the_run_and_its_rows_are_saved(
    name: str, data: str, more: list[str], says: str, then: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("worse.jsonl").write_text("".join(json.dumps({"text": f"{BROKEN} {text}"}) + "\n" for text in ROWS))
    if data == "worse":  # The first two rows are looked at before training.
        text = Path("worse.jsonl").read_text().splitlines(keepends=True)
        Path("worse.jsonl").write_text(
            json.dumps({"text": ROWS[0]}) + "\n" + json.dumps({"text": ROWS[1]}) + "\n" + "".join(text)
        )
    assert main(settings(data, 7 if data == "spiky" else 4, *more, f"output.name={name}")) == 1
    run = RunFolder(Path("runs") / name)
    error = " ".join(capsys.readouterr().err.partition("error: ")[2].split())
    assert error.startswith(says) and "bad_batches.jsonl" in error, error
    assert run.manifest().status == "failed" and not run.final.exists()
    lines = bad_batches(run.path)
    assert sorted({line["step"] for line in lines}) == then and lines[-1]["then"] == "ended the run"
    assert [row["step"] for row in metrics(run.path) if "loss" in row][-1] == then[-1]


def test_logged_loss_is_that_of_the_steps_that_were_taken(reference: dict[str, Path]) -> None:
    assert main(settings("bad", 4, *SKIP, "logging.every_steps=2", "output.name=mean")) == 0
    first, second, last = losses(reference["good"])
    assert losses(Path("runs/mean")) == pytest.approx([(first + second) / 2, last], rel=1e-6)


def test_guard_changes_nothing_of_a_sound_run(reference: dict[str, Path]) -> None:
    assert main(settings("good", 3, *SKIP, "output.name=sound", "logging.every_steps=3")) == 0
    assert difference(Path("runs/sound"), reference["good"]) == 0
    assert not Path("runs/sound/bad_batches.jsonl").exists()


def test_rows_of_a_stream_are_saved_as_text(reference: dict[str, Path]) -> None:
    assert main(settings("bad", 4, *SKIP, "data.streaming=true", "output.name=stream")) == 0
    (line,) = bad_batches(Path("runs/stream"))
    assert (line["step"], line["then"]) == (3, "skipped") and BROKEN in line["texts"][0] and "rows" not in line
