"""The normal forms that rows of all formats become before they are tokenised."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from toolkit.common import Partial

IGNORE = -100
"""The label of a token that carries no loss."""


@dataclass(frozen=True)
class Text:
    """A document; every token is a target."""

    text: str


@dataclass(frozen=True)
class Completion:
    """A prompt and the text that continues it, without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered with the tokenizer's chat template.

    Attributes:
        messages: dicts with ``role`` (system, user, assistant, tool ...), ``content`` and, where there are any,
            ``tool_calls`` (arguments are objects, not JSON strings). A message may carry ``train``: false to keep
            it out of the loss (true to have it in), and ``untrained``: field to [start, end) of the characters that
            carry none; and ``dropped``: dotted names of what it held and no template is given.
        tools: tool definitions (JSON schema objects) offered to the model, or None.
        template_kwargs: what the row itself passes to its template, or None.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Pair:
    """The two sides of an encoder-decoder example."""

    source: str
    target: str


@dataclass(frozen=True)
class Segments:
    """Parts of a text, tokenised one by one as they stand: [text, whether it is trained]."""

    parts: list[tuple[str, bool]]


@dataclass(frozen=True)
class Tokens:
    """A row that was tokenised elsewhere, trained as it is."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, each as a row of its own, of which the first is preferred."""

    chosen: Chat | Completion
    rejected: Chat | Completion


@dataclass(frozen=True)
class Judged:
    """An answer, as a row of its own, and whether it is a good one."""

    answer: Chat | Completion
    desirable: bool


@dataclass(frozen=True)
class Prompted:
    """A prompt that the model is to answer by itself, and what is known of the answer.

    Attributes:
        asked: The conversation up to the answer, or a prompt with an empty completion.
        columns: What rewards are given: the row's other columns, and the reference as ``answer``, empty without one.
    """

    asked: Chat | Completion
    columns: dict[str, Any]


@dataclass(frozen=True)
class Labelled:
    """A text or a conversation, with a second text or without, and the name of its class; empty where it has none."""

    text: Text | Chat
    second: str | None
    label: str


@dataclass(frozen=True)
class Tagged:
    """Words, each with the name of its class; empty where it has none."""

    words: list[str]
    tags: list[str]


@dataclass(frozen=True)
class Related:
    """Texts that belong together: an anchor, its positive, and negatives; or two texts and how near they are.

    Attributes:
        score: Higher for what is nearer; of anchors and positives there is none.
        query_prompt: What is put before the first text.
        document_prompt: The same of all others.
    """

    texts: list[str]
    score: float | None = None
    query_prompt: str = ""
    document_prompt: str = ""


Single = Text | Completion | Chat | Pair | Segments | Tokens | Labelled | Tagged
Row = Single | Preference | Judged | Prompted | Related


class Sample(Partial):
    """A row that the model is asked before and after training; an entry of `samples.json`.

    Attributes:
        prompt: What is shown.
        input_ids: What the model reads.
        reference: The row's own answer, where there is one.
        before: The model's answer before training.
        after: The model's answer after training.
    """

    prompt: str
    input_ids: list[int]
    reference: str | None = None
    before: str | None = None
    after: str | None = None


def to_json(row: Row) -> str:
    """One row as a JSON string; unlike an Arrow struct it keeps objects with differing keys as they are."""
    return json.dumps(_listed(row), ensure_ascii=False)


def from_json(text: str) -> Row:
    """The row that `to_json` wrote."""
    return _row(json.loads(text))


def sides(row: Row) -> tuple[Single, ...]:
    """The rows that are encoded: both answers of a preference, the one that is judged, a prompt, each of the texts
    that belong together, any other row itself."""
    if isinstance(row, Preference):
        return row.chosen, row.rejected
    if isinstance(row, Prompted):
        return (row.asked,)
    if isinstance(row, Related):
        prompts = [row.query_prompt, *[row.document_prompt] * (len(row.texts) - 1)]
        return tuple(Labelled(Text(prompt + text), None, "") for prompt, text in zip(prompts, row.texts, strict=True))
    return (row.answer,) if isinstance(row, Judged) else (row,)


def _listed(row: Row) -> list[Any]:
    if isinstance(row, Prompted):
        return [Prompted.__name__, _listed(row.asked), row.columns]
    if isinstance(row, Labelled):
        return [Labelled.__name__, _listed(row.text), row.second, row.label]
    fields = map(_listed, sides(row)) if isinstance(row, Preference | Judged) else vars(row).values()
    return [type(row).__name__, *fields, *([row.desirable] if isinstance(row, Judged) else [])]


def _row(listed: list[Any]) -> Row:
    kind, *fields = listed
    if kind == Preference.__name__:
        return Preference(*map(_row, fields))  # type: ignore[arg-type]
    if kind == Prompted.__name__:
        return Prompted(_row(fields[0]), fields[1])  # type: ignore[arg-type]
    if kind == Judged.__name__:
        return Judged(_row(fields[0]), fields[1])  # type: ignore[arg-type]
    if kind == Related.__name__:
        return Related(*fields)
    if kind == Labelled.__name__:
        return Labelled(_row(fields[0]), *fields[1:])  # type: ignore[arg-type]
    forms: tuple[type[Single], ...] = (Text, Completion, Chat, Pair, Segments, Tokens, Tagged)
    kinds = {form.__name__: form for form in forms}
    return kinds[kind](*fields)
