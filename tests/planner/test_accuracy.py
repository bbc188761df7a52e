"""The benchmark of plans: every case is a recipe that may run; its report follows from what runs left behind."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from example_plan import example_plan

from toolkit.recipe import model_configs
from toolkit.recipe.rules import load_checked

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("plan_accuracy")


def test_every_case_is_an_allowed_recipe(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    cases = (*benchmark.CASES, *benchmark.CPU, *benchmark.SMALL)
    assert len({(case.name, *case.overrides) for case in cases}) == len(cases)
    for case in cases:
        origin, changes = benchmark.material.SHAPES[case.model]
        model = tmp_path / case.model
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({**model_configs.bundled()[origin].config, **changes}))
        values = {"model": model, "documents": tmp_path / "documents.jsonl", "steps": 5, "runs": tmp_path / "runs"}
        (tmp_path / "recipes/case.yaml").write_text(benchmark._RECIPE.format(**values))
        recipe = load_checked("case", case.overrides, None).recipe
        assert recipe.batch.global_batch_size == case.micro_batch_size * case.accumulation, case.name


def test_documents_are_as_long_as_asked(benchmark: ModuleType, tmp_path: Path) -> None:
    file = benchmark.material.documents(200_000, tmp_path / "documents.jsonl")
    lengths = [len(json.loads(line)["text"].split()) for line in file.read_text().splitlines()]
    assert 200_000 <= sum(lengths) < 204_000
    assert 550 < sum(lengths) / len(lengths) < 850
    tokenizer = benchmark.material._tokenizer()
    text = json.loads(file.read_text().splitlines()[0])["text"]
    assert len(tokenizer(text)["input_ids"]) == len(text.split())


def outcome(benchmark: ModuleType, folder: Path, code: int = 0, said: str = "", **manifest: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return benchmark.outcome(benchmark.SMALL[0], folder, code, said)


def test_errors_and_verdicts_follow_from_manifests(benchmark: ModuleType, tmp_path: Path) -> None:
    plan = example_plan().model_dump(mode="json")
    allocated, reserved = plan["memory"][0]["allocated"], plan["memory"][0]["reserved"]["value"]
    step = plan["work"]["step_seconds"]["value"]
    measured = {"allocated": int(allocated / 1.02), "reserved": int(reserved / 0.95), "step_seconds": step / 1.2}
    found = outcome(benchmark, tmp_path / "good", plan=plan, measured=measured)
    assert [round(found.error(figure), 4) for figure in measured] == [0.02, -0.05, 0.2]
    assert [met for met, _ in benchmark.verdicts([found])] == [True, True, False, None, True, True]
    assert "+2.0%" in benchmark.table([found]) and "-5.0%" in benchmark.table([found])

    said = "step 1\nerror: CUDA out of memory. Tried to allocate 2 GiB\n  lower batch.micro_batch_size\n"
    broken = outcome(benchmark, tmp_path / "bad", 1, said, plan=plan)
    assert (broken.status, broken.reason) == ("out of memory", "error: CUDA out of memory. Tried to allocate 2 GiB")
    assert broken.error("allocated") is None
    assert [met for met, _ in benchmark.verdicts([found, broken])] == [True, True, False, None, False, True]

    # What the plan called too large may fail; a run that ended before its plan was kept is no excuse.
    said_no = {**plan, "fit": {**plan["fit"], "answer": "no"}}
    warned = outcome(benchmark, tmp_path / "no", 1, said, plan=said_no)
    unknown = outcome(benchmark, tmp_path / "early", 1, said)
    assert benchmark.verdicts([found, warned])[4][0] and not benchmark.verdicts([found, unknown])[4][0]
    crashed = outcome(benchmark, tmp_path / "crash", 1, "KeyError: 'x'", plan=plan)
    assert [met for met, _ in benchmark.verdicts([crashed])] == [None] * 4 + [True, False]


@pytest.mark.matrix
def test_a_small_case_runs_through_the_normal_command(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--small", "--only", "tiny LoRA", "--steps", "3", "--calibrate", "0", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["plan_accuracy.py", *arguments])
    assert benchmark.main() == 0, capsys.readouterr().out
    (file,) = tmp_path.glob("plan_accuracy-*-small.json")
    (found,) = json.loads(file.read_text())["outcomes"]
    assert found["status"] == "finished"
    assert {"allocated", "step_seconds"} <= set(found["planned"])
    assert {"host", "step_seconds"} <= set(found["measured"])
