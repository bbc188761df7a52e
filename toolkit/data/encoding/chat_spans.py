"""Finds which characters of a rendered conversation belong to which message.

A chat template is a program that turns messages into one text and keeps no account of what came from where. So markers
are written into its syntax tree: at the start of every loop iteration (which message is being rendered?), after every
loop, and around every ``{% generation %}`` block. The marked text is parsed back into character ranges, and must equal,
byte for byte, what the tokenizer's own `apply_chat_template` renders without markers: a second rendering, until enough
have agreed of a template that cannot tell. The usual alternative, to compare renderings of ever longer parts of the
conversation, costs one for each turn and fails where a template writes the last turn otherwise; it serves only where
the markers would change the text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _alias_reasoning_fields

from toolkit.common import UserError
from toolkit.data.encoding.chat_template import (
    TEMPLATE_ERRORS,
    in_time,
    part_roles,
    text_part,
    variables,
    writes_straight,
)
from toolkit.data.encoding.labelling import Span
from toolkit.data.encoding.markers import MARK, MARKER, Markers, marked_template, marker
from toolkit.data.formats.columns import EMPTY
from toolkit.data.formats.messages import FOR_TEMPLATES
from toolkit.data.thoughts import spoken, thought

Message = dict[str, Any]
Tools = list[Any] | None
Settings = Mapping[str, Any] | None

SENTINEL = "(the answer)"
"""What a message says where a rendering shall show the place of it."""
ENOUGH = 64
"""Conversations whose marked text has to be the tokenizer's own before that is taken to be so of others, where the
syntax of the template shows that it cannot be otherwise."""
_SAID = {"content": "text", "tool_calls": "tool calls", "reasoning_content": "reasoning"}
"""Fields with what a message says, and what they are called in errors."""
_AGREED: Counter[str] = Counter()
"""Template to the number of such conversations so far."""


class Conversation:
    """A conversation as text, with the character ranges of its messages.

    Attributes:
        messages: what was rendered.
        settings: what the template gets beside them (`enable_thinking`).
        assistants: indices of the messages of the assistant.
        text: exactly what `apply_chat_template` renders.
        turns: index of a message to the ranges it rendered, in order; empty where the markers would have changed the
            text (say, because the template trims what it collected from a loop over the messages).
        generation: (index of a message, range) of every ``{% generation %}`` block; None if the template has none.

    Raises:
        jinja2.TemplateError: If the template refuses the conversation.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, settings: Settings = None
    ) -> None:
        self.tokenizer, self.tools, self.settings = tokenizer, tools, settings or {}
        self.assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self.turns: dict[int, list[Span]] = {}
        self.generation: list[tuple[int, Span]] | None = None
        self.messages = messages
        source = tokenizer.get_chat_template(tools=tools)
        trusted = _is_plain(messages, tools) and writes_straight(source)
        if trusted and _AGREED[source] >= ENOUGH and (marked := self._marked(source)):
            self.text = MARKER.sub("", marked)
            self._locate(marked)
            return
        self.text, self.messages = render_accepted(tokenizer, messages, tools, settings)
        if (marked := self._marked(source)) and MARKER.sub("", marked) == self.text:
            self._locate(marked)
            _AGREED[source] += trusted

    def _marked(self, source: str) -> str:
        """The text with markers in it; empty where the template refuses the conversation."""
        present = [{key: value for key, value in m.items() if value is not None} for m in self.messages]
        markers = Markers(_alias_reasoning_fields(as_read(source, present)))
        arguments: dict[str, Any] = {**self.tokenizer.special_tokens_map, "tools": self.tools, "documents": None}
        arguments |= {"add_generation_prompt": False, **self.settings}
        try:
            with in_time():
                return marked_template(source).render(messages=markers.messages, **arguments, __markers__=markers)
        except (jinja2.TemplateError, TypeError):
            return ""

    def _locate(self, marked: str) -> None:
        """Turns the markers in a text into ranges. The innermost loop's message owns a character."""
        stack: list[tuple[int, int]] = []  # (loop, message) of the loops being rendered, outermost first
        blocks: list[int] = []  # where the open generation blocks began
        owner, length, position = -1, 0, 0
        for match in MARKER.finditer(f"{marked}{marker('E')}"):
            start, length = length, length + match.start() - position
            position = match.end()
            if owner >= 0 and length > start:
                spans = self.turns.setdefault(owner, [])
                spans.append((spans.pop()[0] if spans and spans[-1][1] == start else start, length))
            kind, loop, index = match[1], int(match[2]), int(match[3])
            if kind == "T":
                if stack and stack[-1][0] == loop:
                    stack.pop()
                stack.append((loop, index))
            elif kind == "E" and any(number == loop for number, _ in stack):
                while stack.pop()[0] != loop:
                    pass
            elif kind == "G":
                blocks.append(length)
            elif kind == "g":
                # A block outside every loop, like an end-of-sequence token after the last one, ends the last turn.
                message = owner if owner >= 0 else max(self.assistants, default=-1)
                self.generation = [*(self.generation or []), (message, (blocks.pop(), length))]
            owner = next((message for _, message in reversed(stack) if message >= 0), -1)

    def ensure_turns(self, indices: list[int]) -> None:
        """Adds to `turns` what the markers did not locate of the messages with these indices.

        Compares the renderings of the conversation cut before and after each of them.

        Raises:
            UserError: If the text of a part of the conversation is not the beginning of the text of the whole.
        """
        for i in indices:
            if any(self.text[a:b].strip() for a, b in self.turns.get(i, [])) or not answer_of(self.messages[i]):
                continue
            try:
                before = render(self.tokenizer, self.messages[:i], self.tools, self.settings) if i else ""
                after = render(self.tokenizer, self.messages[: i + 1], self.tools, self.settings)
            except (jinja2.TemplateError, TypeError):
                before, after = "unknown", ""
            if not (after.startswith(before) and self.text.startswith(after)):
                raise UserError(
                    "The chat template does not show where the assistant's turns begin and end: its text for a part of "
                    "a conversation is not the beginning of its text for the whole.",
                    "Set data.train_on: last_assistant, or give a template with {% generation %} blocks in "
                    "model.chat_template.",
                )
            self.turns[i] = [(len(before), len(after))]

    def locate_parts(self, i: int, parts: dict[str, list[list[int]]]) -> list[Span]:
        """Where characters of a message stand in `text`, with the stop token where they reach its end and no tool
        calls follow.

        Args:
            i: Index of the message, whose turn is located.
            parts: Field of the message to ranges of its characters.

        Raises:
            UserError: The template writes the field otherwise than it is.
        """
        turns = self.turns.get(i) or [span for message, span in self.generation or [] if message == i]
        start, end = (turns[0][0], turns[-1][1]) if turns else (0, 0)
        calls = self.messages[i].get("tool_calls")
        spans: list[Span] = []
        for field, ranges in parts.items():
            content = self.messages[i][field]
            written = content.strip()
            at = self._place(i, field, written, (start, end))
            if at < 0:
                raise UserError(
                    f"The chat template changes the {field} of message {i}, of which only a part is trained.",
                    "Set `train` for the whole message, or model.chat_template to a template that writes it as it is.",
                )
            offset = at - (len(content) - len(content.lstrip()))
            for left, right in ranges:
                is_last = field == "content" and right >= len(content.rstrip()) and not calls
                spans.append((max(offset + left, at), end if is_last else offset + right))
        return spans

    def _place(self, i: int, field: str, written: str, turn: Span) -> int:
        """Where a field of message `i` stands in its turn; negative where the template does not show it."""
        first, last = self.text.find(written, *turn), self.text.rfind(written, *turn)
        if field != "content":
            return first
        # What the model thought stands before what it says, and may hold the same; so may the calls behind it.
        if first == last or not self.messages[i].get("tool_calls"):
            return last
        probe = [*self.messages[:i], self.messages[i] | {field: SENTINEL}, *self.messages[i + 1 :]]
        before, found, _ = render(self.tokenizer, probe, self.tools, self.settings).partition(SENTINEL)
        at = self.text.find(written, len(before)) if found and self.text.startswith(before) else -1
        return -1 if self.text[len(before) : at].strip() else at

    def loses_of_prompt(self) -> bool:
        """Whether the template leaves out a system message, or writes it only where a user speaks last (Mistral's), or
        reads nothing of the tools or of a text in the settings."""
        given = {"tools": self.tools, **self.settings}
        texts = {name for name, value in given.items() if isinstance(value, str | list | dict) and value}
        if texts and texts - variables(self.tokenizer.get_chat_template(tools=self.tools)):
            return True
        systems = (message["content"] for message in self.messages if message["role"] == "system")
        return any(_end(content) not in self.text for content in systems)

    def refuse_lost_content(self) -> None:
        """A template may pass over what it does not know (mostly tool calls): the model would learn to say nothing.

        Raises:
            UserError: If not one word of what the assistant or a tool says is in the text, or the text is the same
                without it, or so for what the model thought before the answer that ends the conversation (many
                templates leave earlier thoughts out); or if a field that changes what should be learnt leaves no
                trace in it.
        """
        ignored = ", or set 'data.ignore=[NAME]' with their name in the data (`reasoning_content`, `thinking` …)"
        for i, message in enumerate(self.messages):
            if message["role"] not in ("assistant", "tool"):
                continue
            turn = "".join(self.text[start:end] for start, end in self.turns.get(i, [])) or self.text
            is_last = message["role"] == "assistant" and i == len(self.messages) - 1
            for field, kind in _SAID.items():
                said: Any = message.get(field)
                if not said or (field == "reasoning_content" and not is_last):
                    continue
                calls = [call["function"]["name"] for call in said] if field == "tool_calls" else []
                words, signs = calls or said.split(), calls or [_end(said)]
                # What the answer says of a call, or of a thought, is not that yet.
                place = turn if field == "content" else turn.replace((message.get("content") or "").strip(), "")
                # Many templates cut off what was thought, also where it stands in the text of the last answer.
                inside = thought(said) if field == "content" and is_last else ""
                if _end(inside) not in turn and self._same_with(i, field, spoken(said)):
                    raise UserError(
                        f"The chat template leaves out the reasoning that stands in the text of message {i}.",
                        "Set model.chat_template to a template that writes it, or take it out of the rows.",
                    )
                # Most stand there as they are, which is quickly seen.
                if not words or all(sign in place for sign in signs):
                    continue
                other = "-" if field == "content" else None  # Some templates refuse a message that says nothing.
                if not any(word in self.text for word in words) or self._same_with(i, field, other):
                    raise UserError(
                        f"The chat template leaves out the {kind} of message {i}.",
                        "Set model.chat_template to a template that writes them, or take them out of the rows"
                        + ignored * (kind == "reasoning")
                        + ".",
                    )
        for field in dict.fromkeys(name for message in self.messages for name in message if name in FOR_TEMPLATES):
            self._refuse_unread(field, *FOR_TEMPLATES[field])

    def _same_with(self, i: int, field: str, value: str | None) -> bool:
        """Whether message `i` is written alike where this field of it says something else, or is not there."""
        message = {key: said for key, said in self.messages[i].items() if key != field}
        message |= {} if value is None else {field: value}
        try:
            given = [*self.messages[:i], message, *self.messages[i + 1 :]]
            return render(self.tokenizer, given, self.tools, self.settings) == self.text
        except TEMPLATE_ERRORS:
            return False

    def _refuse_unread(self, field: str, harmless: Collection[Any], change: str) -> None:
        """A field of messages is unread where the text is the same without it."""
        holders = [i for i, m in enumerate(self.messages) if m.get(field) not in (*EMPTY, *harmless)]
        without = [{key: value for key, value in message.items() if key != field} for message in self.messages]
        if holders and render(self.tokenizer, without, self.tools, self.settings) == self.text:
            value = self.messages[holders[0]][field]
            raise UserError(
                f"The chat template leaves out `{field}` of message {holders[0]} ({str(value)[:40]!r}).",
                f"Set model.chat_template to a template that writes it, or {change}, or set 'data.ignore=[{field}]'.",
            )


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, settings: Settings, prompt: bool = False
) -> str:
    """The conversation as the tokenizer's chat template renders it, and what it writes before an answer if `prompt`.

    Raises:
        jinja2.TemplateError: If the template refuses the conversation.
    """
    options = {**(settings or {}), "tokenize": False, "add_generation_prompt": prompt}
    messages = as_read(tokenizer.get_chat_template(tools=tools), messages)
    with in_time():
        return str(tokenizer.apply_chat_template(messages, tools=tools, **options))


def as_read(source: str, messages: list[Message]) -> list[Message]:
    """The messages with their text in the form that this template reads: as it is, or as a part of the content."""
    if not (roles := part_roles(source)):
        return messages
    in_parts = [m["role"] in roles or (m["role"] == "tool" and "user" in roles) for m in messages]
    return [
        m | {"content": [text_part(m["content"])]} if parts and isinstance(m.get("content"), str) else m
        for m, parts in zip(messages, in_parts, strict=True)
    ]


def render_accepted(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, settings: Settings, prompt: bool = False
) -> tuple[str, list[Message]]:
    """What `render` gives, and the messages it was given: templates disagree whether the arguments of tool calls are
    objects or JSON text."""
    try:
        return render(tokenizer, messages, tools, settings, prompt), messages
    except TypeError:
        messages = [_with_json_arguments(message) for message in messages]
        return render(tokenizer, messages, tools, settings, prompt), messages


def _end(text: str) -> str:
    """The last characters of a text, by which it is known: templates strip, and cut thoughts off at the beginning."""
    return text.strip()[-20:]


def answer_of(message: Message) -> str:
    """What a message says: its text, else its tool calls as JSON."""
    calls = message.get("tool_calls")
    return message.get("content") or (json.dumps(calls, ensure_ascii=False) if calls else "")


def _with_json_arguments(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


def _is_plain(messages: list[Message], tools: Tools) -> bool:
    """Whether Transformers hands a conversation to the template as it is, and nothing in it looks like a marker."""
    values = [value for message in messages for value in message.values()]
    return tools is None and all(type(value) is str and MARK not in value for value in values)
