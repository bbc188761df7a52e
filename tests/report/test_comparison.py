"""Runs side by side: what was different, what came out, and no run so broken that it cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_run import example_run
from pages import Page, eval_line, step_line, write_metrics

from toolkit.report.comparison import MISSING, compare, comparison_page, comparison_text


def make(folder: Path, rate: float = 1e-4, loss: float = 2.5, **manifest: Any) -> Path:
    """A run that was trained with a learning rate, to a held-out loss."""
    run = example_run(folder)
    known = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(known | {"name": folder.name} | manifest))
    recipe = {"objective": "sft", "optimizer": {"learning_rate": rate}, "output": {"name": folder.name}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    write_metrics(run, eval_line(0, 4.0), *(step_line(step) for step in range(1, 9)), eval_line(8, loss))
    return run


def rows_of(compared: Any, kind: str) -> dict[str, tuple[str, ...]]:
    rows = compared.results if kind == "results" else compared.differences.get(kind, [])
    return {row.name: row.texts for row in rows}


def test_only_what_differs_is_shown_and_what_came_out(tmp_path: Path) -> None:
    versions = {"torch": "2.12.0", "peft": "0.21.2"}
    compared = compare([make(tmp_path / "low"), make(tmp_path / "high", 3e-4, 2.25, versions=versions)])
    assert compared.names == ("low", "high")
    assert rows_of(compared, "recipe") == {"optimizer.learning_rate": ("0.0001", "0.0003")}
    assert rows_of(compared, "versions") == {"torch": ("2.13.0", "2.12.0"), "peft": (MISSING, "0.21.2")}
    results = rows_of(compared, "results")
    assert results["held-out loss"] == ("2.5000", "2.2500")
    assert results["held-out loss before"] == ("4.0000", "4.0000")
    assert next(row for row in compared.results if row.name == "held-out loss").best == (1,)
    text = comparison_text(compared, 80).plain
    assert "optimizer.learning_rate  0.0001  0.0003" in text
    assert max(map(len, text.split("\n"))) <= 80


def test_the_same_run_twice_differs_in_nothing(tmp_path: Path) -> None:
    run = make(tmp_path / "one")
    compared = compare([run, run])
    assert compared.differences == {}
    assert len(set(compared.names)) == 2
    assert not any(row.best for row in compared.results), "none is better than itself"
    assert "Nothing of what they were started with is different." in comparison_text(compared).plain


def test_many_runs_are_listed_the_best_first(tmp_path: Path) -> None:
    losses = [2.5, 2.1, float("nan"), 2.3, 2.9]
    runs = [make(tmp_path / f"run-{at}", 1e-4 * at, loss) for at, loss in enumerate(losses, start=1)]
    write_metrics(runs[4], step_line(1))  # Never evaluated.
    lines = comparison_text(compare(runs), 80).plain.split("\n")
    assert lines[0].split()[:2] == ["learning_rate", "status"]
    assert [line.split()[0] for line in lines[1:6]] == ["run-2", "run-4", "run-1", "run-3", "run-5"]


def test_long_names_are_numbered(tmp_path: Path) -> None:
    runs = [make(tmp_path / ("a-name-that-is-long-" * 3 + str(at))) for at in range(3)]
    text = comparison_text(compare(runs), 80).plain
    assert "\n1  a-name-that-is-long-" in text
    assert max(map(len, text.split("\n"))) <= 80


def test_losses_of_other_held_out_tokens_are_not_said_to_be_better(tmp_path: Path) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other", loss=2.0)
    write_metrics(other, step_line(1), {**eval_line(1, 2.0), "eval_tokens": 7})
    compared = compare([one, other])
    assert any("not of the same tokens" in text for text in compared.notices)
    assert not next(row for row in compared.results if row.name == "held-out loss").best


def asked(run: Path, right: float, low: float, high: float, data: str = "d") -> Path:
    """The run, with answers of which a share was right."""
    figure = {"value": right, "low": low, "high": high}
    scores = [{"name": "exact match", "after": figure}, {"name": "chrF", "after": {"value": 20.0}}]
    held_out = {"rows": 64, "held_out": 64, "data": data, "batch_size": 8, "max_new_tokens": 64, "cut": [None, 0]}
    (run / "evaluation.json").write_text(json.dumps({"held_out": held_out | {"scores": scores}}))
    return run


@pytest.mark.parametrize(("low", "data", "best"), [(0.4, "d", (1,)), (0.2, "d", ()), (0.4, "other", ())])
def test_answers_are_compared_where_they_are_to_the_same_rows_and_differ_by_more_than_chance(
    tmp_path: Path, low: float, data: str, best: tuple[int, ...]
) -> None:
    runs = [asked(make(tmp_path / "one"), 0.3, 0.2, 0.4), asked(make(tmp_path / "two"), 0.5, low, 0.6, data)]
    compared = compare([*runs, make(tmp_path / "never")])
    row = next(row for row in compared.results if row.name == "answers: exact match")
    assert row.texts == ("0.300 (0.200 to 0.400)", f"0.500 ({low:.3f} to 0.600)", MISSING) and row.best == best
    assert not next(row for row in compared.results if row.name == "answers: chrF").best, "they are the same"


@pytest.mark.parametrize("damage", ["empty", "garbage", "no metrics"])
def test_a_damaged_run_is_compared_as_far_as_it_can_be_read(tmp_path: Path, damage: str) -> None:
    whole, broken = make(tmp_path / "whole"), make(tmp_path / "broken", 2e-4)
    if damage == "no metrics":
        (broken / "metrics.jsonl").unlink()
    else:
        for file in broken.iterdir():
            file.write_text("" if damage == "empty" else '{"a": [1, \x00')
    compared = compare([whole, broken])
    assert rows_of(compared, "results")["held-out loss"][0] == "2.5000"
    assert comparison_text(compared).plain
    assert Page(comparison_page(compared)).text


def test_the_page_shows_every_run_in_a_colour_of_its_own_and_loads_nothing(tmp_path: Path) -> None:
    runs = [make(tmp_path / "low"), make(tmp_path / "high", 3e-4, 2.25, name="<b>high")]
    html = comparison_page(compare(runs))
    page = Page(html)
    assert page.addresses == []
    for text in ("low", "<b>high", "2 runs compared", "optimizer.learning_rate 0.0001 0.0003"):
        assert text in page.text, text
    for number in (1, 2):
        assert f'class="points nth{number}"' in html and f'class="line nth{number}"' in html


def test_the_page_draws_a_line_for_each_of_several_runs(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"run-{at}", 1e-4 * 2**at, 2.5 - at / 8) for at in range(4)]
    page = comparison_page(compare(runs))
    assert page.count("<title>run-") == 1 + 4 and "run-2: learning_rate 0.0004, held-out loss 2.2500" in page
    assert comparison_page(compare(runs[:2])).count("<title>run-") == 1, "that of the page"
