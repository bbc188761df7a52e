"""One thing to fix in a recipe, and how many of them are printed on one screen.

A configuration of another tool is one unknown key after the other. What to write instead is said of each of them, in a
line where it fits, because a person who is told of two of fifty has to ask twenty-five times.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolkit.common import LINES, brief, printable

UNKNOWN_KEY = "unknown key"
_WIDTH = 100
_NAMED = 20
"""How many problems of other kinds are named, and how many keys of one change."""
_log = logging.getLogger("toolkit.recipe")


@dataclass(frozen=True)
class Problem:
    """One thing to fix."""

    path: str
    """Dotted key, e.g. `method.r`, or empty when the recipe as a whole is meant."""
    what: str
    where: str = ""
    """`file:line` or `command line`."""
    given: str = ""
    """The offending value, as text."""
    allowed: str = ""
    hint: str = ""
    """The likely fix."""

    def __str__(self) -> str:
        head = f"{self.path or 'recipe'}: {self.what}"
        if self.where and len(head) + len(self.where) + 4 <= _WIDTH:
            lines = [f"{head}  ({self.where})"]
        else:
            lines = [_wrapped(head, "", "  "), *([f"    where    {self.where}"] if self.where else [])]
        parts = (("given", self.given), ("allowed", self.allowed), ("change", self.hint))
        text = "\n".join(lines + [_wrapped(text, f"    {label:<8} ", " " * 13) for label, text in parts if text])
        return brief(printable(text), LINES // 2)


def warn(problems: Iterable[Problem]) -> None:
    """Says what is trained all the same."""
    for problem in problems:
        _log.warning("%s", problem)


def on_a_screen(problems: Sequence[Problem]) -> list[str]:
    """Lines of the problems that fit the terminal: all in full if they do. If not, unknown keys come as a table of what
    to change, and of the others the first ones in full, the rest by their first lines alone."""
    # Two stand before these lines, and one may follow.
    room = LINES - 2
    in_full = [line for problem in problems[:_NAMED] for line in str(problem).split("\n")]
    if len(problems) <= _NAMED and len(in_full) <= room:
        return in_full
    unknown = [problem for problem in problems if problem.what == UNKNOWN_KEY]
    others = [problem for problem in problems if problem.what != UNKNOWN_KEY]
    table = _table(unknown)
    texts, lines = [str(problem).split("\n") for problem in others[:_NAMED]], list[str]()
    for left, text in zip(range(len(texts), 0, -1), texts, strict=True):
        fits = len(lines) + len(text) + left + sum(len(row) for row, _ in table) <= room
        lines += text if fits else text[:1]
    named = len(texts)
    for row, count in table:
        if len(lines) + len(row) > room - (named + count < len(problems)):
            break
        lines += row
        named += count
    return lines + [f"… and {len(problems) - named} more"] * (len(problems) > named)


def _table(unknown: Sequence[Problem]) -> list[tuple[list[str], int]]:
    """What to change of unknown keys: the lines of each row, and how many keys it names. Those of a file stand under
    its name, those of the same change in one row, and last those that only go."""
    files: dict[str, dict[str, list[str]]] = {}
    for problem in unknown:
        file, _, line = problem.where.rpartition(":")
        key = f"{problem.path} ({line})" if file else problem.path
        files.setdefault(file or problem.where, {}).setdefault(problem.hint, []).append(key)
    rows = []
    for file, changes in files.items():
        lines = ", with their lines" if any(f"{file}:" in problem.where for problem in unknown) else ""
        head = [_wrapped(f"unknown keys  ({file}{lines})", "", "  ")]
        for hint, keys in sorted(changes.items(), key=lambda row: row[0].startswith("remove it")):
            text = brief(printable(f"{', '.join(keys[:_NAMED])}: {hint}"), LINES // 2)
            rows.append(([*head, *_wrapped(text, "    ", " " * 8).split("\n")], len(keys[:_NAMED])))
            head = []
    return rows


def _wrapped(text: str, first: str, indent: str) -> str:
    # Paths and keys stay whole, so that they can be copied.
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
