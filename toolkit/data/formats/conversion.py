"""Converts the rows of a source to a normal form.

A missing column or a wrong type is an error that names the row. Empty fields are not: such a row has nothing to train
on, which the audit counts. (Data sets' `cast` or a Pydantic model per format would name a column, not `file:line`.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import (
    EMPTY,
    OFTEN_CALLED,
    STEPS,
    listed,
    mapping_text,
    parsed,
    refuse_meaning,
    value_at,
)
from toolkit.data.formats.content import Content
from toolkit.data.formats.judged import judged
from toolkit.data.formats.labelled import read_labelled, read_tagged
from toolkit.data.formats.messages import FLAGS, dicts, holds_messages, read_messages, read_settings, read_tools
from toolkit.data.formats.preferences import read_preference
from toolkit.data.formats.pretokenised import read_segments, read_tokens, refuse_unread_lists
from toolkit.data.formats.proposal import are_texts
from toolkit.data.formats.ratings import Ratings
from toolkit.data.formats.related import one_positive_each, read_related
from toolkit.data.formats.task import Task
from toolkit.data.reading.readers import RawRow
from toolkit.data.rows import (
    Chat,
    Completion,
    Pair,
    Row,
    Text,
)
from toolkit.recipe.data import FORMATS, OF_CHATS

# The prompts of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, README).
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
    "\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class RowFormat:
    """How the rows of one source become rows of a normal form."""

    name: str
    """One of `FORMATS`."""
    columns: Mapping[str, str]
    """Expected column to the column in the data, or to what lies inside one (`body.messages`)."""
    task: Task
    ignored: frozenset[str] = frozenset()
    """Columns, and fields of messages, that are left out on purpose."""
    flags: tuple[str, ...] = FLAGS
    """Fields that say whether a message is trained."""
    verdict: str | None = None
    """The column that says whether the answer is good, where that is asked."""
    ratings: Ratings | None = None
    """Where the scores are of which pairs are made."""
    classes: tuple[str, ...] = ()
    """Names of the classes that numbers stand for, where the data has them."""

    asks: bool = False
    """Whether, of pairs, columns beside the answers say what was asked."""

    @property
    def label_column(self) -> str:
        """The column with labels, of labelled rows."""
        name = "tags" if self.name == "tagged" else "label"
        return self.columns.get(name, name)

    def used_columns(self) -> set[str]:
        """The columns in the data that are read; all others have no influence on training."""
        actual = {self.columns.get(name, name) for names in FORMATS[self.name] for name in names}
        actual |= {self.verdict} if self.verdict else set()
        actual |= self.ratings.columns() if self.ratings else set()
        return actual | {name.partition(".")[0] for name in actual}

    def rows(self, raws: Iterable[RawRow]) -> Iterator[RawRow]:
        """The rows to convert: of texts that belong together, several positives of one anchor make a row each."""
        return one_positive_each(raws, self.columns["positive"]) if self.name == "related" else iter(raws)

    def convert(self, raw: Mapping[str, Any], where: str) -> Row:
        """The normal form of one row.

        Raises:
            UserError: A column is missing, holds something else than it must, or would be left unused though it
                changes what should be learnt; the message names `where`.
        """
        row = self._converted(self.ratings.pair(raw, where) if self.ratings else raw, where)
        return row if self.verdict is None else judged(row, value_at(raw, self.verdict), self.verdict, where)

    def _converted(self, raw: Mapping[str, Any], where: str) -> Row:
        required, optional = FORMATS[self.name]
        for name in required:
            column = self.columns.get(name, name)
            if column not in raw and value_at(raw, column) is None:
                raise UserError(
                    f"{where} has no column `{column}`; it has {listed(raw)}",
                    "correct the row, or set `data.format` and `data.columns`",
                )
        unmapped = [name for name in optional if name not in self.columns]
        steps = [name for name, column in self.columns.items() if column.lower() == STEPS]
        known = self.used_columns() | self.ignored | {column for column in raw if steps and column.lower() == "labels"}
        refuse_meaning(raw, known, unmapped, self.name, where, self.columns)
        mapped = {column.partition(".")[0] for column in self.columns.values()}
        row = {
            name: value_at(raw, self.columns.get(name, name))
            for name in (*required, *optional)
            if self.columns.get(name, name) not in self.ignored
            # A column is read as what it is named for, not as what it is called, too.
            and (name in required or name in self.columns or name not in mapped)
        }
        for name in steps:
            if are_texts(row.get(name)):
                row[name] = "\n".join(row[name])
        if self.name == "alpaca":
            return self._alpaca(row, where)
        if self.name in ("messages", "sharegpt"):
            return self._chat(row, required[0], raw, where)
        if self.name == "labelled":
            if "text_pair" not in {*self.columns, *raw}:
                row.pop("text_pair", None)  # Or it is ignored.
            return read_labelled(row, where, self.classes, lambda value: self._labelled_chat(value, row, where))
        if self.name in ("related", "scored"):
            return read_related(row, where, self.task.embedding)
        if self.name == "tagged":
            return read_tagged(row, where, self.classes)
        if self.name == "preference":
            return read_preference(
                row,
                where,
                self.task.has_chat_template,
                self.asks,
                lambda value, column: self._messages(value, column, where),
                self._with_columns,
                self._alpaca,
            )
        if self.name == "segments":
            return read_segments(row["segments"], where, self.ignored)
        if self.name == "tokens":
            refuse_unread_lists({name: raw[name] for name in raw if name not in known}, row["input_ids"], where)
            return read_tokens(row, where)
        is_pair = self.task.objective == "seq2seq"
        if not is_pair and self.name == "prompt_completion" and any(holds_messages(row[name]) for name in required):
            return self._conversational_completion(row, where)
        if given := next((name for name in optional if row.get(name) not in EMPTY), None):
            asked, answered = (self.columns.get(name, name) for name in required)
            mapping = {"instruction": asked, "output": answered}
            if given in self.columns:
                mapping[given] = self.columns[given]
            raise UserError(
                f"{where}: `{given}` is for chats, not for plain prompts and completions",
                f"set {mapping_text(mapping)}, or write the conversation as `messages`, or set 'data.ignore=[{given}]'",
            )
        texts = [_string(row, name, where) for name in required]
        return Text(*texts) if self.name == "text" else Pair(*texts) if is_pair else Completion(*texts)

    def _alpaca(self, row: Mapping[str, Any], where: str) -> Any:
        names = ("system", "instruction", "input", "output", "reasoning")
        system, instruction, context, output, reasoning = (_string(row, name, where) for name in names)
        history = _rounds(row.get("history"), where)
        is_chat = self.task.objective != "seq2seq" and self.task.has_chat_template
        of_chats = ("history", "reasoning", *OF_CHATS)
        if not is_chat and (given := [name for name in of_chats if parsed(row.get(name)) not in EMPTY]):
            raise UserError(
                f"{where} has {listed(given)}, which only chats have",
                f"set `model.chat_template`, or 'data.ignore=[{', '.join(given)}]' to train without",
            )
        if self.task.objective == "seq2seq":
            return Pair("\n\n".join(filter(None, (system, instruction, context))), output)
        if not is_chat:
            template = ALPACA_WITH_INPUT if context else ALPACA
            prompt = template.format(instruction=instruction, input=context)
            return Completion(f"{system}\n\n{prompt}" if system else prompt, output)
        messages: list[dict[str, Any]] = []
        for asked, answered in history:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        user = f"{instruction}\n\n{context}" if context else instruction
        answer = {"role": "assistant", "content": output} | ({"reasoning_content": reasoning} if reasoning else {})
        return self._with_columns([*messages, {"role": "user", "content": user}, answer], row, where)

    def _labelled_chat(self, value: Any, row: Mapping[str, Any], where: str) -> Chat:
        return self._with_columns(self._messages(value, "messages", where), row, where)

    def _messages(self, value: Any, column: str, where: str) -> list[dict[str, Any]]:
        return read_messages(value, column, where, self.ignored, self.flags, self.task.trained_roles)

    def _chat(self, row: Mapping[str, Any], column: str, raw: Mapping[str, Any], where: str) -> Chat:
        messages = self._messages(row[column], column, where)
        if messages:
            self._refuse_answer_beside(messages[-1], raw, self.columns.get(column, column), where)
        return self._with_columns(messages, row, where)

    def _refuse_answer_beside(self, last: Mapping[str, Any], raw: Mapping[str, Any], column: str, where: str) -> None:
        """A conversation that ends without an answer, which would be left unused in another column."""
        if last["role"] == "assistant" and any(last.get(key) for key in ("content", "tool_calls")):
            return
        messages = ("tool_calls", "function_call", "choices")
        names = ("completion", *OFTEN_CALLED["completion"], "target", "reply", "chosen", *messages)
        left = [name for name in raw if name.lower() in names and name not in self.used_columns() | self.ignored]
        if answer := next((name for name in left if raw[name] not in EMPTY), None):
            change = f"if it is the answer, set {mapping_text({'prompt': column, 'completion': answer})}"
            if last["role"] == "assistant" or answer in messages:
                change = f"write it into `{column}` as the last turn, of the assistant"
            raise UserError(
                f"{where}: `{column}` ends without an answer, and `{answer}` would be left unused",
                f"{change}, or set 'data.ignore=[{answer}]' to train without it",
            )

    def _conversational_completion(self, row: Mapping[str, Any], where: str) -> Chat:
        messages: list[dict[str, Any]] = []
        for column, role, trained in (("prompt", "user", self.task.trains_prompts), ("completion", "assistant", True)):
            value = row[column] if holds_messages(row[column]) else {"role": role, "content": row[column]}
            turns = self._messages(value, column, where)
            messages += turns if trained else [{"train": False} | turn for turn in turns]
        return self._with_columns(messages, row, where)

    def _with_columns(self, messages: list[dict[str, Any]], row: Mapping[str, Any], where: str) -> Chat:
        """A conversation with the system message, tools and settings that stand beside it."""
        # Parts, as Bedrock and Gemini have them.
        if dicts(system := row.get("system")) and not isinstance(system, str):
            content = Content(True, f"{where}: `system`")
            content.add(system.get("parts", system) if isinstance(system, dict) else system)
            row = {**row, "system": content.text}
        if system := _string(row, "system", where):
            if messages and messages[0]["role"] == "system":
                raise UserError(
                    f"{where} has a `system` column and a system message", "keep one of the two, or rename the column"
                )
            messages = [{"role": "system", "content": system}, *messages]
        called = "tools" if row.get("tools") else "functions"
        tools = read_tools(row.get(called), where, called)
        return Chat(messages, tools, read_settings(row.get("chat_template_kwargs"), where))


def _rounds(history: Any, where: str) -> list[tuple[str, str]]:
    """Earlier rounds as LLaMA-Factory writes them: [[question, answer], …]."""
    rounds = parsed(history) or []
    if isinstance(rounds, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in rounds
    ):
        return [(asked, answered) for asked, answered in rounds]
    raise UserError(f"{where}: `history` is no list of pairs", 'write [["question", "answer"], …]')


def _string(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if are_texts(value) and len(value) == 1:
        return str(value[0])
    if not isinstance(value, str):
        kinds = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
        change = "choose one of them, or join them" if are_texts(value) else 'write it as text ("4" for 4)'
        if isinstance(value, list) and holds_messages(value):
            change = "name the column of a whole conversation as `messages` in `data.columns`"
        kind = kinds.get(type(value), type(value).__name__)
        if isinstance(value, float) and math.isnan(value):
            kind, change = "NaN", "write null where pandas has no value, as its `to_json` does"
        raise UserError(
            f"{where}: `{name}` is {kind}, not a string",
            f"{change}, or choose other columns with `data.columns`",
        )
    return value
