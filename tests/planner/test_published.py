"""Ranges hold what others measured, and are not so wide that they would hold anything."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("source", "widest"), [("fms-acceleration, one", 0.32), ("torchtitan", 0.62), ("llm-foundry, H100", 0.57)]
)
def test_published_rates_lie_in_their_ranges(source: str, widest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU, on up to 128, and on up to 512; tracing their models takes a minute each."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = list(importlib.import_module("published").rows(source))
    assert sum(row.within for row in rows) >= 0.9 * len(rows)
    assert statistics.median(row.width for row in rows) < widest
    if source.startswith("fms"):
        assert statistics.median(abs(row.rate[0] / row.rate[1] - 1) for row in rows) < 0.03
        assert statistics.median(abs(row.memory[0] / row.memory[1] - 1) for row in rows) < 0.02


def test_a_source_that_there_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("sys.argv", ["published.py", "--only", "nosuch"])
    with pytest.raises(SystemExit) as error:
        importlib.import_module("published").main()
    assert error.value.code and "nosuch" in (told := capsys.readouterr().err) and "torchtune" in told
