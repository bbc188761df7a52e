"""`manifest.json` of a run folder, as a typed model."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from toolkit.common import Partial
from toolkit.distributed.engine_state import EngineState
from toolkit.distributed.layout import BatchLayout
from toolkit.planner.plan import Plan


class Gpu(BaseModel):
    """One GPU of the machine."""

    name: str
    memory_bytes: int


class Machine(BaseModel):
    """What the first process ran on."""

    device: str
    cpu: str
    cpu_cores: int | None
    ram_bytes: int
    gpus: list[Gpu]


class Git(BaseModel):
    """The commit of the working folder, and whether it had been changed since."""

    commit: str
    dirty: bool


class Parameters(BaseModel):
    """Numbers of parameters."""

    total: int
    trainable: int
    tied: int = 0
    """Stored once under two names."""
    base: int = 0
    """Without adapters and trained copies."""
    quantized: int = 0
    reached: int = 0
    """Parameters of the base that are trained or have an adapter."""

    @property
    def shares(self) -> str:
        """What share of the base is quantized, and what share can change; empty for runs that did not count it."""
        if not self.base:
            return ""
        reached = f"training reaches {self.reached / self.base:.1%} of"
        if not self.quantized:
            return f"{reached} the base"
        return f"{self.quantized / self.base:.1%} of the base is quantized, {reached} it"


class Measured(Partial):
    """What really came, in the units of the plan: bytes, seconds, kilowatt-hours."""

    step_seconds: float | None = None
    save_seconds: float | None = None
    total_seconds: float | None = None
    tokens: float | None = None
    host: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    energy_kwh: float | None = None
    """From the first step to the last, of the devices; evaluations and checkpoints between them included."""


class Published(BaseModel):
    """Which model is in `final`, where the recipe does not say that it is the last one."""

    step: int
    """The step of its evaluation."""
    what: str
    """For a sentence that begins with "the published model is"."""


class Final(BaseModel):
    """The model in `final`, once it is there as a whole."""

    step: int
    """After which training ended."""
    files: dict[str, tuple[int, str]]
    """Bytes and SHA-256 of each file, but the model card, which is written anew."""


class Manifest(Partial):
    """`manifest.json`: how a run was started, what it ran on, how far it came."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    command: str | None = None
    working_folder: str | None = None
    """In which it was started: relative paths in its recipe are followed from there."""
    started: str | None = None
    continued: str | None = None
    restarts: int = 0
    """How often the last `toolkit launch --restarts` has started it again."""
    finished: str | None = None
    status: str | None = None
    """running, interrupted, failed or finished."""
    error: str | None = None
    """What ended the run."""
    versions: dict[str, str] = {}
    git: Git | None = None
    hardware: Machine | None = None
    saved_by: dict[str, Any] = {}
    """See `checkpoint.writer`."""
    chosen: dict[str, str] = {}
    """The values chosen for `auto`, and why."""
    taken_over: dict[str, Any] = {}
    """DeepSpeed's settings that only the launcher's file states, by dotted key."""
    extra: dict[str, Any] = {}
    """What the recipe passes to the libraries by their own names, by dotted key."""
    started_from: list[str] = []
    """Adapters that this run goes on from, the first stage's first."""
    server: dict[str, str] = {}
    """Which one generated the answers, where one did: `address`, its version of `vllm`, and its `model`."""
    hashes: dict[str, str] = {}
    """Hashes of recipe, data and model."""
    batch: BatchLayout | None = None
    parameters: Parameters | None = None
    notes: list[str] = []
    """What has to be known to read the figures."""
    total_steps: int | None = None
    start_up: dict[str, float] = {}
    """Seconds from the start of the first process to the end of its first step, by `startup.Stage`; of a run that was
    continued, those of the last time."""
    resumed_from: str | None = None
    plan: Plan | None = None
    effective: EngineState | None = None
    skipped_steps: list[int] = []
    """Steps without an update: their batches were left out, see `faults` in the recipe, or gradients overflowed in
    fp16."""
    train_seconds: float | None = None
    peak_memory_bytes: int | None = None
    measured: Measured | None = None
    published: Published | None = None
    final: Final | None = None
