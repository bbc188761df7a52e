"""The environment of every test, set before any library is imported and inherited by the processes that tests start."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from figures import pytest_terminal_summary  # noqa: F401
from harness import leave_unmeasured, untraced
from ranks import Ranks

from toolkit import common
from toolkit.models.imports import quick_imports
from toolkit.planner.trace import store
from toolkit.planner.trace.__main__ import answer

# Kept between sessions and shared by parallel workers: the built-in model is converted once. Apart from a user's own,
# as what is put there of this CPU is none of its figures.
CACHE = Path(os.environ.get("TOOLKIT_CACHE", Path(__file__).resolve().parent.parent / ".pytest_cache"))
RANKS = pytest.StashKey[Ranks]()
IMPORTS = ExitStack()

if CACHE.name != "of_tests":  # A worker has it already.
    CACHE /= "of_tests"
os.environ.update(
    TOOLKIT_CACHE=str(CACHE),
    HF_HOME=str(CACHE / "huggingface"),
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    WANDB_MODE="offline",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    # Launched trainings take all cores. Threads that spin while they wait for one another take them from other workers.
    OMP_WAIT_POLICY="passive",
    # A compiler takes up to 1.7 GB for each of DeepSpeed's files; two workers may each compile an operation.
    MAX_JOBS="2",
)
# A token or a launcher's settings of whoever runs the tests must not decide what they see.
for name in list(os.environ):
    if name in ("HF_TOKEN", "RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("ACCELERATE_", "FSDP_")):
        del os.environ[name]
IMPORTS.enter_context(quick_imports())
leave_unmeasured(CACHE)


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Starts trainings on forked processes."""
    ranks = pytestconfig.stash[RANKS]
    ranks.folder = tmp_path_factory.mktemp("ranks")
    return ranks


@pytest.fixture(scope="session", autouse=True)
def traced_here() -> None:
    """What a command would have another process trace, the tests' own traces, which has imported all that it takes."""
    store.ask = answer


@pytest.fixture(scope="session", autouse=True)
def imports_stay_frozen() -> None:
    """A run would look through all that was imported, for a quarter of a second, and leave it to be looked through from
    then on. Those of `ranks` do what users' runs do."""
    importlib.import_module("toolkit.train.train")._not_collected = nullcontext  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def nothing_concealed() -> None:
    """What one test took from the environment may stand in what the next one shows."""
    common._CONCEALED.clear()
    common._concealed_texts.cache_clear()


_GROUPS = {"expert_parallel": "_GROUP", "layer_sums": "_GROUP", "pipeline": "_GROUPS", "shared_rows": "_GROUP"}
"""Where modules of `toolkit.models.parallel` note the groups of processes that they have made."""


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    """A forked process that drops a group of the process it was forked from waits for threads that it has not: it
    crashes."""
    yield
    for name, groups in _GROUPS.items():
        if module := sys.modules.get(f"toolkit.models.parallel.{name}"):
            getattr(module, groups).clear()


@pytest.fixture
def in_foreground() -> Iterator[None]:
    """Has Ctrl-C, and what a closed terminal sends, heard, which `nohup` and the background of a shell ignore."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process are planned by formulas; those of `ranks` always are."""
    from toolkit.planner.trace import fit

    monkeypatch.setattr(fit, "trace", untraced)
    monkeypatch.setattr(store, "_untraced", {})


def pytest_collection_finish() -> None:
    """Trainers collect garbage several times, each time over the objects of all modules imported so far."""
    gc.collect()
    IMPORTS.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Before the first test, when all is imported, the process forks that `ranks` starts trainings from."""
    if not any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        return (yield)
    session.config.stash[RANKS] = ranks = Ranks()
    try:
        return (yield)
    finally:
        ranks.close()
