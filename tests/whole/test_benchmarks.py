"""Benchmarks are run by hand and rarely; here their recipes are held against today's keys and rules."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.recipe import model_configs
from toolkit.recipe.overrides import split_arguments
from toolkit.recipe.rules import load_checked

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if not name.startswith("toolkit"):
            del sys.modules[name]


def config(folder: Path, origin: str, changes: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**model_configs.bundled()[origin].config, **changes})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_throughput(tmp_path: Path) -> None:
    import material
    import throughput

    bench = throughput.Bench(tmp_path, 20, 20, throughput.CPU_JOBS, False)
    for job in (*throughput.CPU_JOBS, *throughput.CUDA_JOBS):
        shape = material.SHAPES.get(job.model, ("HuggingFaceTB/SmolLM2-135M-Instruct", {}))
        model = config(tmp_path / "models" / job.model, *shape)
        rows = tmp_path / "rows.jsonl"
        command = bench._recipe("toolkit+seed=1", job, str(model), rows, tmp_path / "runs" / "job" / "metrics.jsonl")
        name, overrides = split_arguments([each for each in command[2:] if not each.startswith("--")])
        recipe = load_checked(name, overrides, tmp_path / "recipes").recipe
        assert (recipe.objective, recipe.method.name, recipe.seed) == (job.objective, job.method[-4:], 1)


def test_plan_accuracy(tmp_path: Path) -> None:
    import material
    import plan_accuracy

    (tmp_path / "recipes").mkdir()
    for case in (*plan_accuracy.CASES, *plan_accuracy.CPU, *plan_accuracy.SMALL):
        model = config(tmp_path / "models" / case.model, *material.SHAPES[case.model])
        text = plan_accuracy._RECIPE.format(model=model, documents=tmp_path / "documents.jsonl", steps=2, runs=tmp_path)
        (tmp_path / "recipes" / "case.yaml").write_text(text, encoding="utf-8")
        recipe = load_checked("case", case.overrides, tmp_path / "recipes").recipe
        assert recipe.batch.micro_batch_size == case.micro_batch_size


def test_parity(tmp_path: Path) -> None:
    import parity

    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "parity.yaml").write_text(parity._RECIPE, encoding="utf-8")
    for case in parity.cases():
        for settings in (case.reference, (*case.reference, *case.settings)):
            assert load_checked("parity", settings, tmp_path / "recipes").recipe.schedule.max_steps == 8


def test_overhead(tmp_path: Path) -> None:
    import overhead

    (tmp_path / "recipes").mkdir()
    model = config(tmp_path / "model", "meta-llama/Llama-3.2-1B", {})
    text = overhead.RECIPE.format(model=model, data=tmp_path / "documents.jsonl", batches=1, steps=2)
    (tmp_path / "recipes" / "overhead.yaml").write_text(text, encoding="utf-8")
    assert load_checked("overhead", (), tmp_path / "recipes").recipe.batch.seq_len == 32


def test_saves(tmp_path: Path) -> None:
    import saves

    (tmp_path / "recipes").mkdir()
    model = config(tmp_path / "model", "meta-llama/Llama-3.2-1B", {})
    text = saves.RECIPE.format(model=model, data=tmp_path / "documents.jsonl", steps=4, every=2)
    (tmp_path / "recipes" / "saves.yaml").write_text(text, encoding="utf-8")
    for engine in saves.ENGINES:
        recipe = load_checked(
            "saves", [f"strategy={engine}"] if engine != "single" else [], tmp_path / "recipes"
        ).recipe
        assert recipe.checkpoint.save_steps == 2
