"""`toolkit launch`: the line of every machine, and the batch script run with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest
from harness import environment, losses, write_recipe
from small import RECIPE, populate

from toolkit.cli.main import main
from toolkit.recipe import split_arguments
from toolkit.recipe.rules import load_checked

BATCH = "batch.global_batch_size=96"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_recipe(tmp_path, "small", RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The printed command lines, in words."""
    assert main(["launch", "recipe=small", "--print", *arguments]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def understood(words: list[str]) -> tuple[dict[str, str], dict[str, object]]:
    """The variables before a command, and what accelerate's own parser makes of it."""
    from accelerate.commands.launch import launch_command_parser

    start = next(index for index, word in enumerate(words) if "=" not in word)
    assert Path(words[start]).name == "accelerate" and words[start + 1] == "launch"
    options = launch_command_parser().parse_args(words[start + 2 :])
    return dict(word.split("=", 1) for word in words[:start]), vars(options)


def test_one_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = printed(capsys, "--gpus", "4", "strategy=zero3", BATCH, "output.name=it's mine")
    variables, options = understood(words)
    assert variables == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
    assert (options["num_processes"], options["num_machines"], options["multi_gpu"]) == (4, 1, True)
    assert options["main_process_port"] == 0
    assert (options["module"], options["training_script"]) == (True, "toolkit.run")
    assert options["training_script_args"] == ["recipe=small", "strategy=zero3", BATCH, "output.name=it's mine"]
    # No engine, no precision: the recipe has them.
    assert not options["use_deepspeed"] and not options["use_fsdp"] and options["mixed_precision"] is None
    assert Path(str(options["config_file"])).is_file()


def test_several_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [BATCH, "--gpus", "8", "--nodes", "2", "--head", "node-a", "--port", "1234"]
    lines = printed(capsys, *asked)
    for rank, words in enumerate(lines):
        options = understood(words)[1]
        assert (options["num_processes"], options["num_machines"], options["machine_rank"]) == (16, 2, rank)
        assert (options["main_process_ip"], options["main_process_port"]) == ("node-a", 1234)
        assert options["multi_gpu"]
    assert len(lines) == 2
    assert printed(capsys, *asked, "--rank", "1") == [lines[1]]


@pytest.mark.parametrize(
    ("visible", "gpus", "processes", "devices"),
    [("0,1,2", None, 3, None), ("2,3", "1", 1, "2"), ("5", "1", 1, None), ("0,1", "0", 1, ""), ("", None, 1, None)],
)
def test_gpus_of_this_machine(
    visible: str,
    gpus: str | None,
    processes: int,
    devices: str | None,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (words,) = printed(capsys, BATCH, *(["--gpus", gpus] if gpus else []))
    variables, options = understood(words)
    assert (options["num_processes"], options["multi_gpu"]) == (processes, processes > 1)
    assert variables.get("CUDA_VISIBLE_DEVICES") == devices


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--gpus", "3"], 1, "a global batch of 4 sequences does not divide into 3 processes x batch.micro_batch_size"),
        (["--gpus", "2", "strategy=single"], 1, "strategy.name=single"),
        (["--gpus", "2", "strategy=fsdp_hybrid"], 1, "hybrid_shard"),
        (["--gpus", "2", "stratgy=ddp"], 2, "unknown key"),
        (["--gpus", "1", "--nodes", "2"], 1, "--head"),
        (["--gpus", "1", "--nodes", "2", "--head", "a"], 1, "--rank"),
        (["--gpus", "1", "--nodes", "2", "--head", "a", "--rank", "2"], 1, "--rank 2"),
        (["--gpus", "1", "--nodes", "2", "--head", "a", "--rank", "2", "--print"], 1, "--rank 2"),
        # A forgotten --nodes would start a run of its own on every machine.
        (["--gpus", "2", "--rank", "1"], 1, "--nodes"),
        (["--gpus", "2", "--head", "a"], 1, "--nodes"),
        (["--gpus", "2", "--time", "4:00:00", "--cores", "2"], 1, "--time and --cores would be ignored"),
        (["--slurm"], 1, "--gpus"),
        (["--slurm", "--gpus", "1", "--nodes", "2", "--head", "a"], 1, "leave out --head"),
        (["--slurm", "--gpus", "1", "checkpoint.resume=never"], 1, "checkpoint.resume=auto"),
    ],
)
def test_nothing_is_started_that_cannot_work(
    arguments: list[str],
    status: int,
    words: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "execvpe", lambda *args: pytest.fail("started"))
    assert main(["launch", "recipe=small", *arguments]) == status
    assert words in capsys.readouterr().err


def test_gpus_that_are_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execvpe", lambda *args: pytest.fail("started"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["launch", "recipe=small", BATCH, "--gpus", "4"]) == 1
    assert "set --gpus 2" in capsys.readouterr().err
    # A line for another machine may be printed here.
    assert printed(capsys, BATCH, "--gpus", "4")


@pytest.mark.parametrize(
    ("option", "words"),
    [(["--gpus", "two"], "two is not a whole number from 0"), (["--port", "70000"], "from 1 to 65535")],
)
def test_numbers_say_their_range(option: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "recipe=small", *option])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("head", ["http://node0", "node0:29500", "[::1]:29500", "me@node0", "node 0", "node0/", ""])
def test_what_names_no_machine_is_refused_as_the_head(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every machine would wait for it until the rendezvous times out."""
    with pytest.raises(SystemExit):
        main(["launch", "recipe=small", "--gpus", "2", "--nodes", "2", "--head", head])
    assert "is not the name or address of a machine, such as node0" in capsys.readouterr().err


@pytest.mark.parametrize("head", ["node_0.rack-1.example.org.", "10.0.0.1", "fe80::1%eth0", "::1"])
def test_names_and_addresses_of_a_head(head: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = printed(capsys, BATCH, "--gpus", "2", "--nodes", "2", "--rank", "0", "--head", head)
    assert understood(words)[1]["main_process_ip"] == head


def test_what_is_printed_is_what_is_started(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda file, words, env: started.append((words, env)))
    asked = [BATCH, "--gpus", "0", "--nodes", "2", "--head", "a", "--rank", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (words,) = printed(capsys, *asked)
    assert main(["launch", "recipe=small", *asked]) == 0
    ((line, env),) = started
    assert words[:2] == [f"{key}={env[key]}" for key in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "CUDA_VISIBLE_DEVICES")]
    assert words[3] == "launch" and words[4:] == line[3:]
    assert line[:3] == [sys.executable, "-m", "toolkit.cli.start"]
    assert env["PATH"] == os.environ["PATH"]


def test_printing_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from toolkit.cli.main import main; main(['launch', 'recipe=small', '--gpus', '2', '--print']); "
        "print(sorted({'torch', 'accelerate', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stderr


def test_batch_script_is_written_once_and_reads_as_bash(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["launch", "recipe=small", BATCH, "--slurm", "--gpus", "2", "--nodes", "2"]
    assert main([*asked, "--time", "4:00:00", "--account", "lab"]) == 0
    assert "sbatch small.sbatch" in capsys.readouterr().out
    text = (folder / "small.sbatch").read_text()
    for line in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=2", "time=4:00:00", "account=lab", "requeue"):
        assert f"\n#SBATCH --{line}\n" in text
    assert "--partition" not in text
    check = shutil.which("shellcheck")
    command = [check] if check else ["bash", "-n"]
    done = subprocess.run([*command, "small.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert main([*asked, "--time", "5:00:00"]) == 1
    assert "small.sbatch exists" in capsys.readouterr().err
    assert "4:00:00" in (folder / "small.sbatch").read_text()


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("4h", "4h is not a time as Slurm takes it"),
        ("4:00", "4:00 is 240 seconds to Slurm"),
        ("00:05:00", "is 300 seconds"),
        *((fit, "") for fit in ("30", "6:00", "4:00:00", "2-0", "0-1:30", "1-12:30:00", "0", "UNLIMITED")),
    ],
)
def test_a_time_limit_is_as_slurm_takes_it_and_longer_than_saving(
    limit: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["launch", "recipe=small", BATCH, "--slurm", "--gpus", "2", "--print", "--time", limit]
    if not words:
        assert main(asked) == 0 and f"#SBATCH --time={limit}\n" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit, match="2"):
        main(asked)
    assert words in capsys.readouterr().err


# Slurm's commands as far as the script uses them: one task per node, signals handed on, the first failure counts.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_NTASKS=$SLURM_NNODES SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
trap 'kill -USR1 "${tasks[@]}"' USR1
status=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; done
    wait "$task" || status=$?
done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >> scontrol.log
[ "$1" = show ] && printf '127.0.0.1\\n127.0.0.2\\n'
exit 0
"""


def stand_ins(folder: Path) -> dict[str, str]:
    """The environment of a batch script on two nodes."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        file = folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    job |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2"}
    return environment() | job | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


# Instead of Python: a launcher whose training goes on until it is told to stop and saves; once saved, it finishes.
LAUNCHER = """#!/usr/bin/env bash
bash -c 'trap "touch saved-$SLURM_NODEID" TERM; printf "%q " "$@" >> "started-$SLURM_NODEID"
    until [ -e "saved-$SLURM_NODEID" ]; do sleep 0.02; done' -- "$@" &
wait $!
"""


def test_batch_script_stops_every_node_at_its_time_limit_and_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = folder / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(LAUNCHER)
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    asked = ["recipe=small", BATCH, "output.name=it's mine"]
    assert main(["launch", *asked, "--slurm", "--gpus", "2", "--nodes", "2", "--output", "job.sbatch"]) == 0
    env, started = stand_ins(folder), [folder / f"started-{node}" for node in range(2)]
    with subprocess.Popen(["bash", "job.sbatch"], env=env) as job:
        deadline = time.monotonic() + 30
        while not all(file.is_file() for file in started):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=30) == 0
    assert sorted(file.name for file in folder.glob("saved-*")) == ["saved-0", "saved-1"]
    log = folder / "scontrol.log"
    assert log.read_text().splitlines() == ["show hostnames n[1-2]", f"requeue {env['SLURM_JOB_ID']}"]
    lines = [file.read_text() for file in started]
    for node, line in enumerate(lines):
        module, start, *words = shlex.split(line)
        assert (module, start) == ("-m", "toolkit.cli.start")
        options = understood(["accelerate", "launch", *words])[1]
        assert (options["num_processes"], options["num_machines"], options["machine_rank"]) == (4, 2, node)
        assert (options["main_process_ip"], options["multi_gpu"]) == ("127.0.0.1", True)
        assert (options["training_script"], options["training_script_args"]) == ("toolkit.run", asked)
        assert Path(str(options["config_file"])).is_file()
    # Slurm starts the same file again; the run is finished then, and the job is not queued once more.
    assert subprocess.run(["bash", "job.sbatch"], env=env, timeout=30).returncode == 0
    assert [file.read_text() for file in started] == [2 * line for line in lines]
    assert len(log.read_text().splitlines()) == 3


# Instead of Python: a launcher that saves as many checkpoints as it is told, and ends with the exit code it is told.
FAILING = """#!/usr/bin/env bash
echo "$TOOLKIT_RESTARTS" >> "started-$SLURM_NODEID"
read -r saves status < plan
folder="runs/it's mine/checkpoints/checkpoint-"
[ "$saves" -gt 0 ] && mkdir -p "$folder$(wc -l < "started-$SLURM_NODEID")"
exit "$status"
"""


@pytest.mark.parametrize(
    ("saves", "status", "restarts", "starts", "requeued"),
    [
        (1, 75, 0, 1, True),
        (1, 137, 0, 1, True),
        (1, 75, 2, 3, True),
        (0, 75, 2, 3, False),
        (1, 1, 2, 1, False),
        (1, 2, 2, 1, False),
        (1, 143, 2, 1, False),
        (1, 0, 2, 1, False),
    ],
)
def test_batch_script_queues_itself_again_after_what_may_pass(
    saves: int,
    status: int,
    restarts: int,
    starts: int,
    requeued: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong recipe would fail again, and what fails before any progress too."""
    stub = folder / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(FAILING)
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    asked = ["recipe=small", BATCH, "output.name=it's mine", "--restarts", str(restarts), "--slurm", "--gpus", "2"]
    assert main(["launch", *asked, "--nodes", "2", "--output", "job.sbatch"]) == 0
    (folder / "plan").write_text(f"{saves} {status}\n")
    done = subprocess.run(["bash", "job.sbatch"], env=stand_ins(folder), capture_output=True, text=True, timeout=60)
    assert done.returncode == status and done.stderr.count("\n") == starts - 1 + requeued, done.stderr
    assert (folder / "started-1").read_text().split("\n") == ["", *map(str, range(1, starts)), ""]
    assert ("requeue" in (folder / "scontrol.log").read_text()) == requeued


def test_an_array_of_jobs_has_one_for_each_run_of_a_sweep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = folder / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text('#!/usr/bin/env bash\nprintf "%q " "$@" > "started-$SLURM_ARRAY_TASK_ID"\n')
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    asked = ["recipe=small", BATCH, "output.name=it's mine", "seed=3,4,5"]
    assert main(["sweep", *asked, "--slurm", "--gpus", "2", "--parallel", "2", "--output", "job.sbatch"]) == 0
    script = (folder / "job.sbatch").read_text()
    assert "#SBATCH --array=0-2%2\n" in script and "#SBATCH --output=it-s-mine-sweep-%A_%a.out\n" in script
    for task in range(3):
        env = stand_ins(folder) | {"SLURM_ARRAY_TASK_ID": str(task)}
        assert subprocess.run(["bash", "job.sbatch"], env=env, timeout=30).returncode == 0
        words = shlex.split((folder / f"started-{task}").read_text())
        options = understood(["accelerate", "launch", *words[2:]])[1]
        loaded = load_checked(*split_arguments(cast("list[str]", options["training_script_args"])))
        assert loaded.recipe.seed == 3 + task
        assert loaded.run_folder == Path(f"runs/it's mine-sweep/seed-{3 + task}")
    assert main(["sweep", *asked, "--slurm"]) == 1, "the GPUs of other machines have to be said"


@pytest.mark.matrix
def test_batch_script_trains_on_two_nodes_and_continues_after_its_time_limit(folder: Path) -> None:
    populate(folder, "llama")
    # What the user's accelerate is set up for has no say.
    default = folder / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("{distributed_type: FSDP, mixed_precision: fp16, gpu_ids: '7', num_processes: 1}")
    job = ["launch", "recipe=small", "max_steps=30", "output.name=job", "--slurm", "--gpus", "1", "--nodes", "2"]
    assert main(job) == 0
    run, env = folder / "runs" / "job", stand_ins(folder) | {"HF_HOME": str(folder / "home")}
    with (folder / "first.log").open("w") as log:
        first = subprocess.Popen(["bash", "job.sbatch"], env=env, stdout=log, stderr=log)
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").is_file() or len(losses(run)) < 3:
            assert first.poll() is None and time.monotonic() < deadline, (folder / "first.log").read_text()[-3000:]
            time.sleep(0.05)
        first.send_signal(signal.SIGUSR1)
        assert first.wait(timeout=120) == 0, (folder / "first.log").read_text()[-3000:]
    assert (folder / "scontrol.log").read_text().splitlines()[-1] == f"requeue {env['SLURM_JOB_ID']}"
    assert 3 <= len(losses(run)) < 30
    assert list((run / "checkpoints").iterdir())
    # Slurm starts the same file again.
    second = subprocess.run(["bash", "job.sbatch"], env=env, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stdout[-2000:] + second.stderr[-2000:]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["resumed_from"] and len(losses(run)) == 30
    assert len((folder / "scontrol.log").read_text().splitlines()) == 3
