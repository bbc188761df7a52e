"""What every part of the recipe is made of."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from toolkit.recipe.optimizers import OPTIMIZERS

PositiveInt = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A part of the recipe: unknown keys are errors, values keep their types, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    main_key: ClassVar[str | None] = None
    """The key that a section given as a word sets: `optimizer: sgd`, or `optimizer=sgd`, is `optimizer.name`."""


STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")


class Strategy(Section):
    """How training is spread over devices, and what is kept off them."""

    main_key: ClassVar[str | None] = "name"

    name: Literal[(*STRATEGIES, "auto")] = "ddp"  # type: ignore[valid-type]
    """`ddp` replicates the model on every process (one process is plain training), `single` insists on one process.
    DeepSpeed `zero1` shards optimizer state, `zero2` gradients too, `zero3` parameters too. `fsdp` is PyTorch's
    FSDP2. `auto` takes the fastest that fits, with offloading where nothing else fits; other keys of this section then
    stand, and leave only the strategies that read them."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """ZeRO: where optimizer state and fp32 masters live and are updated (`nvme`: stage 3 only)."""
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters wait while they are not computed with: ZeRO-3 `cpu` or `nvme`; FSDP `cpu`, which keeps gradients
    and optimizer state there too."""
    nvme_path: str | None = None
    """Folder on a local NVMe drive for what is offloaded there; each process makes a folder of its own in it."""
    pin_memory: bool = True
    """Page-locked host memory for what is offloaded: faster copies, memory that nothing else can use."""
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """ZeRO and FSDP: in what gradients are summed over processes and micro-batches. `auto`: fp32 (bf16 under
    `pure_bf16`)."""
    overlap_comm: bool = True
    """ZeRO: reduce gradients while the backward pass still runs, at the cost of a second bucket."""
    reduce_bucket_size: PositiveInt = 50_000_000
    """ZeRO: elements reduced at a time. A bucket takes this many times the bytes of `reduce_dtype`."""
    allgather_bucket_size: PositiveInt = 50_000_000
    """ZeRO-1 and 2: elements of updated parameters gathered at a time."""
    prefetch_bucket_size: Annotated[int, Field(ge=0)] = 50_000_000
    """ZeRO-3: elements of parameters gathered ahead of use."""
    param_persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """ZeRO-3: parameters of fewer elements (norms, biases) stay whole on every process."""
    max_live_parameters: PositiveInt = 1_000_000_000
    """ZeRO-3: most elements of gathered parameters on a device at a time."""
    max_reuse_distance: Annotated[int, Field(ge=0)] = 1_000_000_000
    """ZeRO-3: a parameter used again within this many elements is not released in between."""
    sharding: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = "full_shard"
    """FSDP: `full_shard` shards parameters, gradients and optimizer state; `shard_grad_op` keeps gathered parameters
    until the backward pass; `hybrid_shard` shards within a node and replicates across nodes."""
    reshard_after_forward: bool | None = None
    """FSDP: release gathered parameters between forward and backward pass; by default as `sharding` says."""
    wrap_classes: list[str] = []
    """FSDP: classes of layers that are gathered as a unit, e.g. `[LlamaDecoderLayer]`; by default the model's own."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """FSDP: how checkpoints are written. `sharded` ones are fast and resume on another number of processes; `full` ones
    are gathered on the first. The final model is always gathered."""
    cpu_ram_efficient_loading: bool = True
    """FSDP: only the first process of a run reads the weights into host memory; the others receive their shards."""

    @property
    def zero_stage(self) -> int:
        """1 to 3; 0 without DeepSpeed."""
        assert self.name != "auto", "the strategy is not decided yet"
        return int(self.name[-1]) if self.name.startswith("zero") else 0

    @property
    def shards_parameters(self) -> bool:
        """Whether no process holds all parameters, so that every forward pass needs all processes."""
        assert self.name != "auto", "the strategy is not decided yet"
        return self.name in ("zero3", "fsdp")


SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)


Fraction = Annotated[float, Field(ge=0, le=1)]
Scalar = bool | int | float | str
# Names of a Python function's arguments; never `_target_`, which other tools take for code to run.
Arguments = dict[Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")], Scalar]


class Method(Section):
    """Which parameters are trained, and how the frozen ones are stored."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["full", "lora"] = "full"
    """All parameters, or low-rank adapters. QLoRA is `lora` with `quantization: nf4` (group `method: qlora`)."""
    r: PositiveInt = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the adapters: updates are multiplied by lora_alpha / r (by lora_alpha / sqrt(r) with rsLoRA)."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input."""
    target_modules: str | list[str] = "all-linear"
    """`all-linear` (without the output head), or a list of module names."""
    modules_to_save: list[str] = []
    """Modules trained in full beside the adapters, e.g. `[embed_tokens, lm_head]`."""
    use_rslora: bool = False
    """Rank-stabilised scaling (Kalajdzievski 2023)."""
    use_dora: bool = False
    """Weight-decomposed adapters (Liu et al. 2024)."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Storage of the frozen base: 4-bit NormalFloat (QLoRA) or 8-bit integers."""
    double_quantization: bool = True
    """With nf4, quantize the quantization constants too (0.37 bits per parameter less)."""
    freeze: list[str] = []
    """Full fine-tuning: parameters whose names match one of these patterns (`model.embed_tokens.*`) stay fixed."""


class Optimizer(Section):
    """The update rule. Norm weights and biases are never decayed."""

    main_key: ClassVar[str | None] = "name"

    name: Literal[OPTIMIZERS] = "adamw"  # type: ignore[valid-type]
    """`adamw` is torch's fused AdamW, `lion` the 32-bit Lion; all other names are those of Transformers' Trainer."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    beta1: Fraction = 0.9
    """Decay of the first moment (Adam and Lion families)."""
    beta2: Fraction = 0.999
    """Decay of the second moment (Adam and Lion families)."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator (Adam family)."""
    momentum: Fraction = 0.9
    """Momentum of SGD."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are clipped to this norm; 0 switches clipping off."""
    args: Arguments = {}
    """Further arguments of the chosen optimizer, by its own names."""


class Schedule(Section):
    """How long training lasts and how the learning rate moves."""

    main_key: ClassVar[str | None] = "name"

    name: Literal[SCHEDULES] = "cosine"  # type: ignore[valid-type]
    """Shape of the learning rate after warm-up."""
    num_epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows; 1 if neither this nor `max_steps` is set."""
    max_steps: PositiveInt | None = None
    """Optimizer steps, instead of `num_epochs`."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of linear warm-up."""
    warmup_ratio: Fraction | None = None
    """Warm-up as a share of all steps, instead of `warmup_steps`."""
    args: Arguments = {}
    """Further arguments of the schedule, e.g. `{min_lr_rate: 0.1}`."""


class Batch(Section):
    """How many tokens make a step. Gradient accumulation follows from the number of processes."""

    main_key: ClassVar[str | None] = "global_batch_size"

    seq_len: PositiveInt = 2048
    """Longest sequence in tokens; with packing the length of every sequence."""
    global_batch_size: PositiveInt | None = None
    """Sequences per optimizer step over all processes; 16 if `tokens_per_step` is not set either."""
    tokens_per_step: PositiveInt | None = None
    """The same in tokens: global_batch_size x seq_len."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Sequences per process and forward pass; by default as many as stay within 16,384 tokens. `auto`: the number that
    is fastest by the plan and fits."""

    @property
    def sequences_per_step(self) -> int:
        """The global batch in sequences, however it is stated."""
        return self.global_batch_size or max(1, (self.tokens_per_step or 16 * self.seq_len) // self.seq_len)


class ActivationCheckpointing(Section):
    """Trades compute for memory: activations are recomputed, or moved to the host, for the backward pass."""

    main_key: ClassVar[str | None] = "mode"

    mode: Literal["none", "full", "selective", "offload", "auto"] = "none"
    """`full` recomputes layers, `selective` keeps attention outputs and recomputes the rest, `offload` recomputes
    layers and holds their inputs in host memory. `auto`: the fastest by the plan that fits."""
    every_n_layers: PositiveInt = 1
    """With `full` and `offload`, checkpoint only every n-th layer."""


class Checkpoint(Section):
    """What is saved during training, and where training continues."""

    save_steps: PositiveInt | None = None
    """Save every so many steps."""
    save_epochs: Annotated[float, Field(gt=0)] | None = None
    """Save every so many epochs, instead of `save_steps`."""
    save_total_limit: PositiveInt = 2
    """Keep only the newest checkpoints."""
    resume: str = "auto"
    """`auto` continues this recipe's run where it stopped; `never` starts a new run folder; or the path of a
    checkpoint."""


class Evaluation(Section):
    """Held-out loss and perplexity, and what the model says."""

    at_start: bool = True
    """Evaluate before the first step."""
    every_steps: PositiveInt | None = None
    """Evaluate every so many steps, and always at the end."""
    batch_size: PositiveInt | None = None
    """Sequences per process and forward pass; by default the training's micro-batch."""
    prompts: list[str] = []
    """Prompts answered before and after training; by default the first held-out rows'."""
    num_prompts: Annotated[int, Field(ge=0)] = 3
    """How many prompts are answered before and after training."""
    max_new_tokens: PositiveInt = 64
    """Longest answer."""
    generation_metrics: bool = False
    """For `objective: seq2seq`: generate on the held-out rows and report BLEU, chrF and exact match."""
    num_beams: PositiveInt = 1
    """Beams when generating for metrics."""


class Logging(Section):
    """What is reported while training. `metrics.jsonl` in the run folder is always written."""

    every_steps: PositiveInt = 1
    """Write metrics every so many steps."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Experiment trackers to report to as well."""


class Output(Section):
    """Where the run folder is written."""

    main_key: ClassVar[str | None] = "dir"

    dir: str = "runs"
    """Folder of run folders."""
    name: str | None = None
    """Name of the run folder; by default the recipe's name."""
