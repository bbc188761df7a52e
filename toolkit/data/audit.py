"""What the data is, in figures, before anything is trained on it; and which of those figures forbid training.

Most trainings that teach nothing fail in the data: no answer is trained, no stop token, half of it is cut off, which a
loss curve does not show. Everything is counted on the rows as they will be trained, after templates, cutting and
mixing, so that a figure is never about something else than the batches; it costs one pass over columns that tokenising
has written anyway. What cannot teach anything stops the run; what may be meant is a warning. Each says what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from toolkit.common import UserError
from toolkit.data.answers import Pairs, Prompts, Verdicts
from toolkit.data.classes import Classes
from toolkit.data.related import Texts
from toolkit.recipe import Recipe
from toolkit.recipe.heads import HEADED
from toolkit.recipe.preference import PREFERENCES

MIN_UNTRAINED_FATAL = 0.5


@dataclass(frozen=True)
class Problem:
    """Something wrong with the data."""

    level: Literal["fatal", "warning"]
    what: str
    change: str


class SourceFigures(BaseModel):
    """One source of the recipe."""

    path: str
    split: str
    format: str
    classes: list[str] = []
    """Names of classes that it declares itself."""
    rows: int = 0
    empty_rows: int = 0
    """Rows without content."""
    unused_columns: list[str] = []
    verdicts: dict[str, int] = {}
    """Unused columns that say yes in some rows and no in others, and in how many they say no."""
    unused_fields: list[str] = []
    """Fields of messages that neither the toolkit nor the chat template reads."""
    placeholders: int = 0
    """Rows whose text has a placeholder where a picture, sound or film was."""
    ignored: dict[str, bool] = {}
    """Names in `data.ignore`, and whether a row has them."""
    role: Literal["train", "eval"] = "train"
    used_rows: int = 0
    """Rows that are trained on or held out, with their repeats."""
    repeats: float = 1.0
    """How often each used row occurs, on average."""
    share: float = 0.0
    """Of the training rows."""

    def unused(self) -> list[str]:
        """What was not read of it, in lines of up to 20 names."""
        kinds = (("columns", self.unused_columns), ("fields of messages", self.unused_fields))
        return [
            f"unused {what}: {', '.join(names[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")
            for what, names in kinds
            if names
        ]


class OverLong(BaseModel):
    """Rows longer than `batch.seq_len`, and what happened to them."""

    rows: int
    action: str
    seq_len: int


class Bucket(BaseModel):
    """Rows whose length in tokens is from `low` to `high`."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    low: int = Field(validation_alias="from", serialization_alias="from")
    high: int = Field(validation_alias="to", serialization_alias="to")
    rows: int


class Lengths(BaseModel):
    """Lengths of rows in tokens, before over-long ones were handled."""

    percentiles: dict[str, int]
    """min, p10, p50, p90, p99, max; empty where there is no row."""
    histogram: list[Bucket]

    @classmethod
    def of(cls, length: NDArray[np.int64]) -> Lengths:
        """Those of all rows, given the length of each."""
        if not len(length):
            return cls(percentiles={}, histogram=[])
        shares = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
        percentiles = {name: int(np.percentile(length, share, method="nearest")) for name, share in shares.items()}
        edges = [0, *(2**power for power in range(4, max(4, percentiles["max"].bit_length()) + 1))]
        counts, _ = np.histogram(length, edges)
        buckets = zip(edges, edges[1:], counts.tolist(), strict=False)
        histogram = [Bucket(low=low, high=high - 1, rows=rows) for low, high, rows in buckets]
        return cls(percentiles=percentiles, histogram=histogram[np.flatnonzero(counts)[0] :])


class Side(BaseModel):
    """The training rows, or those held out, with their repeats."""

    rows: int
    """Those with a trained token."""
    tokens: int
    trained_tokens: int
    untrained_rows: int
    over_long: OverLong
    longest: str
    """Where the longest row stands."""
    stop_trained_rows: int
    boundary_merged_rows: int
    """Rows in which one token holds the end of the prompt and the start of the answer."""
    prompt_lost_rows: int = 0
    """Rows of which the chat template leaves out the system message, tools, or texts of `chat_template_kwargs`."""
    lengths: Lengths
    pairs: Pairs | None = None
    verdicts: Verdicts | None = None
    prompts: Prompts | None = None
    classes: Classes | None = None
    texts: Texts | None = None

    @property
    def seen_rows(self) -> int:
        """All rows, with those that are left out."""
        return sum(bucket.rows for bucket in self.lengths.histogram)


class ChatTemplate(BaseModel):
    """Which chat template there is, and whether the rows are conversations, which need one."""

    source: str
    needed: bool
    given: bool = False
    """Whether the recipe names it."""


class Packing(BaseModel):
    """Sequences of packed rows, and the share of them that is not padding."""

    rows: int
    efficiency: float


class Audit(BaseModel):
    """All figures of a recipe's data: `audit.json`."""

    objective: str
    scope: str
    """Which part of the data was read, where that is not all of it."""
    sources: list[SourceFigures]
    train: Side
    eval: Side | None
    deduplicate: bool
    duplicates: int
    in_train_and_eval: int
    chat_template: ChatTemplate
    kinds: list[str]
    """Normal forms of the rows, see `toolkit.data.rows`."""
    classes: list[str] = []
    """Names of classes, in the order of their numbers in the head."""
    packing: Packing | None = None
    problems: list[Problem] = []

    @property
    def untrained_rows(self) -> int:
        """Training rows that have nothing to learn from."""
        empty = sum(source.empty_rows for source in self.sources if source.role == "train")
        return empty + self.train.untrained_rows


class DataError(UserError):
    """Data that cannot be trained on.

    Args:
        audit: Its figures, `problems` included, for the user to see what is wrong.
    """

    def __init__(self, audit: Audit) -> None:
        fatal = [problem for problem in audit.problems if problem.level == "fatal"]
        what = "the data cannot be trained on: " + "; ".join(problem.what for problem in fatal)
        super().__init__(what, "; ".join(problem.change for problem in fatal))
        self.audit = audit


def find_problems(audit: Audit) -> Iterator[Problem]:
    """What is wrong with this data."""
    train, held_out = audit.train, audit.eval
    for name, side in (("training", train), ("held-out", held_out)):
        if side is not None and side.over_long.rows:
            yield from _over_long(name, side, audit.kinds)
    untrained = audit.untrained_rows
    seen = train.rows + untrained
    action = train.over_long.action
    learnt = "label" if train.classes else "text of its own" if train.texts else "trained token"
    check_settings = "check `data.columns`, `data.format` and `data.train_on`, or raise `batch.seq_len`"
    if not train.rows:
        if untrained and not train.untrained_rows:
            check_settings = f"end rows with the answer to learn, or {check_settings}"
        yield Problem(
            "fatal",
            f"no usable row: {untrained:,} rows have no {learnt}, {train.over_long.rows:,} are too long "
            f"(`data.over_long: {action}`)",
            check_settings,
        )
    elif untrained > MIN_UNTRAINED_FATAL * seen:
        why = "no text, or no known class" if train.classes else "no answer, or it was cut off"
        why = "a text is missing, or is the other" if train.texts else why
        what = f"{untrained:,} of {seen:,} rows have no {learnt} ({why})"
        yield Problem("fatal", what, check_settings)
    elif untrained:
        what = f"{untrained:,} of {seen:,} rows have no {learnt} and are left out"
        yield Problem("warning", what, "fill or remove them")
    if train.prompts:
        yield from (Problem(level, *each) for level, *each in train.prompts.problems(train.rows))  # type: ignore[arg-type]
    learns_to_stop = audit.objective not in ("language_modelling", *HEADED) and not train.prompts
    if learns_to_stop and train.rows and not train.stop_trained_rows:
        template = "choose a `model.chat_template` that ends a turn"
        ended = "end what is trained in each row" if set(audit.kinds) <= {"Segments", "Tokens"} else template
        yield Problem(
            "fatal",
            "the stop token is trained in no row, so the model would not learn to stop",
            f"{ended} with the model's stop token"
            + (", or raise `batch.seq_len` so that ends are not cut off" if action == "truncate" else ""),
        )
    elif learns_to_stop and train.stop_trained_rows < 0.9 * train.rows:
        yield Problem(
            "warning",
            f"the stop token is trained in only {train.stop_trained_rows:,} of {train.rows:,} rows",
            "raise `batch.seq_len` or set `data.over_long: drop` if ends are cut off",
        )
    without = audit.kinds == ["Completion"] and audit.chat_template.source != "none"
    if audit.objective in ("sft", *PREFERENCES) and without:
        yield Problem(
            "warning",
            "prompts and completions are trained as they are, without the chat template that this model has",
            "for answers in a chat name the columns `instruction` and `output` with `data.columns`; to keep plain "
            "text, ask the trained model in plain text, too",
        )
    elif audit.chat_template.given and train.rows and not audit.chat_template.needed and audit.objective != "seq2seq":
        yield Problem(
            "warning",
            "no row is a conversation, so model.chat_template is read by none and only saved beside the model",
            "remove model.chat_template, or name the columns of a conversation with `data.columns`",
        )
    listed = dict.fromkeys(name for source in audit.sources for name in source.ignored)
    if absent := [name for name in listed if not any(source.ignored.get(name) for source in audit.sources)]:
        yield Problem(
            "warning",
            f"no row has {' or '.join(f'`{name}`' for name in absent)}, which `data.ignore` names",
            "write names as they stand in the data, or remove them from `data.ignore`",
        )
    for source in audit.sources:
        if source.verdicts:
            said = ", ".join(f"`{name}` says no in {rows:,}" for name, rows in source.verdicts.items())
            yield Problem(
                "warning",
                f"all of the {source.rows:,} rows of {source.path} are trained alike, though {said}",
                "if that says which rows are good, keep only those; if not, set "
                f"'data.ignore=[{', '.join(source.verdicts)}]'",
            )
        if source.placeholders:
            yield Problem(
                "warning",
                f"{source.placeholders:,} rows of {source.path} have a placeholder of a picture, sound or film "
                "(such as <image>), which is trained as plain text",
                "remove these rows: their answers describe what the model does not see",
            )
    if audit.duplicates and not audit.deduplicate:
        yield Problem("warning", f"{audit.duplicates:,} rows repeat an earlier row", "set `data.deduplicate: true`")
    if audit.in_train_and_eval:
        yield Problem(
            "warning",
            f"{audit.in_train_and_eval:,} held-out rows are also trained on, so the held-out loss is too low",
            "remove them from one side, or hold a fraction out with `data.eval_split: 0.05`",
        )
    if merged := train.boundary_merged_rows:
        yield Problem(
            "warning",
            f"in {merged:,} rows one token holds the end of the prompt and the start of the answer",
            "end prompts with a line break, or start completions with a space",
        )
    if lost := train.prompt_lost_rows:
        yield Problem(
            "warning",
            f"in {lost:,} rows the chat template leaves out the system message, tools, or texts of "
            "`chat_template_kwargs`",
            "set `model.chat_template` to a template that writes them, or move them into the first user message",
        )
    if train.pairs:
        yield from (Problem("warning", *each) for each in train.pairs.problems())
    if train.classes and train.rows:
        of_words = audit.objective == "token_classification"
        for fatal, what, change in train.classes.problems(held_out is not None, of_words):
            yield Problem("fatal" if fatal else "warning", what, change)
    if train.texts and train.rows:
        for fatal, what, change in train.texts.problems(train.rows, held_out is not None):
            yield Problem("fatal" if fatal else "warning", what, change)
    for what, change in held_out.classes.strangers() if held_out and held_out.classes else ():
        yield Problem("warning", what, change)
    if held_out is not None and not held_out.rows:
        change = "check `data.eval_split`, `data.eval_sources` and `batch.seq_len`"
        yield Problem("fatal", "no usable held-out row", change)


def in_sentences(audit: Audit) -> list[str]:
    """What the figures come to, for people; the problems stand beside it."""
    train, held_out = audit.train, audit.eval
    share = train.trained_tokens / max(train.tokens, 1)
    of_words = audit.objective == "token_classification"
    carried = f"{share:.1%} of the tokens carry loss, {train.trained_tokens:,} in all"
    if audit.objective in HEADED:
        carried = f"{train.trained_tokens:,} words have labels" if of_words else "each has one score"
    if train.classes and not of_words:
        carried = "each has one label"
    if train.texts:
        carried = f"each of their {train.texts.of_row} texts has a vector"
    texts = [f"{train.rows:,} rows of {train.tokens:,} tokens are trained on; {carried}."]
    if train.prompts:
        texts = [f"{train.rows:,} prompts of {train.tokens:,} tokens are asked."]
        texts.append(train.prompts.in_a_sentence(train.rows))
    if held_out:
        what = "prompts" if held_out.prompts else "rows"
        texts.append(f"{held_out.rows:,} {what} of {held_out.tokens:,} tokens are held out for evaluation.")
    if train.pairs and train.rows:
        texts.append(train.pairs.in_a_sentence(train.rows))
    if train.verdicts and train.rows:
        texts.append(train.verdicts.in_a_sentence(train.rows))
    if train.classes and train.rows:
        texts.append(train.classes.in_a_sentence(of_words))
    if train.texts and train.rows:
        texts += train.texts.in_sentences(train.rows)
    texts.append(_cut(audit))
    learnt = "label" if train.classes else "text of its own" if train.texts else "trained token"
    empty = f"{audit.untrained_rows:,} rows have no {learnt} and are left out."
    if audit.untrained_rows or not train.prompts:
        whole = f"Every row has a {'label' if train.classes else 'token to train'}."
        whole = "Every row has all its texts." if train.texts else whole
        texts.append(empty if audit.untrained_rows else whole)
    ends = train.stop_trained_rows / max(train.rows, 1)
    if audit.objective not in HEADED and not train.prompts:
        texts.append(f"The stop token is trained in {'every row' if ends == 1 else f'{ends:.1%} of the rows'}.")
    repeated = f"{audit.duplicates:,} rows repeat an earlier one and are {'dropped' if audit.deduplicate else 'kept'}"
    both = (
        f"{audit.in_train_and_eval or 'no'} held-out row{'s are' if audit.in_train_and_eval > 1 else ' is'} trained on"
    )
    texts.append(f"{repeated if audit.duplicates else 'No row repeats another'}; {both}.")
    needed = "" if audit.chat_template.needed else ", and these rows do not need one"
    texts.append(f"The chat template is {audit.chat_template.source}{needed}.")
    if packing := audit.packing:
        texts.append(f"The rows are packed into {packing.rows:,} sequences, which are {packing.efficiency:.1%} full.")
    if audit.scope:
        texts.append(f"These are figures of {audit.scope} only: the data is streamed.")
    return texts


def _cut(audit: Audit) -> str:
    """How many rows are longer than `batch.seq_len`, and what becomes of them."""
    sides = [("training", audit.train), ("held-out", audit.eval)]
    parts = [
        f"{side.over_long.rows:,} of the {name} rows ({side.over_long.rows / max(side.seen_rows, 1):.1%})"
        for name, side in sides
        if side and side.over_long.rows
    ]
    limit = f"longer than {audit.train.over_long.seq_len:,} tokens"
    if not parts:
        return f"No row is {limit}."
    effects = {"drop": "are left out", "truncate": "lose their ends", "split": "are cut into several"}
    action = audit.train.over_long.action
    return f"{' and '.join(parts)} are {limit} and {effects.get(action, 'stop the run')} (data.over_long: {action})."


def check_batch(audit: Audit, global_batch_size: int) -> Audit:
    """The audit with a warning if all training rows together are fewer than one global batch."""
    rows = (audit.packing or audit.train).rows
    if audit.scope or rows >= global_batch_size:
        return audit
    unit, or_else = ("sequences", ", or set `data.packing: false`") if audit.packing else ("rows", "")
    what = f"{rows:,} training {unit} do not fill one global batch of {global_batch_size:,}"
    problem = Problem("warning", what, f"lower `batch.global_batch_size`{or_else}")
    return audit.model_copy(update={"problems": [*audit.problems, problem]})


def check_weights(audit: Audit, desirable: float, undesirable: float) -> Audit:
    """The audit with a warning if, of judged answers with these weights, one kind counts much more than the other."""
    train = audit.train
    found = train.verdicts.problems(train.rows, (desirable, undesirable)) if train.verdicts and train.rows else ()
    return audit.model_copy(update={"problems": [*audit.problems, *(Problem("warning", *each) for each in found)]})


def with_settings(audit: Audit, recipe: Recipe) -> Audit:
    """The audit with warnings of settings on which prepared data does not depend."""
    preference = recipe.preference
    audit = check_weights(audit, preference.desirable_weight, preference.undesirable_weight)
    return check_batch(audit, recipe.batch.sequences_per_step)


def _over_long(name: str, side: Side, kinds: list[str]) -> Iterator[Problem]:
    """What there is to say about rows longer than `batch.seq_len`."""
    seq_len, action = side.over_long.seq_len, side.over_long.action
    if action == "split" and kinds == ["Text"]:
        return
    lengths = side.lengths.percentiles
    what = (
        f"{side.over_long.rows:,} of {side.seen_rows:,} {name} rows are longer than `batch.seq_len: {seq_len}`, "
        f"the longest has {lengths['max']:,} tokens ({side.longest})"
    )
    change = f"raise `batch.seq_len` (99% of the rows have at most {lengths['p99']:,} tokens)"
    if side.prompts:
        what = (
            f"`rollout.max_completion_tokens` leaves {seq_len:,} tokens to a prompt in `batch.seq_len`, and "
            f"{side.over_long.rows:,} of {side.seen_rows:,} {name} prompts are longer, the longest with "
            f"{lengths['max']:,} tokens ({side.longest})"
        )
    if effect := {"drop": "they are left out", "truncate": "their ends are cut off"}.get(action):
        yield Problem("warning", f"{what}; {effect}", f"{change} to keep them whole")
    elif action == "split":
        what += ", and `data.over_long: split` is for text, not for chats or completions"
        yield Problem("fatal", what, f"{change}, or set `data.over_long` to drop or truncate")
    else:
        yield Problem("fatal", what, f"{change}, or set `data.over_long` to drop, truncate or (text) split")
