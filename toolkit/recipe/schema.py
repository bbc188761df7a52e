"""The recipe: every key that a user may write, its type, its default and what it means.

`Recipe` holds the keys at the top, and the model; `data` holds what it is trained on, `sections` how. pydantic refuses
unknown keys, converts nothing silently and freezes what it read.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from toolkit.recipe.base import Place, Section
from toolkit.recipe.data import Data
from toolkit.recipe.distillation import DISTILLATION, Distillation
from toolkit.recipe.embedding import Embedding
from toolkit.recipe.faults import Faults
from toolkit.recipe.heads import CLASSIFYING, EMBEDDING, HEADED
from toolkit.recipe.parallel import Parallel, Strategy
from toolkit.recipe.precisions import FP8_SCALING, PURE
from toolkit.recipe.preference import (
    JUDGED,
    PAIRED,
    PREFERENCE_LEARNING_RATES,
    PREFERENCES,
    REFERRING,
    Preference,
)
from toolkit.recipe.reinforcement import REINFORCED, Policy, Rewards, Rollout
from toolkit.recipe.sections import (
    ADAPTER_LEARNING_RATE,
    LEARNING_RATE,
    ActivationCheckpointing,
    Batch,
    Checkpoint,
    Evaluation,
    Extra,
    Logging,
    Method,
    Optimizer,
    Output,
    Schedule,
)

VARLEN_ATTENTION = ("torch_varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Backends that take documents by their boundaries instead of a mask."""
CHAT_TEMPLATES = ("chatml",)
"""Names of built-in chat templates."""
ATTENTION_BACKENDS = ("auto", "eager", "sdpa", "flex", *VARLEN_ATTENTION)


class Model(Section):
    """Which weights, in which form, with which attention kernels."""

    main_key: ClassVar[str | None] = "path"

    path: Place
    """Hub id, local folder, GGUF file, or `builtin:smollm2-135m-instruct`."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub; by default its main branch."""
    gguf_file: str | None = None
    """Name of the GGUF file inside a hub repository or local folder that holds several files."""
    adapter: Place | None = None
    """Folder of a LoRA adapter to continue training, e.g. `runs/first/final`; its rank and target modules are used."""
    tokenizer: Place | None = None
    """Hub id or local folder of the tokenizer, if it is not the model's own."""
    new_tokens: list[str] = []
    """Tokens for the model to learn, e.g. `[<tool>, </tool>]`. Those that the tokenizer lacks are added to it as
    special tokens, with new embeddings in the model; with adapters, their rows of the embeddings and of the output head
    are trained too."""
    chat_template: Place | None = None
    """Jinja file, or the built-in name `chatml`, that replaces the tokenizer's own chat template."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type in which weights are stored while training. `auto`: fp32 masters for full fine-tuning (bf16 under
    `precision: pure_bf16` and `pure_fp8`); for adapters the frozen base is stored in the type of `precision`."""
    attention: Literal[ATTENTION_BACKENDS] = "auto"  # type: ignore[valid-type]
    """Attention kernels. `auto` picks the fastest that actually runs on this device; any other value requires that one.
    On NVIDIA GPUs `auto` computes `torch_varlen` with the FlashAttention 3 or 4 package if one is installed, gives the
    same results and gradients as torch's kernels there, and was measured to be faster. If the package of a
    `flash_attention_…` is missing and `kernels` is installed, the kernels-community build in the hub's cache is
    used."""
    trust_remote_code: bool = False
    """Whether Python code from the model's repository may run; for a repository on the hub, only at the full commit
    given in `revision`."""


def _off(value: Any) -> Any:
    """YAML reads an unquoted `off` as false."""
    return "off" if value is False else value


class Recipe(Section):
    """One training run: the model, its data, and how it is trained."""

    description: str = ""
    """What this recipe is for, in one line; `toolkit ls` shows it."""
    model: Model
    data: Data
    objective: Literal[
        "sft",
        "language_modelling",
        "seq2seq",
        "dpo",
        "cpo",
        "simpo",
        "orpo",
        "kto",
        "grpo",
        "rloo",
        "distillation",
        "reward",
        "classification",
        "token_classification",
        "embedding",
    ] = "sft"
    """`sft` is supervised fine-tuning on chats or completions, `language_modelling` continued pre-training on text,
    `seq2seq` the training of encoder-decoders. `dpo`, `cpo`, `simpo` and `orpo` learn from pairs of answers to prefer
    one to the other: `dpo` relative to the model as it was before training, the others without such a reference. `kto`
    learns from single answers, each labelled good or bad. `grpo` and `rloo` learn from rewards for answers that the
    model itself generates. `distillation` learns another model's, the teacher's, distribution of each next token, on
    the rows of `sft`. `reward` learns to score answers from pairs, `classification` to predict the class of a text or a
    pair of texts, `token_classification` that of each word, and `embedding` to give texts that belong together similar
    vectors."""
    preference: Preference = Preference()
    embedding: Embedding = Embedding()
    rollout: Rollout = Rollout()
    rewards: Rewards = Rewards()
    policy: Policy = Policy()
    distillation: Distillation = Distillation()
    method: Method = Method()
    precision: Literal["fp32", "fp16", "bf16", "pure_bf16", "fp8", "fp8_rowwise", "pure_fp8", "auto"] = "bf16"
    """Type in which the model computes. Trained weights keep fp32 masters (`fp16` adds loss scaling), except under
    `pure_bf16`, which holds weights, gradients and optimizer state in bf16. `fp8` is `bf16` but for the products of
    linear layers, which round to 8 bits with a scale for each tensor, or for each row (`fp8_rowwise`); `pure_fp8` is
    `pure_bf16` with the products of `fp8`. `auto`: the one of the first three that the device computes fastest, but
    fp32 only where it is a quarter faster than a shorter one; the losses are then those of that type."""
    tf32: bool | Literal["auto"] = "auto"
    """Let fp32 matrix products use TF32 tensor cores, which is faster and less exact. `auto`: on GPUs that have them,
    NVIDIA's from Ampere on."""
    compile: Annotated[Literal["auto", "off", "layers"], BeforeValidator(_off)] = "auto"
    """Whether torch compiles the model's layers for training (`layers`), which fuses their element-wise operations, or
    runs them as they are (`off`). `auto` compiles if, by the plan, that saves more time than it takes, or if
    `activation_checkpointing.mode: elementwise` needs it; otherwise, on a GPU, Liger's kernels are used if they are
    installed and compute the same. Results differ only in rounding and in the elements that dropout draws."""
    strategy: Strategy = Strategy()
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    batch: Batch = Batch()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    faults: Faults = Faults()
    logging: Logging = Logging()
    output: Output = Output()
    extra: Extra = Extra()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of data order, initialisation and dropout."""

    @model_validator(mode="after")
    def _defaults_of_others(self) -> Recipe:
        # Not counted as set: they stay defaults.
        if "learning_rate" not in self.optimizer.model_fields_set:
            self.optimizer.__dict__["learning_rate"] = self.default_learning_rate
        self.__dict__["preference"] = self.preference.of(self.objective)
        self.__dict__["policy"] = self.policy.of(self.objective)
        return self

    @property
    def default_learning_rate(self) -> float:
        """What `optimizer.learning_rate` is unless it is set."""
        if self.aligns:
            return PREFERENCE_LEARNING_RATES[self.method.name]
        return LEARNING_RATE if self.method.name == "full" else ADAPTER_LEARNING_RATE

    @property
    def aligns(self) -> bool:
        """Whether the model learns which of its answers are better, from preferences or from rewards."""
        return (self.prefers and not self.headed) or self.reinforces

    @property
    def prefers(self) -> bool:
        """Whether rows say which answers are preferred, in pairs or one by one."""
        return self.objective in PREFERENCES

    @property
    def pairs(self) -> bool:
        """Whether rows are pairs of answers, of which one is preferred."""
        return self.objective in PAIRED

    @property
    def judges(self) -> bool:
        """Whether rows are single answers, each of which is good or bad."""
        return self.objective == JUDGED

    @property
    def headed(self) -> bool:
        """Whether the model has a head of the objective's own, or vectors alone, and no head for the vocabulary."""
        return self.objective in HEADED

    @property
    def embeds(self) -> bool:
        """Whether the model learns vectors of texts."""
        return self.objective == EMBEDDING

    @property
    def classifies(self) -> bool:
        """Whether rows have labels, each of a class."""
        return self.objective in CLASSIFYING

    @property
    def refers(self) -> bool:
        """Whether the objective compares with the model as it is before training."""
        return self.objective in REFERRING

    @property
    def reinforces(self) -> bool:
        """Whether the model learns from rewards of answers that it gives itself."""
        return self.objective in REINFORCED

    @property
    def distills(self) -> bool:
        """Whether the model learns from a teacher."""
        return self.objective == DISTILLATION

    @property
    def on_policy(self) -> bool:
        """Whether a student learns from its teacher on answers that it writes itself."""
        return self.distills and self.distillation.on_policy > 0

    @property
    def writes(self) -> bool:
        """Whether the model learns from answers that it gives itself, whatever it learns of them."""
        return self.reinforces or self.on_policy

    @property
    def trains_biases(self) -> bool:
        """Whether the base's own biases are trained beside adapters, without which it is not what it was."""
        return self.method.name == "lora" and self.extra.lora.get("bias", "none") != "none"

    @property
    def rows_for(self) -> str:
        """The objective by which rows are read, and computed with: a student's are those of `sft`."""
        return "sft" if self.distills else self.objective

    @property
    def answers(self) -> int:
        """Sequences of a row: two of a pair of answers, the texts that belong together or not, and as many as a prompt
        is given."""
        if self.embeds:
            return 2 + self.embedding.negatives
        return self.rollout.num_generations if self.reinforces else 2 if self.pairs else 1

    @property
    def longest_row(self) -> int:
        """Tokens that a row may have: those of a sequence, without those of the answer that a prompt is given."""
        answer = self.rollout.max_completion_tokens if self.reinforces else 0
        return max(1, self.batch.seq_len - answer)

    @property
    def undecided(self) -> tuple[str, ...]:
        """Keys that are left to the plan; empty for a recipe that can run."""
        keys = ("precision", "strategy.name", "activation_checkpointing.mode", "batch.micro_batch_size")
        return tuple(key for key in keys if attrgetter(key)(self) == "auto")

    @property
    def compiles_layers(self) -> bool:
        """Whether layers are compiled whatever the plan says."""
        return self.compile == "layers" or self.activation_checkpointing.mode == "elementwise"

    @property
    def pure(self) -> bool:
        """Whether weights, gradients and optimizer state are in bf16, without fp32 masters."""
        return self.precision in PURE.values()

    @property
    def in_bf16(self) -> str:
        """What the precision would be with all products in bf16, and masters as they are."""
        return "pure_bf16" if self.pure else "bf16"

    @property
    def engine_precision(self) -> str:
        """The precision as engines know it."""
        return self.in_bf16 if self.precision in FP8_SCALING else self.precision

    @property
    def knows_engine(self) -> bool:
        """Whether at most the micro-batch is left to the plan, which no engine depends on."""
        return set(self.undecided) <= {"batch.micro_batch_size"}

    @property
    def repositories(self) -> list[str]:
        """What may be the name of a repository on the hub: of the model, its tokenizer, its teacher and the data."""
        names = [self.model.path, self.model.tokenizer]
        names += [self.distillation.teacher.path] if self.distillation.teacher else []
        names += [source.path for source in (*self.data.sources, *self.data.eval_sources)]
        return [name for name in names if name]

    def with_values(self, values: Mapping[str, Any]) -> Recipe:
        """This recipe with other values at some dotted keys, which are taken as they are."""
        changed: dict[str, Any] = {}
        for path, value in values.items():
            section, _, key = path.partition(".")
            kept = changed.get(section, getattr(self, section))
            changed[section] = kept.model_copy(update={key: value}) if key else value
        return self.model_copy(update=changed)


def sections() -> dict[str, type[Section]]:
    """Every section of the recipe, in its order, as name to class."""
    return {
        name: field.annotation
        for name, field in Recipe.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


_MEANT = {"batch_size": ["batch.global_batch_size", "batch.micro_batch_size"]}
"""Other names under which people look for keys."""


def leaf_paths() -> dict[str, list[str]]:
    """Leaf key to the dotted paths it may mean: `seq_len` to `["batch.seq_len"]`, `name` to several."""
    paths = {key: list(places) for key, places in _MEANT.items()}
    for section, kind in sections().items():
        for key in kind.model_fields:
            paths.setdefault(key, []).append(f"{section}.{key}")
    return paths
