"""The recipe: every key a user may write, its type, its default and what it means.

This module and `strategy` are the only places where a default is stated. The text beneath a field is its documentation
and goes into the JSON Schema that editors read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from toolkit.recipe.sections import (
    ActivationCheckpointing,
    Batch,
    Checkpoint,
    Evaluation,
    Logging,
    Method,
    Optimizer,
    Output,
    PositiveInt,
    Schedule,
    Section,
    Strategy,
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
