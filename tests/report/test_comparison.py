"""Runs side by side: what was different, what came out, and no run so broken that it cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
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


def test_the_same_choice_for_a_reason_that_was_measured_anew_is_no_difference(tmp_path: Path) -> None:
    runs = [
        make(
            tmp_path / str(share),
            chosen={"data.num_workers": f"1: it takes {share}% of a step", "precision": precision},
        )
        for share, precision in ((2.0, "bf16: 2.4 times as fast"), (2.1, "fp32: as fast"))
    ]
    assert rows_of(compare(runs), "chosen by auto") == {"precision": ("bf16", "fp32")}


def test_what_only_one_run_has_is_one_row(tmp_path: Path) -> None:
    """A resolved recipe also holds the empty lists of the other."""
    runs = [make(tmp_path / "one"), make(tmp_path / "two")]
    for run, layers, ranks in zip(runs, ([], [1]), ({}, {"q_proj": 4}), strict=True):
        method = {"layers_to_transform": layers, "rank_pattern": ranks}
        (run / "recipe.yaml").write_text(yaml.safe_dump({"objective": "sft", "method": method}))
    assert rows_of(compare(runs), "recipe") == {
        "method.layers_to_transform.0": (MISSING, "1"),
        "method.rank_pattern.q_proj": (MISSING, "4"),
    }


def test_the_same_run_twice_differs_in_nothing(tmp_path: Path) -> None:
    run = make(tmp_path / "one")
    compared = compare([run, run])
    assert compared.differences == {}
    assert len(set(compared.names)) == 2
    assert not any(row.best for row in compared.results), "none is better than itself"
    assert "Nothing of what they were started with is different." in comparison_text(compared).plain


def test_runs_of_one_name_are_told_by_their_folders(tmp_path: Path) -> None:
    for name in ("sweep", "other"):
        (tmp_path / name).mkdir()
    runs = [make(tmp_path / at, name="recipe") for at in ("sweep/low", "sweep/high", "other/low")]
    assert compare(runs[:2]).names == ("low", "high")
    assert compare(runs).names == tuple(map(str, runs))


def test_many_runs_are_listed_the_best_first(tmp_path: Path) -> None:
    losses = [2.5, 2.1, float("nan"), 2.3, 2.9]
    runs = [make(tmp_path / f"run-{at}", 1e-4 * at, loss) for at, loss in enumerate(losses, start=1)]
    write_metrics(runs[4], step_line(1))  # Never evaluated.
    lines = comparison_text(compare(runs), 80).plain.split("\n")
    assert lines[0].split()[:2] == ["learning_rate", "status"]
    assert [line.split()[0] for line in lines[1:6]] == ["run-2", "run-4", "run-1", "run-3", "run-5"]


def test_a_run_that_was_not_evaluated_after_training_has_no_held_out_loss(tmp_path: Path) -> None:
    """One that failed at once would else be the best of those that trained too fast."""
    worse, failed, worst = make(tmp_path / "worse", loss=5.0), make(tmp_path / "failed"), make(tmp_path / "worst", 1, 6)
    write_metrics(failed, eval_line(0, 4.0), step_line(1))
    compared = compare([worse, failed, worst])
    rows = rows_of(compared, "results")
    assert rows["held-out loss"] == ("5.0000", MISSING, "6.0000")
    assert rows["held-out loss before"] == ("4.0000",) * 3
    assert held_out(compared).best == (0,)


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


def measured(folder: Path, losses: Any, counts: Any = None, rows: str = "rows", **values: Any) -> Path:
    """A run whose loss is known of each held-out row."""
    counts = np.full(len(losses), 10.0) if counts is None else counts
    run = make(folder, loss=float(np.sum(losses) / np.sum(counts)), **values)
    kept = {"measured": rows, "counts": list(counts), "sums": {"8": list(losses)}}
    (run / "held_out_rows.json").write_text(json.dumps(kept))
    return run


def draws(*shifts: float) -> list[Any]:
    """Losses of 40 rows that are as hard for all models, each of which has noise of its own and a shift."""
    draw = np.random.default_rng(3)
    hard = draw.normal(25, 5, 40)
    return [hard + draw.normal(0, 0.5, 40) + 10 * shift for shift in shifts]


def held_out(compared: Any) -> Any:
    return next(row for row in compared.results if row.name == "held-out loss")


def test_the_best_is_marked_where_every_other_is_worse_by_more_than_chance(tmp_path: Path) -> None:
    """Though their losses by themselves are far less certain than they differ."""
    low, mid, high = draws(0.0, 0.05, 0.2)
    compared = compare(
        [measured(tmp_path / "mid", mid), measured(tmp_path / "low", low), measured(tmp_path / "high", high)]
    )
    assert held_out(compared).best == (1,) and not compared.notices
    perplexity = next(row for row in compared.results if row.name == "perplexity")
    assert perplexity.best == (1,)
    x = mid - low
    half = 2.0227 * x.std(ddof=1) / 40**0.5 / 10
    above, interval = (rows_of(compared, "results")[name] for name in ("above the lowest", "95% interval"))
    assert (above[0], interval[0]) == (f"{x.mean() / 10:+.4f}", f"± {half:.4f}")
    assert (above[1], interval[1]) == (MISSING, MISSING)
    assert x.mean() / 10 > half and half < 0.3 * low.std() / 40**0.5 / 10


def test_rewards_have_no_perplexity(tmp_path: Path) -> None:
    """The loss of GRPO and RLOO is minus the mean reward."""
    runs = [make(tmp_path / name) for name in ("one", "two")]
    for run, reward in zip(runs, (0.25, 1.5), strict=True):
        rewards = {"eval_reward": reward, "eval_reward_plus_minus": 0.1}
        write_metrics(run, step_line(1), eval_line(8, -reward) | rewards)
    results = rows_of(compare(runs), "results")
    assert results["held-out loss"] == ("-0.2500", "-1.5000")
    assert "perplexity" not in results


def test_runs_that_chance_may_have_ordered_are_not(tmp_path: Path) -> None:
    runs = [measured(tmp_path / f"run-{at}", losses) for at, losses in enumerate(draws(0.0, 0.001, 0.5), start=1)]
    compared = compare(runs)
    assert held_out(compared).best == ()
    lowest, other = sorted((0, 1), key=lambda at: float(held_out(compared).texts[at]))
    above = rows_of(compared, "results")["above the lowest"]
    assert above[other].startswith("≈ +0.01") and above[2].startswith("+0.5")
    (notice,) = compared.notices
    assert notice.startswith(f"By held-out loss run-{other + 1} cannot be told from the lowest, run-{lowest + 1}: ")
    for columns in (80, 120):
        text = comparison_text(compared, columns).plain
        assert notice[:40] in text and "≈ +0.01" in text and max(map(len, text.split("\n"))) <= columns
    assert notice in Page(comparison_page(compared)).text


def test_many_runs_are_told_with_their_intervals(tmp_path: Path) -> None:
    shifts = (0.0, 0.001, 0.5, 0.002, 0.6, 0.003, 0.004, 0.005)
    runs = [
        measured(tmp_path / f"learning_rate-{at}e-4", losses, rate=at * 1e-4)
        for at, losses in enumerate(draws(*shifts), start=1)
    ]
    compared = compare(runs)
    text = comparison_text(compared, 80).plain
    head, *lines = text.split("\n")
    assert max(map(len, text.split("\n"))) <= 80 and "above the lowest" in head and "training loss" not in head
    assert lines[0].split()[3] == MISSING and "≈ +0.00" in lines[1] and "±" in lines[1] and "+0.5" in lines[7]
    assert "learning_rate-7e-4 and learning_rate-8e-4 cannot be told from the lowest" in compared.notices[0]
    assert "training loss" in comparison_text(compared, 120).plain.split("\n")[0]


def test_other_rows_are_not_paired_and_nothing_is_marked(tmp_path: Path) -> None:
    low, high = draws(0.0, 0.5)
    compared = compare([measured(tmp_path / "one", low), measured(tmp_path / "other", high, rows="others")])
    assert held_out(compared).best == () and "above the lowest" not in rows_of(compared, "results")
    assert compared.notices == [
        "Held-out losses are not of the same rows, or not made in the same way: none is marked as best."
    ]
    counts = np.full(40, 10.0) + np.arange(40) % 2 * 2 - 1
    swapped = compare([measured(tmp_path / "a", low, counts), measured(tmp_path / "b", high, counts[::-1])])
    assert held_out(swapped).best == () and "above the lowest" not in rows_of(swapped, "results")


@pytest.mark.parametrize(
    ("data", "objectives", "best"),
    [(("a", "a"), ("dpo", "dpo"), (1,)), (("a", "b"), ("dpo", "dpo"), ()), (("a", "a"), ("dpo", "reward"), ())],
    ids=["another loss of the same pairs", "other pairs", "another objective"],
)
def test_a_score_is_the_best_only_among_those_of_the_same_rows(
    tmp_path: Path, data: tuple[str, str], objectives: tuple[str, str], best: tuple[int, ...]
) -> None:
    runs = []
    for at, losses in enumerate(draws(0.0, 0.5)):
        runs.append(measured(tmp_path / f"run-{at}", losses, rows=f"beta {at}", hashes={"data": data[at]}))
        recipe = yaml.safe_load((runs[at] / "recipe.yaml").read_text()) | {"objective": objectives[at]}
        (runs[at] / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        write_metrics(
            runs[at], step_line(1), eval_line(8, float(np.mean(losses)) / 10) | {"eval_accuracy": 0.5 + at / 4}
        )
    assert next(row for row in compare(runs).results if row.name == "accuracy").best == best


def test_settings_with_the_same_last_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, loss=loss) for name, loss in zip("abcde", (2.1, 2.2, 2.3, 2.4, 2.5), strict=True)]
    for at, run in enumerate(runs):
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
        steps = {"evaluation": {"every_steps": at + 4}, "logging": {"every_steps": at + 1}}
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe | steps | {"schedule": {"name": f"kind-{at}"}}))
    compared = compare(runs)
    head = comparison_text(compared, 120).plain.split("\n")[0].split()
    assert head[:3] == ["evaluation.every_steps", "logging.every_steps", "schedule"]
    page = Page(comparison_page(compared)).text
    assert page.count("evaluation.every_steps") > 1 and page.count("logging.every_steps") > 1, "table and figure"


def test_runs_without_figures_of_rows_are_compared_by_their_losses(tmp_path: Path) -> None:
    low, high = draws(0.0, 0.5)
    runs = [measured(tmp_path / "low", low), measured(tmp_path / "high", high), make(tmp_path / "older", loss=2.9)]
    compared = compare(runs)
    assert held_out(compared).best == (0,) and rows_of(compared, "results")["above the lowest"][2] == MISSING
    # A loss that is not that of its rows, as after a kill between both files, is compared as if they were not there.
    write_metrics(runs[1], step_line(1), eval_line(8, 2.0))
    compared = compare(runs)
    assert held_out(compared).best == (1,) and "above the lowest" not in rows_of(compared, "results")


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
