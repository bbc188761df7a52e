"""Whole runs as a user starts, stops, repeats and breaks them."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import RUN, SUPPORT, environment, losses, metrics, write_jsonl, write_recipe
from ranks import Launch, Ranks
from tiny import chat_rows, tiny_model

from toolkit.common import UserError
from toolkit.recipe.rules import load_checked
from toolkit.train import process as process_module
from toolkit.train.callbacks import CleanStop, Evaluator
from toolkit.train.main import main
from toolkit.train.run_folder import claim, hash_files

RECIPE = """
description: A small LoRA
model: {path: MODEL}
data: {sources: [chat.jsonl], eval_split: 0.1}
method: {option: lora, lora_dropout: 0.1}
precision: fp32
optimizer: {learning_rate: 1.0e-3}
schedule: {max_steps: 12, warmup_ratio: 0.1}
batch: {seq_len: 256, global_batch_size: 4, micro_batch_size: 2}
checkpoint: {save_steps: 3}
evaluation: {num_prompts: 2, max_new_tokens: 4}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a tiny model, chat data and a recipe `small`."""
    model = tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "model")
    write_jsonl(tmp_path / "chat.jsonl", chat_rows(60))
    write_recipe(tmp_path, "small", RECIPE.replace("MODEL", str(model)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(place: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Starts the runner in a process group of its own, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, *launcher, str(RUN), *arguments],
        cwd=place,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], running: Callable[[], bool], seconds: float = 120) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert running(), "the run has ended"
        assert time.monotonic() < end, "the run did not get that far"
        time.sleep(0.02)


def kill(launch: Launch, condition: Callable[[], bool]) -> None:
    """Kills a run once the condition holds."""
    wait_for(condition, launch.running)
    launch.send(signal.SIGKILL)
    launch.wait()


def test_run_folder_holds_all_that_is_needed(place: Path) -> None:
    assert main(["recipe=small", "profile=true"]) == 0
    run = place / "runs" / "small"
    wanted = {"recipe.yaml", "manifest.json", "metrics.jsonl", "audit.json", "samples.json", "report.html", "final"}
    wanted |= {"profile.json.gz", "held_out_rows.json"}
    assert wanted <= {file.name for file in run.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= {
        file.name for file in (run / "final").iterdir()
    }
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "finished"
    assert manifest["parameters"]["trainable"] < manifest["parameters"]["total"]
    assert {"recipe", "data", "model"} <= manifest["hashes"].keys()
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == ["checkpoint-12", "checkpoint-9"]
    assert all({"before", "after"} <= sample.keys() for sample in json.loads((run / "samples.json").read_text()))
    assert [*manifest["start_up"]] == ["imports", "data", "plan", "model", "evaluation", "first_step"]
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, *range(1, 13), 12]
    for row in (row for row in rows if "loss" in row):
        assert 0 < row["trained_tokens_per_second"] < row["tokens_per_second"]
        assert 0 < row["data_wait"] < 1 and row["step_seconds"] > 0
        assert row["model_flops"] > 0 and 0 < row["mfu"] < 1
    assert rows[-1]["tokens_per_second" if "loss" in rows[-1] else "eval_loss"] > 0


def test_killed_run_continues_to_the_same_losses(place: Path, ranks: Ranks) -> None:
    assert main(["recipe=small", "output.name=straight"]) == 0
    run = place / "runs" / "killed"
    kill(ranks.start(place, "recipe=small", "output.name=killed"), lambda: steps_done(run) >= 7)
    assert main(["recipe=small", "output.name=killed"]) == 0
    assert losses(run) == pytest.approx(losses(place / "runs" / "straight"), rel=1e-7)
    assert [row["step"] for row in metrics(run)] == [0, *range(1, 13), 12]
    assert json.loads((run / "manifest.json").read_text())["resumed_from"].endswith(("checkpoint-3", "checkpoint-6"))


def test_a_run_goes_on_with_the_intervals_that_it_is_given(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever set out without checkpoints, and stopped, may want some from then on."""

    def stop_after_two(self: CleanStop, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stopped = control.should_save = control.should_training_stop = state.global_step == 2

    run = place / "runs" / "small"
    with monkeypatch.context() as patch:
        patch.setattr(CleanStop, "on_step_end", stop_after_two)
        assert main(["recipe=small", "save_steps=null"]) == 0
    others = ["save_steps=5", "checkpoint.save_total_limit=9", "logging.every_steps=4"]
    assert main(["recipe=small", *others]) == 0
    assert {each.name for each in (run / "checkpoints").iterdir()} == {f"checkpoint-{step}" for step in (2, 5, 10, 12)}
    assert [row["step"] for row in metrics(run) if "loss" in row] == [1, 2, 4, 5, 8, 10, 12]


def test_losses_before_a_checkpoint_are_told_if_a_run_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of metrics is a mean over steps; a run that goes on in the middle of them knows the later ones alone."""

    def fail_in_eight(self: CleanStop, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.global_step != 8, "the end"

    often = ["recipe=small", "logging.every_steps=4"]
    assert main([*often, "output.name=straight"]) == main(["recipe=small", "output.name=each"]) == 0
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the end"):
        patch.setattr(CleanStop, "on_step_end", fail_in_eight)
        main([*often, "output.name=ended"])
    assert main([*often, "output.name=ended"]) == 0
    runs = place / "runs"
    assert losses(runs / "ended") == pytest.approx(losses(runs / "straight"), rel=1e-7)
    rows = [row for row in metrics(runs / "ended") if "loss" in row]
    assert [row["step"] for row in rows] == [3, 4, 6, 8, 9, 12]
    each = losses(runs / "each")
    for before, row in zip([0, 3, 4, 6, 8, 9], rows, strict=True):
        assert row["loss"] == pytest.approx(sum(each[before : row["step"]]) / (row["step"] - before), rel=1e-6)


def losses_so_far(run: Path) -> list[str]:
    return [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]


def test_half_saved_checkpoint_is_passed_over(place: Path, ranks: Ranks) -> None:
    assert main(["recipe=small", "output.name=straight"]) == 0
    run = place / "runs" / "cut"
    saved = run / "checkpoints" / "checkpoint-6" / "trainer_state.json"
    kill(ranks.start(place, "recipe=small", "output.name=cut"), saved.is_file)
    newest = max(run.glob("checkpoints/checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    (newest / "optimizer.pt").unlink()
    assert main(["recipe=small", "output.name=cut"]) == 0
    by_step = {row["step"]: row["loss"] for row in metrics(run) if "loss" in row}
    assert list(by_step.values()) == pytest.approx(losses(place / "runs" / "straight"), rel=1e-7)


ENDLESS = ("recipe=small", "schedule.max_steps=4000", "checkpoint.save_steps=null", "batch.micro_batch_size=1")
ACCELERATE = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [pytest.param((), marks=pytest.mark.matrix), ACCELERATE], ids=["python", "accelerate"]
)
def test_first_ctrl_c_in_a_terminal_saves_and_stops(place: Path, launcher: tuple[str, ...]) -> None:
    run = place / "runs" / "small"
    # Plain `toolkit/run.py`, but for the trace of the model.
    command = [sys.executable, *launcher, str(SUPPORT / "cpu_engines.py"), *ENDLESS]
    status, output = typed_ctrl_c(place, command, lambda: steps_done(run) >= 3)
    assert "Traceback" not in output, output[-3000:]
    assert status == 0, output[-3000:]
    assert_continues(place, run)


AGENT = f"""
import os
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from toolkit.train.main import main as train
from toolkit.train.process import leave

def main(arguments):
    os.setsid()
    config, _, _ = config_from_args(parse_args([*{TORCHRUN[2:]}, "--start-method", "fork", "run.py"]))
    elastic_launch(config, lambda: leave(lambda: train(arguments)))()
"""


@pytest.mark.parametrize("dies", [False, True])
def test_interrupted_processes_of_torchruns_agent_all_save_and_stop(dies: bool, place: Path, ranks: Ranks) -> None:
    """By a terminal, which tells the agent and what it started; or by the agent's death, which tells nobody."""
    run = place / "runs" / "small"
    (place / "agent.py").write_text(AGENT)
    agent = ranks.start(place, *ENDLESS, entry="agent")
    wait_for(lambda: steps_done(run) >= 3, agent.running)
    if dies:
        os.kill(agent.pids[0], signal.SIGKILL)
    else:
        os.killpg(agent.pids[0], signal.SIGINT)
    agent.wait(120)
    wait_for(lambda: status(run) == "interrupted", lambda: True, 60)
    assert_continues(place, run)


@pytest.mark.matrix
def test_interrupted_processes_of_torchrun_all_save_and_stop(place: Path) -> None:
    run = place / "runs" / "small"
    process = start(place, *ENDLESS, launcher=TORCHRUN)
    wait_for(lambda: steps_done(run) >= 3, lambda: process.poll() is None)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=120)
    assert_continues(place, run)


@pytest.mark.usefixtures("in_foreground")
def test_training_saves_and_stops_when_its_terminal_is_closed(place: Path) -> None:
    """Whatever it says from then on is an error of the terminal's."""
    run, fork = place / "runs" / "small", multiprocessing.get_context("fork")
    master, terminal = pty.openpty()

    def train() -> None:
        os.close(master)
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for number in range(3):
            os.dup2(terminal, number)
        sys.stdout, sys.stderr = (open(number, "w") for number in (1, 2))  # noqa: SIM115
        os._exit(main([*ENDLESS]))

    training = fork.Process(target=train)
    training.start()
    os.close(terminal)
    threading.Thread(target=drain, args=(master, lambda: steps_done(run) >= 3), daemon=True).start()
    training.join(120)
    assert training.exitcode == 0
    assert_continues(place, run)


def drain(master: int, enough: Callable[[], bool]) -> None:
    """Reads what is written to a terminal, and closes it."""
    while not enough():
        if select.select([master], [], [], 0.05)[0]:
            os.read(master, 65536)
    os.close(master)


def test_training_saves_and_stops_when_its_launcher_dies(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_launched_by_accelerate", lambda: True)
    run, fork = place / "runs" / "small", multiprocessing.get_context("fork")

    def launch() -> None:
        training = fork.Process(target=lambda: os._exit(main([*ENDLESS])))
        training.start()
        training.join()

    launcher = fork.Process(target=launch)
    launcher.start()
    wait_for(lambda: steps_done(run) >= 3, launcher.is_alive)
    launcher.kill()
    launcher.join()
    wait_for(lambda: status(run) == "interrupted", lambda: True, 60)
    assert_continues(place, run)


BEGINNING = """
import os, sys, time
from toolkit.train import main, process

process._launched_by_accelerate = lambda: True
main.load_checked = lambda *read: os.write(int(sys.argv[1]), b"x") and time.sleep(60)
os._exit(main.main(sys.argv[2:]))
"""
LAUNCHING = "import subprocess, sys; subprocess.run(sys.argv[2:], pass_fds=[int(sys.argv[1])])"


def test_training_whose_launcher_dies_before_it_has_begun_ends_too(place: Path) -> None:
    """While it imports the frameworks, say, which takes seconds."""
    end, begun = os.pipe()
    training = [sys.executable, "-c", BEGINNING, str(begun), *ENDLESS]
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHING, str(begun), *training], pass_fds=[begun])
    os.close(begun)
    assert os.read(end, 1) == b"x"
    launcher.kill()
    launcher.wait()
    assert select.select([end], [], [], 30)[0], "the training went on without its launcher"
    assert os.read(end, 1) == b""
    os.close(end)


@pytest.mark.matrix
def test_training_saves_and_stops_when_accelerate_dies(place: Path) -> None:
    run = place / "runs" / "small"
    process = start(place, *ENDLESS, launcher=ACCELERATE)
    wait_for(lambda: steps_done(run) >= 3, lambda: process.poll() is None)
    process.kill()
    end = time.monotonic() + 60
    while not list(run.glob("checkpoints/*/trainer_state.json")):
        assert time.monotonic() < end, "the training went on without its launcher"
        time.sleep(0.1)


def status(run: Path) -> str:
    """How a run stands, by its manifest."""
    return str(json.loads((run / "manifest.json").read_text(encoding="utf-8"))["status"])


def steps_done(run: Path) -> int:
    """Training steps in a run's metrics so far."""
    return len(losses_so_far(run)) if (run / "metrics.jsonl").is_file() else 0


def assert_continues(place: Path, run: Path) -> None:
    """The run was interrupted with a checkpoint, and training goes on from it with the next step."""
    assert status(run) == "interrupted"
    checkpoint = max((run / "checkpoints").glob("checkpoint-*"), key=lambda each: int(each.name.split("-")[1]))
    step = int(checkpoint.name.split("-")[1])
    resumed = [*ENDLESS, f"schedule.max_steps={step + 2}", "output.name=other", f"checkpoint.resume={checkpoint}"]
    assert main(resumed) == 0
    assert [row["step"] for row in metrics(place / "runs" / "other") if "loss" in row] == [step + 1, step + 2]


APART = """
import os
import cpu_engines

def main(arguments):
    if os.environ["RANK"] == "1":
        os.chdir("elsewhere")
    return cpu_engines.main(arguments)
"""


def test_nodes_that_do_not_share_the_run_folder_stop_without_saving(place: Path, ranks: Ranks) -> None:
    """Each would keep its part of the checkpoint, and what the first one has would count as whole."""
    (place / "apart.py").write_text(APART)
    (place / "elsewhere" / "runs").mkdir(parents=True)
    for name in ("recipes", "chat.jsonl"):
        (place / "elsewhere" / name).symlink_to(place / name)
    unsaved = ("checkpoint.save_epochs=null", "strategy.name=zero2")
    run = place / "runs" / "small"
    launch = ranks.start(place, *ENDLESS, *unsaved, processes=2, nodes=2, entry="apart")
    wait_for(lambda: steps_done(run) >= 1, launch.running)
    launch.send(signal.SIGTERM)
    done = launch.wait(120)
    assert done.codes == [0, 0] and status(run) == "interrupted", done.stderr[-3000:]
    assert "no checkpoint is saved, because not all nodes see runs/small" in done.stdout
    assert "saving a checkpoint" not in done.stdout and "continues from there" not in done.stdout
    assert not [*place.rglob("checkpoint-*")] and not [*place.rglob("*optim_states.pt")]


@pytest.mark.parametrize("named", [False, True], ids=["anew", "from a named checkpoint"])
def test_what_a_stopped_run_says_continues_it(named: bool, place: Path, ranks: Ranks) -> None:
    """Also where the same command would begin anew, or at a checkpoint that the run has left behind."""
    assert main(["recipe=small", "max_steps=1"]) == 0
    begins = f"{place}/runs/small/checkpoints/checkpoint-1" if named else "never"
    name = ["output.name=other"] if named else []
    run = place / "runs" / ("other" if named else "small-2")
    stopped = ranks.start(place, *ENDLESS, f"checkpoint.resume={begins}", *name)
    wait_for(lambda: steps_done(run) >= 2, stopped.running)
    stopped.send(signal.SIGTERM)
    said = re.search("The same command with (.*) continues from there", stopped.wait().stdout)
    assert said and status(run) == "interrupted"
    folder = claim(load_checked("small", [*ENDLESS[1:], *name, *said[1].split()]), 1)
    step = metrics(run)[-1]["step"]
    assert folder.resume_from and folder.resume_from.resolve() == run / "checkpoints" / f"checkpoint-{step}"


def typed_ctrl_c(place: Path, command: list[str], condition: Callable[[], bool]) -> tuple[int, str]:
    """Runs a command in a terminal, types Ctrl-C once the condition holds, and returns exit code and output."""
    master, terminal = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command, cwd=place, env=environment(), stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True, preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(terminal)
    output, typed, end = b"", False, time.monotonic() + 180
    while time.monotonic() < end:
        if select.select([master], [], [], 0.05)[0]:
            try:
                output += os.read(master, 65536)
            except OSError:  # The last process with the terminal has ended.
                break
        if not typed and condition():
            os.write(master, b"\x03")
            typed = True
    return process.wait(timeout=30), output.decode(errors="replace")


def test_a_quiet_run_tells_results_and_warnings(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["recipe=small", "max_steps=2", "batch.seq_len=64", "data.over_long=drop"]
    assert main([*settings, "output.name=loud"]) == 0
    out = capsys.readouterr().out
    details = ("tokens per row", "FITS", "step 1/2")
    assert all(detail in out for detail in (*details, "they are left out", "training loss")), out
    assert main([*settings, "output.name=quiet", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "training loss" in out and not any(detail in out for detail in details), out
    assert "warning: 28 of 54 training rows" in err and "they are left out" in err, err


def test_finished_run_is_left_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=small", "max_steps=2"]) == 0
    run = place / "runs" / "small"
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    assert main(["recipe=small", "max_steps=2"]) == 0
    assert "finished" in capsys.readouterr().out
    assert before == {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}


def test_a_disk_that_does_not_answer_is_one_message_and_nothing_changes(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(file: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))

    assert main(["recipe=small", "max_steps=2"]) == 0
    before = {file: file.read_bytes() for file in (place / "runs").rglob("*") if file.is_file()}
    monkeypatch.setattr("toolkit.report.load.read_file", read)
    assert main(["recipe=small", "max_steps=2"]) == 1
    assert "manifest.json cannot be used: its disk does not answer" in " ".join(capsys.readouterr().err.split())
    assert before == {file: file.read_bytes() for file in (place / "runs").rglob("*") if file.is_file()}


def test_answers_before_training_are_not_set_aside_where_their_disk_does_not_answer(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe=small"]) == 0
    run = place / "runs" / "small"
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "checkpoint-12")
    answers = (run / "samples.json").read_bytes()
    (run / "samples.json").unlink()
    (run / "samples.json").symlink_to("/proc/self/mem")  # Reading it is an input/output error.
    capsys.readouterr()
    assert main(["recipe=small"]) == 1
    assert "its disk does not answer" in " ".join(capsys.readouterr().err.split())
    assert (run / "samples.json").is_symlink() and not (run / "samples.json.damaged").is_symlink()
    (run / "samples.json").unlink()
    (run / "samples.json").write_bytes(answers)
    assert main(["recipe=small"]) == 0
    again = json.loads((run / "samples.json").read_bytes())
    assert [row["before"] for row in again] == [row["before"] for row in json.loads(answers)]


def test_folder_of_another_run_is_refused_and_untouched(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=small", "max_steps=2"]) == 0
    before = {file: file.read_bytes() for file in (place / "runs").rglob("*") if file.is_file()}
    assert main(["recipe=small", "max_steps=2", "learning_rate=0.5"]) == 1
    message = capsys.readouterr().err
    assert "optimizer.learning_rate (0.001 there, 0.5 here)" in message and "output.name" in message
    assert before == {file: file.read_bytes() for file in (place / "runs").rglob("*") if file.is_file()}
    assert main(["recipe=small", "max_steps=2", "learning_rate=0.5", "checkpoint.resume=never"]) == 0
    assert (place / "runs" / "small-2" / "final").is_dir()


def test_same_seed_same_run_and_another_seed_another(place: Path) -> None:
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        assert main(["recipe=small", "max_steps=3", f"output.name={name}", f"seed={seed}"]) == 0
    one, two, three = (losses(place / "runs" / name) for name in ("one", "two", "three"))
    assert one == two
    assert one != three


def test_settings_of_the_libraries_reach_them_and_are_noted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = "extra.training_arguments.neftune_noise_alpha=50"
    assert main(["recipe=small", "max_steps=2", "output.name=plain"]) == 0
    assert main(["recipe=small", "max_steps=2", noise, "extra.lora.exclude_modules=[down_proj]"]) == 0
    passed = {"training_arguments.neftune_noise_alpha": 50, "lora.exclude_modules": ["down_proj"]}
    run = place / "runs" / "small"
    assert json.loads((run / "manifest.json").read_text(encoding="utf-8"))["extra"] == passed
    shown = capsys.readouterr()
    assert "passed to the libraries: training_arguments.neftune_noise_alpha=50" in shown.out + shown.err
    adapter = json.loads((run / "final" / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["exclude_modules"] == ["down_proj"]
    assert losses(run)[0] != losses(place / "runs" / "plain")[0]
    assert metrics(run)[0]["eval_loss"] == metrics(place / "runs" / "plain")[0]["eval_loss"]
    assert main(["recipe=small", "max_steps=2", noise.replace("50", "5")]) == 1


@pytest.mark.parametrize(
    ("content", "override", "words"),
    [
        (b"", "", ["chat.jsonl", "empty"]),
        (b'{"messages": []}\n{"messages": [}\n', "", ["chat.jsonl:2", "JSON"]),
        (b'{"text": "caf\xe9"}\n', "", ["chat.jsonl", "UTF-8"]),
        (b'{"colour": 1}\n', "", ["colour", "data.columns"]),
        (None, "data.sources=[nothing.jsonl]", ["nothing.jsonl"]),
        (None, "model.path=nowhere/nothing", ["model.path", "nowhere/nothing"]),
        (None, "method.target_modules=[q_prj]", ["q_prj", "q_proj"]),
        (None, "logging.trackers=[trackio]", ["trackio", "pip install"]),
        (None, "precision=fp16", ["fp16", "GPU"]),
        (None, "model.attention=flex", ["flex", "sdpa"]),
    ],
)
def test_one_clear_message_for_bad_input(
    place: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, override: str, words: list[str]
) -> None:
    if content is not None:
        (place / "chat.jsonl").write_bytes(content)
    status = main(["recipe=small", "max_steps=1", *([override] if override else [])])
    assert status == (2 if "target_modules" in override else 1)  # What the recipe alone shows is 2.
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") <= 8
    for word in words:
        assert word in message


def test_full_disk_is_one_message_and_loses_nothing(place: Path, ranks: Ranks) -> None:
    disk = place / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        done = ranks.run(place, "recipe=small", "output.dir=disk/runs")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 1
    assert "disk" in done.stderr and "output.dir" in done.stderr and "Traceback" not in done.stderr


def test_script_is_not_shadowed_by_its_own_folder(place: Path) -> None:
    code = f"import runpy, sys; sys.argv = ['run.py']; sys.path.insert(0, {str(RUN.parent)!r}); " + (
        f"\nrunpy.run_path({str(RUN)!r})\n"
        f"assert {str(RUN.parent)!r} not in sys.path; import accelerate, datasets; print(accelerate.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=place, env=environment(), capture_output=True, text=True)
    assert "accelerate" in done.stdout, done.stderr


def test_a_process_ends_with_pools_of_threads_left_open(tmp_path: Path) -> None:
    """As torch's compiler leaves one behind; what was given to it is done first."""
    code = (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\nfrom toolkit.train.process import leave\n"
        "pool = ThreadPoolExecutor(2)\npool.submit(lambda: (time.sleep(0.2), print('done')))\nleave(lambda: 3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "done\n"), ended.stderr


def test_an_error_without_a_word_may_pass_and_keeps_its_trace(tmp_path: Path) -> None:
    code = "from toolkit.train.process import leave\nleave(lambda: 1 // 0)\n"
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert ended.returncode == os.EX_TEMPFAIL and ended.stderr.startswith("Traceback")
    assert ended.stderr.splitlines()[-1].startswith("ZeroDivisionError")


def test_tracker_by_name_gets_training_and_held_out_loss(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert main(["recipe=small", "max_steps=2", "logging.trackers=[tensorboard]"]) == 0
    events = event_accumulator.EventAccumulator(str(place / "runs" / "small" / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("train/loss")]
    assert logged == pytest.approx(losses(place / "runs" / "small"), rel=1e-5)
    assert len(events.Scalars("eval/loss")) == 2


def test_failed_run_says_so_and_can_be_mended(place: Path) -> None:
    assert main(["recipe=small", "max_steps=2", "method.target_modules=[lm_head]"]) == 1
    manifest = json.loads((place / "runs" / "small" / "manifest.json").read_text())
    assert manifest["status"] == "failed" and "lm_head" in manifest["error"]
    assert main(["recipe=small", "max_steps=2", "method.target_modules=[q_proj]"]) == 0


def test_audit_of_data_that_cannot_be_trained_on_is_saved(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=small", "batch.seq_len=16", "max_steps=1"]) == 1
    captured = capsys.readouterr()
    assert "data.over_long" in captured.err and "tokens per row" in captured.out
    audit = json.loads((place / "runs" / "small" / "audit.json").read_text())
    assert {problem["level"] for problem in audit["problems"]} == {"fatal"}


def test_resume_refuses_other_data(place: Path, capsys: pytest.CaptureFixture[str], ranks: Ranks) -> None:
    kill(ranks.start(place, "recipe=small"), lambda: steps_done(place / "runs" / "small") >= 4)
    rows = (place / "chat.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (place / "chat.jsonl").write_text("".join(rows[:-5]), encoding="utf-8")
    assert main(["recipe=small"]) == 1
    message = capsys.readouterr().err
    assert "the data of runs/small changed" in message and "output.name" in message
    assert "tokenizer, chat template" in message, "which change the rows as well"
    (place / "chat.jsonl").write_text("".join(rows), encoding="utf-8")
    assert main(["recipe=small", "batch.micro_batch_size=1"]) == 0  # As after running out of memory.


def test_a_refused_start_changes_nothing_of_the_run_before(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of one that is finished nor of one that could continue, however late it is refused."""
    run, rows = place / "runs" / "small", (place / "chat.jsonl").read_text(encoding="utf-8")
    assert main(["recipe=small"]) == 0

    def content() -> dict[str, bytes]:
        return {str(each): each.read_bytes() for each in run.rglob("*") if each.is_file() and each.name != ".lock"}

    finished = content()
    for wrong in ("seed=5", "max_steps=5", "precision=fp16"):
        assert main(["recipe=small", wrong]) != 0
        assert content() == finished
    assert main(["recipe=small", "description=again"]) == 0 and content() == finished
    shutil.rmtree(run / "final")
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "status": "interrupted"}))
    interrupted = content()
    (place / "chat.jsonl").write_text(rows.replace("a", "b", 1), encoding="utf-8")
    assert main(["recipe=small", "description=other data"]) == 1 and content() == interrupted
    (place / "chat.jsonl").write_text("{", encoding="utf-8")
    assert main(["recipe=small", "description=no data"]) == 1 and content() == interrupted
    (place / "chat.jsonl").write_text(rows, encoding="utf-8")
    with monkeypatch.context() as patch:
        # The last thing that may refuse a start before the model is loaded.
        patch.setattr("toolkit.train.preflight.all_reduce", lambda *_: (_ for _ in ()).throw(UserError("no network")))
        assert main(["recipe=small", "description=no network"]) == 1 and content() == interrupted
    assert main(["recipe=small", "description=at last"]) == 0
    assert json.loads((run / "manifest.json").read_text())["status"] == "finished"
    assert "at last" in (run / "recipe.yaml").read_text()


def test_a_run_that_cannot_save_says_so_and_goes_on_later(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = place / "runs" / "small"
    assert main(["recipe=small", "output.name=straight"]) == 0  # What is larger lies in caches now.
    adapter = run.with_name("straight") / "final" / "adapter_model.safetensors"
    resource.setrlimit(resource.RLIMIT_FSIZE, (adapter.stat().st_size + 1000, hard))
    try:
        assert main(["recipe=small"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert "Traceback" not in said and "runs/small cannot be written: a file would be larger" in said
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "failed" and "cannot be written" in manifest["error"]
    assert main(["recipe=small"]) == 0
    assert losses(run) == pytest.approx(losses(run.with_name("straight")), rel=1e-7)
    assert not (run / ".reserved").exists()


def test_a_run_whose_folder_is_deleted_says_so(place: Path, ranks: Ranks) -> None:
    run = place / "runs" / "small"
    running = ranks.start(place, "recipe=small", "max_steps=4000")
    wait_for(lambda: steps_done(run) >= 1, running.running)
    shutil.rmtree(run)
    done = running.wait()
    assert done.codes == [1] and "Traceback" not in done.stderr
    assert "runs/small was deleted while it was trained in" in done.stderr


def test_damaged_files_beside_the_checkpoints_neither_end_nor_change_a_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "runs" / "small"
    assert main(["recipe=small"]) == 0
    straight = losses(run)
    shutil.rmtree(run / "final")
    for name, content in (
        ("manifest.json", b'{"status": "fin'),
        ("samples.json", b"[1, {}]"),
        ("audit.json", b"\xff"),
        ("metrics.jsonl", (run / "metrics.jsonl").read_bytes().replace(b'"step": 2', b'"st\xffp": 2') + b'{"step": 1'),
    ):
        (run / name).write_bytes(content)
    shutil.rmtree(run / "checkpoints" / "checkpoint-12")
    capsys.readouterr()
    assert main(["recipe=small"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "runs/small/manifest.json cannot be read" in said
    assert "runs/small/samples.json cannot be read and is kept as samples.json.damaged" in said
    assert "runs/small/metrics.jsonl cannot be read in 1 lines and is kept as metrics.jsonl.damaged" in said
    assert losses(run) == pytest.approx([*straight[:1], *straight[2:]], rel=1e-7)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "finished" and manifest["resumed_from"].endswith("checkpoint-9")
    assert (run / "manifest.json.damaged").read_bytes() == b'{"status": "fin'
    assert b"st\xffp" in (run / "metrics.jsonl.damaged").read_bytes()


def test_second_process_is_kept_out_of_a_run_folder(
    place: Path, capsys: pytest.CaptureFixture[str], ranks: Ranks
) -> None:
    first = ranks.start(place, *ENDLESS)
    wait_for(lambda: steps_done(place / "runs" / "small") >= 1, first.running)
    recipe = (place / "runs" / "small" / "recipe.yaml").read_bytes()
    assert main([*ENDLESS, "description=another"]) == 1
    assert (place / "runs" / "small" / "recipe.yaml").read_bytes() == recipe
    first.send(signal.SIGKILL)
    first.wait()
    assert "another process is training" in capsys.readouterr().err


def test_checkpoint_that_does_not_fit_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("Qwen/Qwen3-8B", place / "other")
    assert main(["recipe=small", "max_steps=3"]) == 0
    checkpoint = place / "runs" / "small" / "checkpoints" / "checkpoint-3"
    named = ["recipe=small", "output.name=other", f"checkpoint.resume={checkpoint}"]
    for overrides, word in (
        (["max_steps=3"], "is at step 3 already"),
        (["~method", "max_steps=6"], "holds an adapter"),
        (["max_steps=6", "method.r=2"], "weights of a LlamaForCausalLM, the recipe trains"),
        (["max_steps=6", "model.path=other"], "weights of a Qwen3ForCausalLM\n"),
        (["max_steps=6"], "is damaged: it lacks optimizer.pt"),
    ):
        if "optimizer" in word:
            # What was refused does not stand in the way of what fits.
            assert main([*named, *overrides]) == 0
            said = capsys.readouterr()
            assert "error" not in said.err
            assert "is no checkpoint of this run, and is taken as checkpoint.resume says" in " ".join(
                (said.out + said.err).split()
            )
            shutil.rmtree(place / "runs" / "other")
            (checkpoint / "optimizer.pt").unlink()
        assert main([*named, *overrides]) == 1
        assert word in capsys.readouterr().err
        assert not [file for file in (place / "runs" / "other").rglob("[!.]*") if file.is_file()], "nothing is written"


def test_metrics_end_with_the_last_step_whatever_the_interval(place: Path) -> None:
    assert main(["recipe=small", "max_steps=5", "logging.every_steps=3"]) == 0
    assert [row["step"] for row in metrics(place / "runs" / "small") if "loss" in row] == [3, 5]


def test_model_from_the_hubs_cache_is_hashed_by_its_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Path(os.environ["HF_HOME"]) / "hub" / "models--org--tiny"
    snapshot = hub / "snapshots" / ("a" * 40)
    shutil.rmtree(hub, ignore_errors=True)
    shutil.copytree(place / "model", snapshot)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("a" * 40)
    assert main(["recipe=small", "max_steps=1", "model.path=org/tiny"]) == 0
    manifest = json.loads((place / "runs" / "small" / "manifest.json").read_text())
    assert manifest["hashes"]["model"] == hash_files([snapshot / "config.json", snapshot / "model.safetensors"])


@pytest.mark.matrix
def test_launcher_does_not_leave_cores_idle(place: Path) -> None:
    """`accelerate launch` sets OMP_NUM_THREADS=1 whatever the machine has."""
    env = {key: value for key, value in environment().items() if key != "OMP_NUM_THREADS"}
    code = (
        "import os\n"
        "from toolkit.distributed.environment import environment\n"
        "from toolkit.distributed.layout import World\n"
        "from toolkit.recipe.rules import load_checked\n"
        "changes = environment(load_checked('small').recipe, World.from_environment(), os.environ)\n"
        "os.environ.update({key: value for key, value in changes.items() if value is not None})\n"
        "import torch\n"
        "print('threads', torch.get_num_threads())\n"
    )
    file = place / "threads.py"
    file.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, *ACCELERATE, str(file)], cwd=place, env=env, capture_output=True, text=True)
    assert f"threads {len(os.sched_getaffinity(0))}" in done.stdout, done.stderr[-2000:]


def test_trained_model_survives_ctrl_c_in_the_last_evaluation(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Evaluator, *of_model: object) -> None:
        raise KeyboardInterrupt

    finish = Evaluator.finish
    monkeypatch.setattr(Evaluator, "finish", interrupted)
    assert main(["recipe=small", "max_steps=2"]) == 130
    run = place / "runs" / "small"
    assert (run / "final" / "adapter_model.safetensors").is_file()
    assert json.loads((run / "manifest.json").read_text())["status"] == "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "finish", finish)
        assert main(["recipe=small", "max_steps=2"]) == 0
    assert json.loads((run / "manifest.json").read_text())["status"] == "finished"
