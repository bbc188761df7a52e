"""The sections of a recipe for reinforcement learning with verifiable rewards: how answers are generated, how they
are scored, and how the model learns from the scores."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from toolkit.recipe.base import Place, Section

REINFORCED = ("grpo", "rloo")
"""Objectives that learn from rewards of answers that the model itself gives."""
LANGUAGES = ("ar", "de", "el", "en", "es", "fr", "he", "hi", "it", "ja", "ko", "nl", "pt", "ru", "th", "zh")
"""Languages that the reward `language` tells, by ISO 639-1."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM can reserve memory for: `MaxLoRARanks` in vllm/config/lora.py."""
BETA = {"rloo": 0.05}
"""Defaults of `policy.beta` by objective, TRL's; of others 0."""

Share = Annotated[float, Field(ge=0, le=1)]
Tokens = Annotated[int, Field(gt=0)]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PydanticCustomError("pattern", f"is no regular expression: {error}") from None
    return text


def _address(text: str) -> str:
    try:
        parts = urlsplit(text)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
        beyond = parts.path.strip("/") or parts.query or parts.fragment
    except ValueError:
        whole, beyond = False, ""
    if not whole or beyond:
        raise PydanticCustomError("address", "is no address of a server such as http://localhost:8000")
    return text.rstrip("/")


def _on(value: Any) -> Any:
    """`numeric: true`, and `numeric:` with nothing behind it is the reward with its defaults."""
    return {} if value is True else None if value is False else value


class Reward(Section):
    """What every reward has."""

    weight: float = 1.0
    """What the reward counts in the sum; below 0 it is a penalty."""


class ExactMatch(Reward):
    """1 if the answer equals the reference, otherwise 0; surrounding white space is ignored."""

    ignore_case: bool = False
    """Whether upper and lower case count as the same."""
    tag: str | None = None
    """The tag whose content is compared, e.g. `answer`; by default all that follows the thoughts is."""


class NumericMatch(Reward):
    """1 if the answer's number equals the reference's, otherwise 0. It is the number in `\\boxed{}`, or else the last
    one; in a reference with `####`, as in GSM8K, the one after that."""

    tolerance: Annotated[float, Field(ge=0)] = 0.0
    """How much the two may differ, relative to the reference."""
    tag: str | None = None
    """The tag whose content is searched for the number, e.g. `answer`; by default all that follows the thoughts
    is."""


class RegexMatch(Reward):
    """1 if a regular expression is found in the answer, otherwise 0."""

    main_key: ClassVar[str | None] = "pattern"

    pattern: Annotated[str, AfterValidator(_pattern)]
    """In Python's syntax, searched for with `.` for line breaks too. A group named `answer` must be the reference."""


class JsonMatch(Reward):
    """0.5 for an answer that is one JSON object or array, 1 if it also fits the schema."""

    schema_file: Place | None = None
    """JSON Schema that the answer must fit; without one, any valid JSON does."""


class LengthMatch(Reward):
    """1 for answers whose length is within a range, otherwise 0."""

    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Shortest length, in tokens."""
    max_tokens: Tokens | None = None
    """Longest length, in tokens; by default only `rollout.max_completion_tokens` limits it."""
    soft: Annotated[int, Field(ge=0)] = 0
    """Number of tokens beyond either end over which the reward falls linearly from 1 to 0."""


class LanguageMatch(Reward):
    """How much of the answer is in a language: the share of its letters in the language's script, or for those written
    in Latin letters, whether more of its commonest words are this language's than any other's."""

    main_key: ClassVar[str | None] = "code"

    code: Literal[LANGUAGES]  # type: ignore[valid-type]
    """ISO 639-1."""


class FormatMatch(Reward):
    """How well the answer keeps to a frame of tags: for each of them half of its share for one opening and half for one
    closing, and all of it only if they stand once each, in order, with nothing outside of them."""

    tags: Annotated[list[str], Field(default_factory=lambda: ["think", "answer"], min_length=1)]
    """Names of the tags in their order: `[think, answer]` asks for `<think>…</think><answer>…</answer>`."""
    partial: Share = 0.5
    """Reward for having all tags without keeping to the frame; with 0 it is all or nothing."""


class Rewards(Section):
    """How answers are scored, for `objective: grpo` and `rloo`: the weighted sum of the rewards named here, e.g.
    `rewards: {format: {tags: [answer]}, numeric: {weight: 2}}`."""

    exact_match: Annotated[ExactMatch | None, BeforeValidator(_on, json_schema_input_type=ExactMatch | bool | None)] = (
        None
    )
    """Whether the answer equals the reference."""
    numeric: Annotated[NumericMatch | None, BeforeValidator(_on, json_schema_input_type=NumericMatch | bool | None)] = (
        None
    )
    """Whether the answer's number equals the reference's."""
    regex: RegexMatch | None = None
    """Whether a regular expression is found in the answer."""
    json_schema: Annotated[JsonMatch | None, BeforeValidator(_on, json_schema_input_type=JsonMatch | bool | None)] = (
        None
    )
    """Whether the answer is JSON and fits a schema."""
    length: Annotated[LengthMatch | None, BeforeValidator(_on, json_schema_input_type=LengthMatch | bool | None)] = None
    """Whether the answer's length is within a range."""
    language: LanguageMatch | None = None
    """Whether the answer is in a given language."""
    format: Annotated[FormatMatch | None, BeforeValidator(_on, json_schema_input_type=FormatMatch | bool | None)] = None
    """Whether the answer keeps to a frame of tags."""
    file: Place | None = None
    """Python file with a reward function of your own; its code is run, so it needs `trust_python`."""
    function: str = "reward"
    """Name of the function: `def reward(completions, prompts, **columns) -> list[float]`. Its keyword arguments are
    lists: the texts of answers and prompts, and each column of their rows, with the reference as `answer`."""
    function_weight: float = 1.0
    """Weight of the function's reward in the sum."""
    trust_python: bool = False
    """Whether the code in `file` may run. Its hash is stored with the run, which can only be continued with the same
    file."""

    def parts(self) -> dict[str, Reward]:
        """The built-in rewards that are named, in the schema's order."""
        named = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: part for name, part in named if isinstance(part, Reward)}

    def names(self, token: str) -> bool:
        """Whether a built-in reward looks for a token in answers: as one of its tags, or in its pattern."""
        parts = self.parts().values()
        tags = {tag for part in parts for tag in (*getattr(part, "tags", ()), getattr(part, "tag", None)) if tag}
        patterns = [part.pattern for part in parts if isinstance(part, RegexMatch)]
        in_pattern = any(form in pattern for pattern in patterns for form in (token, re.escape(token)))
        return in_pattern or token in {mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")}

    def weights(self) -> dict[str, float]:
        """Name to weight of all rewards."""
        own = {self.function: self.function_weight} if self.file else {}
        return {name: part.weight for name, part in self.parts().items()} | own


class Rollout(Section):
    """How the answers that a model learns from are generated, for `objective: grpo` and `rloo`, and for students that
    write answers (`distillation.on_policy`)."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Number of answers to each prompt, which are compared with each other. `batch.global_batch_size` counts prompts,
    each with all of its answers."""
    max_completion_tokens: Tokens = 256
    """Longest answer, in tokens; prompt and answer together have at most `batch.seq_len` tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature by which logits are divided when answers are sampled, and when they are scored."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the most likely tokens that together have this share of the probability."""
    system: str | None = None
    """A system message for every prompt that has none, e.g. one that asks for a format."""
    batch_size: Tokens | None = None
    """Number of answers that a process generates at once; by default all of its step, and in an evaluation as many as a
    micro-batch has, unless `evaluation.batch_size` says how many. Fewer need less memory and more time."""
    server: Annotated[str, AfterValidator(_address)] | None = None
    """URL of a vLLM server that generates the answers on its own devices, e.g. `http://localhost:8000`. Without one,
    the training processes generate them with Transformers."""


class Policy(Section):
    """How a model learns from the rewards of its answers, for `objective: grpo` and `rloo`."""

    loss: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    """How the losses of tokens are averaged for `objective: grpo`, by TRL's names: within each answer first (`grpo`),
    over all tokens of the step (`dapo`), or over as many as all answers could have (`dr_grpo`)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """The standard deviation by which advantages are divided: that of a prompt's answers (`group`), that of all answers
    of the step (`batch`), or none (`none`). RLOO does not divide them."""
    importance: Literal["token", "sequence"] = "token"
    """Whether `objective: grpo` compares the likelihoods of tokens with those before the update, or of whole answers,
    per token (`sequence`, GSPO)."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the model as it was before training: in the loss, or for RLOO in the reward. The
    reference is then the base without its adapters. For `rloo` 0.05 by default."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How much ratios of likelihoods may differ from 1 before they are clipped."""
    epsilon_high: Annotated[float, Field(gt=0)] | None = None
    """`epsilon` for ratios above 1, if it differs, as in DAPO (0.28)."""
    num_iterations: Tokens = 1
    """Optimizer steps taken on the answers of one rollout."""
    server_cap: Annotated[float, Field(gt=0)] = 3.0
    """Largest importance weight of a token of a server's answer: the loss of each token, or with `rloo` of each answer,
    is multiplied by the ratio of its likelihood in training to that at `rollout.server`, up to this value."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The range in which ratios of likelihoods are not clipped."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    def of(self, objective: str) -> Policy:
        """This section with an objective's own defaults, which do not count as set."""
        decided = self.model_copy()
        if "beta" not in self.model_fields_set and objective in BETA:
            decided.__dict__["beta"] = BETA[objective]
        return decided
