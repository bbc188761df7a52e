"""Markers that a chat template writes about itself: which message it is rendering, and where its generation blocks
stand. `chat_spans` reads them."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

Message = dict[str, Any]

# Private-use characters; neither is whitespace, neither is one that transformers uses for its own markers.
MARK = "\U000ff0a0"
MARKER = re.compile(MARK + "([TEGg])([0-9]+):(-?[0-9]+)\U000ff0a1")


class Markers:
    """Read by a marked template while it renders; recognises messages by identity.

    Subscripts, because the sandbox that templates run in looks at every attribute and call from all sides.
    """

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self._index = {id(message): index for index, message in enumerate(messages)}
        self._open: set[int] = set()

    def __getitem__(self, key: tuple[Any, ...] | int) -> str:
        """The marker after a loop, by its number, or at the start of an iteration, by the number and what may be the
        message; loops that are not over messages leave none."""
        if isinstance(key, int):
            if key not in self._open:
                return ""
            self._open.discard(key)
            return marker("E", key)
        loop, *candidates = key
        index = next((self._index[id(c)] for c in candidates if id(c) in self._index), -1)
        if index < 0 and loop not in self._open:
            return ""
        self._open.add(loop)
        return marker("T", loop, index)


def marker(kind: str, loop: int = 0, index: int = 0) -> str:
    """One of a kind, with the number of its loop and the index of its message."""
    return f"{MARK}{kind}{loop}:{index}\U000ff0a1"


@lru_cache(maxsize=16)
def marked_template(source: str) -> jinja2.Template:
    """A template that writes markers, to be rendered with `Markers` as `__markers__`."""
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
        loop.body.insert(0, self._output(f"__markers__[{number}, {candidates}]"))
        return [loop, self._output(f"__markers__[{number}]")]

    def visit_CallBlock(self, block: nodes.CallBlock) -> nodes.CallBlock:
        self.generic_visit(block)
        if isinstance(block.call.node, nodes.ExtensionAttribute):
            block.body = [self._output(repr(marker("G"))), *block.body, self._output(repr(marker("g")))]
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
