"""`toolkit sweep --ray`: a job for each run that is not finished, in the folder where it was submitted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small import place_with

from toolkit.cli.main import main
from toolkit.report.load import read_manifest

place = place_with("llama")

ASKED = ("sweep", "recipe=small", "schedule.max_steps=1", "seed=1,2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ray"], "say how many each run takes with --gpus"),
        (["--ray", "--gpus", "1", "--parallel", "2"], "leave out --parallel"),
        (["--ray", "--slurm", "--gpus", "1"], "leave out --slurm"),
        (["--ray", "--print"], "leave out --print"),
        (["--ray", "--gpus", "1", "--trials", "3"], "leave out --ray or --trials"),
        (["--ray", "--gpus", "1", "--nodes", "2"], "--nodes would be ignored"),
        (["--ray", "--gpus", "8", "strategy=single"], "single"),
    ],
)
def test_what_ray_cannot_do_is_refused(
    options: list[str], words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *options]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("installed", [False, True])
def test_a_missing_cluster_is_named(
    installed: bool, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if installed:
        pytest.importorskip("ray.job_submission")
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    else:
        monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    assert main([*ASKED, "--ray", "--gpus", "0"]) == 1
    assert ("ray start --head" if installed else "pip install 'ray[default]'") in capsys.readouterr().err


@pytest.fixture
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine alone."""
    pytest.importorskip("ray.job_submission")
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = ["start", "--head", "--num-cpus=1", "--dashboard-port=8265", "--disable-usage-stats"]
    subprocess.run([*ray, *head], check=True, capture_output=True, timeout=120)
    yield
    subprocess.run([*ray, "stop", "--force"], check=True, capture_output=True, timeout=120)


@pytest.mark.matrix
def test_each_run_is_a_job_of_a_real_cluster(
    cluster: None, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time on one core; what is queued or finished is not submitted again, what failed is."""
    from ray.job_submission import JobSubmissionClient

    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    client = JobSubmissionClient("http://127.0.0.1:8265")
    asked = [*ASKED, "--ray", "--gpus", "0"]
    blocked = place / "runs"
    blocked.write_text("no folder", encoding="utf-8")
    names = ["small-sweep-seed-1", "small-sweep-seed-2"]
    assert main(asked) == 0
    assert capsys.readouterr().out.count("submitted; ray job logs --follow small-sweep-seed-") == 2
    assert main(asked) == 0
    assert capsys.readouterr().out.count("already") == 2
    assert [_ended(client, name) for name in names] == ["FAILED", "FAILED"]
    blocked.unlink()
    assert main(asked) == 0
    assert capsys.readouterr().out.count("submitted") == 2
    again = [f"{name}-2" for name in names]
    ends = [_ended(client, name) for name in again]
    assert ends == ["SUCCEEDED", "SUCCEEDED"], [client.get_job_logs(name)[-3000:] for name in again]
    folders = [place / "runs" / "small-sweep" / f"seed-{seed}" for seed in (1, 2)]
    assert [read_manifest(each)[0].status for each in folders] == ["finished", "finished"]
    assert main(asked) == 0
    assert capsys.readouterr().out.count("finished before") == 2 and os.listdir(folders[0].parent)


def _ended(client: object, name: str) -> str:
    """How a job ended, after at most four minutes."""
    until = time.monotonic() + 240
    while (status := str(client.get_job_status(name))) in ("PENDING", "RUNNING") and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(1)
    return status
