"""Finds which characters of a rendered conversation belong to which message.

A chat template is a program that turns messages into one text and keeps no account of what came from where. Here its
syntax tree gets marks: at the start of every loop iteration (which message is being rendered?), after every loop, and
around every ``{% generation %}`` block. The marked text is parsed back into character ranges. The marks must not change
the text: without them it has to equal what the tokenizer's own `apply_chat_template` renders, byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _alias_reasoning_fields, _compile_jinja_template

from toolkit.common import UserError

Message = dict[str, Any]
Span = tuple[int, int]

ASSISTANT_ROLES = ("assistant", "model")
# Private-use characters; neither is whitespace, neither is one that transformers uses for its own marks.
_MARK = re.compile("\U000ff0a0([TEGg])([0-9]+):(-?[0-9]+)\U000ff0a1")


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
    offered: Any = tools
    text = tokenizer.apply_chat_template(
        messages, tools=offered, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(text, str)
    return text


def render_with_turns(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Message] | None
) -> Rendered:
    """Renders a conversation and locates its messages.

    `turns` is empty where the marks would have changed the text (say, because the template trims what it collected
    from a loop over the messages).

    Raises:
        jinja2.TemplateError: If the template refuses the conversation.
    """
    text = render(tokenizer, messages, tools)
    source = tokenizer.get_chat_template(tools=tools)
    marks = _Marks(_alias_reasoning_fields([{k: v for k, v in m.items() if v is not None} for m in messages]))
    arguments = {**tokenizer.special_tokens_map, "tools": tools, "documents": None, "add_generation_prompt": False}
    try:
        marked = _marked_template(source).render(messages=marks.messages, **arguments, __marks__=marks)
    except (jinja2.TemplateError, TypeError):
        return Rendered(text)
    rendered = _parse(marked, [i for i, m in enumerate(messages) if m["role"] in ASSISTANT_ROLES])
    return rendered if rendered.text == text else Rendered(text)


def ensure_turns(
    tokenizer: PreTrainedTokenizerBase,
    rendered: Rendered,
    messages: list[Message],
    tools: list[Message] | None,
    wanted: list[int],
) -> None:
    """Adds to `rendered.turns` what the marks did not find of the wanted messages.

    Compares the renderings of the conversation cut before and after each of them.

    Raises:
        UserError: If the text of a part of the conversation is not the beginning of the text of the whole.
    """
    for i in wanted:
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
                "Set data.train_on: last_assistant, or give a template with {% generation %} marks in "
                "model.chat_template.",
            )
        rendered.turns[i] = [(len(before), len(after))]


def refuse_lost_answers(text: str, messages: list[Message]) -> None:
    """A template may pass over what it does not know (tool calls, most often): the model would learn to say nothing.

    Raises:
        UserError: If not one word of what the assistant says is in the text.
    """
    for i, message in enumerate(messages):
        if message["role"] not in ASSISTANT_ROLES:
            continue
        calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
        for kind, words in (("text", (message.get("content") or "").split()), ("tool calls", calls)):
            if words and not any(word in text for word in words):
                raise UserError(
                    f"The chat template leaves out the {kind} of message {i}.",
                    "Set model.chat_template to a template that writes them, or take them out of the rows.",
                )


def answer_of(message: Message) -> str:
    """What a message says: its text, else its tool calls as JSON."""
    content: Any = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = message.get("tool_calls")
    return content or (json.dumps(calls, ensure_ascii=False) if calls else "")


class _Marks:
    """Called by a marked template while it renders; recognises messages by identity."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self._index = {id(message): index for index, message in enumerate(messages)}
        self._open: set[int] = set()

    def turn(self, loop: int, *candidates: Any) -> str:
        """Start of an iteration; loops that are not over messages leave no mark."""
        index = next((self._index[id(c)] for c in candidates if id(c) in self._index), -1)
        if index < 0 and loop not in self._open:
            return ""
        self._open.add(loop)
        return _mark("T", loop, index)

    def end(self, loop: int) -> str:
        """After a loop."""
        if loop not in self._open:
            return ""
        self._open.discard(loop)
        return _mark("E", loop)


def _mark(kind: str, loop: int = 0, index: int = 0) -> str:
    return f"\U000ff0a0{kind}{loop}:{index}\U000ff0a1"


def _parse(marked: str, assistants: list[int]) -> Rendered:
    """Takes the marks out of a text and turns them into ranges. The innermost loop's message owns a character."""
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
            if spans and spans[-1][1] == length:
                spans[-1] = (spans[-1][0], length + len(piece))
            else:
                spans.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)

    position = 0
    for match in _MARK.finditer(marked):
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
    tree = environment.parse(source)
    for number, loop in enumerate(list(tree.find_all(nodes.For))):
        candidates = list(_message_expressions(loop))
        if candidates:
            loop.body.insert(0, _output(_call("turn", nodes.Const(number), *candidates)))
            _insert_after(tree, loop, _output(_call("end", nodes.Const(number))))
    for block in tree.find_all(nodes.CallBlock):
        if isinstance(block.call.node, nodes.ExtensionAttribute):
            block.body = [_output(nodes.Const(_mark("G"))), *block.body, _output(nodes.Const(_mark("g")))]
    tree.set_environment(environment)
    for node in tree.find_all(nodes.Node):
        node.set_lineno(1)
    return environment.from_string(tree)


def _message_expressions(loop: nodes.For) -> Iterator[nodes.Expr]:
    """What may be the message of an iteration: the loop variable, or a list indexed by it (`messages[i]`)."""
    if not isinstance(loop.target, nodes.Name):
        return
    target = loop.target.name
    yield nodes.Name(target, "load")
    body = nodes.Template(loop.body)
    assigned = {name.name for name in body.find_all(nodes.Name) if name.ctx == "store"}
    indexed = {
        item.node.name
        for item in body.find_all(nodes.Getitem)
        if isinstance(item.node, nodes.Name) and isinstance(item.arg, nodes.Name) and item.arg.name == target
    }
    for name in sorted(indexed - assigned):
        item = nodes.Getitem(nodes.Name(name, "load"), nodes.Name(target, "load"), "load")
        defined = nodes.Test(nodes.Name(name, "load"), "defined", [], [], None, None)
        yield nodes.CondExpr(defined, item, nodes.Const(None))


def _call(method: str, *arguments: nodes.Expr) -> nodes.Expr:
    function = nodes.Getattr(nodes.Name("__marks__", "load"), method, "load")
    return nodes.Call(function, list(arguments), [], None, None)


def _output(expression: nodes.Expr) -> nodes.Output:
    return nodes.Output([expression])


def _insert_after(tree: nodes.Node, node: nodes.Node, new: nodes.Node) -> None:
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for _, value in parent.iter_fields():
            if isinstance(value, list) and any(item is node for item in value):
                value.insert(next(i for i, item in enumerate(value) if item is node) + 1, new)
                return
