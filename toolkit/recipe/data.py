"""What a recipe is trained on: its data sets, how their rows become tokens, and which formats rows can have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from toolkit.recipe.base import Place, PositiveInt, Section
from toolkit.recipe.sections import Arguments

OF_CHATS = ("tools", "functions", "chat_template_kwargs")
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "prompt_completion": (("prompt", "completion"), ("system", *OF_CHATS)),
    "alpaca": (("instruction", "output"), ("input", "system", "history", "reasoning", *OF_CHATS)),
    "messages": (("messages",), ("system", *OF_CHATS)),
    "sharegpt": (("conversations",), ("system", *OF_CHATS)),
    "source_target": (("source", "target"), ()),
    "segments": (("segments",), ()),
    "tokens": (("input_ids",), ("labels", "attention_mask", "completion_mask", "assistant_masks", "loss_mask")),
    "preference": (
        ("chosen", "rejected"),
        ("instruction", "input", "prompt", "messages", "conversations", "history", "system", *OF_CHATS),
    ),
    "labelled": (("label",), ("text", "text_pair", "messages", "system", *OF_CHATS)),
    "tagged": (("tokens", "tags"), ()),
    "related": (("anchor", "positive"), ("negative", "negatives", *(f"negative_{n}" for n in range(1, 17)))),
    "scored": (("sentence1", "sentence2", "score"), ()),
}
"""Format to its required and its optional columns."""
OF_OBJECTIVES = ("preference", "labelled", "tagged", "related", "scored")
"""Formats that belong to objectives, and are not recognised by their columns alone."""

Roles = Annotated[list[Literal["system", "user", "assistant", "tool"]], Field(min_length=1)]


class Source(Section):
    """One data set of a mixture."""

    main_key: ClassVar[str | None] = "path"

    path: Place
    """Local file, folder or glob (JSON, JSONL, CSV, Parquet, text), a URL (`s3://`, `https://`), a hub id, or a
    built-in data set: `builtin:stdlib-docstrings`, the same as pairs of answers (`builtin:stdlib-docstring-pairs`), as
    judged answers (`builtin:stdlib-docstrings-judged`), with labels of texts (`builtin:stdlib-docstrings-kinds`) or of
    words (`builtin:stdlib-docstrings-names`), or as questions and answers (`builtin:stdlib-docstrings-answers`); or
    `builtin:arithmetic`, sums to work out."""
    name: str | None = None
    """Configuration (subset) of a hub data set."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set; by default its main branch."""
    split: str = "train"
    """Split of the data set to read. A local folder has the splits named by its files (`train.jsonl`,
    `validation.jsonl`)."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Relative share of this source in the mixture, in rows. Without weights, every row is used once per epoch; with
    weights, smaller sources repeat until every row of every source has been used."""
    max_samples: PositiveInt | None = None
    """Use at most this many rows of this source, from its beginning."""
    format: Literal["auto", *FORMATS] | None = None  # type: ignore[valid-type]
    """How the rows of this source are laid out, if it differs from `data.format`."""
    columns: dict[str, str] | None = None
    """Column names of this source, if they differ from `data.columns`."""
    ignore: list[str] | None = None
    """Columns and fields of messages of this source to leave out, if they differ from `data.ignore`."""

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class Data(Section):
    """The training data, how rows become tokens, and which tokens are trained."""

    main_key: ClassVar[str | None] = "sources"

    sources: Annotated[list[Source], Field(min_length=1)]
    """Training data: paths or hub ids, or mappings with `path` and further keys. Several make a mixture."""
    format: Literal["auto", *FORMATS] = "auto"  # type: ignore[valid-type]
    """How rows are laid out: which columns they have and what those mean. `auto` recognises the format by the
    columns."""
    columns: dict[str, str] = {}
    """Column names that differ from the expected ones, as `expected: actual`, e.g. `{prompt: question, completion:
    answer}`. Nested fields are named with a dot: `{messages: body.messages}`. `train` names the field of messages that
    says whether they are trained: `{train: keep}`."""
    ignore: list[str] = []
    """Columns, and fields of messages, to leave out even though they would change what is learnt, e.g. `[images]`."""
    eval_split: Annotated[float, Field(gt=0, lt=1)] | str | None = None
    """Rows held out for evaluation: a fraction of the training rows, e.g. 0.05, or the name of a split of the same
    sources, e.g. `validation`."""
    eval_sources: list[Source] = []
    """Separate data sets for evaluation, written like `sources`."""
    eval_max_samples: PositiveInt | None = None
    """Evaluate on at most this many held-out rows."""
    eval_seed: int | None = None
    """Seed by which `eval_split` as a fraction and `eval_max_samples` choose rows; by default the recipe's `seed`. With
    the same value here, runs with different seeds hold out the same rows and can be compared."""
    max_samples: PositiveInt | None = None
    """Train on at most this many rows of the whole mixture, chosen by the seed."""
    train_on: Literal["auto", "assistant", "last_assistant", "completion", "all"] | Roles = "auto"
    """Which tokens are trained. `auto`: every assistant turn of chats (`assistant`), the completions of prompts
    (`completion`), all tokens of texts (`all`). `last_assistant`: only the last assistant turn. A list names the roles
    whose turns are trained, e.g. `[assistant, tool]`."""
    chat_template_kwargs: Arguments = {}
    """Variables for the chat template beside the messages, in training, in samples and in `generate`, e.g.
    `{enable_thinking: false}`."""
    over_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What happens to rows longer than `batch.seq_len` tokens: `error` stops, `drop` leaves them out, `truncate` keeps
    their beginning, `split` cuts texts into several rows."""
    packing: bool = False
    """Pack several whole rows into one sequence of `batch.seq_len` tokens, for less padding. Attention keeps them
    apart."""
    deduplicate: bool = False
    """Keep only the first of several rows with the same content."""
    shuffle: bool = True
    """Shuffle the training rows in each epoch, with the recipe's `seed`."""
    streaming: bool = False
    """Read rows during training instead of preparing them all beforehand; needs `schedule.max_steps`."""
    num_proc: PositiveInt | None = None
    """Number of processes that tokenise; by default one per CPU core for large data."""
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Worker processes that prepare batches ahead for each training process; with 0 it prepares them itself. `auto`: as
    many as, by the plan, are worthwhile: none if preparing batches takes less than 2% of a step, as with prepared rows,
    otherwise one or two. A stream has at most one. Results do not depend on it."""

    @property
    def held_out_by_seed(self) -> bool:
        """Whether a seed says which rows are held out."""
        takes_some = self.eval_max_samples is not None and not self.streaming
        return isinstance(self.eval_split, float) or (takes_some and bool(self.eval_split or self.eval_sources))

    @property
    def decided_workers(self) -> int:
        """`num_workers`; none as long as nothing has decided it."""
        return 0 if self.num_workers == "auto" else self.num_workers

    def training_sources(self) -> list[Source]:
        """The sources with `data.format`, `data.columns` and `data.ignore` filled in."""
        return [self._complete(source) for source in self.sources]

    def evaluation_sources(self) -> list[Source]:
        """Sources of held-out rows that are not split off the training rows by a fraction."""
        sources = [self._complete(source) for source in self.eval_sources]
        if isinstance(self.eval_split, str):
            update = {"split": self.eval_split, "max_samples": None, "weight": None}
            sources += [source.model_copy(update=update) for source in self.training_sources()]
        return sources

    def _complete(self, source: Source) -> Source:
        defaults = {"format": self.format, "columns": self.columns, "ignore": self.ignore}
        return source.model_copy(update={k: v for k, v in defaults.items() if getattr(source, k) is None})
