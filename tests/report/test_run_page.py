"""The report: true figures, a page that needs nothing from outside, and no run so broken that there is no page."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from example_run import AUDIT, MANIFEST, SAMPLES, example_run
from pages import Page, eval_line, step_line, write_metrics

from toolkit.common import UserError
from toolkit.report.charts import MAX_POINTS, Series, chart, downsample, nice_ticks, smooth
from toolkit.report.load import read_manifest, read_metrics, read_run
from toolkit.report.page import render
from toolkit.report.run_page import write_report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with everything in it."""
    return example_run(tmp_path / "demo")


def test_a_report_shows_the_headline_figures(run: Path) -> None:
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    for figure in ("3.960 → 2.740", "\N{MINUS SIGN}30.8%", "52.46", "15.49", "400", "3 GiB", "4m 28s", "3.5%"):
        assert figure in text, figure
    assert "100 of 100 steps" in text
    assert "finished" in text
    assert "16 GiB" in text
    assert "64\u2013127 1,520" in text
    assert "41 rows repeat — set `data.deduplicate: true`" in text


def test_a_report_is_self_contained_and_complete_without_scripts(run: Path) -> None:
    html = write_report(run).read_text(encoding="utf-8")
    page = Page(html)
    assert page.addresses == []
    assert not re.search(r"https?://|@import|url\(", html)
    without_scripts = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert Page(without_scripts).text == page.text
    assert without_scripts.count("<path") >= 5


def test_everything_from_outside_is_escaped(run: Path) -> None:
    html = write_report(run).read_text(encoding="utf-8")
    page = Page(html)
    assert html.count("<script>") == 1
    assert not {"img", "u", "s"} & set(page.tags)
    for text in ("<script>alert(1)</script>", "R & D", "</p><img src=x onerror=1>", "demo <b>run</b>", "<u>kind</u>"):
        assert text in page.text
    assert "no <em>row</em>" in page.text
    assert "${oc.env:BASE} # <s>" in page.text


def test_charts_are_well_formed(run: Path) -> None:
    html = write_report(run).read_text(encoding="utf-8")
    charts = re.findall(r"<svg height.*?</svg></figure>", html, flags=re.DOTALL)
    assert len(charts) == 5
    for svg in charts:
        ElementTree.fromstring(svg.removesuffix("</figure>"))


@pytest.mark.parametrize("name", ["manifest.json", "audit.json", "samples.json", "metrics.jsonl", "recipe.yaml"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[1, null]", b'"text"', b"\xff\xfe\x00", b"[" * 100_000])
def test_any_missing_or_broken_file_still_gives_a_page(run: Path, name: str, content: bytes | None) -> None:
    (run / name).unlink() if content is None else (run / name).write_bytes(content)
    Page(write_report(run).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "manifest",
    [
        dict.fromkeys(("parameters", "git", "hardware", "versions", "hashes", "batch", "effective"), 7),
        {"parameters": {"total": 0, "trainable": 0}, "total_steps": "many", "started": 12, "status": ["odd"]},
        {"parameters": {"total": "x", "trainable": None}, "train_seconds": "NaN", "name": {}, "git": {"commit": None}},
        {"of another program": 1},
    ],
)
def test_a_manifest_of_wrong_types_still_gives_a_page(run: Path, manifest: dict[str, Any]) -> None:
    (run / "manifest.json").write_text(json.dumps({**manifest, "command": "python run.py"}))
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "manifest.json holds what this version cannot read" in text
    assert "python run.py" in text, "the readable keys are shown"


def test_a_run_folder_is_read_as_it_was_written(run: Path) -> None:
    manifest, problems = read_manifest(run)
    assert not problems and manifest.model_dump(mode="json") == {
        **MANIFEST,
        "parameters": manifest.parameters.model_dump(),
    }
    record = read_run(run)
    assert record.audit.model_dump() == AUDIT and [sample.model_dump() for sample in record.samples] == SAMPLES


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path: Path) -> None:
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "manifest.json" in text
    assert text.count("Nothing was measured.") == 5


def test_a_missing_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        write_report(tmp_path / "nothing")


def test_one_step_and_no_evaluation(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", step_line(1))
    html = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "never evaluated" in html
    assert html.count("<circle") == 5


def test_a_loss_that_broke_is_marked_and_reported(tmp_path: Path) -> None:
    rows = [step_line(step) for step in range(1, 60)]
    rows[29]["loss"], rows[30]["loss"], rows[40]["grad_norm"] = math.nan, "Infinity", math.inf
    write_metrics(tmp_path / "run", *rows, eval_line(59, math.nan))
    html = write_report(tmp_path / "run").read_text(encoding="utf-8")
    text = Page(html).text
    assert "The training loss was not finite at 2 steps, first at step 30." in text
    assert "The gradient norm was not finite at 1 steps, first at step 41." in text
    assert 'class="broken"' in html
    assert not re.search(r'd="[^"]*(nan|inf)', html)


def test_a_line_cut_off_by_a_kill_is_skipped(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", step_line(1), step_line(2), end='{"step": 3, "loss": 1')
    training, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in training] == [1, 2]


def test_after_a_resume_the_abandoned_steps_are_forgotten(tmp_path: Path) -> None:
    before = [step_line(1), step_line(2), eval_line(2, 3.0), step_line(3), step_line(4), eval_line(4, 2.0)]
    write_metrics(tmp_path / "run", eval_line(0, 4.0), *before, step_line(3, loss=0.5))
    record = read_run(tmp_path / "run")
    assert [(row["step"], row["loss"]) for row in record.training] == [(1, 3.99), (2, 3.98), (3, 0.5)]
    assert [row["step"] for row in record.evaluations] == [0, 2]


def test_gpu_memory_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", *(step_line(step, device_memory_bytes=step * 2**30) for step in (1, 2)))
    text = Page(write_report(tmp_path / "run").read_text(encoding="utf-8")).text
    assert "Peak memory 2 GiB GPU" in text
    assert "GPU memory, GiB" in text


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", *(step_line(step, loss=math.sin(step) + 3) for step in range(1, 20_001)))
    page = write_report(tmp_path / "run")
    assert page.stat().st_size < 600_000
    assert max(path.count("L") for path in re.findall(r' d="([^"]*)"', page.read_text(encoding="utf-8"))) < MAX_POINTS


def drawn(title: str, series: list[Series], **options: Any) -> str:
    return render("chart.html.j2", chart=chart(title, series, **options))


def test_downsampling_keeps_ends_and_extremes() -> None:
    y = [math.sin(index / 500) for index in range(100_000)]
    y[31_337], y[77_777], y[50_000] = 99.0, -99.0, math.nan
    points = downsample(range(100_000), y)
    assert len(points) <= MAX_POINTS
    assert points[0][0] == 0 and points[-1][0] == 99_999
    assert (31_337, 99.0) in points and (77_777, -99.0) in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert downsample([1, 2], [3, 4]) == [(1, 3), (2, 4)]


def test_smoothing_follows_the_curve_and_ignores_spikes() -> None:
    line = [5.0 - 0.01 * index for index in range(400)]
    assert smooth(line)[200] == pytest.approx(line[200])
    spiked = [*line]
    spiked[200], spiked[100] = 1e6, math.nan
    assert max(abs(a - b) for a, b in zip(smooth(spiked), line, strict=True)) < 0.1
    assert smooth([]) == []
    assert smooth([1.0]) == [1.0]
    assert all(math.isnan(value) for value in smooth([math.nan] * 50))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (2.1, 4.3, (2, 2.5, 3, 3.5, 4, 4.5)),
        (0, 2e-5, (0, 5e-6, 1e-5, 1.5e-5, 2e-5)),
        (1, 100_000, (0, 20_000, 40_000, 60_000, 80_000, 100_000)),
        (-3, 7, (-4, -2, 0, 2, 4, 6, 8)),
    ],
)
def test_ticks_are_round_numbers_around_the_data(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0],
        [5.0, 5.0],
        [-1.0, -2.0],
        [1e-30, 2e-30],
        [1e-300, 1e299],
        [math.inf, math.nan],
        [1.0, 1.0 + 1e-12],
        [3.4e38, 1.0],
    ],
)
@pytest.mark.parametrize("options", [{}, {"from_zero": True}, {"may_log": True}])
def test_any_values_make_a_chart(values: list[float], options: dict[str, bool]) -> None:
    html = drawn("Anything", [Series("line", [1.0, 2.0], values)], **options)
    Page(html)
    for y in re.findall(r'(?:cy|y1)="(-?[\d.]+|nan|inf)"', html):
        assert -1 <= float(y) <= 185


def test_few_large_values_get_a_logarithmic_axis() -> None:
    x = [float(step) for step in range(1, 101)]
    y = [1.0 + step % 3 for step in range(99)] + [8000.0]
    html = drawn("Gradient norm", [Series("norm", x, y)], may_log=True)
    assert "logarithmic" in html
    assert "10000</text>" in html
