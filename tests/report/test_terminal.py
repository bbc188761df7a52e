"""The terminal: nothing but text in a log, one line that fits in a terminal, and values as people read them."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

from toolkit.data.rows import Sample
from toolkit.report import terminal
from toolkit.report.terminal import Progress, prompts_before_after

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


def test_a_log_gets_plain_lines_about_every_twentieth_of_the_steps(log: io.StringIO) -> None:
    shown = Progress(log)
    shown.start(1000)
    for step in range(1, 1001):
        shown.update(step, loss=2.5, tokens_per_second=51_700.0)
    shown.close()
    lines = log.getvalue().splitlines()
    assert not CONTROL.search(log.getvalue())
    assert 20 <= len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert "step 1000/1000 (100%)" in lines[-1]
    assert "loss 2.5000  51.7k tok/s" in lines[-1]


def test_a_log_of_slow_steps_gets_a_line_every_ten_seconds(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: float(next(clock) // 2))
    shown = Progress(log)
    shown.start(100_000)
    for step in range(1, 101):
        shown.update(step, loss=1.0)
    assert 10 <= len(log.getvalue().splitlines()) <= 101


def test_evaluations_are_logged_and_evaluation_progress_is_not(log: io.StringIO) -> None:
    shown = Progress(log)
    shown.evaluating(1, 8)
    shown.evaluation(0, 3.9602)
    shown.start(10)
    shown.evaluation(10, 2.7402)
    shown.evaluation(20, 0.6012, accuracy=0.875)
    assert log.getvalue().splitlines() == [
        "Held-out loss 3.9602, perplexity 52.47 (before training)",
        "Training: 10 steps",
        "Held-out loss 2.7402, perplexity 15.49 (step 10)",
        "Held-out loss 0.6012, accuracy 87.5% (step 20)",
    ]


def test_time_left_is_estimated_from_the_steps_since_the_resume(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    shown = Progress(log)
    shown.start(100, step=50)
    now = 120.0
    shown.update(60)
    assert "resumed at step 50" in log.getvalue()
    assert "1m 20s left" in log.getvalue()


def test_extreme_figures_do_not_break_the_line(log: io.StringIO) -> None:
    shown = Progress(log)
    shown.start(2)
    shown.update(1, loss=float("nan"), tokens_per_second=float("inf"), seconds_left=float("inf"))
    shown.evaluation(1, float("inf"))
    shown.evaluation(1, 1e9)
    shown.update(5, loss=1e30)
    lines = log.getvalue().splitlines()
    assert "loss nan  inf tok/s  ? left" in lines[1]
    assert "perplexity inf" in lines[2]


def test_a_log_in_a_narrow_encoding_never_stops_the_training() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(stream).message("日本 done")
    stream.seek(0)
    assert stream.read() == "?? done\n"


def test_a_terminal_gets_one_line_that_fits_and_keeps_its_cursor() -> None:
    program = textwrap.dedent("""
        import time, warnings
        from toolkit.report.terminal import Progress
        shown = Progress()
        shown.evaluating(1, 2)
        shown.evaluation(0, 3.9)
        shown.start(100_000)
        for step in range(1, 6):
            shown.update(step, loss=12.3456, tokens_per_second=51_700.0, seconds_left=90_000.0)
            time.sleep(0.11)
        print("from elsewhere")
        shown.close()
        shown.close()
    """)
    output = run_in_terminal(program, columns=80)
    assert "\x1b[?25l" not in output.rsplit("\x1b[?25h", 1)[-1], "the cursor stays visible"
    visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    lines = re.split(r"[\r\n]+", visible)
    assert max(len(line) for line in lines) <= 80
    assert any("evaluating 1/2" in line for line in lines)
    live = [line for line in lines if line.startswith("Training")]
    assert all(figure in live[-1] for figure in ("─", "5/100000", "loss 12.3456", "51.7k tok/s", "1d 01h left"))
    assert "from elsewhere" in lines


@pytest.mark.parametrize("columns", [20, 44])
def test_a_narrow_terminal_loses_figures_not_lines(columns: int) -> None:
    program = textwrap.dedent("""
        from toolkit.report.terminal import Progress
        shown = Progress()
        shown.start(100)
        shown.update(100, loss=2.0, tokens_per_second=1234.0)
        shown.close()
    """)
    visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", run_in_terminal(program, columns))
    lines = [line for line in re.split(r"[\r\n]+", visible) if line]
    assert max(len(line) for line in lines) < columns
    assert "100/100" in lines[-1]


def run_in_terminal(program: str, columns: int) -> str:
    """What a program writes to a pseudo-terminal of this width."""
    parent, child = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", "PYTHONUTF8": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=child, stderr=child, stdin=child, env=environment
    ) as process:
        os.close(child)
        chunks = []
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(parent)
    output = b"".join(chunks).decode()
    assert process.returncode == 0, output
    return output


def test_nothing_heavy_is_imported() -> None:
    program = "import sys, toolkit.report.terminal; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_samples_are_wrapped_and_cannot_steer_the_terminal() -> None:
    samples = [
        Sample(prompt="word " * 60, input_ids=[], before="\x1b[2J\x07gone?", after="日本語" * 40),
        Sample(prompt="short", input_ids=[], reference="yes\nindeed", before="", after="ok"),
    ]
    text = prompts_before_after(samples, width=60)
    assert not CONTROL.search(text)
    # A Japanese character takes two columns.
    assert max(len(line) + sum(c > "\u3000" for c in line) for line in text.splitlines()) <= 60
    assert "Sample 2 of 2" in text
    assert text.count("reference") == 1
    assert max(len(line) for line in prompts_before_after(samples, width=500).splitlines()) <= 100


def test_samples_take_no_more_than_a_screen() -> None:
    texts = ("word " * 5000, "line\n" * 5000, "x" * 50_000, "ok")
    for number in (1, 4, 300):
        samples = [Sample(prompt=texts[0], input_ids=[], reference=texts[1], before=texts[2], after=texts[3])] * number
        lines = prompts_before_after(samples, width=80, whole="samples.json").splitlines()
        assert len(lines) <= 40 and lines[-1] == "all of it: samples.json" and "more lines" in " ".join(lines)
    assert sum(line.strip() == "Sample 4 of 4" for line in prompts_before_after([samples[0]] * 4, 80).splitlines()) == 1
