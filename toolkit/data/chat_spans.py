"""Finds which characters of a rendered conversation belong to which message.

A chat template is a program that turns messages into one text and keeps no account of what came from where. So markers
are written into its syntax tree: at the start of every loop iteration (which message is being rendered?), after every
loop, and around every ``{% generation %}`` block. The marked text is parsed back into character ranges, and must equal,
byte for byte, what the tokenizer's own `apply_chat_template` renders without markers: it costs a second rendering. The
usual alternative, to compare renderings of ever longer parts of the conversation, costs one for each turn and fails
where a template writes the last turn otherwise; it serves only where the markers would change the text.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _alias_reasoning_fields, _compile_jinja_template

from toolkit.common import UserError

Message = dict[str, Any]
Span = tuple[int, int]

# Private-use characters; neither is whitespace, neither is one that transformers uses for its own markers.
_MARKER = re.compile("\U000ff0a0([TEGg])([0-9]+):(-?[0-9]+)\U000ff0a1")


@dataclass
class Rendered:
    """A conversation as text, with the character ranges of its messages.

    Attributes:
        text: exactly what `apply_chat_template` renders.
        turns: index of a message to the ranges it rendered, in order.
        generation: (index of a message, range) of every ``{% generation %}`` block; None if the template has none.
    """

    text: str
    turns: dict[int, list[Span]] = field(default_factory=dict)
    generation: list[tuple[int, Span]] | None = None


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[Message] | None,
    add_generation_prompt: bool = False,
) -> str:
    """The conversation as the tokenizer's chat template renders it.

    Raises:
        jinja2.TemplateError: If the template refuses the conversation.
    """
    options: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
    return str(tokenizer.apply_chat_template(messages, **options))


def render_with_turns(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Message] | None
) -> Rendered:
    """Renders a conversation and locates its messages.

    `turns` is empty where the markers would have changed the text (say, because the template trims what it collected
    from a loop over the messages).

    Raises:
        jinja2.TemplateError: If the template refuses the conversation.
    """
    text = render(tokenizer, messages, tools)
    source = tokenizer.get_chat_template(tools=tools)
    markers = _Markers(_alias_reasoning_fields([{k: v for k, v in m.items() if v is not None} for m in messages]))
    arguments = {**tokenizer.special_tokens_map, "tools": tools, "documents": None, "add_generation_prompt": False}
    try:
        marked = _marked_template(source).render(messages=markers.messages, **arguments, __markers__=markers)
    except (jinja2.TemplateError, TypeError):
        return Rendered(text)
    rendered = _parse(marked, [i for i, m in enumerate(messages) if m["role"] == "assistant"])
    return rendered if rendered.text == text else Rendered(text)


def ensure_turns(
    tokenizer: PreTrainedTokenizerBase,
    rendered: Rendered,
    messages: list[Message],
    tools: list[Message] | None,
    indices: list[int],
) -> None:
    """Adds to `rendered.turns` what the markers did not locate of the messages with these indices.

    Compares the renderings of the conversation cut before and after each of them.

    Raises:
        UserError: If the text of a part of the conversation is not the beginning of the text of the whole.
    """
    for i in indices:
        if any(rendered.text[a:b].strip() for a, b in rendered.turns.get(i, [])) or not answer_of(messages[i]):
            continue
        try:
            before = render(tokenizer, messages[:i], tools) if i else ""
            after = render(tokenizer, messages[: i + 1], tools)
        except (jinja2.TemplateError, TypeError):
            before, after = "unknown", ""
        if not (after.startswith(before) and rendered.text.startswith(after)):
            raise UserError(
                "The chat template does not show where the assistant's turns begin and end: its text for a part of a "
                "conversation is not the beginning of its text for the whole.",
                "Set data.train_on: last_assistant, or give a template with {% generation %} blocks in "
                "model.chat_template.",
            )
        rendered.turns[i] = [(len(before), len(after))]


def refuse_lost_answers(text: str, messages: list[Message]) -> None:
    """A template may pass over what it does not know (tool calls, most often): the model would learn to say nothing.

    Raises:
        UserError: If not one word of what the assistant says is in the text.
    """
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
        for kind, parts in (("text", (message.get("content") or "").split()), ("tool calls", calls)):
            if parts and not any(part in text for part in parts):
                raise UserError(
                    f"The chat template leaves out the {kind} of message {i}.",
                    "Set model.chat_template to a template that writes them, or take them out of the rows.",
                )


def answer_of(message: Message) -> str:
    """What a message says: its text, else its tool calls as JSON."""
    calls = message.get("tool_calls")
    return message.get("content") or (json.dumps(calls, ensure_ascii=False) if calls else "")


class _Markers:
    """Called by a marked template while it renders; recognises messages by identity."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self._index = {id(message): index for index, message in enumerate(messages)}
        self._open: set[int] = set()

    def turn(self, loop: int, *candidates: Any) -> str:
        """Start of an iteration; loops that are not over messages leave no marker."""
        index = next((self._index[id(c)] for c in candidates if id(c) in self._index), -1)
        if index < 0 and loop not in self._open:
            return ""
        self._open.add(loop)
        return _marker("T", loop, index)

    def end(self, loop: int) -> str:
        """After a loop."""
        if loop not in self._open:
            return ""
        self._open.discard(loop)
        return _marker("E", loop)


def _marker(kind: str, loop: int = 0, index: int = 0) -> str:
    return f"\U000ff0a0{kind}{loop}:{index}\U000ff0a1"


def _parse(marked: str, assistants: list[int]) -> Rendered:
    """Takes the markers out of a text and turns them into ranges. The innermost loop's message owns a character."""
    rendered = Rendered("")
    stack: list[tuple[int, int]] = []  # (loop, message) of the loops being rendered, outermost first
    blocks: list[int] = []  # where the open generation blocks began
    pieces: list[str] = []
    length = 0
    owner = -1

    def take(piece: str) -> None:
        nonlocal length
        if piece and owner >= 0:
            spans = rendered.turns.setdefault(owner, [])
            start = spans.pop()[0] if spans and spans[-1][1] == length else length
            spans.append((start, length + len(piece)))
        pieces.append(piece)
        length += len(piece)

    position = 0
    for match in _MARKER.finditer(marked):
        take(marked[position : match.start()])
        position = match.end()
        kind, loop, index = match[1], int(match[2]), int(match[3])
        loops = [number for number, _ in stack]
        if kind == "T":
            if loops and loops[-1] == loop:
                stack.pop()
            stack.append((loop, index))
        elif kind == "E" and loop in loops:
            del stack[len(loops) - 1 - loops[::-1].index(loop) :]
        elif kind == "G":
            blocks.append(length)
        elif kind == "g":
            # A block outside every loop, like an end-of-sequence token after the last one, ends the last turn.
            message = owner if owner >= 0 else assistants[-1] if assistants else -1
            rendered.generation = rendered.generation or []
            rendered.generation.append((message, (blocks.pop(), length)))
        owner = next((message for _, message in reversed(stack) if message >= 0), -1)
    take(marked[position:])
    rendered.text = "".join(pieces)
    return rendered


@lru_cache(maxsize=16)
def _marked_template(source: str) -> jinja2.Template:
    environment = _compile_jinja_template(source).environment
    return environment.from_string(_AddMarkers(environment).visit(environment.parse(source)))


class _AddMarkers(NodeTransformer):
    """Writes markers into the syntax tree of a template."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment
        self._numbers = itertools.count()

    def visit_For(self, loop: nodes.For) -> list[nodes.Node]:
        number = next(self._numbers)
        candidates = ", ".join(_message_expressions(loop))
        self.generic_visit(loop)
        if not candidates:
            return [loop]
        loop.body.insert(0, self._output(f"__markers__.turn({number}, {candidates})"))
        return [loop, self._output(f"__markers__.end({number})")]

    def visit_CallBlock(self, block: nodes.CallBlock) -> nodes.CallBlock:
        self.generic_visit(block)
        if isinstance(block.call.node, nodes.ExtensionAttribute):
            block.body = [self._output(repr(_marker("G"))), *block.body, self._output(repr(_marker("g")))]
        return block

    def _output(self, expression: str) -> nodes.Node:
        return self._environment.parse(f"{{{{ {expression} }}}}").body[0]


def _message_expressions(loop: nodes.For) -> list[str]:
    """What may be the message of an iteration: the loop variable, or a list indexed by it (`messages[i]`)."""
    if not isinstance(loop.target, nodes.Name):
        return []
    target = loop.target.name
    body = nodes.Template(loop.body)
    assigned = {name.name for name in body.find_all(nodes.Name) if name.ctx == "store"}
    indexed = {
        item.node.name
        for item in body.find_all(nodes.Getitem)
        if isinstance(item.node, nodes.Name) and isinstance(item.arg, nodes.Name) and item.arg.name == target
    }
    return [target, *(f"({name}[{target}] if {name} is defined else none)" for name in sorted(indexed - assigned))]
