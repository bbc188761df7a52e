"""Jinja's sandbox with bounds for single calls: one into C may take all memory or time, and no time limit ends it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sized
from typing import Any

from jinja2 import Environment
from jinja2.filters import do_format
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from transformers.utils import chat_template_utils

_LARGEST = 2**24
"""Characters of a text that a template repeats or fills up, and the largest number that it does so with."""
_PRODUCT = 16 * _LARGEST
"""Characters where a text is put in at many places of another."""
_BITS = 2**20
"""Of a number that is multiplied."""
_FILTERS = ("batch", "center", "indent", "join", "replace", "round", "slice", "truncate", "wordwrap")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """What chat templates are compiled and rendered in."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.binop_table |= {"*": _times, "**": _power, "%": _modulo}
        self.filters |= {name: _bounded(self.filters[name]) for name in _FILTERS} | {"format": _format}

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Calls what a template calls."""
        if isinstance(of := getattr(function, "__self__", None), str | bytes | int):
            _check(of, (*arguments, *named.values()))
        return super().call(context, function, *arguments, **named)

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
    return left * right


def _power(left: Any, right: Any) -> Any:
    if abs(right) * math.log2(abs(left) + 1) > 64:
        raise SecurityError(f"it raises {left} to the power of {right}")
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_values(left, right if isinstance(right, tuple) else (right,))
    return left % right


def _format(text: Any, *arguments: Any, **named: Any) -> str:
    _check_values(str(text), (*arguments, *named.values()))
    return do_format(text, *arguments, **named)


def _check_values(form: str, values: tuple[Any, ...]) -> None:
    _check_form(form)
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
