"""What is on the screen when a launch fails: the reason, and nothing after it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import RUN, environment
from ranks import Ranks
from small import populate

from toolkit.cli import start
from toolkit.distributed import previous_attempt

LAUNCHERS = {"ours": "toolkit.cli.start", "accelerate": "accelerate_launch"}
NOISE = ("Traceback", "CalledProcessError", "ChildFailedError", "torch/distributed", "closing signal")


def launch(ranks: Ranks, folder: Path, processes: int, *arguments: str, launcher: str = "ours") -> tuple[int, str]:
    """Exit code and standard error; of 0 processes: of one that accelerate does not start."""
    if not processes:
        done = ranks.run(folder, *arguments, entry=LAUNCHERS[launcher])
        return done.returncode, done.stderr
    several = ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else []
    options = ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no", *several]
    done = ranks.run(folder, *options, "--dynamo_backend", "no", *arguments, entry=LAUNCHERS[launcher])
    return done.returncode, done.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_recipe_is_told_once_and_last(processes: int, tmp_path: Path, ranks: Ranks) -> None:
    status, text = launch(ranks, tmp_path, processes, str(RUN), "recipe=smollm2_135m_lora_demo", "seq_len=long")
    assert status == 2
    assert text.startswith("error: recipe smollm2_135m_lora_demo: 1 problem")
    assert text.strip().splitlines()[-1].startswith("    change ")
    assert "on process" not in text and not any(noise in text for noise in NOISE)


def test_accelerates_own_report_ends_with_the_error(tmp_path: Path, ranks: Ranks) -> None:
    status, text = launch(
        ranks, tmp_path, 2, str(RUN), "recipe=smollm2_135m_lora_demo", "seq_len=long", launcher="accelerate"
    )
    assert status == 1
    root = text[text.index("Root Cause") :]
    assert "error: recipe smollm2_135m_lora_demo: 1 problem" in root
    assert root.strip().splitlines()[-2].lstrip().startswith("change ")


def test_one_process_is_started_as_accelerate_would_without_it(tmp_path: Path) -> None:
    """With the same environment, and its exit code."""
    script = tmp_path / "said.py"
    script.write_text(
        "import json, os, sys\n"
        "told = {key: value for key, value in os.environ.items() if key.startswith(('ACCELERATE_', 'OMP_', 'RANK'))}\n"
        "print(json.dumps(told), sys.argv[1:], file=sys.stderr)\nsys.exit(7)\n"
    )
    alone = [sys.executable, "-X", "importtime", "-m", "toolkit.cli.start", str(script), "a=1", "--force"]
    env = {key: value for key, value in environment().items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(alone, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7 and not re.search(r"\| +(torch|accelerate)\b", done.stderr)
    told, words = re.search(r"^({.*}) (.*)$", done.stderr, re.MULTILINE).groups()
    assert words == "['a=1', '--force']"
    options = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    line = [sys.executable, "-m", "toolkit.cli.start", *options, str(script)]
    by_accelerate = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert by_accelerate.returncode == 7
    theirs = json.loads(re.search(r"^({.*}) ", by_accelerate.stderr, re.MULTILINE)[1])
    assert json.loads(told).items() <= theirs.items()
    assert all("DYNAMO" in key for key in theirs.keys() - json.loads(told).keys())


@pytest.mark.parametrize(
    ("processes", "number", "name", "told"),
    [
        *((processes, 9, "SIGKILL", "memory") for processes in (0, 1, 2)),
        (0, signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}", "toolkit doctor"),
    ],
)
def test_process_that_is_killed_gets_a_line(
    processes: int, number: int, name: str, told: str, tmp_path: Path, ranks: Ranks
) -> None:
    (tmp_path / "killed.py").write_text(
        f"import os, time\nif os.environ.get('RANK', '0') == '0': os.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n"
    )
    status, text = launch(ranks, tmp_path, processes, "killed.py")
    first, change = text.splitlines()
    assert status == 128 + number and first.startswith("error: ") and first.endswith(f"was ended by {name}")
    assert told in change


@contextlib.contextmanager
def started(folder: Path, script: str, start_new_session: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher of one process, whose script has made the file `up`."""
    command = [sys.executable, "-m", "toolkit.cli.start", script]
    settings: dict[str, Any] = {"cwd": folder, "env": environment(), "start_new_session": start_new_session}
    with subprocess.Popen(command, **settings) as launcher:
        end = time.monotonic() + 60
        while not (folder / "up").exists():
            assert launcher.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        yield launcher


@pytest.mark.usefixtures("in_foreground")
def test_who_is_stopped_by_ctrl_c_waits_for_what_the_training_still_saves(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def save(number, frame):\n    time.sleep(1)\n    pathlib.Path('saved').touch()\n    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, save)\npathlib.Path('up').touch()\ntime.sleep(60)\n"
    )
    with started(tmp_path, "saves.py") as launcher:
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130 and (tmp_path / "saved").exists()


@pytest.mark.usefixtures("in_foreground")
def test_ctrl_c_of_a_whole_group_does_not_cut_short_what_the_training_clears_away(tmp_path: Path) -> None:
    """As notebooks and editors send it, also to the launcher, which passes on that it heard it."""
    (tmp_path / "clears.py").write_text(
        "import pathlib, time\nfrom toolkit.train.process import told_to_stop\n"
        "with told_to_stop():\n    pathlib.Path('up').touch()\n    try:\n        time.sleep(60)\n"
        "    finally:\n        time.sleep(1)\n        pathlib.Path('cleared').touch()\n"
    )
    with started(tmp_path, "clears.py", start_new_session=True) as launcher:
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(60) == 130 and (tmp_path / "cleared").exists()


def test_what_is_started_ends_with_its_launcher_whatever_it_is_at(tmp_path: Path, ranks: Ranks) -> None:
    """A training that is still importing, which takes seconds, has asked for nothing yet."""
    (tmp_path / "imports.py").write_text(
        "import os, pathlib, time\npathlib.Path('.up').write_text(str(os.getpid()))\n"
        "pathlib.Path('.up').rename('up')\ntime.sleep(60)\n"
    )
    launch = ranks.start(tmp_path, "imports.py", entry=LAUNCHERS["ours"])
    end = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert launch.running() and time.monotonic() < end
        time.sleep(0.02)
    training = psutil.Process(int((tmp_path / "up").read_text()))
    launch.send(signal.SIGKILL)
    launch.wait()
    psutil.wait_procs([training], timeout=30)
    assert not training.is_running() or training.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("nohup", [True, False])
@pytest.mark.parametrize("processes", [0, 2])
def test_a_closed_terminal_reaches_the_training_but_for_nohup(
    nohup: bool, processes: int, tmp_path: Path, ranks: Ranks
) -> None:
    """torch's agent would take SIGHUP back from `nohup`; of a launcher that it ends the training would hear SIGTERM."""
    (tmp_path / "unheard.py").write_text(
        "import signal\nfrom toolkit.cli import start\ndef main(arguments):\n"
        f"    signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if nohup else 'SIG_DFL'})\n"
        "    return start.main(arguments)\n"
    )
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, signal, sys, time\nheard = []\n"
        "for number in (signal.SIGTERM, signal.SIGHUP):\n"
        "    if signal.getsignal(number) != signal.SIG_IGN:\n"
        "        signal.signal(number, lambda number, frame: heard.append(number))\n"
        'pathlib.Path(f\'up-{os.environ.get("RANK", "0")}\').touch()\n'
        "while not (heard or pathlib.Path('end').exists()): time.sleep(0.02)\n"
        'pathlib.Path(f\'heard-{os.environ.get("RANK", "0")}\').write_text(str(heard[:1]))\n'
    )
    options = f"--multi_gpu --num_processes {processes} --num_machines 1 --main_process_port 0 --mixed_precision no"
    launch = ranks.start(tmp_path, *(options.split() if processes else []), "waits.py", entry="unheard")
    each = range(max(1, processes))
    end = time.monotonic() + 60
    while not all((tmp_path / f"up-{rank}").exists() for rank in each):
        assert launch.running() and time.monotonic() < end
        time.sleep(0.02)
    launch.send(signal.SIGHUP)
    if nohup:
        time.sleep(0.5)
        (tmp_path / "end").touch()
    done = launch.wait(60)
    assert done.codes == [0 if nohup or not processes else 128 + signal.SIGHUP], done.stderr
    assert {(tmp_path / f"heard-{rank}").read_text() for rank in each} == {"[]" if nohup else f"[{int(signal.SIGHUP)}]"}


def test_a_machine_that_starts_again_does_so_once_the_first_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second process of its number would end the training there as a mistake of the user, which none starts again."""
    came: list[str] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda options: came.append("started"))
    monkeypatch.setattr(previous_attempt, "await_end", lambda *where: came.append(f"{where[:3]}"))
    options = "--multi_gpu --num_processes 8 --num_machines 2 --main_process_ip node-a --main_process_port 1234"
    for rank, restarts in ((0, "1"), (1, "0"), (1, "1")):
        monkeypatch.setenv("TOOLKIT_RESTARTS", restarts)
        assert start.main([*options.split(), "--machine_rank", str(rank), "-m", "toolkit.run"]) == 0
    assert came == ["started", "started", "('node-a', 1234, range(4, 8))", "started"]


def test_a_machine_does_not_wait_minutes_for_one_whose_launcher_was_stopped(tmp_path: Path, ranks: Ranks) -> None:
    """By itself its agent waits for the other's until a time-out of 300 s, and prints a stack trace."""
    (tmp_path / "briefly.py").write_text(
        "from toolkit.cli import start\nstart._OTHERS_SECONDS = 1.0\nmain = start.main\n"
    )
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\npathlib.Path(f'up-{os.environ[\"RANK\"]}').touch()\n"
        "while not pathlib.Path('end').exists(): time.sleep(0.05)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = "--multi_gpu --num_processes 2 --num_machines 2 --mixed_precision no --dynamo_backend no"
    where = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    first, second = (
        ranks.start(tmp_path, *options.split(), *where, "--machine_rank", rank, "waits.py", entry="briefly")
        for rank in "01"
    )
    end = time.monotonic() + 60
    while not all((tmp_path / f"up-{rank}").exists() for rank in range(2)):
        assert first.running() and second.running() and time.monotonic() < end
        time.sleep(0.05)
    second.send(signal.SIGTERM)
    assert second.wait(60).codes == [128 + signal.SIGTERM]
    (tmp_path / "end").touch()
    done = first.wait(60)
    assert done.codes == [0] and not any(noise in done.stderr for noise in NOISE)


def test_deepspeeds_launcher_starts_the_runner(tmp_path: Path) -> None:
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    command = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--master_port=29781"]
    # Refused once the launch is known: two processes cannot take it.
    arguments = ["recipe=smollm2_135m_lora_demo", "strategy=single"]
    done = subprocess.run(
        [*command, str(RUN), *arguments], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert "error: the recipe says strategy.name=single, the launcher started 2 processes" in done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("processes", [1, 2])
def test_failing_run_ends_with_its_error(processes: int, tmp_path: Path, ranks: Ranks) -> None:
    populate(tmp_path, "llama")
    # Found when the model is there, after the processes have met.
    status, text = launch(
        ranks, tmp_path, processes, str(RUN), "recipe=small", "method=lora", "method.target_modules=[lm_head]"
    )
    assert status == 1
    assert text.count("trained or merged wrongly") == 1 and not any(noise in text for noise in NOISE), text
    assert "error: " in text.strip().splitlines()[-2]
