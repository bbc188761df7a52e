"""Starts the toolkit on several CPU processes in milliseconds: they are forked from one that has imported everything.

Importing torch, Transformers, TRL and DeepSpeed takes about ten seconds on every process, a tiny training two. A forked
process begins with all imports made and with no other state: no process group, no engine, the environment it is given.
Run as a script, this is the process that forks: one request per line on standard input, one answer per line on standard
output.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import environment

_GRACE_SECONDS = 5


class Ranks:
    """Runs `toolkit/run.py` on forked processes, with gloo under every engine (see `cpu_engines`)."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=environment() | {"DS_ACCELERATOR": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(
        self,
        folder: Path,
        *arguments: str,
        processes: int = 1,
        nodes: int = 1,
        timeout: float = 240,
        entry: str = "toolkit.run",
    ) -> list[int]:
        """Runs one training in a folder. Its output is in the log.

        Args:
            processes: Processes in all; one is started as plain `python toolkit/run.py` is.
            nodes: Over how many machines they seem to be spread.
            entry: Module whose `main` each process calls.

        Returns:
            Exit code of each process; -6 for those that were ended because time was up or because another failed.
        """
        assert self._server.stdin and self._server.stdout
        request = {
            "folder": str(folder), "arguments": arguments, "processes": processes, "nodes": nodes, "timeout": timeout,
            "log": str(self._log), "entry": entry,
        }  # fmt: skip
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the process that forks has ended"
        codes: list[int] = json.loads(answer)
        return codes

    def said(self) -> str:
        """What the last training printed, on all its processes."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Ends the process that forks."""
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(timeout=30)


def _serve() -> None:
    # Whatever libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import()
    for line in sys.stdin:
        print(json.dumps(_fork(json.loads(line))), file=answers, flush=True)


def _import() -> None:
    from cpu_engines import use_cpu_processes

    import toolkit.train.train  # noqa: F401

    use_cpu_processes()
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import sacrebleu  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    # Trainers collect garbage several times, each time half a second over the objects of all these modules.
    gc.freeze()


def _fork(request: dict[str, Any]) -> list[int]:
    Path(request["log"]).write_bytes(b"")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running: dict[int, int] = {}
    for rank in range(request["processes"]):
        child = os.fork()
        if child == 0:
            _become(rank, port, request)
        running[child] = rank
    codes = [0] * request["processes"]
    end = time.monotonic() + request["timeout"]
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            code = codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
            if code:
                # The others may wait for this one for ever.
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        elif time.monotonic() > end:
            for each in running:
                os.kill(each, signal.SIGABRT)
            end = float("inf")
        else:
            time.sleep(0.01)
    return codes


def _become(rank: int, port: int, request: dict[str, Any]) -> None:
    """Turns a forked process into one of a launch. Never returns."""
    code = 1
    try:
        os.dup2(os.open(request["log"], os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # SIGABRT prints where each thread stands.
        faulthandler.enable()
        os.chdir(request["folder"])
        world, local = request["processes"], request["processes"] // request["nodes"]
        if world > 1:
            numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
            os.environ.update({name: str(number) for name, number in numbers.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.path.append(str(Path(__file__).resolve().parent))
        code = importlib.import_module(request["entry"]).main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
