"""The plan itself: what `toolkit plan --json` prints. Bytes, seconds and FLOPs everywhere; no rounding."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from toolkit.common import UserError

PHASES = ("load", "forward", "backward", "step", "evaluation", "save", "resume")
PARTS = {
    "parameters": "weights of the model as the engine holds them between steps",
    "adapters": "weights of the adapters",
    "masters": "fp32 copies that the optimizer updates, where the weights are in 16 bits",
    "gradients": "gradients of the trained parameters",
    "optimizer": "moments of the optimizer",
    "activations": "what the layers keep for the backward pass, and their temporary tensors",
    "casts": "copies of weights in the compute dtype, made by autocast or by dequantizing",
    "logits": "the output head and the loss",
    "engine": "buckets, gathered parameters, prefetching and staging of the engine",
    "batch": "token ids, labels, positions, masks",
    "workspace": "cuBLAS and kernels",
}
"""What the allocator holds, by part."""


class UnknownSize(UserError):
    """A model whose code cannot be traced, and whose config does not say how large it is in words that are known."""


class Figures(BaseModel):
    """Base of the plan's sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Range(Figures):
    """An estimate and the range in which the real figure is expected."""

    value: float
    """Best estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""


class Memory(Figures):
    """Bytes on one device of one kind of rank."""

    ranks: str
    """`every rank`, or which ones."""
    phases: dict[str, dict[str, int]]
    """Phase (load, forward, backward, step, evaluation, save, resume) to part to bytes, at the phase's own peak. Parts
    that hold nothing are left out."""
    peak_phase: str
    """The phase with the largest sum."""
    allocated: int
    """That sum: what torch's `max_memory_allocated` will show, or on a CPU the bytes of live tensors."""
    reserved: Range
    """What the allocator will have taken from the device (`max_memory_reserved`): the allocated bytes and
    fragmentation."""
    context: int
    """What the CUDA context, NCCL and loaded kernels take beside it. On a CPU: the interpreter and its libraries."""
    total: Range
    """Reserved and context: what must fit."""


class Host(Figures):
    """Bytes of host RAM on one node, at the worst moment."""

    parts: dict[str, int]
    """Offloaded optimizer state, masters, gradients and parameters, pinned staging buffers, activations, loading,
    saving, data, processes."""
    peak: int
    """What is needed at once: parts that come one after the other, as loading and training do, are not added up."""


class Disk(Figures):
    """Bytes on drives."""

    checkpoint: int
    """One checkpoint, all ranks together."""
    kept: int
    """All checkpoints that `checkpoint.save_total_limit` keeps, and the one being written."""
    model: int
    """The published model or adapter."""
    nvme: int
    """Per node, offloaded to NVMe while training."""


class Fit(Figures):
    """Whether it fits."""

    answer: Literal["yes", "tight", "no"]
    """`tight`: the estimate fits and the upper end of its range does not."""
    where: str
    """What is scarcest: device memory, host RAM or NVMe."""
    needed: int
    """Bytes needed there, by the estimate."""
    available: int
    """Bytes there are."""
    margin: int
    """Available less needed."""
    decides: str
    """The largest part at the peak."""


class Link(Figures):
    """Traffic of one rank over one link in one optimizer step."""

    name: str
    """NVLink, PCIe (between devices, or to the host), network, NVMe."""
    bytes: int
    """Bytes sent by one rank (for host and NVMe: both directions)."""
    seconds: float
    """At the link's effective rate."""


class Work(Figures):
    """FLOPs, tokens, traffic, time and money."""

    parameters: int
    """All parameters, tied ones once; 4-bit ones count as what they stand for."""
    trained_parameters: int
    """Those that get gradients."""
    steps: int | None
    """Optimizer steps; None where the data is not prepared and the recipe counts epochs."""
    tokens_per_step: float
    """Tokens that pass through the model in a step, over all ranks."""
    tokens: float | None
    """In all steps."""
    tokens_from: Literal["counted", "upper bound"]
    """`counted` from prepared data, or full sequences assumed."""
    model_flops_per_step: float
    """Traced FLOPs of forward and backward, over all ranks, without recomputation; causal attention counted half."""
    hardware_flops_per_step: float
    """The same with what is recomputed, as executed."""
    rule_flops_per_step: float
    """The rule of thumb: 6 x parameters that a token meets x tokens (2 for the forward pass, 2 for the gradients of
    inputs and 2 for those of weights, the last only of trained ones)."""
    links: list[Link]
    """Traffic per step."""
    compute_seconds: Range
    """Per step: kernels and their launches."""
    communication_seconds: float
    """Per step, not hidden behind computation."""
    offload_seconds: float
    """Per step, not hidden behind computation."""
    step_seconds: Range
    """One optimizer step."""
    total_seconds: Range | None
    """All steps, with evaluations and checkpoints."""
    tokens_per_second: float
    """Over all ranks."""
    mfu: float
    """Model FLOPs per second as a share of the devices' dense peak in the compute dtype."""
    pflop_days: float | None
    """Model FLOPs of the whole run, in days of 1e15 FLOP/s."""
    gpu_hours: float | None
    """Devices x hours."""
    cost: float | None
    """At the given price per GPU-hour."""
    chinchilla_tokens: float | None
    """Pre-training from scratch: 20 tokens per parameter (Hoffmann et al. 2022)."""


class Advice(Figures):
    """A setting that fits at the same global batch."""

    kind: Literal["as asked", "fastest", "cheapest", "option"]
    """What it is best at: `as asked` is the recipe as it stands or, where that does not fit, with the smallest change
    that does; `option` shows what one change does."""
    changes: dict[str, str]
    """Key to value, as on the command line."""
    buys: str
    """What gets better, in words with figures."""
    costs: str
    """What gets worse."""
    fits: Literal["yes", "tight", "no"]
    """On the same hardware."""
    total: int
    """Device memory of a rank, bytes."""
    step_seconds: float
    """One optimizer step."""
    gpu_seconds_per_token: float
    """What a token costs."""


class Plan(Figures):
    """What a recipe will cost on some hardware."""

    schema_version: int = 1
    """Raised when a key changes its meaning."""
    recipe: str
    """Name."""
    overrides: list[str]
    """What was set on the command line."""
    hardware: str
    """Name, such as `h200x8`."""
    devices: int
    """Number of them, which is the number of processes."""
    nodes: int
    """Machines."""
    device_memory: int
    """Bytes of one device."""
    strategy: str
    """As it will run."""
    attention: str
    """Backend, as it will run."""
    micro_batch_size: int
    """Sequences per device and pass."""
    gradient_accumulation_steps: int
    """Micro-batches per step."""
    global_batch_size: int
    """Sequences per step."""
    seq_len: int
    """Tokens per sequence, at most."""
    chosen: dict[str, str]
    """Values that `auto` stood for, with the reason."""
    memory: list[Memory]
    """Per kind of rank, the fullest first."""
    host: Host
    """RAM of one node."""
    host_memory: int
    """Bytes of RAM of one node."""
    disk: Disk
    """Drives."""
    fit: Fit
    """Whether it fits."""
    work: Work
    """FLOPs, tokens, time, money."""
    advice: list[Advice]
    """What to change."""
    origin: Literal["traced", "formulas"]
    """Where activations come from."""
    notes: list[str]
    """What the figures leave out or rest on."""


class Refused(Figures):
    """A setting of `--compare` or `--sweep` that cannot run."""

    recipe: str
    """Name."""
    overrides: list[str]
    """What was set on the command line."""
    hardware: str
    """Name, such as `h200x8`."""
    reason: str
    """What is wrong, and what to change."""


def json_schema() -> dict[str, Any]:
    """JSON Schema of `toolkit plan --json`: a plan, or a list for `--compare` and `--sweep`."""
    return {"title": "toolkit plan --json", **TypeAdapter(Plan | list[Plan | Refused]).json_schema()}
