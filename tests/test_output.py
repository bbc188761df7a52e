"""What a command says, and what libraries say beside it."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import environment

from toolkit.common import (
    conceal,
    table,
)
from toolkit.output import add_verbosity, quiet_libraries, start_logging, unprinted


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Gives the toolkit's logger back as it was."""
    logger = logging.getLogger("toolkit")
    before = logger.level, logger.handlers, logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = before


@pytest.mark.parametrize(
    ("arguments", "first", "shown"),
    [
        ([], True, ["where the cache is", "compiling", "warning: low on disk"]),
        (["--verbose"], True, ["chosen and why", "where the cache is", "compiling", "warning: low on disk"]),
        (["--quiet"], True, ["warning: low on disk"]),
        (["--verbose"], False, ["warning: low on disk"]),
    ],
)
def test_what_is_said(arguments: list[str], first: bool, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_verbosity(parser)
    for _ in range(2):  # Once more, as by a second command in one process, nothing is said twice.
        start_logging(parser.parse_args(arguments), first)
    logging.getLogger("toolkit.models").debug("chosen and why")
    logging.getLogger("toolkit").info("where the cache is")
    logging.getLogger("toolkit.distributed").info("compiling")
    logging.getLogger("toolkit.train").warning("low on disk")
    logging.getLogger("library").info("not ours")
    said = capsys.readouterr()
    assert (said.err.splitlines(), said.out) == (shown, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_started_with_closed_streams_has_some_that_lead_nowhere(closed: str) -> None:
    """A file that is opened would else be where C code prints."""
    opens = "open_streams(); print('out'); print('err', file=sys.stderr); assert os.open(os.devnull, 0) > 2"
    code = f"import os, sys; from toolkit.output import open_streams; {opens}; assert not sys.stdin.read()"
    for each in (code, "import sys; from toolkit.cli.main import main; sys.exit(main(['ls']))"):
        shell = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, each]
        assert subprocess.run(shell, stdin=subprocess.DEVNULL, timeout=120).returncode == 0


def test_a_stream_of_a_notebook_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no `TextIOWrapper`."""
    monkeypatch.setattr(sys, "stdout", said := io.StringIO())
    start_logging(argparse.Namespace(quiet=False, verbose=False))
    print("here")
    assert said.getvalue() == "here\n"


@pytest.mark.parametrize("gone", ["reader", "terminal", "room"])
def test_work_goes_on_where_nobody_hears_of_it(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if gone == "room":
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        other, end = os.pipe() if gone == "reader" else pty.openpty()
        os.close(other)
    before = logging.getLogger("toolkit").handlers
    with os.fdopen(end, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        start_logging(argparse.Namespace(quiet=False, verbose=False))
        for _ in range(2):
            print("half of the work is done", flush=True)
        lost = unprinted()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stream.close()
    logging.getLogger("toolkit").handlers = before
    assert lost == "standard output cannot be written: No space left on device" * (gone == "room")


@pytest.mark.parametrize(
    ("typed", "redirected", "status", "said"),
    [
        ("ls", ">/dev/full", 1, "error: standard output cannot be written: No space left on device\n"),
        ("ls", "2>/dev/full", 0, ""),
        ("ls", "| true", 0, ""),
        ("show --help", "| true", 0, ""),
        ("show --help", ">/dev/full", 0, ""),
        ("validate recipe=none", "2>/dev/full", 2, ""),
        ("validate --all --recipes wrong", ">/dev/full", 2, "error: standard output cannot be written"),
        ("init", ">/dev/full", 1, "files that were written are there\n"),
    ],
)
def test_a_command_ends_in_a_line_where_its_words_find_no_place(
    typed: str, redirected: str, status: int, said: str, tmp_path: Path
) -> None:
    """And says with its exit code what it did, not whether an error could be told."""
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "mine.yaml").write_text("nonsense: 3\n", encoding="utf-8")
    shell = f'set -o pipefail; "$0" -m toolkit {typed} {redirected}'
    ended = subprocess.run(
        ["bash", "-c", shell, sys.executable], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (status, False)
    assert said in ended.stderr if said else not ended.stderr
    assert typed != "init" or (tmp_path / "recipes" / "mine.yaml").is_file()


def test_what_deepspeed_says_at_its_import_is_heard_from_errors_on() -> None:
    """Its logger takes a level of its own then, after others were silenced."""
    quiet_libraries()
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    said = {each: bool(logger.filter(logger.makeRecord("", each, "", 0, "", (), None))) for each in (30, 40)}
    logger.setLevel(level)
    assert said == {logging.WARNING: False, logging.ERROR: True}


def test_what_is_concealed_is_not_printed_by_anybody(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(argparse.Namespace(quiet=False, verbose=False))
    conceal("hunter2hunter2", "${X}")
    print("out: hunter2hunter2")
    sys.stderr.writelines(["err: hunter2", "hunter2\n"])
    logging.getLogger("toolkit.train").warning("logged: %s", "hunter2hunter2")
    shown = "".join(capsys.readouterr())
    assert "hunter2" not in shown and shown.count("${X}") == 3
    assert "".join(table([["hunter2hunter2"] * 2], columns=12).plain.split()) == "${X}${X}"


@pytest.mark.parametrize("door", ["toolkit", "toolkit.run"])
def test_ctrl_c_while_the_modules_of_a_command_are_imported_ends_it_in_a_line(door: str) -> None:
    code = f"""
import runpy, sys
class Interrupted:
    def find_spec(self, name, *of):
        if name == "pydantic":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("{door}", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (130, "stopped by Ctrl-C: nothing was begun\n")
