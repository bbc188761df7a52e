"""The report: true figures, a page that needs nothing from outside, and no run so broken that there is no page."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_plan import FITS
from example_run import example_run
from pages import Page, eval_line, step_line, write_metrics

from toolkit.cache import locked
from toolkit.common import UserError
from toolkit.files import write_json
from toolkit.report.charts import MAX_POINTS
from toolkit.report.comparison import compare
from toolkit.report.load import LOCK
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


def test_what_a_report_that_was_killed_has_left_goes_with_a_later_one(run: Path) -> None:
    """But not what another one is writing."""
    left, new = (run / f".{name}.7.89ab.partial" for name in ("report.html", "evaluation.json"))
    for each in (left, new):
        each.touch()
    os.utime(left, (0, 0))
    write_report(run)
    assert not left.exists() and new.exists()


def test_what_was_asked_after_training_is_shown_with_its_intervals(run: Path) -> None:
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "at which 3 of the base model's were cut." in text and "<b>gsm8k: 20 of 1,319 samples" in text
    assert "exact <i>match</i> 0.500 (0.250 to 0.750) 0.500 (0.250 to 0.750) +0.500 (+0.250 to +0.750)" in text


def test_speed_and_start_up_are_told_in_sentences(run: Path) -> None:
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    for sentence in (
        "The first step had ended 15.5 s after the process was started: imports and checks 5.1 s, data 0.5 s, the plan "
        "0.1 s, loading the model 1.5 s, answers and evaluation 6.3 s, the step itself 2.0 s.",
        "Half of the steps took at most 2.00 s, 90% at most 2.00 s, 99% at most 2.00 s (the first 2 steps are not",
        "Of that, 1.0% was waiting for batches.",
        "400 tokens a second, 160 of them trained: 310 GFLOP/s, 23.0% of the dense peak.",
        "6 for every parameter that it meets (4 where they are frozen)",
    ):
        assert sentence in text, sentence


def test_all_steps_of_a_short_run_are_counted(run: Path) -> None:
    write_metrics(run, step_line(1), step_line(2))
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "Half of the steps took at most" in text and "are not counted" not in text


def test_a_pipeline_is_told_with_its_stages_and_its_bubble(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    work = FITS.work.model_copy(update={"bubble_seconds": 0.125})
    plan = FITS.model_copy(update={"work": work, "pipeline": 2, "stages": [17, 15], "schedule": "1f1b"})
    batch = manifest["batch"] | {"world_size": 4, "pipeline": 2}
    (run / "manifest.json").write_text(json.dumps(manifest | {"batch": batch, "plan": plan.model_dump(mode="json")}))
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "on each of 2 groups of 2 processes that follow each other." in text
    assert "As planned, its stages are 17 + 15 layers by 1f1b; its bubble is 12.5% of a step." in text


def test_data_and_machine_are_told_in_sentences_with_all_figures_behind_a_fold(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    gpus = [{"name": "NVIDIA H100", "memory_bytes": 80 * 2**30}] * 2
    state = {"engine": "fsdp", "autocast": "bfloat16", "attention": "sdpa", "optimizer": "AdamW"}
    changes = {"hardware": manifest["hardware"] | {"gpus": gpus}, "effective": state | {"trained_dtype": "float32"}}
    (run / "manifest.json").write_text(json.dumps(manifest | changes))
    html = write_report(run).read_text(encoding="utf-8")
    text = Page(html).text
    for sentence in (
        "3,084 rows of 301,234 tokens are trained on; 66.8% of the tokens carry loss, 201,234 in all.",
        "3 of the training rows (0.2%) and 3 of the held-out rows (0.2%) are longer than 512 tokens and are left out",
        "5 rows have no trained token and are left out.",
        "41 rows repeat an earlier one and are kept; no held-out row is trained on.",
        "rows.jsonl: unused columns: <u>kind</u>",
        "It ran on 2 NVIDIA H100 of 80 GiB, in a machine with 2 cores (x86_64) and 16 GiB of RAM.",
        "A step is 8 sequences of up to 512 tokens: 2 micro-batches of 4 on one process.",
        "It computed in bfloat16 under fsdp, with sdpa attention; AdamW updated float32 weights.",
        "The code was commit 0123abc, with uncommitted changes.",
        "8% of what is computed is padding",
    ):
        assert sentence in text, sentence
    assert re.search(r"<summary>audit.json</summary><pre>{[^<]*&#34;duplicates&#34;: 41", html)
    assert re.search(r"<summary>manifest.json</summary><pre>{[^<]*&#34;cpu_cores&#34;: 2", html)


def test_the_header_names_model_data_method_and_learning_rate(run: Path) -> None:
    recipe = {"model": {"path": "org/base"}, "data": {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}}
    recipe |= {"method": {"name": "lora", "quantization": "nf4"}, "optimizer": {"learning_rate": 2e-4}}
    recipe |= {"evaluation": {"max_new_tokens": 64}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "org/base · a.jsonl and 1 more · lora on nf4 · learning rate 2e-4" in text
    assert "An answer is cut after 64 tokens" in text
    for broken in ("model: [", "- 1", "model: 3\ndata: {sources: 4}\noptimizer: {learning_rate: x}", ""):
        (run / "recipe.yaml").write_text(broken)
        write_report(run)


def test_what_has_to_be_known_to_read_the_figures_stands_above_them(tmp_path: Path) -> None:
    text = Page(write_report(example_run(tmp_path / "demo", notes=["the <b>loss</b> holds two"])).read_text()).text
    assert "the <b>loss</b> holds two" in text
    (tmp_path / "demo" / "manifest.json").write_text('{"notes": [7]}')
    assert "left out: notes" in Page(write_report(tmp_path / "demo").read_text()).text


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


def test_the_load_of_experts_is_shown_where_there_are_any(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    load = {"expert_load": 1.5, "expert_load_worst": 2.25, "idle_experts": 0.125, "dropped_tokens": 0}
    said = (
        "In the newest steps the fullest expert of a layer met 1.50 times as many tokens as the mean of its experts, "
        "2.25 times in the worst layer; 12.5% of the experts met none, and no token was dropped."
    )
    for further, end in ((load, ""), (load | {"process_load": 1.2}, " The fullest of the processes that divide them ")):
        text = "".join(json.dumps(row | (further if "loss" in row else {})) + "\n" for row in rows)
        (run / "metrics.jsonl").write_text(text, encoding="utf-8")
        html = write_report(run).read_text(encoding="utf-8")
        assert len(re.findall("<svg height", html)) == 6
        assert said + end in html
        assert ("computed 1.20 times the mean." in html) == bool(end)


@pytest.mark.parametrize(
    "name", ["manifest.json", "audit.json", "samples.json", "metrics.jsonl", "recipe.yaml", "held_out_rows.json"]
)
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


@pytest.mark.parametrize("change", [{"memory": []}, {"peak_phase": "x"}, {"phases": {}}, {"work": None}], ids=str)
def test_a_plan_without_what_is_shown_of_it_is_left_out_and_named(run: Path, change: dict[str, Any]) -> None:
    plan, manifest = FITS.model_dump(mode="json"), json.loads((run / "manifest.json").read_text())
    (plan["memory"][0] if change.keys() & plan["memory"][0].keys() else plan).update(change)
    (run / "manifest.json").write_text(json.dumps({**manifest, "plan": plan, "measured": {"step_seconds": 1.0}}))
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "what this version cannot read, and it is left out: plan" in text and "100 of 100 steps" in text


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


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    said = {"status": "failed", "error": "RuntimeError: shapes <1> and 2\n  at step 7"}
    page = Page(write_report(example_run(tmp_path / "run", **said)).read_text(encoding="utf-8"))
    assert "The run failed: RuntimeError: shapes <1> and 2 — at step 7" in page.text
    stopped = example_run(tmp_path / "stopped", status="interrupted", error="KeyboardInterrupt: ")
    assert "The run failed" not in write_report(stopped).read_text(encoding="utf-8")


def test_a_run_that_was_killed_does_not_run_for_ever(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run", status="running", finished=None)
    with locked(run / LOCK):
        page = write_report(run).read_text(encoding="utf-8")
        assert '<span class="status running">' in page and "No process trains in this folder" not in page
        assert compare([run, run]).results[0].texts == ("running", "running")
    page = write_report(run).read_text(encoding="utf-8")
    assert '<span class="status stopped">' in page and "was killed after its last sign of life, 20" in page
    assert compare([run, run]).results[0].texts == ("stopped", "stopped")


def test_a_loss_that_broke_is_marked_and_reported(tmp_path: Path) -> None:
    rows = [step_line(step) for step in range(1, 60)]
    rows[29]["loss"], rows[30]["loss"], rows[40]["grad_norm"] = math.nan, "Infinity", math.inf
    write_metrics(tmp_path / "run", *rows, eval_line(59, math.nan))
    html = write_report(tmp_path / "run").read_text(encoding="utf-8")
    text = Page(html).text
    assert "The training loss was not finite at steps 30, 31." in text
    assert "The gradient norm was not finite at step 41." in text
    assert 'class="broken"' in html
    assert not re.search(r'd="[^"]*(nan|inf)', html)


def test_gpu_memory_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", *(step_line(step, device_memory_bytes=step * 2**30) for step in (1, 2)))
    text = Page(write_report(tmp_path / "run").read_text(encoding="utf-8")).text
    assert "Peak memory 2 GiB GPU" in text
    assert "GPU memory, GiB" in text


def test_the_peak_of_memory_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """Answers to prompts and the saving of the model come after the last line of the metrics."""
    write_metrics(tmp_path / "run", step_line(1), step_line(2))
    write_json(tmp_path / "run" / "manifest.json", {"peak_memory_bytes": 5 * 2**30})
    assert "Peak memory 5 GiB host" in Page(write_report(tmp_path / "run").read_text(encoding="utf-8")).text
    write_metrics(tmp_path / "run", step_line(1, device_memory_bytes=2**30), step_line(2))
    write_json(tmp_path / "run" / "manifest.json", {"measured": {"allocated": 2**31}, "peak_memory_bytes": 5 * 2**30})
    assert "Peak memory 2 GiB GPU" in Page(write_report(tmp_path / "run").read_text(encoding="utf-8")).text


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", *(step_line(step, loss=math.sin(step) + 3) for step in range(1, 20_001)))
    page = write_report(tmp_path / "run")
    assert page.stat().st_size < 600_000
    assert max(path.count("L") for path in re.findall(r' d="([^"]*)"', page.read_text(encoding="utf-8"))) < MAX_POINTS


def test_the_report_sets_the_plan_against_what_was_measured(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", step_line(1), step_line(2))
    measured = {"allocated": int(FITS.memory[0].allocated / 1.02), "step_seconds": 1.25, "tokens": None}
    measured["energy_kwh"] = 0.0024
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(json.dumps({"plan": FITS.model_dump(), "measured": measured}))
    text = Page(write_report(tmp_path / "run").read_text(encoding="utf-8")).text
    assert re.search(r"memory allocated 38\.7 GiB 37\.9 GiB \+2\.0%", text)
    assert re.search(r"time of a step 1\.00 s \(900 ms to 1\.20 s\) 1\.25 s \N{MINUS SIGN}20\.0%", text)
    assert "energy not planned 2.4 Wh" in text
    assert "memory reserved" not in text and "host RAM" not in text, "what was not measured has no row"
    assert "activations 20.0 GiB" in text


@pytest.mark.parametrize(
    "manifest",
    [{"plan": {"old": 1}, "measured": {"allocated": 1}}, {"plan": 3, "measured": []}, {"measured": {"allocated": 5}}],
    ids=["other-version", "odd", "no-plan"],
)
def test_a_report_without_a_readable_plan_is_a_report(tmp_path: Path, manifest: dict[str, object]) -> None:
    write_metrics(tmp_path / "run", step_line(1))
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    assert "Planned and measured" not in Page(write_report(tmp_path / "run").read_text(encoding="utf-8")).text


@pytest.mark.parametrize(
    ("after", "tile"), [(20.0, '<span class="good">'), (30.0, '<span class="bad">'), (25.01, "<span>")]
)
def test_a_change_of_the_loss_is_coloured_where_it_is_more_than_chance(run: Path, after: float, tile: str) -> None:
    noise = [(-1) ** row for row in range(20)]
    sums = {"0": [25.0] * 20, "8": [after + each for each in noise]}
    (run / "held_out_rows.json").write_text(json.dumps({"measured": "rows", "counts": [10.0] * 20, "sums": sums}))
    write_metrics(run, eval_line(0, 2.5), *(step_line(step) for step in range(1, 9)), eval_line(8, after / 10))
    page = write_report(run).read_text(encoding="utf-8")
    assert tile in page.split("Held-out loss")[1].split("step 0 to 8")[0]
