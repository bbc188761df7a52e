"""`toolkit launch --restarts`: what is started again, from where, on how many GPUs; and what is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faults
import psutil
import pynvml
import pytest
from harness import environment, losses, write_recipe
from matrix import Difference, Result
from ranks import Ranks
from small import RECIPE, populate

from toolkit.cli import jobs, launch, restarts
from toolkit.cli.main import main

# In place of the processes: each start takes the next line of `plan`: a step that it comes to, a checkpoint that it
# saves (or -), and how it ends: with an exit code, or by a signal.
TRAINING = """
import json, os, pathlib, sys, time
sys.path.insert(0, {root!r})
from toolkit.seal import seal
number = len(pathlib.Path("started").read_text().splitlines()) if os.path.exists("started") else 0
with open("started", "a") as started:
    print(os.environ["TOOLKIT_RESTARTS"], os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[1:], file=started)
step, saved, end = json.load(open("plan"))[number]
run = pathlib.Path("runs/small")
run.mkdir(parents=True, exist_ok=True)
with (run / "metrics.jsonl").open("a") as metrics:
    print(json.dumps(dict(step=step, seconds=1.0, loss=1.0)), file=metrics)
if saved != "-":
    (checkpoint := run / f"checkpoints/checkpoint-{{saved}}").mkdir(parents=True)
    seal(checkpoint, dict(step=saved, method="full", strategy="ddp", world_size=2))
if end == "stopped":
    open("ready", "w").close()
    time.sleep(30)
if isinstance(end, str):
    signal = __import__("signal")
    if end != "SIGKILL":
        # A shell has what it starts in the background ignore Ctrl-C.
        signal.signal(getattr(signal, end), signal.SIG_DFL)
    os.kill(os.getpid(), getattr(signal, end))
sys.exit(end)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_recipe(tmp_path, "small", RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "training.py").write_text(TRAINING.format(root=str(Path(launch.__file__).parents[2])))

    def line(cluster: launch.Cluster, *of_this_machine: Any) -> list[str]:
        return [sys.executable, "training.py", f"{cluster.world.world_size}"]

    monkeypatch.setattr(launch, "line", line)
    return tmp_path


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """This process's own are not changed by what the tests start."""
    before = {number: signal.getsignal(number) for number in restarts._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def started(plan: list[tuple[int, Any, Any]], *arguments: str) -> tuple[int, int]:
    """Exit code of a launch, and how often the processes were started."""
    Path("plan").write_text(json.dumps(plan))
    status = main(["launch", "recipe=small", *arguments])
    return status, len(Path("started").read_text().splitlines())


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSEGV", os.EX_TEMPFAIL, 255])
def test_what_may_pass_goes_on_from_the_last_checkpoint(
    end: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started([(1, "-", end), (5, 4, end), (6, "-", 0)], "--restarts", "2") == (0, 3)
    first, second = (line for line in capsys.readouterr().err.splitlines() if line.startswith("restart "))
    reason = end if isinstance(end, str) else f"exit code {end}"
    assert first.startswith("restart 1 of 2: ") and reason in first
    assert first.endswith("after step 1; from the beginning, as no checkpoint was saved")
    assert second.startswith("restart 2 of 2: ") and second.endswith("step 5; from runs/small/checkpoints/checkpoint-4")
    assert [line.split()[0] for line in Path("started").read_text().splitlines()] == ["0", "1", "2"]


@pytest.mark.parametrize("end", [1, 2, 130, "SIGTERM", "SIGINT", "SIGHUP"])
def test_what_would_come_again_or_was_meant_is_not_started_again(end: Any, folder: Path) -> None:
    status, starts = started([(1, "-", end)], "--restarts", "3")
    assert starts == 1 and status == (128 + getattr(signal, end) if isinstance(end, str) else end)


def test_same_failure_at_the_same_step_ends_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [(5, 4, "SIGKILL"), (4, "-", "SIGKILL"), (5, "-", 75), (5, "-", 75), (6, "-", 0)]
    assert started(plan, "--restarts", "9") == (75, 4)
    assert "error: not started again: a process failed with exit code 75 after step 5, twice" in capsys.readouterr().err


def test_restarts_are_used_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert started([(1, "-", "SIGKILL"), (2, "-", "SIGKILL")], "--restarts", "1") == (128 + 9, 2)
    assert "all 1 restarts are used up" in capsys.readouterr().err


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_stops_a_launch_between_two_starts_stops_it(
    sent: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_newest", lambda run: os.kill(os.getpid(), sent))
    assert started([(1, "-", "SIGKILL"), (2, "-", 0)], "--restarts", "3") == (128 + sent, 1)


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_stopped_while_it_comes_into_being_ends(
    sent: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *line: Any, **settings: Any) -> None:
            super().__init__(*line, **settings)
            os.kill(os.getpid(), sent)

    monkeypatch.setattr(subprocess, "Popen", Stopped)
    assert restarts.Group().run([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0) in (128 + sent, 1)


@pytest.mark.usefixtures("in_foreground")
def test_a_training_that_is_chosen_while_somebody_stops_a_sweep_is_not_started() -> None:
    def chosen() -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        yield "the next one"

    begun: list[Any] = []
    assert jobs.train(chosen(), jobs.shares(1, 0), begun.append, lambda *_: None) == 128 + signal.SIGTERM
    assert begun == []


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_stopping_the_launcher_stops_the_training(sent: signal.Signals, folder: Path) -> None:
    (folder / "plan").write_text(json.dumps([(1, "-", "stopped"), (2, "-", 0)]))
    code = (
        "import sys; from toolkit.cli import launch; from toolkit.cli.main import main\n"
        "launch.line = lambda *_: [sys.executable, 'training.py']\n"
        "sys.exit(main(['launch', 'recipe=small', '--restarts', '3']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment()) as launcher:
        deadline = time.monotonic() + 60
        while not (folder / "ready").exists():
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        launcher.send_signal(sent)
        assert launcher.wait(timeout=20) == 128 + sent
    assert len((folder / "started").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["checkpoint.resume=never"], "checkpoint.resume=auto"),
        (["--print"], "--restarts is no part of the line"),
    ],
)
def test_restarts_that_cannot_be_meant(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "recipe=small", "--restarts", "1", *arguments]) == 1
    assert words in capsys.readouterr().err and not Path("started").exists()


def lose(lost: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for NVIDIA's driver, which has lost these GPUs."""

    def memory(index: int) -> None:
        if index in lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    for name, answer in (("Init", lambda: None), ("Shutdown", lambda: None)):
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")


@pytest.mark.parametrize(
    ("lost", "gpus"), [(set(), 4), ({3}, 2), ({0, 1, 2}, 1), ({0, 1, 2, 3}, 0)], ids=lambda value: f"{value}"
)
def test_lost_gpus_are_left_out_as_far_as_the_batch_divides(
    lost: set[int],
    gpus: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lose(lost, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    asked = ["strategy=ddp", "batch.micro_batch_size=1", "--restarts", "1"]
    status, starts = started([(5, 4, "SIGKILL"), (6, "-", 0)], *asked)
    said = capsys.readouterr().err
    if not gpus:
        assert (status, starts) == (1, 1) and "0 of 4 GPUs still answer" in said
        return
    assert (status, starts) == (0, 2)
    assert (f"restart 1 of 1, on {gpus} of 4 GPUs: " in said) == (gpus < 4)
    left = ",".join(str(index) for index in range(4) if index not in lost)
    _, again = Path("started").read_text().splitlines()
    assert again == f"1 {left} {gpus}"


@pytest.mark.parametrize(("gpus", "visible"), [(1, "2"), (2, "2,3")])
def test_a_training_on_some_of_the_gpus_goes_on_with_others_if_its_own_are_lost(
    gpus: int, visible: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose({0, 1}, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    asked = ["strategy=ddp", "batch.micro_batch_size=1", "--gpus", str(gpus), "--restarts", "1"]
    assert started([(5, 4, "SIGKILL"), (6, "-", 0)], *asked) == (0, 2)
    assert Path("started").read_text().splitlines()[1] == f"1 {visible} {gpus}"


@pytest.mark.matrix
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_rank_goes_on_to_the_same_losses_and_weights(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    populate(tmp_path, "llama")
    command = [sys.executable, "-m", "toolkit", "launch", "recipe=small", "max_steps=30", "checkpoint.save_steps=2"]
    command += ["batch.micro_batch_size=1", *(["--gpus", "2", "strategy=ddp"] if processes > 1 else [])]
    settings: dict[str, Any] = {"cwd": tmp_path, "env": environment() | {"CUDA_VISIBLE_DEVICES": ""}}
    straight = subprocess.run([*command, "output.name=straight"], **settings, capture_output=True, timeout=200)
    assert straight.returncode == 0, straight.stderr.decode()[-3000:]
    run, log = tmp_path / "runs" / "killed", tmp_path / "log"
    with log.open("w") as stream:
        launcher = subprocess.Popen(
            [*command, "output.name=killed", "--restarts", "1"], **settings, stdout=stream, stderr=stream
        )
        while not (run / "metrics.jsonl").is_file() or len(losses(run)) < 3:
            assert launcher.poll() is None, log.read_text()[-3000:]
            time.sleep(0.02)
        children = psutil.Process(launcher.pid).children(recursive=True)
        words = {each: each.cmdline() for each in children}
        ranks = [each for each in children if "toolkit.run" in words[each] and "toolkit.cli.start" not in words[each]]
        # Later ones are forked by the first, to plan.
        sorted(ranks, key=lambda each: each.pid)[processes - 1].kill()
        assert launcher.wait(timeout=200) == 0, log.read_text()[-3000:]
    assert "restart 1 of 1: " in log.read_text()
    assert losses(run) == losses(tmp_path / "runs" / "straight")
    first, second = (
        load_file(tmp_path / "runs" / name / "final" / "model.safetensors") for name in ("killed", "straight")
    )
    assert first.keys() == second.keys() and all(first[key].equal(second[key]) for key in first)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["restarts"] == 1 and "checkpoint-" in manifest["resumed_from"]


TRIAL = """
import sys
sys.path.append({support!r})
import faults
from toolkit.train.process import leave

if __name__ == "__main__":
    leave(lambda: faults.main(sys.argv[1:]))
"""


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp"])
def test_a_run_that_has_lost_a_gpu_goes_on_without_it(
    engine: str,
    tmp_path: Path,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From two processes to one, by real launchers; as the processes have no GPUs, they train on the CPU."""
    straight, code, said = faults.run(ranks, faults.home(tmp_path), engine, "straight")
    assert code == 0, said[-3000:]
    (tmp_path / "trial.py").write_text(TRIAL.format(support=str(Path(faults.__file__).parent)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, value in (environment() | {"CUDA_VISIBLE_DEVICES": "0,1"}).items():
        monkeypatch.setenv(name, value)
    lose({1}, monkeypatch)
    happens, line = iter(["4 last kill", ""]), launch.line

    def of_trial(*of_this_machine: Any) -> list[str]:
        monkeypatch.setenv("FAULTS", next(happens))
        return [word.replace("toolkit.run", "trial") for word in line(*of_this_machine)]

    monkeypatch.setattr(launch, "line", of_trial)
    arguments = ["--gpus", "2", "--restarts", "1", *faults.ENGINES[engine][1], "output.name=lost"]
    assert main(["launch", "recipe=small", *arguments]) == 0
    assert "restart 1 of 1, on 1 of 2 GPUs: " in capsys.readouterr().err
    manifest = json.loads((tmp_path / "runs" / "lost" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["restarts"] == 1 and manifest["resumed_from"].endswith("checkpoint-2")
    difference = Difference.between(Result.read(tmp_path / "runs" / "lost"), Result.read(straight))
    assert max(vars(difference).values()) <= 1e-6, difference
