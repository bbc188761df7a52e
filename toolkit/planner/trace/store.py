"""Where traces are kept, and how a new one is made.

A trace is read from those shipped with the package, or from the cache. One that is not known is made, which takes
seconds: in this process where torch is imported already, else in a worker, because this module must not import torch
(`toolkit plan` answers at once where the trace is known). The worker stays for further questions, as its imports take
longer than a trace. A lock keeps processes that ask for the same trace from making it twice.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from toolkit import cache, own_process
from toolkit.common import UserError, concealed, in_a_line
from toolkit.data.reading import hub
from toolkit.hub_cache import use_own
from toolkit.planner.trace.analytic import estimated
from toolkit.planner.trace.every import every_nth
from toolkit.planner.trace.setting import Setting
from toolkit.planner.trace.types import Trace

SHIPPED = Path(__file__).resolve().parent / "shipped"
"""Traces of the shipped recipes' models: one file for each architecture, made by `python scripts/ship_traces.py`."""

Tracing = Literal["worker", "in_process"]
"""Where a trace that is not known is made: in a process of its own, or in this one, which then imports torch."""

_log = logging.getLogger("toolkit.planner")
_LAUNCH = ("ACCELERATE_", "FSDP_", "DEEPSPEED_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the variables by which launchers speak to the processes they start."""
_read_before: dict[str, Trace] = {}
"""Traces by key: advice asks for the same one again and again."""
_told: set[str] = set()
"""Architectures of which it was said that they are traced."""
_untraced: dict[str, str] = {}
"""Why there is no trace, by key; and by architecture where its code takes too long, which it does in any setting."""


def find(setting: Setting) -> Trace | None:
    """The trace of a setting, if it is known."""
    key = setting.key()
    if key not in _read_before and setting.every_n_layers > 2:
        none, every = (find(each) for each in setting.ends())
        if none is None or every is None:
            return None
        _read_before[key] = every_nth(none, every, setting.every_n_layers)
    if key not in _read_before:
        shipped = _shipped(setting.architecture()).get(key)
        trace = _read(cache.find(_cached(setting))) if shipped is None else Trace.from_json(shipped)
        if trace is None:
            return None
        _read_before[key] = trace
    return _read_before[key]


def obtain(setting: Setting, tracing: Tracing = "worker") -> Trace:
    """The trace of a setting; made if it is not known, or estimated from the config if that cannot be done.

    Raises:
        UserError: If the method names modules or parameters that the model does not have.
        UnknownSize: If it can be neither traced nor estimated.
    """
    known = find(setting)
    if known is not None:
        return known
    if setting.every_n_layers > 2:
        none, every = (obtain(each, tracing) for each in setting.ends())
        return every_nth(none, every, setting.every_n_layers)
    return _trace_here(setting) if tracing == "in_process" else _trace_in_worker(setting)


def _trace_here(setting: Setting) -> Trace:
    from toolkit.planner.trace.fit import trace

    try:
        made = trace(setting)
    except UserError:
        raise
    except Exception as error:  # A model's own code may raise anything, and a run must not end for its plan.
        return estimated(setting, in_a_line(error))
    keep(setting, made)
    return made


def _trace_in_worker(setting: Setting) -> Trace:
    with cache.locked(Path(f"{cache.writable(_cached(setting))}.lock")):
        # Another process may have made it while this one waited.
        known = find(setting)
        if known is None:
            key, architecture = setting.key(), setting.architecture()
            if why := _untraced.get(architecture) or _untraced.get(key):
                return estimated(setting, why)
            ways = f"{setting.method['name']}, checkpointing {setting.checkpointing}, attention {setting.attention}"
            sizes = {way: getattr(setting, way) for way in ("tensor", "context", "expert")}
            ways += "".join(f", parallel.{way} {size}" for way, size in sizes.items() if size > 1)
            ways += ", layers compiled" if setting.compiled else ""
            # What is chosen for a recipe takes a trace of each way; one line says why that takes so long.
            level = logging.DEBUG if architecture in _told else logging.INFO
            _log.log(level, "tracing this model for the first time: method %s", ways)
            _told.add(architecture)
            answer = ask({"trace": dataclasses.asdict(setting)})
            if answer.get("change"):
                raise UserError(answer["error"], answer["change"])
            if why := answer.get("error", ""):
                _untraced[architecture if why.startswith(TimeoutError.__name__) else key] = why
                return estimated(setting, why)
            known = Trace.from_json(answer["trace"])
            keep(setting, known)
    return known


def keep(setting: Setting, trace: Trace) -> None:
    """Puts a trace into the cache."""
    cache.keep(_cached(setting), json.dumps(concealed(trace.to_json())))


def ask(question: Mapping[str, Any]) -> dict[str, Any]:
    """Has another process, which may import torch, trace a setting or read a model's config.

    Returns:
        Its answer; `error` says why there is none.
    """
    process = _tracer()
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        # Libraries may print lines of their own.
        line = next((line for line in process.stdout if line.startswith("{")), "")
    except BrokenPipeError:
        line = ""
    if not line:
        _tracer.cache_clear()
        return {"error": f"the tracing process ended with code {process.wait()}"}
    answer: dict[str, Any] = json.loads(line)
    return answer


@functools.cache
def _tracer() -> subprocess.Popen[str]:
    """The process that answers, kept for further questions: its imports take longer than a trace."""
    return subprocess.Popen(
        own_process.command("toolkit.planner.trace"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=apart(),
    )


def apart() -> dict[str, str]:
    """The environment of a process beside a launch, of which nothing may reach it: it is one process on a CPU."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCH)}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}


def config_of(recipe: Any) -> dict[str, Any]:
    """The config of a model that is neither bundled nor on this disk as JSON: inside a GGUF file, or on the hub.

    Raises:
        UserError: If it cannot be read; names the nearest known model.
    """
    use_own([recipe.model.path])
    hub.ask_for(recipe.model.path)
    answer = ask({"config": recipe.model_dump(mode="json")})
    if "error" in answer:
        raise UserError(answer["error"], answer.get("change") or "set model.path to a model that can be read here")
    config: dict[str, Any] = answer["config"]
    return config


@functools.cache
def _shipped(architecture: str) -> dict[str, Any]:
    file = SHIPPED / f"{architecture}.json.gz"
    if not file.is_file():
        return {}
    content: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return content


def _read(file: Path) -> Trace | None:
    try:
        return Trace.from_json(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
    except (OSError, ValueError):
        return None  # Cut off, or of another version: it is made again.


def _cached(setting: Setting) -> Path:
    return cache.cache_dir() / "traces" / _code() / f"{setting.key()}.json"


@functools.cache
def _code() -> str:
    """A name for the code that decides what a trace says: of another version of it, what was kept is made again."""
    package = Path(__file__).resolve().parent.parent.parent
    files = sorted([*package.glob("models/**/*.py"), *package.glob("planner/trace/*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
