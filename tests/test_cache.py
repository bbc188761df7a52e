"""A cache that several users share, in every state in which one may leave it to another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout
from second_user import as_nobody, shared

from toolkit import cache

__all__ = ["shared"]
IMPORTS = "import filelock; from toolkit import cache; from toolkit.cache import *; from pathlib import Path"
BUILD = """
def build(folder): (folder / "x").write_text("made")
for _ in range(2):
    print(build_once(cache_dir() / "data" / "key", build))
keep(cache_dir() / "data" / "file.json", "mine")
print(found := find(cache_dir() / "data" / "file.json"), found.read_text())
print(found if found.read_text() == "mine" else "")
"""


def entry(data: Path) -> None:
    (data / "key").mkdir()
    (data / "key" / "x").write_text("made")


def hidden_entry(data: Path) -> None:
    entry(data)
    (data / "key").chmod(0o700)


def lock(mode: int) -> Callable[[Path], None]:
    def leave(data: Path) -> None:
        for name in ("key.lock", "file.json.lock"):
            (data / name).touch()
            (data / name).chmod(mode)

    return leave


def partial(data: Path) -> None:
    (data / ".key.1.partial").mkdir(mode=0o700)
    (data / ".key.1.partial" / "half").touch()


def nothing(data: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("left", "mode", "own"),
    [
        (nothing, 0o777, False),
        (entry, 0o777, False),
        (hidden_entry, 0o777, True),
        (lock(0o644), 0o777, False),
        (lock(0o600), 0o777, True),
        (lock(0o644), 0o1777, False),
        (partial, 0o777, False),
        (partial, 0o1777, False),
        (nothing, 0o755, True),
        (nothing, 0o700, True),
    ],
    ids=[
        *("nothing", "entry", "hidden_entry", "lock", "hidden_lock", "sticky_lock", "partial", "sticky_partial"),
        *("unwritable", "hidden"),
    ],
)
def test_what_another_user_left_is_used_or_gone_around(
    left: Callable[[Path], None], mode: int, own: bool, shared: Path
) -> None:
    data = shared / "cache" / "data"
    data.mkdir(parents=True)
    left(data)
    data.chmod(mode)
    done = as_nobody(shared, IMPORTS, BUILD)
    assert done.returncode == 0, done.stderr
    place = shared / "home" / ".cache" / "accelerate-toolkit" / "data" if own else data
    first, second, *_ = done.stdout.splitlines()
    assert Path(first) == Path(second) == place / "key"
    assert (place / "key" / "x").read_text() == "made"
    assert done.stderr.count("is not this user's to write") == own and len(done.stderr.splitlines()) == own


def test_warm_cache_that_is_not_writable_is_read(shared: Path) -> None:
    data = shared / "cache" / "data"
    data.mkdir(parents=True)
    entry(data)
    (data / "file.json").write_text("theirs")
    code = "print(build_once(cache_dir() / 'data' / 'key', None), find(cache_dir() / 'data' / 'file.json').read_text())"
    done = as_nobody(shared, IMPORTS, code)
    assert done.stdout == f"{data / 'key'} theirs\n" and not done.stderr


def test_home_that_cannot_be_written_either(shared: Path) -> None:
    (shared / "cache").mkdir()
    done = as_nobody(shared, IMPORTS, BUILD, HOME="/nonexistent", TMPDIR=str(shared / "home"))
    assert done.stdout.startswith(str(shared / "home" / "accelerate-toolkit-65534"))


@pytest.mark.matrix
def test_compiled_code_of_another_user_is_not_run(shared: Path) -> None:
    (shared / "cache" / "compiled").mkdir(parents=True)
    (shared / "cache" / "compiled").chmod(0o777)
    code = "print(own_folder(cache_dir() / 'compiled'))"
    own = shared / "home" / ".cache" / "accelerate-toolkit" / "compiled"
    assert as_nobody(shared, IMPORTS, code).stdout == f"{own}\n"
    imports = "import torch.utils.cpp_extension; from toolkit.distributed.compiled_ops import _folder"
    done = as_nobody(
        shared, imports, "print(_folder(), _folder())", TORCH_EXTENSIONS_DIR=str(shared / "cache" / "compiled")
    )
    assert done.stdout == f"{own.with_name('extensions')} {own.with_name('extensions')}\n"
    assert done.stderr.count("is not this user's") == 1


def test_folders_of_strangers_on_a_drive_stay_as_they_are(shared: Path) -> None:
    drive = shared / "drive"
    for name, mode in (("toolkit-host-0-1", 0o755), ("toolkit-host-0-2", 0o700)):
        (drive / name).mkdir(parents=True)
        (drive / name / ".lock").touch()
        (drive / name).chmod(mode)
    drive.chmod(0o777)
    code = (
        f"root = Path({str(drive)!r}); (root / 'toolkit-mine').mkdir(); (root / 'toolkit-mine' / '.lock').touch()\n"
        f"nvme.remove_abandoned(root, 'toolkit-*', 'toolkit-own'); print(len(list(root.iterdir())))"
    )
    done = as_nobody(shared, "from pathlib import Path; from toolkit.distributed import nvme", code)
    assert done.stdout == "2\n", done.stderr


@pytest.mark.matrix
def test_run_folder_that_a_group_shares_is_locked_by_whoever_trains(shared: Path) -> None:
    run = shared / "run"
    run.mkdir()
    (run / ".lock").touch(0o644)
    run.chmod(0o777)
    imports = "from pathlib import Path; from toolkit.train.run_folder import RunFolder"
    code = f"with RunFolder(Path({str(run)!r})).held(): print('held')"
    assert as_nobody(shared, imports, code).stdout == "held\n"
    with cache.locked(run / ".lock"):
        assert "another process is training in" in as_nobody(shared, imports, code).stderr


def test_who_may_only_read_a_lock_waits_as_long_as_others_do(shared: Path) -> None:
    lock = shared / ".lock"
    lock.touch(0o644)
    code = f"with locked(Path({str(lock)!r}), timeout=60): print('held')"
    with cache.locked(lock):
        waiting = threading.Timer(0.0, lambda: said.append(as_nobody(shared, IMPORTS, code)))
        said: list[Any] = []
        waiting.start()
        # Longer than Python takes to begin.
        waiting.join(4)
        assert not said, said[0].stderr
    waiting.join(60)
    assert said[0].stdout == "held\n"


@pytest.mark.parametrize("written", [0.0, time.time() + 10 * 86_400], ids=["long ago", "before the clock was set back"])
def test_what_killed_processes_have_left_of_anything_goes_once_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: float
) -> None:
    """Of data and settings that nobody prepares again, too."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    killed, running, new, file, of_others = (
        tmp_path / name
        for name in (".a.1.b.partial", ".running.1.partial", ".new.1.partial", ".f.json.7.0.partial", ".theirs.partial")
    )
    for folder in (killed, running, new, of_others):
        folder.mkdir()
        (folder / "half").touch()
    for name in ("a.1.lock", "running.lock", "new.lock"):
        (tmp_path / name).touch()
    file.touch()
    for each in (killed, running, file, of_others):
        os.utime(each, (written, written))
    with cache.locked(tmp_path / "running.lock"):
        cache.build_once(tmp_path / "key", lambda folder: None)
        assert not killed.exists() and running.exists() and new.exists() and file.exists() and of_others.exists()
    cache.keep(tmp_path / "kept.json", "{}")
    assert not file.exists() and new.exists() and of_others.exists()


def test_who_only_looks_whether_a_lock_is_held_is_told_and_keeps_nobody_out(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    assert not cache.is_held(file) and not file.exists()
    with cache.locked(file):
        assert cache.is_held(file)
    assert not cache.is_held(file)
    with cache.locked(file, timeout=0):
        pass


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_what_libraries_write_for_the_user_alone_is_shared_as_the_umask_says(
    umask: int, mode: int, tmp_path: Path
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    before = os.umask(umask)
    try:
        save_file({"x": np.zeros(2)}, tmp_path / "model.safetensors")
        (tmp_path / "run.sh").touch(0o700)
        cache.share(tmp_path)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode
    assert (tmp_path / "run.sh").stat().st_mode & 0o100


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder in which nobody can make a file")
def test_where_no_lock_can_be_made_nobody_waits() -> None:
    with pytest.raises(OSError) as raised, cache.locked(Path("/proc/toolkit.lock"), timeout=1):
        pass
    assert not isinstance(raised.value, Timeout) and raised.value.filename == "/proc/toolkit.lock"
