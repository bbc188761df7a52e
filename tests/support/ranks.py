"""Starts the toolkit on one or several processes in milliseconds, forked from one that has imported everything.

Importing torch, Transformers, TRL and DeepSpeed takes about ten seconds on every process, a tiny training two. A forked
process begins with all imports made and with no other state: no process group, no engine, the environment it is given.
The process that forks is itself forked from the one that runs the tests, when this has collected them and run none; it
reads a request per line from a socket and writes an answer per line. What a launcher itself does is tested with the
real one, see `train/test_main.py` and `cli/test_launch.py`.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from harness import compile_no_inference, environment, untraced

ON_CPU = "cpu_engines"
"""Entry of trainings with DeepSpeed or FSDP2 on CPU processes."""
_GRACE_SECONDS = 5
_IMPORTED_LATE = (
    "toolkit.train.main",
    "toolkit.train.train",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "numpy.ctypeslib",
    "peft",
    "rich._emoji_codes",
    "sacrebleu",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.cpp_extension",
    "transformers.models.llama.modeling_llama",
)
"""What trainings import when they come to need it; `toolkit.train.main` first, which says how others are imported."""


@dataclass(frozen=True)
class Finished:
    """What a launch came to."""

    codes: list[int]
    """Exit code of each process; -6 for those that were ended because time was up or because another failed."""
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        """The first exit code that is not 0."""
        return next((code for code in self.codes if code), 0)


class Launch:
    """Running processes of one launch."""

    def __init__(self, ranks: Ranks, number: int, pids: list[int]) -> None:
        self._ranks, self._number = ranks, number
        self.pids = pids

    def send(self, sent: signal.Signals) -> None:
        """Sends a signal to all of its processes, as a terminal does."""
        for pid in self.pids:
            os.kill(pid, sent)

    def running(self) -> bool:
        """Whether none of its processes has ended."""
        return not any(isinstance(code, int) for code in self._ranks.ask(poll=self._number))

    def wait_for_steps(self, run: Path) -> None:
        """Waits until the run has written the loss of a step, for two minutes at most."""
        metrics, end = run / "metrics.jsonl", time.monotonic() + 120
        while not metrics.is_file() or '"loss"' not in metrics.read_text():
            assert self.running() and time.monotonic() < end
            time.sleep(0.05)

    def printed(self) -> str:
        """Standard output so far."""
        out, _ = self._ranks.files(self._number)
        return out.read_text(encoding="utf-8", errors="replace") if out.is_file() else ""

    def wait(self, timeout: float = 240) -> Finished:
        """Waits for all processes; when one has failed, or time is up, the others are ended."""
        codes = self._ranks.ask(wait=self._number, timeout=timeout)
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in self._ranks.files(self._number))
        return Finished(codes, out, err)


class Ranks:
    """Runs `toolkit/run.py`, or another module's `main`, on forked processes."""

    folder: Path
    """Where the output of the processes goes."""

    def __init__(self) -> None:
        self._number = 0
        ours, theirs = socket.socketpair()
        self._server = os.fork()
        if self._server == 0:
            ours.close()
            _serve(theirs)
        with theirs, ours:
            self._requests, self._answers = ours.makefile("w"), ours.makefile("r")

    def start(
        self, folder: Path, *arguments: str, processes: int = 1, nodes: int = 1, entry: str = "toolkit.run", **own: str
    ) -> Launch:
        """Starts processes in a folder.

        Args:
            folder: Current folder of the processes; modules in it can be an `entry`.
            arguments: What follows the command.
            processes: Processes in all; one is started as plain `python toolkit/run.py` is.
            nodes: Over how many machines they seem to be spread.
            entry: Module whose `main` each process calls.
            own: Variables beside those of the environment.
        """
        self._number += 1
        pids = self.ask(
            start=self._number, folder=str(folder.resolve()), arguments=arguments,
            processes=processes, nodes=nodes, entry=entry,
            environment=environment() | own, files=[str(file) for file in self.files(self._number)],
        )  # fmt: skip
        return Launch(self, self._number, pids)

    def run(self, folder: Path, *arguments: str, timeout: float = 240, **settings: Any) -> Finished:
        """Starts processes as `start` does, and waits for them."""
        return self.start(folder, *arguments, **settings).wait(timeout)

    def files(self, number: int) -> list[Path]:
        """Files with the standard output and the standard error of a launch."""
        return [self.folder / f"{number}.{name}" for name in ("out", "err")]

    def ask(self, **request: Any) -> Any:
        """The answer of the process that forks."""
        print(json.dumps(request), file=self._requests, flush=True)
        answer = self._answers.readline()
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process that forks, and what it has started."""
        self._requests.close()
        self._answers.close()
        os.waitpid(self._server, 0)


def _serve(connection: socket.socket) -> NoReturn:
    """Answers requests until the other end is closed."""
    with suppress(BaseException):
        _use_pythons_own_warnings()
        _import()
        launches: dict[int, dict[int, int | None]] = {}
        answers = connection.makefile("w")
        for line in connection.makefile("r"):
            request = json.loads(line)
            if "start" in request:
                launches[request["start"]] = _fork(request)
                answer: list[int | None] = list(launches[request["start"]])
            elif "poll" in request:
                answer = _poll(launches[request["poll"]])
            else:
                answer = _wait(launches.pop(request["wait"]), request["timeout"])
            print(json.dumps(answer), file=answers, flush=True)
        for codes in launches.values():
            _end(codes, signal.SIGKILL)
    os._exit(0)


def _use_pythons_own_warnings() -> None:
    """Those of pytest, which make some of them errors, are for the tests."""
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)


def _import() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.argv = [__file__]
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    from accelerate.utils import imports as accelerates
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from toolkit.models.imports import import_deepspeed
    from toolkit.planner.trace import fit
    from toolkit.report import page
    from toolkit.train import process

    # What is made when it is first asked for, and kept: each process would make it again.
    get_checkpoint_conversion_mapping("llama")
    accelerates._is_package_available = functools.cache(accelerates._is_package_available)
    import_deepspeed()
    for template in page.TEMPLATES.list_templates(extensions=["j2"]):
        page.TEMPLATES.get_template(template)
    fit.trace = untraced
    process.TELL_SECONDS = 0
    compile_no_inference()

    # Trainers collect garbage several times, each time half a second over the objects of all these modules.
    gc.freeze()


def _fork(request: dict[str, Any]) -> dict[int, int | None]:
    """Process ids to exit codes, which are not known yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    codes: dict[int, int | None] = {}
    for rank in range(request["processes"]):
        child = os.fork()
        if child == 0:
            _become(rank, port, request)
        codes[child] = None
    return codes


def _poll(codes: dict[int, int | None]) -> list[int | None]:
    for child, code in codes.items():
        if code is None:
            ended, status = os.waitpid(child, os.WNOHANG)
            codes[child] = os.waitstatus_to_exitcode(status) if ended else None
    return list(codes.values())


def _wait(codes: dict[int, int | None], timeout: float) -> list[int | None]:
    end = time.monotonic() + timeout
    while None in _poll(codes):
        if any(codes.values()):
            # The others may wait for this one for ever.
            end = min(end, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > end:
            _end(codes, signal.SIGABRT)
            end = float("inf")
        time.sleep(0.01)
    return list(codes.values())


def _end(codes: dict[int, int | None], sent: signal.Signals) -> None:
    for child, code in codes.items():
        if code is None:
            os.kill(child, sent)


def _become(rank: int, port: int, request: dict[str, Any]) -> None:
    """Turns a forked process into one of a launch. Never returns."""
    code = 1
    try:
        for number, stream, file in zip((1, 2), (sys.stdout, sys.stderr), request["files"], strict=True):
            opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(opened, number)
            # pytest's, to which loggers of the libraries hold on since their import.
            os.dup2(opened, stream.fileno())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # As in a terminal, also where the tests themselves are run in the background or by `nohup`.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        # SIGABRT prints where each thread stands.
        faulthandler.enable()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        world, local = request["processes"], request["processes"] // request["nodes"]
        if world > 1:
            numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
            # As DeepSpeed's launcher says it. On a CPU DeepSpeed counts by starting a program, at every reduction.
            numbers["LOCAL_SIZE"] = local
            os.environ.update({name: str(number) for name, number in numbers.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.path.append(request["folder"])
        code = importlib.import_module(request["entry"]).main(request["arguments"]) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
