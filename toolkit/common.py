"""What every package shares: the error a user can fix, what must not be shown, units, and text that fits.

Nothing heavy is imported, so that `toolkit show` answers at once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

if TYPE_CHECKING:
    from rich.text import Text

_log = logging.getLogger("toolkit")
T = TypeVar("T")


class UserError(ValueError):
    """Something the user gave cannot work. Printed without a stack trace, and what it quotes as `printable` text.

    Args:
        what: What is wrong, with the offending value and where it stands (file and line, row, key).
        change: What to change, naming the setting.

    Attributes:
        whole: `what` as it was given, however long.
    """

    exit_code = 1

    def __init__(self, what: str, change: str = "") -> None:
        self.whole = what
        self.change = brief(printable(change), 10)
        self.what = brief(printable(what), LINES - len(self.change.splitlines()))
        super().__init__(f"{self.what}\n  {self.change}" if change else self.what)


def printable(text: str) -> str:
    r"""Text from outside as a terminal or a page may show it, line by line.

    What could steer the terminal or hide something (control characters, marks that turn the direction of writing, half
    surrogates) becomes an escape, such as `\x1b`.
    """
    text = concealed(text)
    return text if text.isprintable() else _HIDDEN.sub(lambda c: c[0].encode("unicode_escape").decode(), text)


_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)


LINES = 40
"""That a text of foreign content takes of the terminal at most, and how many characters one of them has."""
COLUMNS = 1000


def brief(text: str, lines: int = LINES, columns: int = COLUMNS) -> str:
    """A text of which no more is kept than a person reads: so many lines, and of very long ones not the middle, because
    errors begin with what is wrong and end with why."""
    if len(text) <= columns and text.count("\n") < lines:
        return text
    every = [_without_middle(line, columns) if len(line) > columns else line for line in text.split("\n")]
    left = len(every) - lines + 1
    return "\n".join(every if left <= 1 else [*every[:-left], f"… and {left:,} more lines"])


def _without_middle(line: str, columns: int) -> str:
    end = columns // 4
    return f"{line[: columns - end]}…{line[len(line) - end :]}"


def fitted(blocks: Sequence[Sequence[str]], whole: str) -> str:
    """Blocks of lines that fit the terminal together: the longest give way first, each saying how much it leaves out.

    Args:
        whole: The file in which all of it stands, for a last line where something was left out; empty for none.
    """
    longest = most = max(map(len, blocks))
    while sum(min(len(block), most) for block in blocks) > LINES - 1 and most > 1:
        most -= 1
    text = "\n".join(brief("\n".join(block), most) for block in blocks if block)
    fits = most == longest and text.count("\n") < LINES
    return text if fits else brief(text, LINES - 1) + f"\nall of it: {whole}" * bool(whole)


def on_screen(text: str, whole: str) -> str:
    """Text for standard output: a terminal gets as much as a person reads, a file or another program all of it.

    Args:
        whole: How to see all of it, for a last line where something was left out.
    """
    short = brief(text, LINES - 1)
    return text if text in (short, brief(text)) or not sys.stdout.isatty() else f"{short}\nall of it: {whole}"


PAGED = "the same command with `| less`"


_CONCEALED: dict[str, str] = {}
"""Values to what is shown in their place."""
_LEAST, _LEAST_ANYWHERE = 4, 8
_OF_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([\w./~-]*)\s*)?\}")


def conceal(value: str, written: str) -> None:
    """Has all that this process prints, and all that a run leaves, show `written` where it would show `value`.

    Values of less than four characters stand in too many words to be looked for; those of less than eight are looked
    for as whole words, and so are numbers, longer ones anywhere.
    """
    # Also as they are quoted, and as a path of theirs is written.
    for spelling in (value, repr(value)[1:-1], json.dumps(value)[1:-1], str(Path(value))):
        if len(spelling) >= _LEAST and spelling not in _CONCEALED:
            _CONCEALED[spelling] = written
            _concealed_texts.cache_clear()


@functools.cache
def _concealed_texts() -> tuple[re.Pattern[str], list[str]]:
    """What finds the values, the longest first, each as a group of its own; and what is shown in their place."""

    def form(value: str) -> str:
        # A line may have been wrapped at its spaces.
        text = r"\s+".join(map(re.escape, re.split(r"\s+", value)))
        is_word = len(value) < _LEAST_ANYWHERE or value.isdigit()
        return rf"(?<!\w)(?<!\w\.){text}(?!\w|\.\w)" if is_word else text

    values = sorted(_CONCEALED, key=len, reverse=True)
    return re.compile("|".join(f"({form(value)})" for value in values)), [_CONCEALED[value] for value in values]


def concealed(content: T) -> T:
    """Content as it may be shown, see `conceal`; of nested content every text."""
    result: Any = content
    if not _CONCEALED:
        return content
    if isinstance(content, str):
        pattern, written = _concealed_texts()
        result = pattern.sub(lambda match: written[(match.lastindex or 0) - 1], content)
    elif isinstance(content, dict):
        result = {concealed(key): concealed(value) for key, value in content.items()}
    elif isinstance(content, list | tuple):
        result = [concealed(value) for value in content]
    return result


def shell_line(*words: str) -> str:
    """A command as it may be shown, see `conceal`, and typed: `${oc.env:NAME}` is the shell's own variable there."""
    return " ".join(map(_shell_word, concealed(words)))


def _shell_word(word: str) -> str:
    texts, variables = _OF_ENVIRONMENT.split(word)[::3], _OF_ENVIRONMENT.findall(word)
    # Another interpolation around one stays as it was written.
    if not variables or any("${" in text for text in texts):
        return shlex.quote(word)
    shown = [f"${{{name}:-{default}}}" if default else f"${{{name}}}" for name, default in variables]
    plain = [re.sub(r'([\\"`$])', r"\\\1", text) for text in texts]
    return f'"{"".join(itertools.chain(*itertools.zip_longest(plain, shown, fillvalue="")))}"'


def in_a_line(error: BaseException) -> str:
    """Kind and first line of somebody else's error."""
    first = first_line(error)
    kind = type(error).__name__
    return kind if first == kind else f"{kind}: {first}"


def in_words(error: BaseException) -> tuple[str, str, int]:
    """What other processes are told of an error that ends this one, what to change, and the exit code that they end
    with."""
    if isinstance(error, UserError):
        return error.what, error.change, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "stopped by Ctrl-C", "", getattr(error, "exit_code", 128 + signal.SIGINT)
    return in_a_line(error), "its own message tells more", os.EX_TEMPFAIL


def first_line(error: BaseException) -> str:
    """The first line of somebody else's error, with the next where it only announces that; its kind if it is silent."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def given_up(error: BaseException) -> UserError:
    """What is said of an error of which `panicked` is true, and nothing else is known."""
    change = "check the files of the model and its tokenizer, and the data; --verbose shows where it was"
    return UserError(f"a library has given up: {in_a_line(error)}", change)


def panicked(error: BaseException) -> bool:
    """Whether this is the error in which a library in Rust, such as tokenizers, has given up; it is no `Exception`."""
    return type(error).__name__ == "PanicException"


def in_background(call: Callable[[], T]) -> Future[T]:
    """Calls a function in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def usable_cores() -> int:
    """Logical CPU cores that this process may run on, as far as the system says: macOS only counts all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def content_hash(content: Any) -> str:
    """SHA-256 of JSON content in 64 hexadecimal digits, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def duration(seconds: float) -> str:
    """Seconds as people say them: `8s`, `2m 05s`, `1h 02m`, `3d 04h`."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def seconds_text(seconds: float) -> str:
    """A short time: `12.3 ms`, `3.21 s`, `2m 05s`."""
    if seconds >= 59.95:
        return duration(seconds)
    size, name = (1.0, "s") if seconds >= 0.9995 else (1e-3, "ms") if seconds >= 0.9995e-3 else (1e-6, "µs")
    return f"{f'{seconds / size:#.3g}'.rstrip('.')} {name}"


def compact(number: float) -> str:
    """Three significant digits with a suffix: `857`, `1.2k`, `51.7k`, `135M`, `8.03B`; beyond all suffixes `1e+16`."""
    if not math.isfinite(number):
        return str(number)
    if abs(number) >= 0.9995e15:
        return f"{number:.3g}"
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def count_text(number: int, one: str, many: str = "") -> str:
    """A number with its noun, and what follows from it: `1 row repeats`, `2,000 rows repeat`.

    Args:
        one: For the number 1.
        many: For all others; by default with an s.
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def bytes_text(value: float) -> str:
    """Bytes in binary units: `3.6 GiB`."""
    unit, name = byte_unit(value)
    return f"{value / unit:,.0f} {name}" if value >= 100 * unit else f"{value / unit:.3g} {name}"


def byte_unit(value: float) -> tuple[float, str]:
    """The largest binary unit that is not larger than `value`: its size in bytes and its name."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return 1024.0**power, name
    return 1.0, "bytes"


def perplexity_of(loss: float) -> float:
    """Perplexity of a mean loss per token in nats; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 or math.isnan(loss) else math.inf


def perplexity_text(perplexity: float) -> str:
    """A perplexity as text: `15.49`, `1.30e+05`."""
    return f"{perplexity:.2f}" if perplexity < 1e4 else f"{perplexity:.2e}"


def table(
    rows: Iterable[Sequence[str | Text]],
    align: str = "ll",
    *,
    columns: int | None = None,
    indent: int = 0,
    gap: int = 2,
    first: int = 0,
) -> Text:
    """Rows in aligned columns, laid out by rich; `.plain` is the text without colours.

    Args:
        rows: Cells of each row; none is read as rich's markup.
        align: For each column `l`, or `r` for figures.
        columns: Width in which the last column is wrapped; None to wrap nothing, so that paths can be copied.
        indent: Spaces before each line.
        gap: Spaces between two columns.
        first: Least width of the first column, so that several tables line up.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, gap, 0, 0))
    for at, side in enumerate(align, start=1):
        wraps = columns is not None and at == len(align)
        grid.add_column(justify="right" if side == "r" else "left", no_wrap=not wraps, overflow="fold")
    grid.columns[0].min_width = first
    for row in rows:
        # Before a value is wrapped, which would hide it from `concealed`.
        grid.add_row(*(Text(brief(printable(cell))) if isinstance(cell, str) else cell for cell in row))
    console = Console(width=10_000 if columns is None else columns - indent)
    lines = []
    for parts in console.render_lines(grid, pad=False):
        lines.append(Text.assemble(" " * indent, *((part.text, part.style or "") for part in parts)))
        lines[-1].rstrip()
    return Text("\n").join(lines)


class Partial(BaseModel):
    """A record of which some may be unknown: what was never set is left out of its JSON."""

    @model_serializer(mode="wrap")
    def _only_what_was_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}
