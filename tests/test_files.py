"""Files that are there in full or not at all, and room for them."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import strict_json

from toolkit.common import (
    UserError,
    in_background,
)
from toolkit.files import (
    check_disk,
    remove_partial,
    write_atomically,
    write_json,
    write_json_lines,
    write_named,
    write_new,
)


def test_a_disk_too_small_is_refused_with_both_numbers(tmp_path: Path) -> None:
    check_disk(tmp_path, 1000, "the model needs", "name another disk")
    with pytest.raises(UserError, match=r"iB of disk left; the model needs 9,095 TiB\n  name another disk"):
        check_disk(tmp_path, 10**16, "the model needs", "name another disk")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\ud800")
    assert file.read_text() == "old"
    write_atomically(file, "new")
    assert file.read_text() == "new"


def test_what_a_killed_process_has_left_of_a_file_is_removed(tmp_path: Path) -> None:
    """Nothing else is: files that were not finished under another name are somebody else's."""
    for name in ("figures.json", ".lock", "rows.partial"):
        (tmp_path / name).touch()
    there = sorted(tmp_path.iterdir())
    _killed_at_rename(f"write_atomically(Path({str(tmp_path / 'figures.json')!r}), 'new')")
    assert sorted(tmp_path.iterdir()) != there
    remove_partial(tmp_path)
    assert sorted(tmp_path.iterdir()) == there


def _killed_at_rename(code: str) -> None:
    """Runs a line in a process that kills itself where a file would get its name."""
    kill = "import os; os.link = os.replace = lambda *of: os.kill(os.getpid(), 9)"
    line = f"{kill}; from pathlib import Path; from toolkit.files import *; {code}"
    assert subprocess.run([sys.executable, "-c", line]).returncode == -signal.SIGKILL


def test_ctrl_c_leaves_nothing_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*of: object) -> None:
        raise KeyboardInterrupt

    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, interrupted)
    for write in (write_atomically, write_new, write_named):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "page.html", "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("linked", [True, False])
def test_a_new_file_takes_the_place_of_none(tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on disks where a file has one name, and through no link."""

    def refused(*of: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not linked:
        monkeypatch.setattr(os, "link", refused)
    file, dangling = tmp_path / "recipes" / "mine.yaml", tmp_path / "recipes" / "other.yaml"
    write_new(file, "first")
    dangling.symlink_to("gone")
    for there in (file, dangling):
        with pytest.raises(FileExistsError):
            write_new(there, "second")
    with pytest.raises(NotADirectoryError, match=r"mine\.yaml/more'$"):
        write_new(file / "more", "third")
    assert sorted(each.name for each in file.parent.iterdir()) == ["mine.yaml", "other.yaml"]
    assert (file.read_text(), dangling.is_symlink()) == ("first", True)


def test_what_a_named_file_links_to_is_written_and_a_pipe_stays(tmp_path: Path) -> None:
    page, link, dangling, pipe = (tmp_path / name for name in ("page.html", "link.html", "new.html", "pipe"))
    page.write_text("old")
    link.symlink_to(page.name)
    dangling.symlink_to("made/new.html")
    os.mkfifo(pipe)
    reader = in_background(pipe.read_text)
    for each in (link, dangling, pipe):
        write_named(each, "new")
    assert (page.read_text(), dangling.read_text(), reader.result()) == ("new", "new", "new")
    assert link.is_symlink() and dangling.is_symlink() and pipe.is_fifo()


@pytest.mark.parametrize("folder", ["missing", "a file"])
def test_what_cannot_be_written_is_named(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(OSError, match=f"{folder}/page.html'$"):
        write_atomically(tmp_path / folder / "page.html", "text")


def test_writers_of_one_file_never_leave_it_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also processes of one number, as in two containers: a reader sees one text or the other, whole."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    file, texts = tmp_path / "figures.yaml", ["a" * 100_000, "b" * 100_000]
    write_atomically(file, texts[0])
    writers = [in_background(lambda text=text: [write_atomically(file, text) for _ in range(200)]) for text in texts]
    while not all(writer.done() for writer in writers):
        assert file.read_text() in texts
    assert [writer.result() for writer in writers] and list(tmp_path.iterdir()) == [file]


def test_lines_of_json_are_whole_and_hold_no_half_characters(tmp_path: Path) -> None:
    rows = [{"text": "über\nzwei \ud800"}, {"text": ""}]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [{"text": "über\nzwei ?"}, {"text": ""}] and lines[-1] == ""


def test_numbers_that_json_does_not_have_are_texts(tmp_path: Path) -> None:
    """Bare `NaN` stops every reader but Python's own."""
    content = {"loss": math.nan, "ends": (-math.inf, math.inf), "rows": [{"mean": math.nan, "count": 2, "low": 0.5}]}
    write_json(tmp_path / "figures.json", content)
    read = strict_json((tmp_path / "figures.json").read_text())
    assert read == {
        "loss": "NaN",
        "ends": ["-Infinity", "Infinity"],
        "rows": [{"mean": "NaN", "count": 2, "low": 0.5}],
    }
    assert [float(end) for end in read["ends"]] == [-math.inf, math.inf]
