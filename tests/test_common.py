"""What every package shares: errors in a line, what must not be shown, values as text."""

from __future__ import annotations

import subprocess
import sys

import pytest

from toolkit.common import (
    UserError,
    brief,
    bytes_text,
    compact,
    conceal,
    concealed,
    count_text,
    duration,
    first_line,
    on_screen,
    printable,
    shell_line,
    table,
)


def test_what_an_error_quotes_cannot_steer_the_terminal() -> None:
    error = UserError("no column `\x1b[31mred`\nbut `caf\u00e9`, `\u202eback`, `\ud800`", "rename `\r`")
    assert str(error) == "no column `\\x1b[31mred`\nbut `caf\u00e9`, `\\u202eback`, `\\ud800`\n  rename `\\r`"
    assert error.change == "rename `\\r`"


def test_first_line_of_an_error() -> None:
    assert first_line(ValueError("Error in file:\n  line 3\nmore")) == "Error in file: line 3"
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3599.7, "1h 00m"), (86400, "1d 00h"), (float("nan"), "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (857, "857"),
        (999.7, "1k"),
        (51_700, "51.7k"),
        (134_515_008, "135M"),
        (8.03e9, "8.03B"),
        (3e16, "3e+16"),
    ],
)
def test_compact_numbers(value: float, text: str) -> None:
    assert compact(value) == text


def test_numbers_with_their_nouns() -> None:
    assert [count_text(number, "step") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [count_text(number, "row is", "rows are") for number in (1, 2)] == ["1 row is", "2 rows are"]


def test_bytes() -> None:
    assert [bytes_text(value) for value in (0, 512, 3.6 * 2**30, 141 * 2**30)] == [
        "0 bytes",
        "512 bytes",
        "3.6 GiB",
        "141 GiB",
    ]


def test_a_table_wraps_only_its_last_column_and_reads_no_markup() -> None:
    rows = [("name", "10", "[bold]one two three"), ("日本", "9", "")]
    assert table(rows, "lrl", columns=24, indent=1).plain == (" name  10  [bold]one two\n           three\n 日本   9")
    path = "/a/long/path " * 20 + "end"
    assert table([("report", path)]).plain == f"report  {path}"
    assert table([]).plain == ""
    summary = [("run folder", "runs/demo"), ("report", "runs/demo/report.html")]
    assert table(summary, indent=2).plain == "  run folder  runs/demo\n  report      runs/demo/report.html"


@pytest.mark.parametrize(
    ("value", "text", "shown"),
    [
        ("hunter2hunter2", "xhunter2hunter2y", "x${X}y"),
        ("a 'quoted' \\ word", repr("a 'quoted' \\ word"), '"${X}"'),
        ("wrapped at spaces", "wrapped at\n     spaces", "${X}"),
        ("./here/there", "in here/there/final", "in ${X}/final"),
        ("llama", "llama, llama. llamas codellama", "${X}, ${X}. llamas codellama"),
        ("20261123", "0.20261123 and 20261123", "0.20261123 and ${X}"),
        ("yes", "yes", "yes"),
    ],
)
def test_a_value_is_concealed_wherever_it_would_be_recognised(value: str, text: str, shown: str) -> None:
    conceal(value, "${X}")
    assert concealed(text) == shown
    assert concealed({value: [text, 1, None]}) == {concealed(value): [shown, 1, None]}
    assert str(UserError(text)) == shown


def test_all_that_steers_or_hides_is_escaped_and_what_people_write_is_not() -> None:
    hidden = [
        *map(chr, (*range(9), *range(11, 32), *range(0x7F, 0xA0))),
        *"\xad\u200b\u200f\u202e\u2066\ufeff\udc80\U000e0041",
    ]
    for character in hidden:
        assert printable(f"a{character}b") == f"a{character.encode('unicode_escape').decode()}b"
    written = "a\tb\nc\xa0d\u3000e \u200d\U0001f469\u200d\U0001f680 \u0645\u06cc\u200c\u062e \U0001f1e8\U0001f1ed"
    assert printable(written) == written
    assert table([("\x1b[2J", "x")]).plain == "\\x1b[2J  x"


def test_a_message_is_no_longer_than_a_person_reads() -> None:
    error = UserError("\n".join(f"column {number}" for number in range(1_000_000)), "x" * 1_000_000)
    assert len(str(error).splitlines()) == 40 and "999,962 more lines" in str(error) and len(str(error)) < 4000
    assert brief("one\ntwo") == "one\ntwo" and brief("a\nb\nc", 2) == "a\n… and 2 more lines"


def test_a_terminal_gets_what_a_person_reads_and_a_file_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, long, wide = "line\n" * 39 + "end", "line\n" * 40 + "end", "x" * 5000
    assert [on_screen(text, "how") for text in (fits, long, wide)] == [fits, long, wide]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert on_screen(fits, "how") == fits
    for text in (long, wide):
        shown = on_screen(text, "how").splitlines()
        assert len(shown) <= 40 and len("".join(shown)) < 1100 and shown[-1] == "all of it: how"


@pytest.mark.parametrize("value", ["/data/my runs", "it's", "/plain"])
def test_a_line_to_copy_has_the_shells_own_variables(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within single quotes no shell would fill them in."""
    monkeypatch.setenv("OUT", value)
    conceal(value, "${oc.env:OUT}")
    words = ("printf", r"%s\n", f"{value}/x", f'print("{value}", "$HOME `id`")', "a b")

    line = shell_line(*words)

    assert '"${OUT}/x"' in line and value not in line
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(words[2:])


def test_a_line_to_copy_has_the_default_of_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    conceal("/tmp/there", "${oc.env:OUT,/tmp/there}")
    line = shell_line("printf", "%s", "/tmp/there/x")
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout == "/tmp/there/x"
