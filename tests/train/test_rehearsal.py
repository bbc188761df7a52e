"""The first checkpoint of a long run is read back at once."""

from __future__ import annotations

import json
from pathlib import Path

import faults
import pytest
from faults import engines, run, saved
from harness import losses
from ranks import Ranks

from toolkit.train.checkpoints import checkpoint


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.home(tmp_path_factory.mktemp("home"))


LONG = ["checkpoint.save_steps=21", "max_steps=22"]


@pytest.mark.parametrize("engine", engines())
def test_a_long_run_saves_after_its_first_step_and_changes_nothing_by_it(
    ranks: Ranks,
    home: Path,
    engine: str,
) -> None:
    rehearsed, code, said = run(ranks, home, engine, f"{engine}-rehearsed", "3 all kill", *LONG)
    assert code, said[-3000:]
    assert list(saved(rehearsed)) == [1]
    rehearsed, code, said = run(ranks, home, engine, rehearsed.name, "", *LONG)
    assert code == 0, said[-3000:]
    manifest = json.loads((rehearsed / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["resumed_from"].endswith("checkpoint-1")
    plain, code, said = run(ranks, home, engine, f"{engine}-plain", "", *LONG, "checkpoint.rehearse=false")
    assert code == 0 and list(saved(plain)) == [21, 22], said[-3000:]
    assert losses(rehearsed) == pytest.approx(losses(plain), rel=1e-6)


@pytest.mark.parametrize("engine", engines())
def test_a_save_that_cannot_work_ends_the_run_after_its_first_step(
    ranks: Ranks,
    home: Path,
    engine: str,
) -> None:
    folder, code, said = run(ranks, home, engine, f"{engine}-cannot", "1 all limit 20000", *LONG)
    assert code == 1 and "ulimit -f" in said and "Traceback" not in said, said[-3000:]
    assert len(losses(folder)) <= 1 and checkpoint.newest(folder / "checkpoints")[0] is None


def test_a_file_that_reads_back_otherwise_is_named(ranks: Ranks, home: Path) -> None:
    folder, code, said = run(ranks, home, "single", "damaged", "1 all flip optimizer.pt", *LONG)
    assert code == 1 and "checkpoint-1, cannot be read: optimizer.pt: the checksum of" in said, said[-3000:]
    assert "checkpoint.rehearse=false" in said and len(losses(folder)) <= 1
