"""The sections of a recipe that say how it is trained.

A field states its type, its bounds and its default, and nothing else does. The text beneath it stands alone, because
editors show it through the JSON Schema and `docs/recipes.md` lists it.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from toolkit.recipe.arguments import POSITIVE, SHARE, Argument, count, number, one_of
from toolkit.recipe.base import Place, PositiveInt, Section
from toolkit.recipe.optimizers import OPTIMIZERS, Traits

_WAVES = {"num_cycles": POSITIVE}
_LOWEST = {"min_lr": number(0), "min_lr_rate": SHARE}
_SHAPE = one_of("linear", "cosine", "1-sqrt")
SCHEDULES: dict[str, dict[str, Argument]] = {
    "linear": {},
    "cosine": _WAVES,
    "cosine_with_restarts": {"num_cycles": count(1)},
    "polynomial": {"lr_end": number(0), "power": POSITIVE},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": count(1)},
    "cosine_with_min_lr": {**_WAVES, **_LOWEST},
    "cosine_warmup_with_min_lr": {**_WAVES, **_LOWEST, "warmup_lr_rate": SHARE},
    "warmup_stable_decay": {
        **{"num_decay_steps": count(1), "num_stable_steps": count(0), "warmup_type": _SHAPE, "decay_type": _SHAPE},
        **{"min_lr_ratio": SHARE, **_WAVES},
    },
}
"""Transformers' schedules and their arguments; the figures of warm-up and length come from the recipe."""

MOVES_BASE = ("pissa", "olora")
"""Values of `method.init_lora_weights` that take a part out of the base and put it into the adapter."""
EVA_ROWS, EVA_TOKENS = 64, 2**14
"""EVA reads at most so many rows before step 1, and none after as many trained tokens as this."""

MEMORY = PurePath("/dev/shm")
"""A folder whose files are kept in memory, which every process of a Linux machine can write."""

Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
Scalar = bool | int | float | str
# Names of a Python function's arguments; never `_target_`, which other tools take for code to run.
ArgumentName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
Arguments = dict[ArgumentName, Scalar]


class Method(Section):
    """Which parameters are trained, and how the frozen ones are stored."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["full", "lora"] = "full"
    """`full` trains all parameters, `lora` low-rank adapters on a frozen base. QLoRA is `lora` with `quantization:
    nf4`, the option `qlora`."""
    r: PositiveInt = 16
    """Rank of the LoRA adapters: larger ones learn more and take more memory."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the LoRA adapters: updates are multiplied by lora_alpha / r (by lora_alpha / sqrt(r) with rsLoRA)."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the input of the LoRA adapters."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get LoRA adapters: `all-linear` (all linear layers but the output head), or a list of module names,
    e.g. `[q_proj, v_proj]`."""
    target_parameters: list[str] = []
    """Parameters outside linear layers that get LoRA adapters too, such as the fused experts of a mixture, e.g.
    `[experts.gate_up_proj, experts.down_proj]`."""
    layers_to_transform: list[Annotated[int, Field(ge=0)]] = []
    """Numbers of the layers that get LoRA adapters, from 0; by default all of them."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Ranks of modules that differ from `r`, by the end of their name or a regular expression for it, e.g.
    `{down_proj: 32}`."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Values of modules that differ from `lora_alpha`, written like `rank_pattern`."""
    modules_to_save: list[str] = []
    """Modules trained in full beside the LoRA adapters, e.g. `[embed_tokens, lm_head]`. Embeddings that are tied to the
    output head stay tied, which PEFT alone does not ensure."""
    init_lora_weights: Literal["default", "gaussian", "orthogonal", "pissa", "olora", "eva", "loftq"] = "default"
    """How adapters are initialised: `default` and `gaussian` with one matrix at zero, `orthogonal` with a product of
    zero, `pissa` (largest singular values) and `olora` (QR) with a part of the base, so that the result is published as
    an adapter of twice the rank for the original base, `eva` with the principal directions of each layer's inputs over
    the first rows. All of these leave the model's outputs unchanged. `loftq` compensates for part of the error of
    `quantization: nf4`."""
    loraplus_lr_ratio: Annotated[float, Field(gt=0)] | None = None
    """Factor on the learning rate of the second matrix of each adapter (LoRA+, Hayou et al. 2024), e.g. 16."""
    use_rslora: bool = False
    """Whether LoRA adapters are scaled by lora_alpha / sqrt(r), which keeps high ranks stable (Kalajdzievski 2023)."""
    use_dora: bool = False
    """Whether LoRA adapters train the magnitude and the direction of weights separately (DoRA, Liu et al. 2024)."""
    quantization: Literal["none", "nf4", "int8", "fp8", "int4"] = "none"
    """How the frozen base is stored under LoRA: as it is (`none`), in 4-bit NormalFloat (`nf4`, QLoRA), in 8-bit
    integers (`int8`), in 8-bit floating point (`fp8`, in which GPUs from compute capability 8.9 on also multiply), or
    in 4-bit integers with groups of 64 (`int4`: 4.25 bits, with a smaller error of the weights than `nf4` with 4.13).
    All but `int8` also quantize the experts of mixtures."""
    double_quantization: bool = True
    """Whether `quantization: nf4` quantizes its constants too, which saves 0.37 bits per parameter."""
    freeze: list[str] = []
    """Parameters that full fine-tuning does not train, as patterns of their names, e.g. `[model.embed_tokens.*]`."""

    @property
    def published_rank(self) -> int:
        """The largest rank of the published adapter: twice the trained one if the initialisation moves a part of the
        base."""
        return max(self.r, *self.rank_pattern.values(), 0) * (2 if self.init_lora_weights in MOVES_BASE else 1)


LEARNING_RATE, ADAPTER_LEARNING_RATE = 2e-5, 2e-4
"""Adapters learn best at about ten times the rate of full fine-tuning (Schulman et al. 2025, "LoRA Without Regret")."""


class Optimizer(Section):
    """The update rule. Norm weights and biases are never decayed."""

    main_key: ClassVar[str | None] = "name"

    name: Literal[tuple(OPTIMIZERS)] = "adamw"  # type: ignore[valid-type]
    """`adamw` is torch's fused AdamW, `lion` the 32-bit Lion, `muon` torch's Muon for the matrices of hidden layers
    with AdamW for all else; all other names are those of Transformers' Trainer."""
    learning_rate: Annotated[float, Field(gt=0)] = LEARNING_RATE
    """Peak learning rate, reached after warm-up. The default for adapters is ten times as high, 2e-4; for preference
    objectives other than `reward`, and for `grpo` and `rloo`, both are divided by twenty."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay; norm weights and biases are never decayed. It is decoupled from the gradient, except for `sgd`,
    `adagrad` and `rmsprop` of every kind, whose libraries add it to the gradient (L2)."""
    beta1: DecayRate = 0.9
    """Decay rate of the first moment, for optimizers of the Adam and Lion families."""
    beta2: DecayRate = 0.999
    """Decay rate of the second moment, for optimizers of the Adam and Lion families."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the update, for optimizers of the Adam family."""
    momentum: DecayRate | None = None
    """Momentum of SGD and schedule-free SGD (0.9 by default) and of Muon (0.95 by default)."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are clipped to this norm; 0 switches clipping off."""
    args: Arguments = {}
    """Further arguments of the optimizer, by its own names."""

    @property
    def stated_momentum(self) -> float | None:
        """`momentum` or its default; None for optimizers that have none."""
        return self.traits.momentum if self.momentum is None else self.momentum

    @property
    def traits(self) -> Traits:
        """What is known of the optimizer of this name, with these arguments."""
        return OPTIMIZERS[self.name].given(self.args)


class Schedule(Section):
    """How long training lasts and how the learning rate moves."""

    main_key: ClassVar[str | None] = "name"

    name: Literal[tuple(SCHEDULES)] = "cosine"  # type: ignore[valid-type]
    """How the learning rate moves after warm-up."""
    num_epochs: Annotated[float, Field(gt=0)] | None = None
    """Number of passes over the training rows; 1 if neither this nor `max_steps` is set."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps to train for, instead of `num_epochs`."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Number of steps in which the learning rate rises from zero to its peak; with `warmup_stable_decay` from its
    `min_lr_ratio`, with `cosine_warmup_with_min_lr` from its `warmup_lr_rate` (by default one such step's share)."""
    warmup_ratio: Fraction | None = None
    """Share of all steps in which the learning rate rises from zero to its peak, instead of `warmup_steps`."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without an improvement of the metric in `checkpoint.keep_best`, or of
    the held-out loss if that is not set."""
    early_stopping_min_delta: Annotated[float, Field(ge=0)] = 0.0
    """The smallest improvement of that metric that counts for `early_stopping_patience`."""
    args: Arguments = {}
    """Further arguments of the learning rate schedule, e.g. `{min_lr_rate: 0.1}`."""


class Batch(Section):
    """How many tokens make a step. Gradient accumulation follows from the number of processes."""

    main_key: ClassVar[str | None] = "global_batch_size"

    seq_len: PositiveInt = 2048
    """Longest sequence in tokens; with `data.packing` the length of every sequence."""
    global_batch_size: PositiveInt | None = None
    """Sequences, pairs of answers, prompts with all their answers, or texts that belong together, per optimizer step
    over all processes; 16 if `tokens_per_step` is not set either."""
    tokens_per_step: PositiveInt | None = None
    """Tokens per optimizer step over all processes, instead of `global_batch_size`, which is then this number divided
    by `seq_len`."""
    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Sequences per process and forward pass, on average: those of a step are sorted by length and grouped so that the
    largest micro-batch has few tokens and there is little padding. `auto`: the number that, by the plan, fits and is
    fastest, up to `micro_batch_tokens`."""
    micro_batch_tokens: PositiveInt = 16_384
    """Most tokens, on average, in a micro-batch that `micro_batch_size: auto` chooses, though always at least one
    sequence. This many keep a current GPU busy; more only cost memory."""
    share_prefixes: bool = True
    """Compute once what conversations of a micro-batch have in common at their beginning, such as a system message,
    tools, or the question of several answers, where this changes nothing but the order of sums: with `model.attention:
    torch_varlen`, and without dropout, noise, or processes that share rows or layers."""

    @property
    def sequences_per_step(self) -> int:
        """The global batch in sequences, however it is stated."""
        return self.global_batch_size or max(1, (self.tokens_per_step or 16 * self.seq_len) // self.seq_len)


class ActivationCheckpointing(Section):
    """Trades compute for memory: activations are recomputed, or moved to the host, for the backward pass."""

    main_key: ClassVar[str | None] = "mode"

    mode: Literal["none", "elementwise", "full", "selective", "offload", "auto"] = "none"
    """What is not kept from the forward pass: `none` keeps all activations; `elementwise` recomputes norms, activation
    functions and everything else between matrix products and attention, which are never repeated, and compiles the
    layers for that; `full` recomputes layers, `selective` keeps attention outputs and recomputes the rest, `offload`
    recomputes layers and keeps their inputs in host memory. `auto`: the mode, and `every_n_layers` unless it is set,
    that by the plan fit and are fastest."""
    every_n_layers: PositiveInt = 1
    """With `mode: full` and `mode: offload`, checkpoint only every n-th layer: faster, for more memory."""
    mlp_tiles: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of tiles of a row's tokens in which the MLP of each layer is computed, one after the other, and again in
    the backward pass, so that its inner activations exist for one tile at a time (tiled MLP, Bekman et al. 2025,
    arXiv:2506.13996). For long rows, with `mode: none`, `full` or `offload`; MLPs are computed one more time than
    without."""

    @property
    def of_layers(self) -> bool:
        """Whether layers are computed again, at least every n-th; of `elementwise` torch's compiler decides within
        their graphs what is."""
        return self.mode not in ("none", "elementwise")

    @property
    def of_all_layers(self) -> bool:
        """Whether every layer is computed again."""
        return self.of_layers and self.every_n_layers == 1


RETRIEVAL, CORRELATIONS = ("recall_at_1", "recall_at_10", "mrr_at_10"), ("spearman", "pearson")
"""What is measured of vectors: how well positives are found, and how well cosines agree with scores."""
_OF_VECTORS = tuple(f"eval_{name}" for name in (*RETRIEVAL, *CORRELATIONS))
_OF_TARGETS = ("eval_bleu", "eval_chrf", "eval_exact_match")
_BEST = ("eval_loss", "eval_accuracy", "eval_macro_f1", "eval_entity_f1", *_OF_VECTORS, *_OF_TARGETS)


class Checkpoint(Section):
    """What is saved during training, and where training continues."""

    save_steps: PositiveInt | None = None
    """Number of optimizer steps between checkpoints."""
    save_epochs: Annotated[float, Field(gt=0)] | None = None
    """Number of epochs between checkpoints, instead of `save_steps`."""
    save_total_limit: PositiveInt = 2
    """Number of checkpoints to keep; older ones are deleted."""
    keep_best: Literal[_BEST] | None = None  # type: ignore[valid-type]
    """Publish the model that was best by this metric of all evaluations in training, instead of the last one.
    `eval_accuracy` is for judged answers and for classes, `eval_macro_f1` for classes, `eval_entity_f1` for
    `objective: token_classification`, `eval_recall_at_…` and `eval_mrr_at_10`, or with scores `eval_spearman` and
    `eval_pearson`, for `objective: embedding`; the others but `eval_loss` take `evaluation.generation_metrics`."""
    average_last: Annotated[int, Field(ge=2)] | None = None
    """Number of checkpoints, the last step included, whose mean weights are published (stochastic weight averaging,
    Izmailov et al. 2018). For adapters it is the mean of each matrix, not of their products."""
    rehearse: bool = True
    """Save a checkpoint after the first step and read it back, if the first regular save would come 20 steps later or
    more, so that a run that cannot save ends in its first minute."""
    staging: Place = "auto"
    """Where each machine first writes checkpoints, so that training continues while they are copied to the run folder:
    a folder on a fast disk of its own, or `none` for the run folder itself. `auto`: memory (`/dev/shm`) if the run
    folder's disk is slow and memory for two of the machine's parts of a checkpoint is free; otherwise `none`."""
    resume: Place = "auto"
    """`auto` continues this recipe's run where it stopped, `never` starts a new run folder, and the path of a
    checkpoint continues from that one."""

    @property
    def saves(self) -> bool:
        """Whether checkpoints are saved during training."""
        return bool(self.save_steps or self.save_epochs)

    @property
    def in_memory(self) -> bool:
        """Whether they are taken into the memory of machines."""
        return self.saves and PurePath(self.staging).is_relative_to(MEMORY)


class Evaluation(Section):
    """Held-out loss and perplexity, and sample answers."""

    at_start: bool = True
    """Evaluate before the first step, for a figure to compare with."""
    every_steps: PositiveInt | None = None
    """Number of optimizer steps between evaluations; there is always one at the end of training."""
    batch_size: PositiveInt | None = None
    """Sequences per process and forward pass of an evaluation; by default the micro-batch of training."""
    prompts: list[str] = []
    """Prompts that the model answers before and after training; by default those of the first held-out rows, or of the
    first training rows where none are held out."""
    num_prompts: Annotated[int, Field(ge=0)] = 3
    """How many prompts the model answers before and after training."""
    max_new_tokens: PositiveInt = 64
    """Longest answer to a prompt, in tokens."""
    generation_metrics: bool = False
    """For `objective: seq2seq`: generate on the held-out rows and report BLEU, chrF and exact match."""
    num_beams: PositiveInt = 1
    """Number of beams when generating for `generation_metrics`."""


class Logging(Section):
    """What is reported while training. `metrics.jsonl` in the run folder is always written."""

    every_steps: PositiveInt = 1
    """Number of optimizer steps between metrics; they are also written at each evaluation and checkpoint, and at the
    end."""
    profile: bool = False
    """Profile three steps soon after the first two, or one where steps are long, with torch's profiler: print the time
    by kind of operation, and write `profile.json.gz`, a trace to open in Perfetto, into the run folder."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Experiment trackers that metrics are reported to, beside `metrics.jsonl`."""


class Output(Section):
    """Where the run folder is written."""

    main_key: ClassVar[str | None] = "dir"

    dir: Place = "runs"
    """Folder in which run folders are made."""
    name: Place | None = None
    """Name of the run folder; by default the recipe's name."""


class Extra(Section):
    """Settings of the libraries that a recipe has no key for, by the libraries' own names."""

    training_arguments: dict[ArgumentName, Any] = {}
    """For Transformers' and TRL's TrainingArguments, e.g. `{neftune_noise_alpha: 5}`."""
    lora: dict[ArgumentName, Any] = {}
    """For PEFT's LoraConfig, e.g. `{bias: all}`."""
    deepspeed: dict[ArgumentName, Any] = {}
    """For DeepSpeed's configuration, e.g. `{zero_optimization: {parameter_alignment: true}}`."""
