"""Libraries that a killed linker left are compiled anew; those that somebody links right now are left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from toolkit.train.torn_libraries import is_torn, remove_torn


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole one, where torch would have put it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    file = tmp_path / "ab" / "cabc.main.so"
    file.parent.mkdir()
    shutil.copyfile(Path(torch.__file__).parent / "lib" / "libtorch.so", file)
    return file


@pytest.mark.parametrize("kept", [0, 63, 64, 0.5, -1])
def test_what_was_cut_off_anywhere_goes(kept: float, library: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = library.read_bytes()
    remove_torn()
    assert library.read_bytes() == whole

    library.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    assert is_torn(library) and not caplog.text
    with caplog.at_level("INFO", "toolkit.train"):
        remove_torn()
    assert not library.exists() and str(library.parent.parent) in caplog.text


def test_so_does_one_whose_header_is_not_written_yet(library: Path) -> None:
    library.write_bytes(bytes(64) + library.read_bytes()[64:])
    remove_torn()
    assert not library.exists()


def test_one_that_is_being_linked_stays(library: Path) -> None:
    library.write_bytes(b"")
    (library.parent.parent / "locks").mkdir()
    with FileLock(library.parent.parent / "locks" / "cabc.lock"):
        remove_torn()
    assert library.exists()
    remove_torn()
    assert not library.exists()


def test_without_a_folder_of_compiled_code_the_users_own_files_stay(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.write_bytes(b"")
    monkeypatch.chdir(library.parent.parent)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    remove_torn()
    assert library.exists()
