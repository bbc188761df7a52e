"""The plan itself: what `toolkit plan --json` prints, a run's manifest keeps and reports show.

Bytes, seconds and FLOPs everywhere, without rounding. The texts beneath the fields are the descriptions in
`toolkit plan --schema`, so each stands alone. Another form of the same figures, for people, is made of it in `report`.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from toolkit.common import UserError

Answer = Literal["yes", "tight", "no"]
"""Whether something fits."""
Kind = Literal["as asked", "nearest", "fastest", "cheapest", "option"]
"""What a piece of advice is best at."""
PHASES = ("load", "generation", "teacher", "forward", "backward", "step", "evaluation", "save", "resume")
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
    "teacher": "weights of the teacher that a student learns from, and its hidden states of a micro-batch",
    "cache": "keys and values of the answers that are generated",
}
"""What the allocator holds, by part."""
OVERHEAD = {
    "fragmentation": "what the allocator holds and cannot hand out",
    "context": "CUDA context, NCCL and loaded kernels; on a CPU the interpreter and its libraries",
}
"""What lies on the device beside it."""


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
    """Lower end of the range in which the real figure is expected."""
    high: float
    """Upper end of the range in which the real figure is expected."""


class Memory(Figures):
    """Bytes on one device of one kind of rank."""

    ranks: str
    """The ranks that hold this much: `every rank`, `rank 0`, `other ranks`, or `process N of M of each pipeline`."""
    phases: dict[str, dict[str, int]]
    """Phase (load, generation, teacher, forward, backward, step, evaluation, save, resume) to part to bytes, at the
    phase's own peak. Parts that hold nothing are left out."""
    peak_phase: str
    """The phase with the largest sum."""
    allocated: int
    """Bytes at the peak phase, all parts together: what torch's `max_memory_allocated` will show, or on a CPU the bytes
    of live tensors."""
    reserved: Range
    """What the allocator will have taken from the device (`max_memory_reserved`): the allocated bytes and
    fragmentation."""
    context: int
    """Bytes that the CUDA context, NCCL and loaded kernels take beside the allocator. On a CPU: the interpreter and its
    libraries."""
    total: Range
    """Reserved memory and context together: the bytes that must fit on the device."""

    @model_validator(mode="after")
    def _has_its_peak(self) -> Self:
        if self.peak_phase not in self.phases:
            raise ValueError(f"peak_phase {self.peak_phase!r} is none of phases")
        return self

    def parts_at_peak(self) -> dict[str, float]:
        """What one device holds at its worst moment, by part, in bytes; the sum is `total.value`."""
        phase = self.phases[self.peak_phase]
        overhead = {"fragmentation": self.reserved.value - self.allocated, "context": float(self.context)}
        parts = {part: float(phase.get(part, 0)) for part in PARTS} | overhead
        return {part: amount for part, amount in parts.items() if amount > 0}


class Host(Figures):
    """Bytes of host RAM on one node, at the worst moment."""

    parts: dict[str, int]
    """Offloaded optimizer state, masters, gradients and parameters, pinned staging buffers, activations, loading,
    saving, checkpoints on their way to the run folder, data, processes."""
    peak: int
    """Bytes of host RAM needed at once: parts that come one after the other, as loading and training do, are not added
    up."""


class Disk(Figures):
    """Bytes on drives."""

    checkpoint: int
    """Bytes of one checkpoint, all ranks together."""
    part: int = 0
    """Bytes of one that the processes of one machine write, of the machine that writes most."""
    writer: int = 0
    """Bytes of one that a single process writes, of the process that writes most."""
    kept: int
    """Bytes of all checkpoints that `checkpoint.save_total_limit` keeps, and the one being written."""
    model: int
    """Bytes of the published model or adapter."""
    nvme: int
    """Bytes offloaded to the NVMe drives of each node while training."""
    snapshots: int = 0
    """Bytes of the models of which one, or the mean, is published, for `checkpoint.keep_best` and `average_last`."""


class Fit(Figures):
    """Whether it fits."""

    answer: Answer
    """Whether the recipe fits; `tight` means that the estimate fits and the upper end of its range does not."""
    where: str
    """The scarcest place: device memory, host RAM or NVMe."""
    needed: int
    """Bytes needed in the scarcest place, by the estimate."""
    available: int
    """Bytes that the scarcest place has."""
    margin: int
    """Bytes available less bytes needed, in the scarcest place."""
    decides: str
    """The part that is largest in the scarcest place at the peak."""


class Link(Figures):
    """Traffic of one rank over one link in one optimizer step."""

    name: str
    """Name of the link: NVLink, xGMI, PCIe (between devices, or to the host), network, NVMe."""
    bytes: int
    """Bytes sent by one rank in an optimizer step (for host and NVMe: both directions)."""
    seconds: float
    """Seconds that these bytes take at the link's effective rate."""


class Work(Figures):
    """FLOPs, tokens, traffic, time and money."""

    parameters: int
    """Parameters of the model and its adapters, tied ones once; 4-bit ones count as what they stand for."""
    trained_parameters: int
    """Parameters that get gradients."""
    steps: int | None
    """Optimizer steps of the run; None where the data is not prepared and the recipe counts epochs."""
    tokens_per_step: float
    """Tokens that pass through the model in an optimizer step, over all ranks."""
    tokens: float | None
    """Tokens that pass through the model in all steps."""
    tokens_from: Literal["counted", "sampled", "upper bound"]
    """Where tokens come from: `counted` in prepared data, `sampled` from some of its rows, or an `upper bound` for
    which full sequences are assumed."""
    model_flops_per_step: float
    """FLOPs of an optimizer step as traced: forward and backward, over all ranks, without recomputation; causal
    attention counted half."""
    hardware_flops_per_step: float
    """FLOPs of an optimizer step as executed, with what is recomputed, over all ranks."""
    rule_flops_per_step: float
    """FLOPs of an optimizer step by the rule of thumb: 6 x parameters that a token meets x tokens (2 for the forward
    pass, 2 for the gradients of inputs and 2 for those of weights, the last only of trained ones)."""
    links: list[Link]
    """Traffic of one rank in an optimizer step, by link."""
    compute_seconds: Range
    """Seconds of an optimizer step in kernels and their launches."""
    communication_seconds: float
    """Seconds of an optimizer step in which devices wait for each other's data."""
    contention_seconds: float = 0.0
    """Seconds of an optimizer step by which GPUs slow each other down: kernels beside collectives take longer, and the
    slowest GPU sets the pace."""
    offload_seconds: float
    """Seconds of an optimizer step in which a device waits for its host or drive."""
    bubble_seconds: float = 0.0
    """Seconds of an optimizer step in which a device waits for a pipeline to fill and to run empty."""
    step_seconds: Range
    """Seconds of one optimizer step."""
    generation_seconds: float | None = 0.0
    """Seconds of an optimizer step in which answers are generated, where the model learns from its own; None where a
    server generates them, whose time is not known and is in no figure."""
    compile_seconds: float = 0.0
    """Seconds that compiling the layers takes, once; 0 where they run as they are."""
    saves: int = 0
    """Checkpoints in all steps."""
    save_seconds: float = 0.0
    """Seconds for which training waits for each: until it is written, not until it is on the drive."""
    snapshots: int = 0
    """Models that are kept in all steps to be published, at most."""
    snapshot_seconds: float = 0.0
    """Seconds for which training waits for each: until it is written, or, with `checkpoint.staging`, in the host's
    memory."""
    total_seconds: Range | None
    """Seconds of all steps, evaluations, checkpoints and kept models, and of compiling; None where the steps are not
    known."""
    tokens_per_second: float
    """Tokens per second over all ranks, while training."""
    mfu: float
    """Model FLOPs utilisation: FLOPs of the model per second as a share of the devices' dense peak in the compute
    dtype."""
    pflop_days: float | None
    """Model FLOPs of the whole run, in days of 1e15 FLOP/s."""
    gpu_hours: float | None
    """Hours of the run times devices."""
    cost: float | None
    """Price of the run, in the currency of the price per GPU-hour that was given."""
    cost_per_million_tokens: float | None = None
    """Price of a million tokens that pass through the model in training, which needs no length of the run."""
    energy_kwh: float | None = None
    """Kilowatt-hours of the run at the devices' power limit; hosts and cooling are not counted."""
    co2_kg: float | None = None
    """Kilograms of CO2 of that energy, where the hardware's entry says what its grid emits."""
    chinchilla_tokens: float | None
    """Tokens for pre-training from scratch: 20 per parameter (Hoffmann et al. 2022)."""


class Served(Figures):
    """The trained model in one form on servers with such devices."""

    form: str
    """How weights are stored: `16 bits`, with adapters merged, or as a quantized base is, with adapters beside them."""
    weights: int
    """Bytes of all weights."""
    sequences: int
    """Sequences of the context's length that one device holds at once beside the weights; 0 where it cannot serve."""
    devices: int | None
    """Fewest devices, of 1, 2, 4, 8 and 16, that hold the weights and one sequence; None if more are needed."""


class Serving(Figures):
    """What it takes to run the trained model."""

    context: int
    """Tokens of a sequence, prompt and answer together."""
    cache: int
    """Bytes of the keys and values of one such sequence, in 16 bits."""
    forms: list[Served]
    """The forms in which the model may be served."""


class Advice(Figures):
    """A setting that fits at the same global batch."""

    kind: Kind
    """What it is best at: `as asked` is the recipe as it stands, `nearest` where that does not fit the smallest change
    that trains the same and does; `option` shows what one change does."""
    changes: dict[str, str]
    """What the setting changes: key to value, as on the command line."""
    buys: str
    """What gets better with these changes, with figures."""
    costs: str
    """What gets worse with these changes, with figures."""
    fits: Answer
    """Whether the changed setting fits."""
    total: int
    """Bytes of device memory on the fullest rank with these changes."""
    step_seconds: float
    """Seconds of one optimizer step with these changes."""
    gpu_seconds_per_token: float
    """Device-seconds for each token with these changes."""


class Plan(Figures):
    """What a recipe will cost on some hardware."""

    schema_version: int = 1
    """Raised when a key changes its meaning."""
    recipe: str
    """Name of the recipe."""
    overrides: list[str]
    """What was set on the command line."""
    hardware: str
    """Name of the hardware, such as `h200x8`."""
    devices: int
    """Number of devices, which is the number of processes."""
    nodes: int
    """Number of machines."""
    device_memory: int
    """Bytes of one device."""
    strategy: str
    """Name of the strategy as it will run, and what it offloads."""
    attention: str
    """Attention backend as it will run."""
    micro_batch_size: int
    """Rows per device and pass."""
    gradient_accumulation_steps: int
    """Micro-batches per optimizer step."""
    global_batch_size: int
    """Rows per optimizer step: sequences, pairs of answers, prompts, or texts that belong together."""
    answers: int = 1
    """Sequences of a row: 2 of a pair of answers, the answers to a prompt, or texts that belong together or not."""
    texts: bool = False
    """Whether these are texts that belong together."""
    seq_len: int
    """Tokens per sequence, at most."""
    sequence: int = 1
    """Devices that share each sequence."""
    tensor: int = 1
    """Devices that divide each layer."""
    expert: int = 1
    """Devices that divide the experts of each layer."""
    stages: list[int] = []
    """Layers of each stage of a pipeline; empty without one."""
    schedule: str = ""
    """In which order devices of a pipeline take micro-batches; empty without one."""
    pipeline: int = 1
    """Devices that the layers are spread over."""
    num_workers: int = 0
    """Processes beside each training process that make its batches ahead."""
    lengths: str = ""
    """What the rows' lengths are taken to be where not all were counted, and what follows; empty where they were."""
    chosen: dict[str, str]
    """Keys that `auto` decided: key to value and reason."""
    memory: list[Memory] = Field(min_length=1)
    """Device memory per kind of rank, the fullest first."""
    host: Host
    """Host RAM that one node needs."""
    host_memory: int
    """Bytes of host RAM that one node has, or a limit leaves of it."""
    host_limit: str = ""
    """That limit, such as `ulimit -v`; empty where there is none."""
    disk: Disk
    """Bytes on drives: checkpoints, the final model, what is offloaded to NVMe."""
    fit: Fit
    """Whether the recipe fits on this hardware, and what is scarcest."""
    work: Work
    """FLOPs, tokens, traffic, time and money."""
    serving: Serving | None = None
    """Memory for running the trained model on such a device; None for models without a cache of keys and values."""
    advice: list[Advice]
    """What to change: settings that fit, are faster or cheaper."""
    origin: Literal["traced", "formulas"]
    """Where activations come from: `traced` on the model's code, or `formulas` on its config."""
    notes: list[str]
    """What the figures leave out or rest on."""


class Refused(Figures):
    """A setting of `--compare` or `--sweep` that cannot run."""

    recipe: str
    """Name of the recipe."""
    overrides: list[str]
    """What was set on the command line."""
    hardware: str
    """Name of the hardware, such as `h200x8`."""
    reason: str
    """Why the setting cannot run, and what to change."""


def json_schema() -> dict[str, Any]:
    """JSON Schema of `toolkit plan --json`: a plan, or a list for `--compare` and `--sweep`."""
    return {"title": "toolkit plan --json", **TypeAdapter(Plan | list[Plan | Refused]).json_schema()}
