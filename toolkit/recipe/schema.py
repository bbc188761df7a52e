"""The recipe: every key a user may write, its type, its default and what it means.

This module and `strategy` are the only places where a default is stated. The text beneath a field is its documentation
and goes into the JSON Schema that editors read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from toolkit.recipe.section import PositiveInt, Section
from toolkit.recipe.strategy import Strategy

OPTIMIZERS = (
    # Short names of the field first, then what Transformers' Trainer offers under its own names.
    *("adamw", "lion"),
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_4bit", "adamw_torch_8bit", "adamw_anyprecision"),
    *("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_8bit", "adamw_bnb_8bit"),
    *("paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit"),
    *("paged_ademamix_8bit", "sgd", "adagrad", "adafactor", "lion_32bit", "lion_8bit", "paged_lion_32bit"),
    *("paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
    *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"),
    *("lomo", "adalomo", "grokadamw", "stable_adamw"),
    *("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
)
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
ATTENTION_BACKENDS = (
    "auto",
    "eager",
    "sdpa",
    "flex",
    "torch_varlen",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
ROW_FORMATS = ("auto", "text", "prompt_completion", "alpaca", "messages", "sharegpt", "source_target")

Fraction = Annotated[float, Field(ge=0, le=1)]
Scalar = bool | int | float | str
# Names of a Python function's arguments; never `_target_`, which other tools take for code to run.
Arguments = dict[Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")], Scalar]


class Model(Section):
    """Which weights, in which form, with which attention kernels."""

    main_key: ClassVar[str | None] = "path"

    path: str
    """Hub id, local folder, GGUF file, or `builtin:smollm2-135m-instruct`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    gguf_file: str | None = None
    """Name of the GGUF file inside a hub repository or local folder."""
    tokenizer: str | None = None
    """Hub id or local folder of the tokenizer, if it is not the model's own."""
    chat_template: str | None = None
    """Jinja file or built-in name (`chatml`) that replaces the tokenizer's chat template."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """How weights are stored while training. `auto`: fp32 masters for full fine-tuning (bf16 under `pure_bf16`); for
    adapters the frozen base takes the compute precision."""
    attention: Literal[ATTENTION_BACKENDS] = "auto"  # type: ignore[valid-type]
    """Attention backend; `auto` picks the best that really runs on this device."""
    trust_remote_code: bool = False
    """Whether Python code from the model's repository may run."""


class Source(Section):
    """One data set of a mixture."""

    main_key: ClassVar[str | None] = "path"

    path: str
    """Local file, folder or glob (JSON, JSONL, CSV, Parquet, text), hub id, or `builtin:stdlib-docstrings`."""
    name: str | None = None
    """Configuration (subset) of a hub data set."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set."""
    split: str = "train"
    """Split to read. A local folder has the splits its file names carry (`train.jsonl`, `validation.jsonl`)."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Relative share of this source in the mixture, in rows. Without any weight every row is used once; with weights
    smaller sources repeat until every row of every source has been used."""
    max_samples: PositiveInt | None = None
    """Use only the first rows."""
    format: Literal[ROW_FORMATS] | None = None  # type: ignore[valid-type]
    """Shape of the rows, if it differs from `data.format`."""
    columns: dict[str, str] | None = None
    """Column names of this source, if they differ from `data.columns`."""

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class Data(Section):
    """What is trained on, how rows become tokens, and which tokens are trained."""

    main_key: ClassVar[str | None] = "sources"

    sources: Annotated[list[Source], Field(min_length=1)]
    """Paths, or mappings with `path` and more (see Source). Several make a mixture."""
    format: Literal[ROW_FORMATS] = "auto"  # type: ignore[valid-type]
    """Shape of the rows; `auto` recognises it from the columns."""
    columns: dict[str, str] = {}
    """Names: expected column to the column in the data, e.g. `{prompt: question, completion: answer}`."""
    eval_split: Annotated[float, Field(gt=0, lt=1)] | str | None = None
    """Held-out rows: a fraction of the training rows, or the name of a split of the same sources."""
    eval_sources: list[Source] = []
    """Held-out rows from data sets of their own."""
    eval_max_samples: PositiveInt | None = None
    """Evaluate on at most this many held-out rows."""
    max_samples: PositiveInt | None = None
    """Train on at most this many rows of the whole mixture, chosen by the seed."""
    train_on: Literal["auto", "assistant", "last_assistant", "completion", "all"] = "auto"
    """Which tokens carry loss. `auto`: assistant turns for chat, completions for prompt/completion, all for text."""
    over_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What happens to rows longer than `batch.seq_len` tokens."""
    packing: bool = False
    """Pack several rows into one sequence of `batch.seq_len` tokens, isolated from each other (best fit)."""
    deduplicate: bool = False
    """Drop rows whose text was seen before."""
    shuffle: bool = True
    """Shuffle training rows each epoch, by the seed."""
    streaming: bool = False
    """Read rows while training instead of preparing them all before; needs `schedule.max_steps`."""
    num_proc: PositiveInt | None = None
    """Processes that tokenise; by default one per CPU core for large data."""

    def training_sources(self) -> list[Source]:
        """The sources with `data.format` and `data.columns` filled in."""
        return [self._complete(source) for source in self.sources]

    def evaluation_sources(self) -> list[Source]:
        """Sources of held-out rows that are not split off the training rows by a fraction."""
        sources = [self._complete(source) for source in self.eval_sources]
        if isinstance(self.eval_split, str):
            update = {"split": self.eval_split, "max_samples": None, "weight": None}
            sources += [source.model_copy(update=update) for source in self.training_sources()]
        return sources

    def _complete(self, source: Source) -> Source:
        defaults = {"format": self.format, "columns": self.columns}
        return source.model_copy(update={k: v for k, v in defaults.items() if getattr(source, k) is None})


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


class Recipe(Section):
    """One training: what, on what, how."""

    description: str = ""
    """One line for `toolkit ls`."""
    model: Model
    """Which weights, in which form, with which attention kernels."""
    data: Data
    """What is trained on, how rows become tokens, and which tokens are trained."""
    objective: Literal["sft", "language_modelling", "seq2seq"] = "sft"
    """Supervised fine-tuning on chats or completions, continued pre-training on text, or encoder-decoder training."""
    method: Method = Method()
    """Which parameters are trained, and how the frozen ones are stored."""
    precision: Literal["fp32", "fp16", "bf16", "pure_bf16"] = "bf16"
    """Compute in this type with fp32 masters (fp16 with loss scaling); `pure_bf16` holds weights, gradients and
    optimizer state in bf16."""
    tf32: bool = True
    """Let fp32 matrix products use TF32 tensor cores (CUDA only)."""
    strategy: Strategy = Strategy()
    """How training is spread over devices."""
    optimizer: Optimizer = Optimizer()
    """The update rule."""
    schedule: Schedule = Schedule()
    """How long training lasts and how the learning rate moves."""
    batch: Batch = Batch()
    """How many tokens make a step."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    """Trades compute for memory."""
    checkpoint: Checkpoint = Checkpoint()
    """What is saved during training, and where training continues."""
    evaluation: Evaluation = Evaluation()
    """Held-out loss and perplexity, and what the model says."""
    logging: Logging = Logging()
    """What is reported while training."""
    output: Output = Output()
    """Where the run folder is written."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of data order, initialisation and dropout."""

    @property
    def undecided(self) -> tuple[str, ...]:
        """Keys that are left to the plan; empty for a recipe that can run."""
        values = {
            "strategy.name": self.strategy.name,
            "activation_checkpointing.mode": self.activation_checkpointing.mode,
            "batch.micro_batch_size": self.batch.micro_batch_size,
        }
        return tuple(key for key, value in values.items() if value == "auto")

    def with_values(self, values: Mapping[str, Any]) -> Recipe:
        """This recipe with other values at some dotted keys, which are taken as they are."""
        changed: dict[str, Any] = {}
        for path, value in values.items():
            section, _, key = path.partition(".")
            kept = changed.get(section, getattr(self, section))
            changed[section] = kept.model_copy(update={key: value}) if key else value
        return self.model_copy(update=changed)


def sections() -> dict[str, type[Section]]:
    """Name to class of every section of the recipe, in the order of the recipe."""
    return {
        name: field.annotation
        for name, field in Recipe.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def leaf_paths() -> dict[str, list[str]]:
    """Leaf key to the dotted paths it stands at: `seq_len` to `["batch.seq_len"]`, `name` to several."""
    paths: dict[str, list[str]] = {}
    for section, kind in sections().items():
        for key in kind.model_fields:
            paths.setdefault(key, []).append(f"{section}.{key}")
    return paths
