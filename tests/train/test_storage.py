"""Why a run folder cannot be written any more, told from what writers say and from trying."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from traceback import StackSummary

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from toolkit.common import UserError
from toolkit.train.checkpoints.storage import build_new, check_new, room_for, unwritable


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


def written_to(file: str) -> BaseException:
    try:
        with open(file, "wb", buffering=0) as stream:
            stream.write(b"x")
    except OSError as error:
        return error
    raise AssertionError


def test_why_a_run_folder_cannot_be_written(place: Path) -> None:
    full = written_to("/dev/full")
    said = unwritable(place, full)
    assert said and said.what == f"{place} cannot be written: its disk is full"
    assert re.match(r"free space there \([\d.,]+ [KMGT]iB are left\), lower checkpoint.save_total_limit", said.change)
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = full
    assert unwritable(place, wrapped)
    assert unwritable(place, CheckpointException("write", {1: (full, StackSummary())}))
    assert unwritable(place, RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"))
    for unrelated in (written_to("nowhere/file"), ValueError("no"), RuntimeError("unexpected pos 64 vs 0")):
        assert unwritable(place, unrelated) is None
    cache = UserError("prepared data cannot be written to `cache`: No space left on device", "free space there")
    cache.__cause__ = full
    assert unwritable(place, cache) is None, "it is another disk that is full"
    gone = unwritable(place / "gone", written_to(str(place / "gone" / "file")))
    assert gone and gone.what == f"{place / 'gone'} was deleted while it was trained in"


def test_a_writer_that_does_not_say_why_is_answered_by_trying(place: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        said = unwritable(place, RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said and "larger than this process may write" in said.what


def test_what_finds_no_room_says_so_of_the_folder_that_was_asked_for(place: Path) -> None:
    partial = place / ".merged.partial"
    partial.mkdir()
    (partial / "part").write_bytes(bytes(10))
    with pytest.raises(UserError) as caught, room_for(place / "merged", partial, "--output"):
        raise RuntimeError("the model cannot be read") from written_to("/dev/full")
    assert caught.value.what == f"{place / 'merged'} cannot be written: its disk is full"
    assert "were not enough, or name another folder with --output" in caught.value.change
    with pytest.raises(OSError), room_for(place / "merged", partial, "--output"):
        raise written_to("nowhere/file")


def test_of_two_that_fill_a_folder_at_once_the_later_one_is_told(place: Path) -> None:
    """While the first one works, whose lock stays; or when that is done."""

    def again(folder: Path) -> None:
        imports = "from pathlib import Path; from toolkit.train.checkpoints.storage import build_new"
        line = f"{imports}; build_new(Path({str(place / 'merged')!r}), print, '-o')"
        other = subprocess.run([sys.executable, "-c", line], capture_output=True)
        assert b"another process writes" in other.stderr and Path(f"{place / 'merged'}.lock").exists()
        (folder / "file").touch()

    build_new(place / "merged", again, "--output")
    assert sorted(file.name for file in place.rglob("*")) == ["file", "merged"]
    shutil.rmtree(place / "merged")
    build_new(place / "merged", lambda folder: (folder / "file").touch(), "--output")
    with pytest.raises(UserError, match="another process has written"):
        build_new(place / "merged", lambda folder: (folder / "other").touch(), "--output")
    assert sorted(file.name for file in place.rglob("*")) == ["file", "merged"]


def test_all_of_a_new_folder_is_on_the_drive_before_it_is_there(place: Path, order: list[str]) -> None:
    def fill(folder: Path) -> None:
        (folder / "parts").mkdir()
        for name in ("weights", "parts/of"):
            (folder / name).touch()

    build_new(place / "merged", fill, "--output")
    before, after = order[: order.index("renamed")], order[order.index("renamed") :]
    assert {"weights", "parts", "of"} < {*before} and before[-1].startswith(".merged."), "its list of files"
    assert after == ["renamed", place.name]


def test_what_a_killed_process_has_left_of_a_folder_goes_by_its_exact_name(place: Path) -> None:
    for name in (".m[1]*.0.partial", ".m1.0.partial", ".m[1]*x.0.partial"):
        (place / name).mkdir()
    build_new(place / "m[1]*", lambda folder: None, "--output")
    assert sorted(each.name for each in place.iterdir()) == [".m1.0.partial", ".m[1]*x.0.partial", "m[1]*"]


def test_a_place_that_takes_no_folder_is_told_with_the_reason(place: Path) -> None:
    (place / "link").symlink_to("gone")
    for output, reason in (
        (Path("/proc/new"), "no file can be made in /proc"),
        (place / "link" / "new", "link is a link to gone, which is not there"),
        (place / ("n" * 300), "a name in it, is longer than this file system takes"),
    ):
        with pytest.raises(UserError, match=f"{output} cannot be written: .*{reason}"):
            check_new(output, "--output")
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        build_new(place / ("n" * 300), lambda folder: None, "--output")


def test_a_write_is_told_of_its_disk_also_where_that_works_again_and_no_socket_is(place: Path) -> None:
    silent, lost = RuntimeError("unexpected pos 64 vs 0"), OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    said = unwritable(place, silent, writing=True)
    assert said and "could not be written for a moment: RuntimeError: unexpected pos 64" in said.what
    said = unwritable(place, lost, writing=True)
    assert said and said.what == f"{place} cannot be written: its disk is not mounted any more"
    assert unwritable(place, lost) is None and unwritable(place, silent) is None
    assert unwritable(place, ValueError("no"), writing=True) is None
