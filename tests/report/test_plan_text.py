"""A plan in the terminal: the answer first, a line that stands where the device ends, 80 columns."""

from __future__ import annotations

import io
import json
import re

import pytest
from example_plan import FITS, GIB, REFUSED, TIGHT, TOO_LARGE, example_plan, with_memory
from pages import Page
from rich.cells import cell_len
from rich.text import Text

from toolkit.common import LINES
from toolkit.planner.plan import OVERHEAD, PARTS, Plan
from toolkit.report import plan_text, plan_view
from toolkit.report.plan_page import plan_page
from toolkit.report.terminal import console_of, write


def plain(text: Text) -> str:
    stream = io.StringIO()
    write(text, console_of(stream))
    return stream.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_the_phases_stay_apart_in_a_narrow_terminal(columns: int) -> None:
    lines = plain(plan_text.plan_text(FITS, columns)).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("Allocated by phase"))
    assert len(lines[start + 1].split()) == len(FITS.memory[0].phases)
    assert cell_len(lines[start + 1]) <= columns


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (FITS, "FITS: 41.6 of 140.0 GiB device memory, 98.4 GiB free; largest part: activations"),
        (TIGHT, "TIGHT: 130.9 of 140.0 GiB device memory, up to 149.4 possible"),
        (TOO_LARGE, "DOES NOT FIT: 178.1 of 140.0 GiB device memory, 38.1 GiB too much"),
    ],
    ids=["fits", "tight", "too-large"],
)
def test_the_first_lines_answer(plan: Plan, words: str) -> None:
    lines = plain(plan_text.plan_text(plan)).splitlines()
    assert lines[0] == f"{' '.join([plan.recipe, *plan.overrides])} on h200x8"
    assert words in " ".join(line.strip() for line in lines[1:3])
    assert re.search(r"1\.00 s a step, 65\.5k tokens/s, 18m 20s in all, 2\.44 GPU-hours, costs 6\.10", "\n".join(lines))


@pytest.mark.parametrize("where", ["host RAM", "device memory"])
def test_a_limit_on_the_hosts_memory_is_named(where: str) -> None:
    plan = example_plan(host_limit="`ulimit -v`")
    plan = plan.model_copy(update={"fit": plan.fit.model_copy(update={"where": where})})
    assert ("`ulimit -v` leaves" in plan_view.fit_text(plan)) == (where == "host RAM")
    assert "that `ulimit -v` leaves" in dict(plan_view.store_rows(plan))["RAM"]


@pytest.mark.parametrize("plan", [FITS, TIGHT, TOO_LARGE], ids=["fits", "tight", "too-large"])
def test_bars_follow_each_other_and_the_line_stands_where_the_device_ends(plan: Plan) -> None:
    lines = plain(plan_text.memory_text(plan)).splitlines()
    bars = {line.split()[0]: line[16:60] for line in lines[1:-1]}
    columns = {name: [at for at, mark in enumerate(bar) if mark not in " │0123456789."] for name, bar in bars.items()}
    line = {bar.index("│") for bar in bars.values() if "│" in bar}
    total = max(columns["total"])
    assert len(line) <= 1, "one line for all parts"
    # Where all fits, the line is the scale's end.
    assert (total > min(line)) == (plan.fit.answer == "no") if line else plan.fit.answer != "no"
    starts = [min(marks) for name, marks in columns.items() if name != "total" and marks]
    assert starts == sorted(starts)
    assert max(max(marks) for marks in columns.values()) == total
    assert columns["activations"], "the largest part has a bar"


def test_every_part_and_phase_is_in_the_table() -> None:
    memory = FITS.memory[0]
    phases, table = plan_view.phase_table(memory)
    assert phases == ["load", "forward", "backward", "step", "evaluation", "save", "resume"]
    columns = zip(*(row for part, row in table.items() if part != "allocated"), strict=True)
    assert [sum(column) for column in columns] == table["allocated"]
    assert max(table["allocated"]) == memory.allocated
    shown = plain(plan_text.plan_text(FITS))
    assert re.search(r"^  activations +· +20\.0 +20\.0 +· +1\.00 +· +·$", shown, re.M)
    assert re.search(r"^  other +· +<0\.01", shown, re.M), "a batch of 256 KiB has no row of its own"


def test_nothing_is_wider_than_80_columns_and_nothing_steers_the_terminal() -> None:
    long = example_plan(
        recipe="a_recipe_with_quite_a_long_name_for_a_large_model",
        overrides=["data.sources=[first.jsonl,second.jsonl]", "batch.seq_len=131072", "optimizer.name=adamw_8bit"],
        chosen={"strategy.name": "fsdp, because every other one needs more memory than a device of this kind has"},
        notes=["a note that is much longer than a line of the terminal has columns " * 3],
    )
    for text in (plan_text.plan_text(long), plan_text.comparison_text([long, FITS, TOO_LARGE, REFUSED])):
        shown = plain(text)
        assert max(map(cell_len, shown.splitlines())) <= 80
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", shown)


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("plan", [FITS, TIGHT, TOO_LARGE], ids=["fits", "tight", "too-large"])
def test_a_screen_gets_what_a_user_decides_by_and_says_what_is_left_out(plan: Plan, columns: int) -> None:
    many = [plan.advice[-1].model_copy(update={"kind": "option"})] * 9 if plan.advice else []
    full = plan.model_copy(update={"advice": [*plan.advice, *many], "notes": ["a long note of many words " * 9] * 3})
    for each in (plan, full):
        lines = plain(plan_text.screen_text(each, columns, "elsewhere")).splitlines()
        whole = plain(plan_text.plan_text(each, columns)).splitlines()
        assert len(lines) <= LINES < len(whole) and max(map(cell_len, lines)) <= columns
        assert lines[:3] == whole[:3] and "  total" in "\n".join(lines)
        said = re.sub(r"\s+", " ", "\n".join(lines[-4:]))
        assert "more: memory by phase, " in said and said.endswith("all of it: elsewhere")
        kinds = {advice.kind for advice in each.advice if advice.kind != "option" and advice.changes}
        assert all(re.search(rf"^  {kind} ", "\n".join(lines), re.MULTILINE) for kind in kinds)
        # What is named as left out is, and what is not named is there.
        for name, title in (("work", "Work"), ("host and disk", "Host and disk"), ("traffic", "Traffic of")):
            assert (name in said) != any(line.startswith(title) for line in lines)
    assert ("options" in said) == (sum("  option " in line for line in lines) < len(many))


def test_a_plan_that_fits_on_a_screen_is_shown_as_a_whole() -> None:
    memory = FITS.memory[0].model_copy(update={"phases": {"step": {"parameters": 1}}, "peak_phase": "step"})
    short = example_plan(memory=[memory.model_dump()], advice=[], notes=[])
    assert plain(plan_text.screen_text(short, 80, "elsewhere")) == plain(plan_text.plan_text(short))


def test_a_terminal_without_these_characters_still_gets_a_plan() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write(plan_text.plan_text(FITS), console_of(stream))
    stream.flush()
    assert b"FITS: 41.6 of 140.0 GiB" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_unknown_length_is_said_and_no_price_is_made_up() -> None:
    unknown = {"steps": None, "tokens": None, "total_seconds": None, "gpu_hours": None, "cost": None}
    plan = example_plan(work=FITS.work.model_dump() | unknown | {"pflop_days": None})
    shown = plain(plan_text.plan_text(plan))
    assert "unknown length: prepare the data" in shown
    assert "costs" not in shown.split("What to change")[0] and "GPU-hours" not in shown
    assert "in all" not in shown.splitlines()[2]
    assert "15s per million tokens" in shown and "which cost" not in shown
    priced = example_plan(work=plan.work.model_dump() | {"cost_per_million_tokens": 0.034})
    assert "15s per million tokens, which cost 0.03" in plain(plan_text.plan_text(priced)).replace("\n", " ")
    assert "15s per million tokens, which cost 0.03" in Page(plan_page([priced])).text
    assert "cost" not in Page(plan_page([plan])).text.split("What to change")[0]
    beside = plain(plan_text.comparison_text([plan, FITS]))
    assert "?" in beside and re.search(" costs$", beside, re.M) and "cost/1M" not in beside
    beside = plain(plan_text.comparison_text([priced, plan]))
    assert re.search(r" \? +0\.03$", beside, re.M) and re.search(" cost/1M$", beside, re.M)
    assert "cost/1M" in Page(plan_page([priced, plan])).text


@pytest.mark.parametrize("part", [*PARTS, *OVERHEAD])
def test_every_part_has_a_letter_and_a_colour_of_its_own(part: str) -> None:
    plan = example_plan() if part in OVERHEAD else with_memory(FITS, **{part: 20 * GIB})
    letter, _ = plan_text.LETTERS[part]
    assert [other for other, _ in plan_text.LETTERS.values()].count(letter) == 1
    shown = plain(plan_text.comparison_text([plan, FITS]))
    assert re.search(rf"^  [A-Z]*{letter}+[A-Z]* +│", shown, re.M)
    assert f" {letter} {part}" in shown.replace("\n", " ") and shown.count(f"{letter} {part}") == 1
    html = plan_page([plan])
    assert f"--part:var(--{part})" in html and re.search(rf"--{part}: #[0-9a-f]{{6}};", html)


def test_a_small_model_is_shown_in_small_units() -> None:
    memory = FITS.memory[0].model_dump()
    small = json.loads(re.sub(r"\d{7,}(\.\d+)?", lambda found: str(int(float(found[0])) >> 12), json.dumps(memory)))
    shown = plain(plan_text.plan_text(example_plan(memory=[small])))
    assert re.search(r"Allocated by phase, MiB\n.*\n  parameters +3\.75", shown)


def test_a_comparison_names_only_what_differs_and_says_why_a_row_is_refused() -> None:
    shown = plain(plan_text.comparison_text([FITS, TIGHT, TOO_LARGE, REFUSED]))
    assert "seq_len=4096" not in shown, "all of them have it"
    assert re.search(r"^batch\.micro_batch_size=8 +tight +130\.9 ", shown, re.M)
    assert re.search(r"^strategy=fsdp +no +178\.1 ", shown, re.M)
    assert re.search(r"^strategy=zero3 +refused\n  strategy: <b>no</b> such thing", shown, re.M)
    bars = [line for line in shown.splitlines() if re.match(r"  P+", line)]
    assert len(bars) == 3 and len({bar.index("│") for bar in bars}) == 1
    beyond = [bar[bar.index("│") + 1 :].strip() for bar in bars]
    assert beyond[0] == beyond[1] == "" and beyond[2].endswith("F"), "only what does not fit crosses the line"
    assert re.fullmatch(r"  P{6}[DGO]*A{8}L*F*X+ +│", bars[0]), "letters in proportion to bytes"
