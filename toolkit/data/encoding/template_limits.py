"""Jinja's sandbox with bounds: for single calls, as one into C may take all memory or time, and no time limit ends it;
and for the texts that a template makes, as one that is doubled again and again takes all memory within that limit."""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from jinja2 import Environment, Template
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.filters import do_format, do_join, make_attrgetter
from jinja2.nodes import Compare, Concat, Dict, EvalContext
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import pass_eval_context
from transformers.utils import chat_template_utils

_LARGEST = 2**24
"""Characters of a text that a template makes, and the largest number that it repeats or fills up one with."""
_LONG, _ALL_LONG = 2**16, 2**29
"""Characters from which on a text counts, and of all of these that are made in one rendering."""
_PRODUCT = 16 * _LARGEST
"""Characters where a text is put in at many places of another."""
_BITS = 2**20
"""Most bits of a number that is multiplied."""
_COMPARING = (
    *("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge", ">="),
    "in",
)
_SHALLOW = ("count", "default", "d", "first", "items", "last", "length", "list", "map", "rejectattr", "selectattr")
"""Filters that look at no more than the entries of a list, which templates ask for at every message."""
_FILTERS = ("batch", "center", "indent", "replace", "round", "slice", "truncate", "wordwrap")
_SLOW, _SLOWLY = ("pprint", "striptags", "title", "urlize", "wordcount", "wordwrap"), 2**20
"""Filters that take up to half a second for a million characters, in one call into C, and the most that they get."""


class _Made(threading.local):
    characters = 0


_made = _Made()
"""Long texts of the rendering that runs in this thread."""


class _BoundedTemplate(Template):
    def render(self, *arguments: Any, **named: Any) -> str:
        _made.characters = 0
        return super().render(*arguments, **named)


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name. Transformers puts its own `tojson` among them, written in C, which no time limit ends."""

    def __setitem__(self, name: str, filter: Callable[..., Any]) -> None:
        @functools.wraps(filter)
        def measured(value: Any, *arguments: Any, **named: Any) -> Any:
            return _counted(filter(_measured(value), *arguments, **named))

        super().__setitem__(name, measured)


class _Code(CodeGenerator):
    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        """`a ~ b`, which Jinja joins by a function of its own."""
        self.write("environment.concat(map(str, map(environment.finalize, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))))")

    def visit_Compare(self, node: Compare, frame: Frame) -> None:
        """`a < b`, which goes through lists in lists."""
        self.write("(environment.finalize(")
        self.visit(node.expr, frame)
        self.write(")")
        for each in node.ops:
            self.write(f" {operators[each.op]} environment.finalize(")
            self.visit(each.expr, frame)
            self.write(")")
        self.write(")")

    def visit_Dict(self, node: Dict, frame: Frame) -> None:
        """`{a: b}`, which goes through tuples in tuples that are a key."""
        self.write("{")
        for each in node.items:
            self.write("environment.finalize(")
            self.visit(each.key, frame)
            self.write("): ")
            self.visit(each.value, frame)
            self.write(", ")
        self.write("}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """What chat templates are compiled and rendered in."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Code
    template_class = _BoundedTemplate

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.binop_table |= {"+": _plus, "*": _times, "**": _power, "%": _modulo}
        self.filters |= {name: _bounded(self.filters[name]) for name in _FILTERS} | {"format": _format, "join": _join}
        self.filters = _Filters({name: _counting(filter, name) for name, filter in self.filters.items()})
        tests: dict[str, Any] = self.tests
        tests |= {name: _counting(tests[name]) for name in _COMPARING}
        # Of all that is written, joined and compared.
        self.finalize = _measured

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What becomes of all that is joined: by `~`, in blocks and macros, and as a whole."""
        return _counted("".join(_within(parts)))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An entry, or a part of a text."""
        return _counted(super().getitem(obj, _measured(argument)))

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Calls what a template calls."""
        if isinstance(of := getattr(function, "__self__", None), str | bytes | int):
            _check(of, (*arguments, *named.values()))
            if isinstance(of, str) and getattr(function, "__name__", "") == "join":
                arguments = tuple(list(_within(each, len(of))) for each in arguments)
        if not isinstance(function, Macro):
            for each in (of, *arguments, *named.values()):
                _measured(each)
        return _counted(super().call(context, function, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A text's method `format` or `format_map`, as Jinja's sandbox has it; None for all else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        _check_form(value.__self__)
        # Then a width may be among the values.
        nested = re.search(r"{[^}]*{", value.__self__)
        return functools.partial(_nested, wrapped) if nested else wrapped


# Transformers makes the environments, and has no setting for their class.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # type: ignore[misc]


def _measured(value: Any) -> Any:
    """What a template goes through in C, which no time limit ends: lists that hold one list twice, again and again,
    have more entries than any number of lists."""
    left, length = [value], 0
    while left:
        each = left.pop()
        length += len(each) if isinstance(each, str) else 1
        if length > _LARGEST:
            raise SecurityError(f"it makes a text or list of more than {_LARGEST:,} entries")
        left += each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ()
    return value


def _counted(result: Any) -> Any:
    """What a template has made."""
    if isinstance(result, str) and len(result) > _LARGEST:
        raise SecurityError(f"it makes a text of more than {_LARGEST:,} characters")
    if isinstance(result, str) and len(result) >= _LONG:
        _made.characters += len(result)
        if _made.characters > _ALL_LONG:
            raise SecurityError(f"it makes texts of more than {_ALL_LONG:,} characters")
    return result


def _counting(filter: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    @functools.wraps(filter)
    def counting(*arguments: Any, **named: Any) -> Any:
        for each in () if name in _SHALLOW else (*arguments, *named.values()):
            _measured(each)
            if name in _SLOW and isinstance(each, str) and len(each) > _SLOWLY:
                raise SecurityError(f"it has `{name}` work on a text of more than {_SLOWLY:,} characters")
        return _counted(filter(*arguments, **named))

    return counting


def _within(parts: Iterable[Any], between: int = 0) -> Iterator[Any]:
    """Parts of a text that is joined, with so many characters between them."""
    length = 0
    for part in parts:
        length += between + (len(part) if isinstance(part, str) else 1)
        if length > _LARGEST:
            raise SecurityError(f"it makes a text of more than {_LARGEST:,} characters")
        yield part


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return do_join(context, _within(value, len(d)), d)


def _plus(left: Any, right: Any) -> Any:
    if isinstance(left, Sized) and isinstance(right, Sized) and len(left) + len(right) > _LARGEST:
        raise SecurityError(f"it makes a text or list of more than {_LARGEST:,} entries")
    return _counted(left + right)


def _check(of: Any, arguments: tuple[Any, ...]) -> None:
    for number in arguments:
        if isinstance(number, int) and abs(number) > _LARGEST:
            raise SecurityError(f"it formats or fills up a text with the number {number}")
    longest = max((len(each) for each in arguments if isinstance(each, str)), default=0)
    if isinstance(of, Sized) and len(of) * longest > _PRODUCT:
        raise SecurityError(f"it puts a text of {longest} characters at places of one of {len(of)}")


def _check_form(form: str) -> None:
    """Of a text that formats others its widths, and the numbers beside them."""
    _check(None, tuple(int(digits[:20]) for digits in re.findall("[0-9]{8,}", form)))


def _times(left: Any, right: Any) -> Any:
    for text, number in ((left, right), (right, left)):
        if isinstance(text, Sized) and isinstance(number, int) and len(text) * number > _LARGEST:
            raise SecurityError(f"it repeats a text {number} times")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _BITS:
        raise SecurityError("it multiplies numbers of hundreds of thousands of digits")
    return _counted(left * right)


def _power(left: Any, right: Any) -> Any:
    if abs(right) * math.log2(abs(left) + 1) > 64:
        raise SecurityError(f"it raises {left} to the power of {right}")
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _measured(right)
        _check_values(left, right if isinstance(right, tuple) else (right,))
    return _counted(left % right)


def _format(text: Any, *arguments: Any, **named: Any) -> str:
    _check_values(str(text), (*arguments, *named.values()))
    return do_format(text, *arguments, **named)


def _check_values(form: str, values: tuple[Any, ...]) -> None:
    _check_form(form)
    _check(form, tuple(value for value in values if isinstance(value, str)))
    if "*" in form:  # Then a width is among the values.
        _check(None, values)


def _nested(wrapped: Callable[..., str], *arguments: Any, **named: Any) -> str:
    values = arguments[0].values() if arguments and isinstance(arguments[0], dict) else ()
    _check(None, (*arguments, *named.values(), *values))
    return wrapped(*arguments, **named)


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def bounded(*arguments: Any, **named: Any) -> Any:
        # Some are given Jinja's own first.
        values = [each for each in arguments if not isinstance(each, Environment | Context | EvalContext)]
        _check(values[0] if values else None, (*values[1:], *named.values()))
        return filter(*arguments, **named)

    return bounded
