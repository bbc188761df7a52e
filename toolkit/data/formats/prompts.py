"""Prompts that a model answers by itself, and what is known of the answers: rows for rewards.

A row holds a prompt, as text or as messages, and mostly a reference answer. All other columns are kept for a user's own
reward. The text of a prompt is a user's turn where the tokenizer renders chats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import EMPTY, MEDIA, listed, mapping_text, parsed, value_at
from toolkit.data.formats.messages import (
    FLAGS,
    are_messages,
    are_tools,
    conversation_in,
    holds_messages,
    read_messages,
    read_settings,
    read_tools,
)
from toolkit.data.formats.proposal import check_named
from toolkit.data.reading.readers import RawRow
from toolkit.data.rewards import ANSWER
from toolkit.data.rows import Chat, Completion, Prompted
from toolkit.recipe.data import OF_CHATS

ASKED = ("prompt", "messages", "question", "problem", "query", "instruction")
"""Columns that hold a prompt."""
_PARTS = ("input", "context", "choices", "options", "documents", "passage", "paragraph", "history")
"""Columns that hold a part of what is asked."""
REFERENCES = (ANSWER, "solution", "ground_truth", "reference_answer", "expected_answer", "final_answer", "completion")
"""Columns that hold the reference."""
_NESTED_REFERENCE = "reward_model.ground_truth"
"""Where rows in the form of verl, such as DAPO's, hold it."""


@dataclass(frozen=True)
class PromptFormat:
    """How the rows of one source become prompts; stands in for a `RowFormat`.

    Attributes:
        asked: Column of the prompt, or what lies inside one.
        reference: That of the reference; None where there is none.
        has_chat_template: Whether the tokenizer renders chats.
        system: A system message for prompts that have none.
        ignored: Columns that are left out on purpose.
        present: All others of the first rows.
    """

    asked: str
    reference: str | None
    has_chat_template: bool
    system: str | None = None
    ignored: frozenset[str] = frozenset()
    present: frozenset[str] = frozenset()
    name = "prompt"

    def used_columns(self) -> set[str]:
        """All that are not ignored: the model is asked the prompt, and rewards are given the others."""
        return set(self.present)

    def rows(self, raws: Iterable[RawRow]) -> Iterator[RawRow]:
        """The rows to convert: all, as they are."""
        return iter(raws)

    def convert(self, raw: Mapping[str, Any], where: str) -> Prompted:
        """The normal form of one row.

        Raises:
            UserError: It has no prompt, or one of another kind; the message names `where`.
        """
        value = value_at(raw, self.asked)
        if value is None and self.asked.partition(".")[0] not in raw:
            raise UserError(
                f"{where} has no column `{self.asked}`, which is the prompt",
                "correct or remove the row, or set 'data.columns={prompt: NAME}'",
            )
        if value in (None, "", [], {}):
            return Prompted(Completion("", ""), {ANSWER: ""})
        asked = self._asked(value, raw, where)
        self._refuse_unseen(asked, raw, where)
        left = {self.asked, *self.ignored, self.asked.partition(".")[0]}
        # What JSON has no form for, such as dates, is kept as text.
        columns = json.loads(json.dumps({name: raw[name] for name in raw if name not in left}, default=str))
        reference: Any = None if self.reference is None else value_at(raw, self.reference)
        if isinstance(asked, Chat) and asked.messages and asked.messages[-1]["role"] == "assistant":
            *before, last = asked.messages
            # The model is to give this answer by itself.
            asked = Chat(before, asked.tools, asked.template_kwargs)
            reference = last["content"] if reference is None else reference
        if are_messages(reference):
            reference = read_messages(reference, str(self.reference), where, self.ignored, FLAGS)[-1]["content"]
        if isinstance(reference, float):  # A column of whole numbers with a gap has them so.
            reference = None if math.isnan(reference) else int(reference) if reference.is_integer() else reference
        if isinstance(reference, bool | dict | list):
            kind = type(reference).__name__
            raise UserError(
                f"{where}: the reference `{self.reference}` is a {kind}, not a text or number",
                "write it as text, or name the column of the reference: 'data.columns={answer: NAME}'",
            )
        return Prompted(asked, columns | {ANSWER: "" if reference is None else str(reference)})

    def _refuse_unseen(self, asked: Chat | Completion, raw: Mapping[str, Any], where: str) -> None:
        """Refuses a row of whose question a part stands in another column, where the model would not see it."""
        said = asked.prompt if isinstance(asked, Completion) else "\n".join(str(m["content"]) for m in asked.messages)
        for name in raw:
            if name in (self.asked, self.reference, *self.ignored) or raw[name] in EMPTY:
                continue
            unseen = name.lower() in _PARTS and not any(text in said for text in _texts_in(raw[name]))
            if unseen or name.lower() in MEDIA:
                raise UserError(
                    f"{where}: `{name}` looks like a part of what is asked, and `{self.asked}` does not hold it",
                    f"write it into `{self.asked}`, or set 'data.ignore=[{name}]' to ask without it",
                )

    def _asked(self, value: Any, raw: Mapping[str, Any], where: str) -> Chat | Completion:
        if is_chat := holds_messages(value):
            messages = read_messages(value, self.asked, where, self.ignored, FLAGS)
        elif not isinstance(value, str):
            raise UserError(
                f"{where}: `{self.asked}` is neither a text nor messages",
                'write a text, or [{"role": "user", "content": …}]',
            )
        elif self.asked.lower() == "instruction" and isinstance(more := raw.get("input"), str) and more.strip():
            return self._asked(f"{value}\n\n{more}", {**raw, "input": None}, where)
        else:
            messages = [{"role": "user", "content": value}]
        beside = {name: raw.get(name) for name in ("system", *OF_CHATS) if name not in self.ignored}
        if not are_tools(beside.get("functions")):
            beside.pop("functions", None)  # A reward may read code from it.
        system = beside["system"] if beside.get("system") else self.system
        if not (is_chat or self.has_chat_template):
            if given := [name for name in OF_CHATS if parsed(beside.get(name)) not in EMPTY]:
                raise UserError(
                    f"{where} has {listed(given)}, which only chats have",
                    f"set `model.chat_template`, or 'data.ignore=[{', '.join(given)}]' to ask without",
                )
            return Completion(f"{system}\n\n{value}" if system else value, "")
        if system and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": str(system)}, *messages]
        called = "tools" if beside.get("tools") else "functions"
        tools = read_tools(beside.get(called), where, called)
        return Chat(messages, tools, read_settings(beside.get("chat_template_kwargs"), where))


def _texts_in(value: Any) -> Iterator[str]:
    """The texts and numbers inside a value, also where it is written as JSON."""
    value = parsed(value)
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(each)
    elif value not in EMPTY:
        yield str(value).strip()


def recognise_prompts(
    rows: list[Mapping[str, Any]],
    columns: Mapping[str, str],
    ignored: frozenset[str],
    path: str,
    has_chat_template: bool,
    system: str | None,
) -> PromptFormat:
    """Finds the columns of prompts and references by the first rows of a source.

    Args:
        columns: Those that `data.columns` names, of `prompt` (or `messages`) and `answer`.
        path: Of the source.

    Raises:
        UserError: None or several may be meant, or one that is named is not there.
    """
    present = dict.fromkeys(name for row in rows for name in row if name not in ignored)
    for expected in columns:
        if expected not in ("prompt", "messages", ANSWER):
            raise UserError(
                f"`data.columns` renames to `{expected}`, which prompts for rewards do not have",
                f"write {{prompt: NAME, {ANSWER}: NAME}}; other columns are passed to your own reward as they are",
            )
    check_named(columns, rows, path)
    asked = columns.get("prompt") or columns.get("messages") or _one_of(ASKED, "prompt", present, path)
    if asked is None:
        raise UserError(
            f"data source `{path}` has the columns {listed(present)}, of which none is known to hold a prompt",
            f"name it: {mapping_text({'prompt': 'NAME', ANSWER: 'NAME'})}",
        )
    texts = [text for row in rows if (text := value_at(row, asked)) not in EMPTY]
    changes = [isinstance(text, str) and not holds_messages(text) and conversation_in(text, {}) for text in texts]
    if texts and all(changes):
        raise UserError(
            f"data source `{path}`: `{asked}` holds conversations, and would be asked as the plain text that they are "
            "written as",
            str(changes[0]),
        )
    reference = columns.get(ANSWER) or _one_of([name for name in REFERENCES if name != asked], ANSWER, present, path)
    holds_nested = _NESTED_REFERENCE.partition(".")[0] in present
    if reference is None and holds_nested and any(value_at(row, _NESTED_REFERENCE) not in EMPTY for row in rows):
        reference = _NESTED_REFERENCE
    return PromptFormat(asked, reference, has_chat_template, system, ignored, frozenset(present))


def _one_of(names: Iterable[str], expected: str, present: Iterable[str], path: str) -> str | None:
    found = [name for name in names if name in present]
    if len(found) > 1:
        raise UserError(
            f"data source `{path}`: {' and '.join(f'`{name}`' for name in found)} may each be the {expected}",
            f"set {mapping_text({expected: found[0]})}",
        )
    return found[0] if found else None


def is_empty_prompt(row: Prompted) -> bool:
    """Whether there is nothing to answer."""
    if isinstance(row.asked, Completion):
        return not row.asked.prompt.strip()
    return all(
        str(message["content"] or "").strip() in EMPTY for message in row.asked.messages if message["role"] != "system"
    )
