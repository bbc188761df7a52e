"""Figures that describe the data, computed before anything is trained on it.

Most trainings that teach nothing fail in the data: no answer is trained, no stop token, half of it is cut off, which a
loss curve does not show. Everything is counted on the rows as they will be trained, after templates, cutting and
mixing, so that a figure is never about something else than the batches; it costs one pass over columns that tokenising
has written anyway. What these figures forbid is in `toolkit.data.auditing.problems`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from toolkit.common import UserError, count_text
from toolkit.data.auditing.answers import Pairs, Prompts, Verdicts
from toolkit.data.auditing.classes import Classes
from toolkit.data.formats.related import Texts
from toolkit.recipe.heads import HEADED


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
    first_empty: str = ""
    """Where the first of them stands."""
    set_aside: list[str] = []
    """Files that are not read because a word in their name may say that they are held out."""
    unused_columns: list[str] = []
    verdicts: dict[str, int] = {}
    """Unused columns that say yes in some rows and no in others, and in how many they say no."""
    worse: dict[str, int] = {}
    """Columns with a score of chosen answers, and in how many rows it is less than that of the rejected one."""
    unused_fields: list[str] = []
    """Fields of messages that neither the toolkit nor the chat template reads."""
    placeholders: int = 0
    """Rows whose text has a placeholder where a picture, sound or film was."""
    empty_turns: int = 0
    """Conversations with a turn that is trained and says nothing."""
    missing_values: int = 0
    """Rows whose answer or text is `nan`, as pandas writes what is missing."""
    ignored: dict[str, bool] = {}
    """Names in `data.ignore`, and whether a row has them."""
    role: Literal["train", "eval"] = "train"
    used_rows: int = 0
    """Rows that are trained on or held out, with their repeats."""
    repeats: float = 1.0
    """How often each used row occurs, on average."""
    share: float = 0.0
    """Share of the training rows."""

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
    first_untrained: str = ""
    """Where the first of them stands."""
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
    stops: list[str] = []
    """The tokens that end an answer of the model."""


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

    @property
    def first_untrained(self) -> str:
        """Where one of them stands."""
        empty = [source.first_empty for source in self.sources if source.role == "train"]
        return next(filter(None, [*empty, self.train.first_untrained]), "")


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
    texts = [f"{count_text(train.rows, 'row')} of {train.tokens:,} tokens {_are(train.rows)} trained on; {carried}."]
    if train.prompts:
        texts = [f"{count_text(train.rows, 'prompt')} of {train.tokens:,} tokens {_are(train.rows)} asked."]
        texts.append(train.prompts.in_a_sentence(train.rows))
    if held_out:
        rows = count_text(held_out.rows, "prompt" if held_out.prompts else "row")
        texts.append(f"{rows} of {held_out.tokens:,} tokens {_are(held_out.rows)} held out for evaluation.")
    if train.pairs and train.rows:
        texts.append(train.pairs.in_a_sentence(train.rows))
    if train.verdicts and train.rows:
        texts.append(train.verdicts.in_a_sentence(train.rows))
    if train.classes and train.rows:
        texts.append(train.classes.in_a_sentence(of_words))
    if train.texts and train.rows:
        texts += train.texts.in_sentences(train.rows)
    texts.append(_cut(audit))
    learnt = "text or no label" if train.classes else "text of its own" if train.texts else "trained token"
    empty = count_text(audit.untrained_rows, "row has", "rows have")
    empty += f" no {learnt} and {_are(audit.untrained_rows)} left out."
    if audit.untrained_rows or not train.prompts:
        whole = f"Every row has a {'label' if train.classes else 'token to train'}."
        whole = "Every row has all its texts." if train.texts else whole
        texts.append(empty if audit.untrained_rows else whole)
    ends = train.stop_trained_rows / max(train.rows, 1)
    if audit.objective not in HEADED and not train.prompts:
        texts.append(f"The stop token is trained in {'every row' if ends == 1 else f'{ends:.1%} of the rows'}.")
    repeated = (
        count_text(audit.duplicates, "row repeats", "rows repeat") + f" an earlier one and {_are(audit.duplicates)} "
    )
    repeated += "dropped" if audit.deduplicate else "kept"
    both = (
        f"{audit.in_train_and_eval or 'no'} held-out row{'s are' if audit.in_train_and_eval > 1 else ' is'} trained on"
    )
    texts.append(f"{repeated if audit.duplicates else 'No row repeats another'}; {both}.")
    needed = "" if audit.chat_template.needed else ", and these rows do not need one"
    texts.append(f"The chat template is {audit.chat_template.source}{needed}.")
    if packing := audit.packing:
        packed = count_text(packing.rows, "sequence, which is", "sequences, which are")
        texts.append(f"The rows are packed into {packed} {packing.efficiency:.1%} full.")
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
    number = sum(side.over_long.rows for _, side in sides if side)
    limit = f"longer than {audit.train.over_long.seq_len:,} tokens"
    if not parts:
        return f"No row is {limit}."
    effects = {
        "drop": ("is left out", "are left out"),
        "truncate": ("loses its end", "lose their ends"),
        "split": ("is cut into several", "are cut into several"),
    }
    action = audit.train.over_long.action
    effect = effects.get(action, ("stops the run", "stop the run"))[number != 1]
    return f"{' and '.join(parts)} {_are(number)} {limit} and {effect} (data.over_long: {action})."


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
